"""The pytest plugin: options, marker, fixture, and hooks that delegate.

At load this imports pytest, the standard library and the settings only, since every suite pays for it; jax, flax and hypothesis
come with the first marked test.
PYTEST_DONT_REWRITE: nothing here is an assertion for pytest to rewrite, and an early import must not warn.
"""

from __future__ import annotations

import argparse
import functools
import inspect
import os
from collections.abc import Generator, Iterable
from typing import TYPE_CHECKING, Any

import pytest

from pytest_nnxcheck.core import catalogue
from pytest_nnxcheck.core import settings as table
from pytest_nnxcheck.core.errors import CheckError, InvariantViolation, SettingError
from pytest_nnxcheck.core.settings import CHECK_ID, MARKER
from pytest_nnxcheck.core.text import tell_from
from pytest_nnxcheck.plugin import gathered, isolation, options
from pytest_nnxcheck.plugin.gathered import IN_BODY, Running
from pytest_nnxcheck.plugin.marker import (
    FIXTURE,
    GIVEN,
    SUITE,
    is_test_case,
    modes_origin,
    own_invariants,
    prepare_targets,
    refuse_test_case,
    settings_of,
    where,
)
from pytest_nnxcheck.plugin.pytest_internals import arguments, tell

if TYPE_CHECKING:
    from pytest_nnxcheck.api import Wrap
    from pytest_nnxcheck.extension import Invariant
    from pytest_nnxcheck.plugin.baseline import BaselineHooks
    from pytest_nnxcheck.runner.run import Run

TITLE = "nnx invariants"
_baseline: pytest.StashKey[BaselineHooks | None] = pytest.StashKey()


# --- options and configuration -------------------------------------------------------------------------------------------


class OwnHooks:
    """The hooks that a conftest.py, or a plugin of the user's, may implement."""

    def pytest_nnx_invariants(self, config: pytest.Config) -> Iterable[Invariant] | None:
        """Hand in invariants of your own.

        Asked for when the run starts, so that the command line and the ini file can name them, and for each marked test, where
        the conftest.py files that are not above it do not count.
        """


def pytest_addhooks(pluginmanager: pytest.PytestPluginManager) -> None:
    """Add the hook that hands in invariants of the user's own."""
    pluginmanager.add_hookspecs(OwnHooks)


def pytest_addoption(parser: pytest.Parser, pluginmanager: pytest.PytestPluginManager) -> None:
    """Add the ``--nnx-*`` options and ``nnx_*`` ini names of the table."""
    options.register(parser, arguments(pluginmanager))


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests(early_config: pytest.Config) -> None:
    """Simulate devices, and prepare for targets, before a conftest can start jax."""
    _prepare_environment(early_config, early_config.known_args_namespace)


def pytest_configure(config: pytest.Config) -> None:
    """Register the marker; read command line and ini file, so that a bad value stops the run before it starts."""
    config.addinivalue_line("markers", table.marker_line())
    config.stash[SUITE], config.stash[_baseline] = None, None
    gathered.of(config)
    # Again: a plugin that a conftest brings in is too late for the hook above.
    _prepare_environment(config, config.option)
    config.add_cleanup(catalogue.forget_own_later())
    config.add_cleanup(tell_from(config.rootpath))
    try:
        own_invariants(config.hook.pytest_nnx_invariants, config)
        config.stash[GIVEN] = options.of_a_check(config)
        _register_parts(config)
    except CheckError as error:
        raise pytest.UsageError(str(error)) from None


def _register_parts(config: pytest.Config) -> None:
    """Add the hooks that the options of this run need beside the checks; a run loads no other of these modules. Raises `SettingError`."""
    named = options.named(config)
    if _names_a_check(named, config.args):
        from pytest_nnxcheck.named import register
        from pytest_nnxcheck.plugin import cache

        register(config, named, _resolve_settings, functools.partial(cache.inputs_of_calls, config))
    if options.given(config, "report") is not None or os.environ.get("GITHUB_ACTIONS") == "true":
        from pytest_nnxcheck.plugin import reports

        reports.register(config)
    if (file := options.given(config, "expected_failures")) is not None:
        from pytest_nnxcheck.plugin import baseline

        config.stash[SUITE] = baseline.register_suite(config, file)
    if options.of_a_run(config):
        from pytest_nnxcheck.plugin import baseline

        config.stash[_baseline] = baseline.register(config)
    if options.given(config, "watch") is not None:
        from pytest_nnxcheck.plugin import watch

        watch.register(config, problem_of)


