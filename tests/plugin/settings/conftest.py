"""What a run reads of its options and files, shown as a user writes it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from pytest_nnxcheck.core.settings import show
from pytest_nnxcheck.plugin import hooks, options


@dataclass(frozen=True)
class Read:
    """The config of a run, and what the plugin makes of it."""

    config: pytest.Config

    @property
    def of_a_check(self) -> dict[str, str]:
        return {name: show(value) for name, value in options.of_a_check(self.config).items()}

    @property
    def of_a_run(self) -> dict[str, str]:
        return {name: show(value) for name, value in options.of_a_run(self.config).items()}

    @property
    def replayed(self) -> str:
        """The options that a replay repeats."""
        return options.replay_options(self.config.option)

    def source(self, name: str) -> tuple[str, Path]:
        """Who gave a setting, and the folder that its paths start from."""
        given = options.given(self.config, name)
        return given.origin, given.folder

    def configure(self) -> None:
        hooks.pytest_configure(self.config)


@pytest.fixture
def read(pytester, inner_args):
    """Start a run with these options and files: ``read("--nnx-all", ini="nnx_sweep = probes")``, ``read(pyproject=...)``."""

    def make(*args: str, ini: str | None = None, pyproject: str | None = None) -> Read:
        if ini is not None:
            pytester.makeini(f"[pytest]\n{ini}\n")
        if pyproject is not None:
            (pytester.path / "pyproject.toml").write_text(pyproject)
        return Read(pytester.parseconfig(*inner_args, *args))

    return make
