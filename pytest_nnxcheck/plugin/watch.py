"""Watch mode: hooks that look, around the call of every test that is not marked, for its leftovers, and hear of the calls that it makes.

Registered as a plugin of pytest where a run is watched. Like `hooks`, this imports pytest and light modules only: a suite without jax stays one.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Generator, Iterable, Mapping
from typing import Any

import pytest

from pytest_nnxcheck.core.settings import MARKER
from pytest_nnxcheck.plugin import gathered, options
from pytest_nnxcheck.plugin.watched_calls import CallHooks, Problem
from pytest_nnxcheck.walk.raw_access import class_name
from pytest_nnxcheck.watch import leftovers, message
from pytest_nnxcheck.watch.leftovers import Leftover, Look, Reported, Root
from pytest_nnxcheck.watch.monitor import Monitor

TITLE = "nnx watch"
_WIRE = "nnx_watch"
"""The attribute of a report of pytest that holds the result of a watched test. It is no record: reports, baseline and JUnit list every record, and a test that is watched was not checked."""
_PATCHES = ("MonkeyPatch", "MockerFixture")
"""Types of fixtures that change the names of modules until a test is torn down."""
_result = pytest.StashKey[dict[str, Any]]()


def register(config: pytest.Config, problem_of: Problem) -> None:
    """Watch the tests of a run that asks for it. Raises `SettingError` that names the source."""
    mode = options.value(config, "watch")
    if mode == "off" or config.option.collectonly:
        return
    calls = CallHooks(config, problem_of, checks=mode == "calls") if mode in ("calls", "list") else None
    if calls is not None:
        config.pluginmanager.register(calls, "nnxcheck_calls")
    config.pluginmanager.register(WatchHooks(calls, fails=mode == "fail"), "nnxcheck_watch")


def _is_not_ours(caught: pytest.ExceptionInfo[BaseException]) -> bool:
    """True if our frames are to be hidden; where the failure is ours, one has to show, or pytest warns that all are hidden."""
    return not caught.errisinstance(pytest.fail.Exception)


class WatchHooks:
    """The hooks of a run that is watched, and what they know so far."""

    def __init__(self, calls: CallHooks | None, *, fails: bool) -> None:
        self.fails, self.calls = fails, calls
        self.reported = Reported()
        self.monitor = Monitor(None if calls is None else calls.recorder.started)
        self.fixtures: dict[pytest.FixtureDef[Any], object] = {}
        """The values of fixtures that pytest keeps."""
        self.results: dict[str, Mapping[str, Any]] = {}
        """The results by node id, in plain types."""

    @pytest.hookimpl
    def pytest_sessionstart(self) -> None:
        """Start to watch the returns of functions."""
        self.monitor.start()

    @pytest.hookimpl
    def pytest_unconfigure(self) -> None:
        """Stop that."""
        self.monitor.stop()

    # --- fixtures ---

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: pytest.FixtureDef[Any]) -> Generator[None, object, object]:
        """Keep the value of a fixture, as long as pytest keeps it."""
        value = yield
        self.fixtures[fixturedef] = value
        return value

    @pytest.hookimpl
    def pytest_fixture_post_finalizer(self, fixturedef: pytest.FixtureDef[Any]) -> None:
        """Let it go."""
        self.fixtures.pop(fixturedef, None)

    # --- a test ---

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Generator[None, object, object]:
        """Look before the call, at its return, and after it; a test that fails keeps its own error."""
        __tracebackhide__ = _is_not_ours
        if not isinstance(item, pytest.Function) or item.get_closest_marker(MARKER) is not None:
            return (yield)
        set_up_before = set(self.fixtures)
        first = self._look_at(item, self._roots(item, set_up_before))
        before, looks = self.reported.new(first), [first]
        inside: list[Leftover] = []
        raised = True

        def at_return(variables: Mapping[str, Any]) -> None:
            looks.append(self._look_at(item, variables.items()))
            inside.extend(self.reported.new(looks[-1]))

        functions = leftovers.bodies(item.function)
        if self.calls is not None:
            self.calls.of(item, functions)
        try:
            with self.monitor.of(functions, at_return):
                result = yield
            raised = False
        finally:
            looks.append(self._look_at(item, self._roots(item, set_up_before)))
            left = message.LeftBehind(before, (*inside, *self.reported.new(looks[-1])))
            self._note(item, left, complete=all(seen.complete for seen in looks))
            if left and (raised or not self.fails):
                item.add_report_section("call", TITLE, message.message(item.nodeid, left))
        if left and self.fails:
            raise pytest.fail.Exception(message.message(item.nodeid, left), pytrace=False)
        return result

    def _look_at(self, item: pytest.Function, roots: Iterable[Root]) -> Look:
        if not leftovers.can_be_there():
            return Look()
        files = leftovers.files_of_test(item.function, item.instance, item.module.__name__)
        # What code outside of the test's file keeps may be the test's own for as long as it is patched.
        is_patched = any(class_name(type(value)) in _PATCHES for value in self.fixtures.values())
        others = leftovers.of_other_tests(item.instance)
        return leftovers.look(roots, others, self.reported, files=None if is_patched else files)

    def _roots(self, item: pytest.Function, set_up_before: set[pytest.FixtureDef[Any]]) -> list[Root]:
        """The objects that the test can reach: fixtures that it asks for by name, or that it has had set up itself since ``set_up_before``."""
        fixtures: list[Root] = [
            (fixture.argname, value)
            for fixture, value in self.fixtures.items()
            if fixture.argname in item.fixturenames or fixture not in set_up_before
        ]
        return leftovers.of_test(item.function, item.instance, fixtures)

    def _note(self, item: pytest.Function, left: message.LeftBehind, *, complete: bool) -> None:
        item.stash[_result] = {
            "kinds": list(left.named()),
            "headline": message.headline(left),
            "complete": complete,
        }

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """Send the result along, in plain types."""
        report = yield
        if report.when == "call" and _result in item.stash:
            setattr(report, _WIRE, item.stash[_result])
            del item.stash[_result]  # a rerun is watched anew
        return report

    # --- the end of the run ---

    @pytest.hookimpl
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Gather the results, wherever the tests ran."""
        if (wire := getattr(report, _WIRE, None)) is not None:
            self.results[report.nodeid] = wire

    @pytest.hookimpl
    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        """One line for each test that left something behind, and one for all of them."""
        results = self.results.values()
        kinds = [kind for result in results for kind in result["kinds"]]
        terminalreporter.section(TITLE, red=bool(kinds and self.fails), yellow=bool(kinds and not self.fails))
        lines = [
            f"{nodeid}  {result['headline']}" for nodeid, result in sorted(self.results.items()) if result["kinds"]
        ]
        partly = sum(not result["complete"] for result in results)
        count = message.summary(len(results), partly, kinds, [self.monitor.missing])
        calls = [] if self.calls is None else self.calls.lines(verbose=options.is_verbose(terminalreporter.config))
        for line in (*lines, count, *calls):
            terminalreporter.write_line(line)
        if lines and not gathered.is_worker(terminalreporter.config):
            from pytest_nnxcheck.reporting import markdown

            # The summary of a step of GitHub Actions may say of the marked tests that all is well.
            if (summary := markdown.step_summary(os.environ)) is not None:
                with contextlib.suppress(OSError):  # the terminal has it
                    markdown.append_watch(summary, count, lines)
