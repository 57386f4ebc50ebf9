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
from pytest_nnxcheck.plugin import options

ACTIVE: pytest.StashKey[dict[str, list[Any]]] = pytest.StashKey()
"""The code of the fixtures that are set up, by their names. There only where something is remembered."""
SHARED: pytest.StashKey[dict[int, list[Callable[[], None]]]] = pytest.StashKey()
"""Functions that forget what fixtures made and filled, by the ids of the fixtures."""
RUNNING: pytest.StashKey[tuple[pytest.Function, contextlib.ExitStack]] = pytest.StashKey()
"""The test that runs, and what is called when it has ended."""

SETUPS = (
    *("setup_module", "setUpModule", "setup_function", "setup_class", "setUpClass", "setup_method", "setUp"),
    *("pytest_runtest_setup", "pytest_runtest_call"),
)
"""Functions that pytest calls before a test, beside fixtures."""


def remember(session: pytest.Session) -> None:
    """Remember what the modules of the tests and the conftest.py files lead to, if a test is checked."""
    modules = {id(module): module for item in session.items if (module := getattr(item, "module", None)) is not None}
    checked = options.value(session.config, "watch") == "calls" or any(
        item.get_closest_marker(MARKER) for item in session.items
    )
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
    """Count what runs before the body of a test to what prepares its calls on purpose. Caches of its fixtures get back what was in them."""
    if ACTIVE not in item.config.stash or not isinstance(item, pytest.Function):
        yield
        return
    from pytest_nnxcheck.subject import after_import
    from pytest_nnxcheck.subject.on_purpose import codes_behind, prepared_by

    holders = (item.module, item.cls, *conftests(item.config))
    setups = [getattr(holder, name, None) for holder in holders if holder is not None for name in SETUPS]
    active = item.config.stash[ACTIVE]
    fixtures = {name: active[name] for name in item.fixturenames if name in active}
    with (
        prepared_by([code for setup in setups for code in codes_behind(setup)], fixtures),
        after_import.running(item.fixturenames),
        contextlib.ExitStack() as put_back,
    ):
        item.config.stash[RUNNING] = item, put_back
        try:
            yield
        finally:
            del item.config.stash[RUNNING]


@contextlib.contextmanager
def body(item: pytest.Item) -> Iterator[None]:
    """Count the body of a test that runs to what prepares its calls on purpose."""
    if ACTIVE not in item.config.stash or not isinstance(item, pytest.Function):
        yield
        return
    from pytest_nnxcheck.subject.on_purpose import codes_behind, in_short, prepared_by

    handle = getattr(item.function, "hypothesis", None)  # of a test with ``@given``
    known = {name: in_short(value) for name, value in {**item.funcargs, "self": item.instance}.items()}
    codes = codes_behind(item.function if handle is None else handle.inner_test)
    with prepared_by((), body=[code._replace(known=known) for code in codes]):
        yield


@contextlib.contextmanager
def set_up(fixture: pytest.FixtureDef[Any], request: pytest.FixtureRequest) -> Iterator[Callable[[Any], None]]:
    """Count a fixture to what prepares the test that runs. Takes what the fixture made, if tests share that.

    It finds the caches that it fills as in a fresh process, where a checked test may use it.
    """
    stash = request.config.stash
    if ACTIVE not in stash or RUNNING not in stash:
        yield lambda _: None
        return
    from pytest_nnxcheck.subject import after_import
    from pytest_nnxcheck.subject.fixtures import Setup
    from pytest_nnxcheck.subject.on_purpose import FIXTURES, codes_behind

    item, put_back = stash[RUNNING]
    codes = stash[ACTIVE][fixture.argname] = [*codes_behind(fixture.func)]
    FIXTURES[fixture.argname] = codes
    shared, forget = fixture.scope != "function", list[Callable[[], None]]()
    setup = None
    is_checked = item.get_closest_marker(MARKER) is not None or options.value(item.config, "watch") == "calls"
    if codes and (shared or is_checked or holds_ours(item.module)):
        arguments = [(name, request.getfixturevalue(name)) for name in fixture.argnames if name != "request"]
        setup = Setup(fixture.argname, fixture.func, item.function, arguments)
        for function in setup.put_back:
            put_back.callback(function)

    def made(value: Any) -> None:
        if setup is not None:
            forget.append(after_import.filled(setup.filling()))
        if shared:
            forget.append(after_import.also([(fixture.argname, value)]))
        stash[SHARED][id(fixture)] = forget

    yield made


def ended(fixture: pytest.FixtureDef[Any], config: pytest.Config) -> None:
    """Forget what a fixture made and filled: its objects are not kept alive."""
    if SHARED in config.stash:
        for forget in config.stash[SHARED].pop(id(fixture), ()):
            forget()
