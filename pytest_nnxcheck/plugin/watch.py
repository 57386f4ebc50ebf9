"""Watch mode: hooks that look, around the call of every test that is not marked, for what it leaves behind.

Registered as a plugin of pytest where a run is watched. Like `hooks`, this imports pytest and light modules only: a suite without jax stays one.
"""

from __future__ import annotations

import contextlib
import inspect
import os
import re
import sys
from collections.abc import Generator, Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from pytest_nnxcheck import atomic_file
from pytest_nnxcheck.core.errors import SettingError
from pytest_nnxcheck.core.setting_values import Budget
from pytest_nnxcheck.core.settings import MARKER, flag
from pytest_nnxcheck.plugin import options, worker_data
from pytest_nnxcheck.plugin.marker import is_test_case
from pytest_nnxcheck.plugin.options import Given
from pytest_nnxcheck.watch import candidates, donation, leftovers, message, roots
from pytest_nnxcheck.watch.calls import Call
from pytest_nnxcheck.watch.candidates import Candidate, Draft
from pytest_nnxcheck.watch.donation import Unused
from pytest_nnxcheck.watch.leftovers import Leftover, Look, Reported
from pytest_nnxcheck.watch.message import Finding
from pytest_nnxcheck.watch.programs import Programs
from pytest_nnxcheck.watch.returns import Returns
from pytest_nnxcheck.watch.roots import Root

NAME = "nnxcheck_watch"
TITLE = "nnx watch"
_WIRE = "nnx_watch"
_result = pytest.StashKey[dict[str, Any]]()


def register(config: pytest.Config) -> None:
    """Watch the tests of a run that asks for it. Raises `SettingError` that names the source."""
    mode = options.value(config, "watch")
    given = options.given(config, "mark_candidates")
    if given is not None and mode == "off":
        raise SettingError(f"{given.origin}: no test is watched, add {flag('watch')}")
    if mode != "off" and not config.option.collectonly:
        budget = options.value(config, "memory_budget")
        new_tests = NewTests(config, given) if given is not None else None
        config.pluginmanager.register(WatchHooks(budget, new_tests, fails=mode == "fail"), NAME)


def _is_not_ours(caught: pytest.ExceptionInfo[BaseException]) -> bool:
    """Where it is ours, one frame has to show, or pytest says that all are hidden."""
    return not caught.errisinstance(pytest.fail.Exception)


