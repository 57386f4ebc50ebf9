"""The marker of a test: its settings, over those of the command line and the ini file, and the origin of each."""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from pytest_nnxcheck.core import settings as table
from pytest_nnxcheck.core.catalogue import HANDED, default_invariants
from pytest_nnxcheck.core.errors import CheckError, SettingError
from pytest_nnxcheck.core.settings import MARKER, Settings
from pytest_nnxcheck.plugin import options

if TYPE_CHECKING:
    from pytest_nnxcheck.plugin.baseline import Suite


FIXTURE = "nnx_wrap"
GIVEN: pytest.StashKey[Mapping[str, Any]] = pytest.StashKey()
"""Settings of the command line and the ini file, read."""
SETTINGS: pytest.StashKey[Settings] = pytest.StashKey()
"""Settings of a marked test, merged."""
_READ: pytest.StashKey[list[pytest.Mark]] = pytest.StashKey()
"""The markers that the settings of a test were read from."""
SUITE: pytest.StashKey[Suite | None] = pytest.StashKey()
"""The file of expected failures, where the run has one."""


def is_test_case(obj: object) -> bool:
    """True if a class is one of unittest, which is there only where somebody has imported it."""
    unittest = sys.modules.get("unittest")
    return unittest is not None and isinstance(obj, type) and issubclass(obj, unittest.TestCase)


def _resolve(item: pytest.Function) -> Settings:
    """The settings of a marked test: marker over command line over ini file. Raises `SettingError`."""
    _refuse_test(item)
    suite = item.config.stash[SUITE]
    from_file = {} if suite is None else {"expected_failures": suite.entries(item)}
    return table.merge(_handed_in(item), item.config.stash[GIVEN], from_file, *reversed([*_from_markers(item)]))


def settings_of_call(item: pytest.Item) -> Settings:
    """The settings of a call that a suite makes. Raises `SettingError`.

    It is checked quickly, unless command line or ini file ask for more, and not in the styles that capture the module: the suite hands it over.
    """
    suite = item.config.stash[SUITE]
    from_file = {} if suite is None else {"expected_failures": suite.entries(item)}
    return table.merge({"effort": "quick", "styles": HANDED}, _handed_in(item), item.config.stash[GIVEN], from_file)


def _handed_in(item: pytest.Item) -> dict[str, Any]:
    """The invariants of a test where none are named: with those that a conftest.py above it has on by default. Raises `SettingError`."""
    try:
        handed = own_invariants(item.ihook.pytest_nnx_invariants, item.config)
    except CheckError as error:
        raise SettingError(str(error)) from None
    return {"invariants": default_invariants(handed)} if handed else {}


def own_invariants(hook: Any, config: pytest.Config) -> tuple[str, ...]:
    """Add the invariants that implementations of the hook hand in; the names of those that are on by default. Raises `CheckError`."""
    if not hook.get_hookimpls():
        return ()
    from pytest_nnxcheck import extension

    return extension.handed_in(hook, config)


def _from_markers(item: pytest.Function) -> Iterator[dict[str, Any]]:
    """The settings of each marker, the nearest first."""
    for node, mark in item.iter_markers_with_node(MARKER):
        origin = f"{MARKER} marker at {where(node)}"
        if mark.args:
            arguments = ", ".join(map(repr, mark.args))
            raise SettingError(f"{origin}: {arguments} has no name, write keyword arguments such as memory_budget='2x'")
        origins = dict.fromkeys(mark.kwargs, origin)
        given = table.parse_given(mark.kwargs, origins.__getitem__, "marker")
        prepare_targets(item.config, given.get("target", ()), origin)
        if "expected_failures" in given:
            place = f"the marker at {where(node)}"
            given["expected_failures"] = tuple(replace(entry, origin=place) for entry in given["expected_failures"])
        yield given


def prepare_targets(config: pytest.Config, targets: Collection[str], origin: str) -> None:
    """Set what the compilers of targets need, until the end of the run. Raises `SettingError` that names the source."""
    if not targets:
        return
    from pytest_nnxcheck import wheels

    try:
        config.add_cleanup(wheels.prepare(os.environ, targets))
    except SettingError as error:
        raise SettingError(f"{origin}: {error}") from None


def modes_origin(item: pytest.Function, settings: Settings) -> str:
    """The origin of a test's modes: they alone are refused late, once flax is imported."""
    if settings.nesting is not None and settings.nesting.mode not in settings.modes:
        return f"option {table.flag('nesting')}"
    marked = [node for node, mark in item.iter_markers_with_node(MARKER) if "modes" in mark.kwargs]
    if marked:
        return f"{MARKER} marker at {where(marked[0])}"
    given = options.given(item.config, "modes")
    return "" if given is None else given.origin


def where(node: Any) -> str:
    """``file:line`` of a test or class, the file of a module."""
    path, line, _ = node.reportinfo() if isinstance(node, pytest.Function | pytest.Class) else (node.path, None, "")
    file = os.path.relpath(path, node.config.rootpath)
    return file if line is None else f"{file}:{line + 1}"


def _refuse_test(item: pytest.Function) -> None:
    body = getattr(getattr(item.function, "hypothesis", None), "inner_test", item.function)
    if inspect.iscoroutinefunction(body) or inspect.isasyncgenfunction(body):
        raise SettingError(
            f"{where(item)}: {item.name} is async, and {MARKER} cannot await it for each nesting: write a plain function,"
            " with asyncio.run(...) inside where it is needed"
        )
    if FIXTURE not in item.fixturenames:
        raise SettingError(
            f"{where(item)}: {item.name} is marked {MARKER} but does not use {FIXTURE}, so nothing would be checked: take"
            f" {FIXTURE} as an argument and wrap the module, or take the marker off"
        )


def refuse_test_case(node: pytest.Class, error: type[Exception]) -> None:
    """Refuse a class of unittest that is marked, or has a marked test: raises ``error``."""
    cls = node.obj
    marks = [mark.name for name in dir(cls) for mark in _own_marks(inspect.getattr_static(cls, name))]
    if MARKER in marks or node.get_closest_marker(MARKER) is not None:
        raise error(
            f"{where(node)}: {cls.__name__} is a unittest.TestCase, which takes no fixtures as arguments, so {MARKER} cannot"
            f" run its tests: write a plain class or function that takes {FIXTURE}"
        )


def _own_marks(attribute: object) -> list[Any]:
    marks = getattr(attribute, "pytestmark", [])
    return marks if isinstance(marks, list) else []


def settings_of(item: pytest.Function) -> Settings:
    """The settings of a marked test, read at its collection, or now where a marker was added later. Raises `SettingError`."""
    marks = [*item.iter_markers(MARKER)]
    read = item.stash.get(_READ, [])
    if SETTINGS not in item.stash or [*map(id, marks)] != [*map(id, read)]:
        item.stash[SETTINGS], item.stash[_READ] = _resolve(item), marks
    return item.stash[SETTINGS]