def _prepare_environment(config: pytest.Config, parsed: argparse.Namespace) -> None:
    """Set what jax reads as it starts, for targets and simulated devices that command line or ini file name, until the end of the run."""
    try:
        target, count = (options.given(config, name, parsed) for name in ("target", "devices"))
        if target is not None:
            prepare_targets(config, target.value, target.origin)
            count = count or _of_slice(target)
        count = count or _of_meshes(config, parsed)
    except SettingError as error:
        raise pytest.UsageError(str(error)) from None
    if count is None:
        return
    from pytest_nnxcheck import devices

    try:
        config.add_cleanup(devices.simulate(os.environ, count.value))
    except CheckError as error:
        raise pytest.UsageError(f"{count.origin}: {error}") from None


def _of_slice(target: options.Given) -> options.Given | None:
    """The devices of the largest slice that is named; `None` where none is, or where the environment says how many to simulate."""
    from pytest_nnxcheck import devices
    from pytest_nnxcheck.core.chips import parse_target

    count = max((parse_target(word).devices for word in target.value), default=1)
    return target._replace(value=count) if count > 1 and not devices.is_simulated(os.environ) else None


def _of_meshes(config: pytest.Config, parsed: argparse.Namespace) -> options.Given | None:
    """The devices of the largest mesh that a check by name is for; `None` where none has one."""
    args = [str(each) for each in getattr(parsed, "file_or_dir", None) or ()]  # with --help pytest reads no files
    if not _names_a_check(parsed.nnx_named, args):
        return None
    from pytest_nnxcheck.named import devices_of_meshes

    count = devices_of_meshes(parsed.nnx_named, args)
    return options.Given(count, f"option {table.flag('mesh')}", config.invocation_params.dir) if count > 1 else None


def _names_a_check(typed: Iterable[tuple[str, str]], args: Iterable[str]) -> bool:
    """True if the command line may name a check: most runs name none, and load no reader of names."""
    return bool(typed) or any(f"{CHECK_ID}::" in arg for arg in args)


# --- collection ----------------------------------------------------------------------------------------------------------


@pytest.hookimpl(wrapper=True)
def pytest_pycollect_makeitem(collector: pytest.Module | pytest.Class, obj: object) -> Generator[None, Any, Any]:
    """Resolve the settings of marked tests, and refuse what cannot work, as a collection error."""
    nodes = yield
    for node in nodes if isinstance(nodes, list) else [nodes]:
        if isinstance(node, pytest.Function):
            _resolve_settings(node, collector.CollectError)
        elif isinstance(node, pytest.Class) and is_test_case(obj):
            refuse_test_case(node, collector.CollectError)
    return nodes


def _resolve_settings(item: pytest.Function, error: type[Exception]) -> None:
    if item.get_closest_marker(MARKER) is None:
        if FIXTURE in item.fixturenames and FIXTURE in inspect.signature(item.function).parameters:
            raise error(f"{where(item)}: {item.name} uses {FIXTURE} but is not marked, add @pytest.mark.{MARKER}")
        return
    try:
        settings_of(item)
    except SettingError as unreadable:
        raise error(str(unreadable)) from None
    # The test becomes one of hypothesis, so it must be selected by ``-m hypothesis`` too.
    if item.config.pluginmanager.hasplugin("hypothesispytest"):
        item.add_marker("hypothesis")


def pytest_collection_finish(session: pytest.Session) -> None:
    """Remember what the modules hold before the first test."""
    isolation.remember(session)


# --- the run -------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def nnx_wrap() -> Wrap:
    """Wrap a module, a bound method or a function of modules, to run under the nestings of a marked test."""
    from pytest_nnxcheck.api import wrap

    return wrap


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, Any, Any]:
    """Note what runs before the calls of a test."""
    with isolation.prepared(item):
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(
    fixturedef: pytest.FixtureDef[Any], request: pytest.FixtureRequest
) -> Generator[None, Any, Any]:
    """Note the fixtures of a test, and what they make for several."""
    with isolation.set_up(fixturedef, request) as made:
        value = yield
        made(value)
    return value


def pytest_fixture_post_finalizer(fixturedef: pytest.FixtureDef[Any], request: pytest.FixtureRequest) -> None:
    """Forget what a fixture made."""
    isolation.ended(fixturedef, request.config)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup(item: pytest.Item) -> Generator[None, Any, Any]:
    """Skip or fail a test that needs more devices than there are, before its fixtures ask for them."""
    if isinstance(item, pytest.Function) and (reason := _too_few_devices(item)):
        if settings_of(item).on_too_few_devices == "fail":
            pytest.fail(reason, pytrace=False)
        # As a mark: the summary then names the test, where `pytest.skip` would name this file.
        item.add_marker(pytest.mark.skip(reason=reason))
    return (yield)


