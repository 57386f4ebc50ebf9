"""Watch mode: hooks that look, around the call of every test that is not marked, for its leftovers.

Registered as a plugin of pytest where a run is watched. Like `hooks`, this imports pytest and light modules only: a suite without jax stays one.
"""

from __future__ import annotations

import contextlib
import inspect
import os
from collections.abc import Generator, Mapping
from typing import Any

import pytest

from pytest_nnxcheck.core.setting_values import Budget
from pytest_nnxcheck.core.settings import MARKER
from pytest_nnxcheck.plugin import gathered, options
from pytest_nnxcheck.plugin.marker import is_test_case
from pytest_nnxcheck.walk.raw_access import class_name
from pytest_nnxcheck.watch import leftovers, message, programs
from pytest_nnxcheck.watch.leftovers import Leftover, Look, Reported, Root
from pytest_nnxcheck.watch.monitor import Monitor

TITLE = "nnx watch"
_WIRE = "nnx_watch"
"""The attribute of a report of pytest that holds the result of a watched test. It is no record: reports, baseline and JUnit list every record, and a test that is watched was not checked."""
_PATCHES = ("MonkeyPatch", "MockerFixture")
"""Types of fixtures that change the names of modules until a test is torn down."""
_result = pytest.StashKey[dict[str, Any]]()


def register(config: pytest.Config) -> None:
    """Watch the tests of a run that asks for it. Raises `SettingError` that names the source."""
    mode = options.value(config, "watch")
    if mode != "off" and not config.option.collectonly:
        budget = options.value(config, "memory_budget")
        config.pluginmanager.register(WatchHooks(budget, fails=mode == "fail"), "nnxcheck_watch")


def _is_not_ours(caught: pytest.ExceptionInfo[BaseException]) -> bool:
    """True if our frames are to be hidden; where the failure is ours, one has to show, or pytest warns that all are hidden."""
    return not caught.errisinstance(pytest.fail.Exception)


class WatchHooks:
    """The hooks of a run that is watched, and what they know so far."""

    def __init__(self, budget: Budget | None, *, fails: bool) -> None:
        self.fails = fails
        self.budget = budget
        self.programs = programs.WatchedPrograms(budget.bytes if budget is not None else None)
        self.reported = Reported()
        self.monitor = Monitor()
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
        with self.programs.of(fixture=fixturedef.argname):
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
        first = self._look(item, set_up_before)
        before, looks = self.reported.new(first), [first]
        inside: list[Leftover] = []
        unused: list[programs.UnusedBuffers] = []
        raised = True

        def at_return(variables: Mapping[str, Any]) -> None:
            looks.append(leftovers.look(variables.items(), leftovers.of_other_tests(item.instance), self.reported))
            inside.extend(self.reported.new(looks[-1]))

        try:
            with (
                self.programs.of(lambda: self._roots(item, set_up_before)),
                programs.noted() as unused,
                self.monitor.of(leftovers.bodies(item.function), at_return),
            ):
                result = yield
            raised = False
        finally:
            looks.append(self._look(item, set_up_before))
            left = message.LeftBehind(
                before,
                (
                    *inside,
                    *self.reported.new(looks[-1]),
                    *programs.merged(unused, self.programs.unused),
                    *self.programs.take(),
                ),
            )
            self._note(item, left, complete=all(seen.complete for seen in looks))
            if left and (raised or not self.fails):
                item.add_report_section("call", TITLE, message.message(item.nodeid, left))
        if left and self.fails:
            raise pytest.fail.Exception(message.message(item.nodeid, left), pytrace=False)
        return result

    def _look(self, item: pytest.Function, set_up_before: set[pytest.FixtureDef[Any]]) -> Look:
        if not leftovers.can_be_there():
            return Look()
        files = leftovers.files_of_test(item.function, item.instance, item.module.__name__)
        # What code outside of the test's file keeps may be the test's own for as long as it is patched.
        is_patched = any(class_name(type(value)) in _PATCHES for value in self.fixtures.values())
        others = leftovers.of_other_tests(item.instance)
        return leftovers.look(
            self._roots(item, set_up_before), others, self.reported, files=None if is_patched else files
        )

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
            "to_mark": self._to_mark(item),
            "unread": self.programs.unread and f"programs were not judged ({self.programs.unread})",
        }

    def _to_mark(self, item: pytest.Function) -> dict[str, str] | None:
        """The call that a test could be marked for."""
        call = self.monitor.first_call
        if call is None or is_test_case(item.cls):
            return None
        function = leftovers.bodies(item.function)[-1]
        if inspect.iscoroutinefunction(function):
            return None
        test = f"{item.parent.nodeid if item.parent else ''}::{item.originalname}"
        place = f"{os.path.relpath(call.file, item.config.rootpath)}:{call.line}"
        return message.Unmarked(test, message.definition(function), call.type, place, call.name)._asdict()

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
            self.results[report.nodeid] = wire if report.passed else {**wire, "to_mark": None}

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
        missing = [self.monitor.missing, *sorted({result["unread"] for result in results})]
        if self.budget is not None and self.budget.bytes is None:
            a_multiple = f"memory_budget {self.budget} is a multiple, which works in marked tests alone"
            missing.append(f"{a_multiple}: write bytes to bound the programs of other tests")
        count = message.summary(len(results), partly, kinds, missing)
        # Of the parameters of a test the first that called a module, in whatever order they ran.
        found = [result["to_mark"] for _, result in sorted(self.results.items(), reverse=True) if result["to_mark"]]
        unmarked = sorted({test["test"]: message.Unmarked(**test) for test in found}.values())
        is_verbose = options.is_verbose(terminalreporter.config)
        for line in (*lines, count, *message.to_mark(unmarked, all_=is_verbose)):
            terminalreporter.write_line(line)
        if lines and not gathered.is_worker(terminalreporter.config):
            from pytest_nnxcheck.reporting import markdown

            # The summary of a step of GitHub Actions may say of the marked tests that all is well.
            if (summary := markdown.step_summary(os.environ)) is not None:
                with contextlib.suppress(OSError):  # the terminal has it
                    markdown.append_watch(summary, count, lines)
