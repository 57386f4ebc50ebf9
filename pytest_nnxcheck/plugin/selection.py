"""The part of the suite that a run collects: a test counts as gone only if its whole file or folder was collected."""

from __future__ import annotations

import contextlib
import os
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pytest_nnxcheck.core.settings import CHECK_ID, TABLE, flag
from pytest_nnxcheck.plugin import options

if TYPE_CHECKING:
    import pytest


@dataclass(frozen=True, slots=True)
class Selection:
    """The files and folders that a run was asked to collect as a whole."""

    root: Path
    paths: tuple[Path, ...]
    everything: bool = False
    """True if these are all files that pytest finds without a name on the command line."""

    @classmethod
    def of(cls, config: pytest.Config) -> Selection:
        cut = any(config.getoption(name, None) for name in ("lf", "ignore", "ignore_glob"))
        folder = config.invocation_params.dir
        names = () if cut else tuple(folder / arg for arg in config.args if "::" not in arg)
        paths = tuple(Path(os.path.abspath(name)) for name in names)  # noqa: PTH100 - pytest's root follows no links either
        return cls(config.rootpath, paths, bool(paths) and config.args_source is config.ArgsSource.TESTPATHS)

    def covers(self, place: str) -> bool:
        """True if the run collected everything in a file or folder, whose path starts from the root.

        Never true for the checks by name: another command line may name other checks.
        """
        if place == CHECK_ID:
            return False
        return self.everything or any((self.root / place).is_relative_to(path) for path in self.paths)


def as_typed(item: pytest.Item) -> tuple[str, list[str]]:
    """The argument that selects a test, and the options that belong to it, as one types them in the folder where the run was started.

    The id of a test starts from pytest's root. A check by name knows its own.
    """
    named: tuple[str, list[str]] | None = getattr(item, "nnx_typed", None)
    if named is not None:
        return named
    file, colons, name = item.nodeid.partition("::")
    with contextlib.suppress(ValueError):  # on another drive of Windows
        file = Path(os.path.relpath(item.config.rootpath / file, item.config.invocation_params.dir)).as_posix()
    return f"{file}{colons}{name}", []


def is_narrowed(config: pytest.Config) -> bool:
    """True if the command line leaves out tests, by name or mark, or nestings. Options that are always in the ini file do not count."""
    usual = config.getini("addopts")
    parts = [
        *(config.getoption(name, "") for name in ("keyword", "markexpr")),
        *(config.getoption("deselect", None) or []),
    ]
    if any(part and not any(arg.endswith(part) for arg in usual) for part in parts):
        return True
    words = [*shlex.split(os.environ.get("PYTEST_ADDOPTS", "")), *map(str, config.invocation_params.args)]
    given = {word.partition("=")[0] for word in words}
    ini_names = {name.partition("=")[0].strip() for name in config.getoption("override_ini", None) or []}
    chosen = options.profile(config) if flag("profile") in given or "nnx_profile" in ini_names else None
    # A profile that names the baseline always goes with it.
    of_profile = () if chosen is None or "baseline" in chosen.values else chosen.values
    names = {*given, *ini_names, *(f"nnx_{name}" for name in of_profile)}
    return any({flag(name), f"nnx_{name}"} & names for name, row in TABLE.items() if row.narrows)