def _too_few_devices(item: pytest.Function) -> str:
    try:
        needed = settings_of(item).devices if item.get_closest_marker(MARKER) else None
    except SettingError:
        return ""  # the call says what is wrong
    if needed is None:
        return ""
    from pytest_nnxcheck import devices

    return devices.too_few(needed, devices.available(), item.config.stash[GIVEN].get("devices"))


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, Any, Any]:
    """Run a marked test as a hypothesis test over nestings, outside of hypothesis' own wrapper of this hook."""
    __tracebackhide__ = True
    with isolation.body(item):
        if not isinstance(item, pytest.Function) or item.get_closest_marker(MARKER) is None:
            return (yield)
        item.stash[IN_BODY] = True
        try:
            return (yield from _run_under_nestings(item))
        finally:
            item.stash[IN_BODY] = False


def _run_under_nestings(item: pytest.Function) -> Generator[None, Any, Any]:
    __tracebackhide__ = True
    from pytest_nnxcheck.plugin import progress
    from pytest_nnxcheck.reporting import report

    original = item.obj
    run, item.obj = _build(item)
    running = gathered.of(item.config).running[item.nodeid] = Running(run)
    run.listeners.append(running.listen)
    result, raised = None, None
    try:
        progress.attach(item, run)
        result = yield
    except BaseException as error:  # noqa: BLE001 - raised again below, after its message is complete
        raised = error
    finally:
        item.obj = original
        # In place of the figures of an earlier run.
        others = [pair for pair in item.user_properties if not str(pair[0]).startswith("nnx_")]
        item.user_properties[:] = [*others, *report.properties(report.head(run.report()))]
    final = _conclude(item, running, raised)
    if final is not None:
        raise final.with_traceback(final.__traceback__)
    return result


def _build(item: pytest.Function) -> tuple[Run, Any]:
    from pytest_nnxcheck.compat import flax_modes
    from pytest_nnxcheck.plugin import cache
    from pytest_nnxcheck.runner import hypothesis_test
    from pytest_nnxcheck.runner import run as runs

    try:
        settings = settings_of(item)
    except SettingError as error:
        raise pytest.fail.Exception(str(error), pytrace=False) from None
    try:
        flax_modes.require_modes(settings.chosen_modes)
    except SettingError as error:
        raise pytest.fail.Exception(f"{modes_origin(item, settings)}: {error}", pytrace=False) from None
    argument, own = options.as_typed(item)
    written = options.replay_options(item.config.option, own)
    run = runs.Run(
        settings,
        test_id=gathered.nodeid(item),
        argument=argument,
        options=written,
        programs=cache.programs_of(item, argument, written),
        compiles=cache.folder_of_compiles(item.config),
    )
    seeded = item.config.getoption("hypothesis_seed", None) is not None
    return run, hypothesis_test.build(item.obj, run, item.fixturenames, seeded=seeded)


def _conclude(item: pytest.Item, running: Running, raised: BaseException | None) -> BaseException | None:
    from pytest_nnxcheck.runner import conclude

    run = running.run
    final = None if raised is None else conclude.conclude(raised, run)
    run.forget()
    if raised is not None:
        return final
    problem = conclude.proves_nothing(run) or problem_of(item, running)
    return pytest.fail.Exception(problem, pytrace=False) if problem else None


def problem_of(item: pytest.Item, running: Running) -> str:
    """Why a check fails under whose nestings nothing failed: a mode of flax, an expected failure that did not happen, the baseline; empty if it passes."""
    from pytest_nnxcheck.reporting import report

    checked = running.run.report()
    problem = report.rejected_modes(checked) or "\n".join(checked.unexpected)
    if not problem and (baseline := item.config.stash[_baseline]) is not None:
        problem = baseline.finished(item, running)
    return problem


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Take the class name off our first line, and have the short summary name the broken invariant and the leaf."""
    report = yield
    if report.when == "call" and call.excinfo is not None and item.get_closest_marker(MARKER) is not None:
        error, in_short = call.excinfo.value, getattr(item, "nnx_in_short", "")
        if isinstance(error, InvariantViolation):
            from pytest_nnxcheck.reporting import report as texts

            in_short = texts.in_short(error.outcome)
        tell(report.longrepr, in_short)
    return report


# --- the summary ---------------------------------------------------------------------------------------------------------


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """One line for each marked test, on the controller; after Ctrl-C also for the test that it stopped."""
    if not (tests := gathered.of(config).tests):
        return
    from pytest_nnxcheck.reporting import report

    width, verbose = config.get_terminal_writer().fullwidth, options.is_verbose(config)
    heads = sorted((record.head for record in tests.values() if record.head.summary), key=lambda head: head.nodeid)
    if heads:
        terminalreporter.section(TITLE)
    for head in heads:
        terminalreporter.write_line(report.in_terminal(head, width, verbose=verbose))