class WatchHooks:
    """The fixtures that are alive, what was reported so far, and the results of the tests."""

    def __init__(self, budget: Budget | None, new_tests: NewTests | None, *, fails: bool) -> None:
        self.fails = fails
        self.new_tests = new_tests
        self.budget = budget
        self.programs = Programs(budget.bytes if budget is not None else None)
        self.reported = Reported()
        self.returns = Returns()
        self.fixtures: dict[pytest.FixtureDef[Any], object] = {}
        self.results: dict[str, Mapping[str, Any]] = {}
        self.candidates: dict[str, Mapping[str, Any]] = {}

    @pytest.hookimpl
    def pytest_sessionstart(self) -> None:
        """Watch the returns of functions."""
        self.returns.start()

    @pytest.hookimpl
    def pytest_unconfigure(self) -> None:
        """Give back what was taken."""
        self.returns.stop()

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
        unused: list[Unused] = []
        raised = True

        def at_return(variables: Mapping[str, Any]) -> None:
            looks.append(leftovers.look(variables.items(), roots.of_other_tests(item.instance), self.reported))
            inside.extend(self.reported.new(looks[-1]))

        try:
            with (
                self.programs.of(lambda: self._roots(item, set_up_before)),
                donation.noted() as unused,
                self.returns.of(roots.bodies(item.function), at_return),
            ):
                result = yield
            raised = False
        finally:
            looks.append(self._look(item, set_up_before))
            finding = Finding(
                before,
                (*inside, *self.reported.new(looks[-1])),
                donation.merged(unused, self.programs.unused),
                self.programs.take(),
            )
            self._note(item, finding, complete=all(seen.complete for seen in looks))
            if finding and (raised or not self.fails):
                item.add_report_section("call", TITLE, message.message(item.nodeid, finding))
        if finding and self.fails:
            raise pytest.fail.Exception(message.message(item.nodeid, finding), pytrace=False)
        return result

    def _look(self, item: pytest.Function, set_up_before: set[pytest.FixtureDef[Any]]) -> Look:
        if not leftovers.can_be_there():
            return Look()
        return leftovers.look(self._roots(item, set_up_before), roots.of_other_tests(item.instance), self.reported)

    def _roots(self, item: pytest.Function, set_up_before: set[pytest.FixtureDef[Any]]) -> list[Root]:
        """What the test can reach: fixtures that it asks for by name, or that it has had set up itself since ``set_up_before``."""
        fixtures: list[Root] = [
            (fixture.argname, value)
            for fixture, value in self.fixtures.items()
            if fixture.argname in item.fixturenames or fixture not in set_up_before
        ]
        return roots.of_test(item.function, item.instance, fixtures)

    def _note(self, item: pytest.Function, finding: Finding, *, complete: bool) -> None:
        first = self.returns.calls.first
        item.stash[_result] = {
            "kinds": list(finding.kinds),
            "headline": message.headline(finding),
            "complete": complete,
            "calls": first is not None,
            "can_be_marked": not inspect.iscoroutinefunction(roots.bodies(item.function)[-1])
            and not is_test_case(item.cls),
            "draft": self.new_tests is not None
            and first is not None
            and self.new_tests.draft(item, first, self.fixtures),
            "unread": self.programs.unread and f"programs were not judged ({self.programs.unread})",
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
            if report.passed and wire["calls"]:
                self.candidates[report.nodeid] = wire["draft"]

    @pytest.hookimpl
    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        """One line for each test that left something behind, and one for all of them."""
        results = self.results.values()
        kinds = [kind for result in results for kind in result["kinds"]]
        terminalreporter.section(TITLE, red=bool(kinds and self.fails), yellow=bool(kinds and not self.fails))
        lines = [
            f"{nodeid}  {result['headline']}" for nodeid, result in sorted(self.results.items()) if result["kinds"]
        ]
        for line in lines:
            terminalreporter.write_line(line)
        partly = sum(not result["complete"] for result in results)
        missing = [self.returns.missing, *sorted({result["unread"] for result in results}), self._no_bytes()]
        count = message.summary(len(results), partly, kinds, missing)
        terminalreporter.write_line(count)
        if lines and not worker_data.is_worker(terminalreporter.config):
            _summarize_step(count, lines)
        verbose = terminalreporter.config.get_verbosity() > 0
        to_mark = [nodeid for nodeid in sorted(self.candidates) if self.results[nodeid]["can_be_marked"]]
        for line in message.candidates(to_mark, all_=verbose):
            terminalreporter.write_line(line)
        if self.new_tests is not None and not worker_data.is_worker(terminalreporter.config):
            drafts = [self.candidates[nodeid] for nodeid in sorted(self.candidates)]
            terminalreporter.write_line(self.new_tests.write(drafts, self.returns.missing))

    def _no_bytes(self) -> str:
        if self.budget is None or self.budget.bytes is not None:
            return ""
        return f"memory_budget {self.budget} is a multiple, which a test has that is marked: write bytes to hold all programs to it"


def _summarize_step(count: str, lines: list[str]) -> None:
    """Tell a step of GitHub Actions too: its summary may say of the marked tests that all is well."""
    from pytest_nnxcheck.reporting import markdown

    summary = markdown.step_summary(os.environ)
    if summary is not None:
        with contextlib.suppress(OSError):  # the terminal has it
            markdown.append_watch(summary, count, lines)


class NewTests:
    """The file of marked tests that the run writes."""

    def __init__(self, config: pytest.Config, given: Given) -> None:
        self.config = config
        self.path = given.folder / given.value
        if self.path.suffix != ".py":
            raise SettingError(f"{given.origin}: {given.value!r} is no file of Python, write 'tests/test_marked.py'")
        if self.path.exists():
            raise SettingError(
                f"{given.origin}: {given.value} is there, and stays as it is: move it, or name another file"
            )
        if reason := atomic_file.unwritable(self.path):
            raise SettingError(f"{given.origin}: {given.value} cannot be written ({reason})")

    def draft(
        self, item: pytest.Function, call: Call, fixtures: Mapping[pytest.FixtureDef[Any], object]
    ) -> dict[str, Any]:
        """What can be said of a marked test for one that calls a module, in plain types."""
        module, no_module = self._module(item)
        used = [fixture for fixture in fixtures if fixture.argname in item.fixturenames]
        callspec = getattr(item, "callspec", None)
        places = {
            fixture.argname: self._place(item, fixture)
            for fixture in used
            if fixture.argname not in (callspec.params if callspec else ()) or not _is_of_pytest(fixture)
        }
        own = frozenset(name for name, place in places.items() if place == "own")
        missing = [name for name, place in places.items() if place == "missing"]
        obstacle = _not_there(missing[0]) if missing else no_module if own else ""
        marks = [
            (mark.name, mark.args, mark.kwargs) for node, mark in item.iter_markers_with_node() if node is not item
        ]
        function = roots.bodies(item.function)[-1]
        candidate = Candidate(
            item.nodeid,
            function,
            module,
            no_module,
            own,
            frozenset({"request", *(name for name, place in places.items() if place == "given")}),
            tuple(marks),
            obstacle,
        )
        return asdict(candidates.draft(candidate, call))

    def _module(self, item: pytest.Function) -> tuple[str, str]:
        """The name that the new file can import the file of a test by, or why there is none."""
        name, file = item.module.__name__, Path(item.module.__file__ or "")
        if self.config.getoption("importmode") == "importlib":
            return "", "with --import-mode=importlib the files of tests are no modules"
        if sys.modules.get(name) is not item.module or _base(file) != _base(self.path.absolute()):
            return "", f"write the new file into the folder of {file.name}"
        return name, ""

    def _place(self, item: pytest.Function, fixture: pytest.FixtureDef[Any]) -> str:
        """Where the new file has a fixture from: it is ``given``, it is to be imported as the test's ``own``, or it is ``missing``."""
        home, function = fixture.baseid, fixture.func
        if "::" in home:
            is_missing = fixture.argname in item.fixturenames and not _is_of_pytest(fixture)
            return "missing" if is_missing or _set_up(fixture.argname) else ""
        if home.endswith(".py"):
            named = item.module.__dict__.get(fixture.argname)
            return "own" if function.__name__ == fixture.argname and named is not None else "missing"
        if not home and not function.__module__.endswith("conftest"):
            return "given"
        folder = self.config.rootpath / home
        return "given" if folder in self.path.absolute().parents else "missing"

    def write(self, drafts: Iterable[Mapping[str, Any]], missing: str) -> str:
        """Write the file, of which is said what the result is."""
        tests = [Draft(**draft) for draft in drafts]
        if not tests:
            reason = missing or "no test that passed calls a module outside of any transform"
            return f"{self.path.name} was not written: {reason}"
        if self.path.exists():
            return f"{self.path.name} was not written: it is there by now, and stays as it is"
        try:
            atomic_file.write(self.path, candidates.file_text(tests))
        except OSError as error:
            return f"{self.path.name} was not written: {atomic_file.reason(error)}"
        return f"{self.path.name} was written: read it before you keep it"


def _is_of_pytest(fixture: pytest.FixtureDef[Any]) -> bool:
    """Whether pytest made it: for the values of a parameter, or of a ``setup`` function."""
    return str(fixture.func.__module__).partition(".")[0] == "_pytest"


def _set_up(name: str) -> str:
    """The ``setup`` function that pytest has made a fixture of, by its name: the same on pytest 8.0 and 9.2."""
    of_setup = re.match(r"_?xunit_(setup_[a-z]+)_fixture_", name)
    return of_setup[1] if of_setup else ""


def _not_there(name: str) -> str:
    function = _set_up(name)
    return f"its {function} would not be run" if function else f"its fixture {name} would not be there"


def _base(file: Path) -> Path:
    """The folder that pytest puts on the path of modules for a file."""
    folder = file.parent
    while (folder / "__init__.py").is_file():
        folder = folder.parent
    return folder
