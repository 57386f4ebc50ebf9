"""Which files and folders a run was asked to collect as a whole: only of these can it say that a test is gone."""

from __future__ import annotations

import contextlib
import os
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pytest


@dataclass(frozen=True, slots=True)
class Selection:
    """The files and folders that a run was asked to collect as a whole; ``everything`` is the whole suite."""

    root: Path
    paths: tuple[Path, ...]
    everything: bool = False

    @classmethod
    def of(cls, config: pytest.Config) -> Selection:
        cut = any(config.getoption(name, None) for name in ("lf", "ignore", "ignore_glob"))
        folder = config.invocation_params.dir
        names = () if cut else tuple(folder / arg for arg in config.args if "::" not in arg)
        paths = tuple(Path(os.path.abspath(name)) for name in names)  # noqa: PTH100 - pytest's root follows no links either
        return cls(config.rootpath, paths, not cut and config.args_source is config.ArgsSource.TESTPATHS)

    def covers(self, place: str) -> bool:
        """Whether everything in a file or folder, which starts from the root, was looked at."""
        return self.everything or any((self.root / place).is_relative_to(path) for path in self.paths)


def as_argument(item: pytest.Item) -> str:
    """A test as pytest takes it in the folder that the run was started in; its id starts from pytest's root."""
    file, colons, name = item.nodeid.partition("::")
    with contextlib.suppress(ValueError):  # on another drive of Windows
        file = Path(os.path.relpath(item.config.rootpath / file, item.config.invocation_params.dir)).as_posix()
    return f"{file}{colons}{name}"


def typed(config: pytest.Config) -> set[str]:
    """The options that this run alone was given: typed, in the environment, or as ``-o`` of the ini file's name."""
    words = [*shlex.split(os.environ.get("PYTEST_ADDOPTS", "")), *map(str, config.invocation_params.args)]
    overridden = [name.partition("=")[0].strip() for name in config.getoption("override_ini", None) or []]
    return {word.partition("=")[0] for word in words} | {f"--{name.replace('_', '-')}" for name in overridden}


def narrowed(config: pytest.Config) -> bool:
    """Whether the command line takes tests out by name or by mark; what the ini file always takes out is no narrowing."""
    usual = config.getini("addopts")
    typed = [config.getoption(name, "") for name in ("keyword", "markexpr")] + (
        config.getoption("deselect", None) or []
    )
    return any(part and not any(arg.endswith(part) for arg in usual) for part in typed)
