"""No verdict depends on the tests before it: what the modules held before the first test is remembered, and what each test prepares on purpose.

A run without a test that this plugin checks remembers nothing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from types import FunctionType, ModuleType
from typing import Any

import pytest

from pytest_nnxcheck.core.settings import MARKER

ACTIVE: pytest.StashKey[dict[str, list[Any]]] = pytest.StashKey()
"""The code of the fixtures that are set up, by their names. There only where something is remembered."""
SHARED: pytest.StashKey[dict[int, Callable[[], None]]] = pytest.StashKey()
"""Functions that forget what fixtures of a wider scope made, by the ids of the fixtures."""

SETUPS = (
    *("setup_module", "setUpModule", "setup_function", "setup_class", "setUpClass", "setup_method", "setUp"),
    *("pytest_runtest_setup", "pytest_runtest_call"),
)
"""Functions that pytest calls before a test, beside fixtures."""


def remember(session: pytest.Session) -> None:
    """Remember what the modules of the tests and the conftest.py files lead to, if a test is checked."""
    modules = {id(module): module for item in session.items if (module := getattr(item, "module", None)) is not None}
    checked = any(item.get_closest_marker(MARKER) for item in session.items)
    if session.config.option.collectonly or not (checked or any(map(holds_ours, modules.values()))):
        return
    from pytest_nnxcheck.subject import after_import

    modules.update((id(module), module) for module in conftests(session.config))
    roots = [item for module in modules.values() for item in vars(module).items()]
    session.config.add_cleanup(after_import.remember(roots))
    session.config.stash[ACTIVE], session.config.stash[SHARED] = {}, {}


def conftests(config: pytest.Config) -> list[ModuleType]:
    """The modules of the conftest.py files."""
    plugins = config.pluginmanager.get_plugins()
    return [plugin for plugin in plugins if isinstance(plugin, ModuleType) and plugin.__name__.endswith("conftest")]


def holds_ours(module: ModuleType) -> bool:
    """True if a module imports something of this package, such as `check`."""
    return any(
        str(value.__name__ if isinstance(value, ModuleType) else value.__module__).partition(".")[0]
        == "pytest_nnxcheck"
        for value in vars(module).values()
        if isinstance(value, ModuleType) or type(value) in (FunctionType, type)
    )


@contextlib.contextmanager
def prepared(item: pytest.Item) -> Iterator[None]:
    """Count the body of a test, and the fixtures that are set up by now, to what prepares its calls on purpose."""
    if ACTIVE not in item.config.stash or not isinstance(item, pytest.Function):
        yield
        return
    from pytest_nnxcheck.subject.on_purpose import codes_behind, prepared_by

    handle = getattr(item.function, "hypothesis", None)  # of a test with ``@given``
    holders = (item.module, item.cls, *conftests(item.config))
    body = [*codes_behind(item.function if handle is None else handle.inner_test)]
    setups = [getattr(holder, name, None) for holder in holders if holder is not None for name in SETUPS]
    active = item.config.stash[ACTIVE]
    codes = [code for setup in setups for code in codes_behind(setup)]
    with prepared_by([*codes, *(code for name in item.fixturenames for code in active.get(name, ()))], body):
        yield


def fixture_starts(fixture: pytest.FixtureDef[Any], config: pytest.Config) -> None:
    """Count a fixture that is about to be set up to what prepares the test that runs."""
    if ACTIVE in config.stash:
        from pytest_nnxcheck.subject.on_purpose import PREPARING, codes_behind

        config.stash[ACTIVE][fixture.argname] = [*codes_behind(fixture.func)]
        PREPARING.extend(config.stash[ACTIVE][fixture.argname])


def fixture_made(fixture: pytest.FixtureDef[Any], config: pytest.Config, value: Any) -> None:
    """Remember an object that tests share as its fixture left it."""
    if ACTIVE in config.stash and fixture.scope != "function":
        from pytest_nnxcheck.subject import after_import

        config.stash[SHARED][id(fixture)] = after_import.also([(fixture.argname, value)])


def fixture_ended(fixture: pytest.FixtureDef[Any], config: pytest.Config) -> None:
    """Forget what a fixture made: its objects are not kept alive."""
    if SHARED in config.stash and (forget := config.stash[SHARED].pop(id(fixture), None)) is not None:
        forget()
