"""The memory baseline of a run: hooks that measure every test, compare it with the file, and at the end say what is stale and write the file.

Like `hooks`, this imports pytest and light modules only. What is compared and written is decided by pure functions in `reporting`. Tests are compared
where they run; their results cross to the controller of xdist with their reports, and only the controller writes.
"""

from __future__ import annotations

import shlex
from collections.abc import Generator, Iterator
from dataclasses import asdict, astuple, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from pytest_nnxcheck import atomic_file, devices
from pytest_nnxcheck.core.errors import SettingError
from pytest_nnxcheck.core.nesting import Nesting
from pytest_nnxcheck.core.outcome import NestingFinished
from pytest_nnxcheck.core.settings import MARKER, TABLE, flag
from pytest_nnxcheck.core.text import counted
from pytest_nnxcheck.plugin import options, selection, worker_data
from pytest_nnxcheck.reporting import baseline_comparison, baseline_file
from pytest_nnxcheck.reporting.baseline_comparison import ANY_STAMP, NEW_ONLY, UPDATE, Measured, Request, Result
from pytest_nnxcheck.reporting.baseline_file import Baseline

if TYPE_CHECKING:
    from pytest_nnxcheck.runner.run import Run

_WIRE = "nnx_baseline"

_measured = pytest.StashKey[dict[str, Measured]]()
_result = pytest.StashKey[Result]()


def register(config: pytest.Config) -> BaselineHooks | None:
    """Register the hooks, if the run has a baseline. Raises `SettingError` that says which option or file is wrong."""
    tolerance = options.value(config, "memory_tolerance")
    given = options.given(config, "baseline")
    asked = [flag(name) for name, row in TABLE.items() if row.of == "baseline" and options.asked(config, name)]
    if given is None:
        if asked:
            raise SettingError(
                f"option {asked[0]} needs a file: add {flag('baseline')} PATH, or nnx_baseline to the ini file"
            )
        return None
    if {UPDATE, NEW_ONLY} <= {*asked}:
        raise SettingError(
            f"options {UPDATE} and {NEW_ONLY}: the first replaces every entry, the second keeps them all: give one of them"
        )
    request = Request(
        given.value,
        tolerance,
        "all" if UPDATE in asked else "new" if NEW_ONLY in asked else "",
        any_stamp=ANY_STAMP in asked,
        replayed=options.given(config, "nesting") is not None,
    )
    path = given.folder / given.value
    try:
        stored = baseline_file.read(path, given.value)
    except SettingError as error:
        raise SettingError(f"{given.origin}: {error}") from None
    hooks = BaselineHooks(request, path, given.origin, stored)
    config.pluginmanager.register(hooks, "nnxcheck_baseline")
    worker_data.of(config)
    return hooks


class BaselineHooks:
    """The baseline in the file, the results of the tests so far, and the lines to write at the end."""

    def __init__(self, request: Request, path: Path, origin: str, stored: Baseline | None) -> None:
        self.request, self.path, self.origin, self.stored = request, path, origin, stored
        self.results: dict[str, Result] = {}
        self.failures = 0
        self.lines: list[tuple[str, bool]] = []
        """The lines, each with True if it is bad news."""

    @pytest.hookimpl
    def pytest_sessionstart(self, session: pytest.Session) -> None:
        """Stop a run that could not be compared or written; ``pytest --help`` and a collection need no file."""
        if session.config.option.collectonly or worker_data.is_worker(session.config):
            return
        shown, update = self.request.shown, self.request.update
        if self.stored is None and not update:
            raise pytest.UsageError(
                f"{self.origin}: there is no file {shown}: write it with {UPDATE}, from a run of all tests"
            )
        if update and (reason := atomic_file.unwritable(self.path)):
            raise pytest.UsageError(f"{self.origin}: cannot write {shown}: {reason}")

    # --- a test ---

    def listen(self, item: pytest.Item, run: Run) -> None:
        """Keep what the nestings of a test measure that hold."""
        seen = set[Nesting]()
        item.stash[_measured] = measured = dict[str, Measured]()

        def keep(event: object) -> None:
            # The first run of a nesting: with arguments of the user's that hypothesis draws, further ones are others each time.
            if not isinstance(event, NestingFinished) or event.nesting in seen:
                return
            seen.add(event.nesting)
            outcome, whole = event.outcome, run.remember or not event.drawn
            if whole and outcome is not None and outcome.verdict == "held" and outcome.peak is not None:
                entry = baseline_file.entry_of(outcome.peak, outcome.evidence, drawn=event.drawn)
                buffers = outcome.evidence.buffers if outcome.evidence else ()
                measured[str(event.nesting)] = Measured(entry, buffers, fleeting=event.drawn and not run.repeats)

        run.listeners.append(keep)

    def finished(self, item: pytest.Item, run: Run) -> str:
        """Compare a test that is all right in itself with the baseline: the text of its failure, or nothing."""
        test, measured, stamp = worker_data.nodeid(item), item.stash[_measured], devices.stamp()
        entries, result, differences = {}, Result(test), ""
        if self.stored is not None:
            entries, differences = self.stored.tests.get(test, {}), self.stored.stamp.differences(stamp)
            if self.request.compares(differences):
                excused = {str(outcome.nesting) for outcome in run.outcomes.values() if outcome.verdict == "expected"}
                result = baseline_comparison.compare(test, entries, measured, self.request, excused)
        item.stash[_result] = replace(
            result,
            stamp=astuple(stamp),
            differences=differences,
            lines=tuple(
                baseline_file.format_line(test, nesting, now.entry)
                for nesting, now in measured.items()
                if not now.fleeting
            ),
        )
        if not result.grew:
            return ""
        checked = run.report()
        typed = options.typed(item.config.option, ("baseline", "memory_tolerance"))
        words = [checked.options, *(f"{flag(name)} {shlex.quote(value)}" for name, value in typed.items())]
        checked = replace(checked, options=" ".join(filter(None, words)))
        return baseline_comparison.message(result, entries, measured, self.request, checked)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """Send the result along."""
        report = yield
        if item.get_closest_marker(MARKER) is not None:
            nothing = Result(worker_data.nodeid(item))
            result = item.stash.get(_result, nothing) if report.when == "call" else nothing
            item.stash[_result] = nothing  # a rerun measures anew
            setattr(report, _WIRE, asdict(result if report.passed else replace(result, stamp=())))
        return report

    # --- the end of the run ---

    @pytest.hookimpl
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Gather the results, wherever the tests ran."""
        self.failures += report.failed
        wire = getattr(report, _WIRE, None)
        if wire and (report.when == "call" or wire["test"] not in self.results):
            self.results[wire["test"]] = Result(**wire)

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Say what is stale, and write, where the results of all processes are."""
        if session.config.option.collectonly or worker_data.is_worker(session.config):
            return
        compared = baseline_comparison.summary(self.request, self.results.values(), exists=self.stored is not None)
        self.lines = [*((line, False) for line in compared), *self._ended(session)]
        if any(red for _, red in self.lines) and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def _ended(self, session: pytest.Session) -> Iterator[tuple[str, bool]]:
        """The lines on stale entries, and on the file: written, or why not."""
        shown, update, stale, gone = self.request.shown, self.request.update, list[str](), list[str]()
        data, status = worker_data.of(session.config), session.exitstatus
        # Only a run of whole files, to its end and under all nestings, knows that something in them is no more.
        if self.stored is not None and data.saw_all(status) and not selection.is_narrowed(session.config):
            selected, skipped = selection.Selection.of(session.config), tuple(data.collection.skipped)
            whole = [test for test in self.stored.tests if selected.covers(test.partition("::")[0])]
            gone = [test for test in whole if test not in data.collection.tests and not test.startswith(skipped)]
            passed = [self.results[test] for test in whole if test in self.results and self.results[test].stamp]
            # Where nothing was compared, nothing is known of nestings.
            if update != "all" and not any(result.differences for result in self.results.values()):
                stale = [f"  {baseline_comparison.on_one_line(test)}: there is no such test" for test in gone]
                stale += [
                    f"  {baseline_comparison.on_one_line(result.test)}: did not run under {', '.join(result.stale)}"
                    for result in passed
                    if result.stale
                ]
        if stale:
            yield f"ERROR {shown} has stale entries, {UPDATE} removes them:", True
            yield from ((line, True) for line in stale)
        if update:
            refusal = self._refusal(data, status, stale=bool(stale))
            sentence, is_written = (refusal, False) if refusal else self._write(gone)
            yield f"{shown} is {'written, ' if is_written else 'not written: '}{sentence}", not is_written

    def _refusal(self, data: worker_data.WorkerData, status: int, *, stale: bool) -> str:
        """Why a run must not leave a baseline, whatever it measured; empty if it may."""
        if data.collection.broken:
            return "not every test could be collected"
        if data.interrupted or status == pytest.ExitCode.INTERRUPTED:
            return "the run was interrupted"
        if self.failures:
            return f"{counted(self.failures, 'test')} failed"
        if status:
            return f"the run failed (exit status {int(status)})"
        return f"it has stale entries, which only {UPDATE} removes" if stale else ""

    def _write(self, gone: list[str]) -> tuple[str, bool]:
        """Put the new baseline in its place, on top of the present content of the file. Returns the changes, or why there are none."""
        try:
            before = baseline_file.read(self.path, self.request.shown)
            after = baseline_comparison.renewed(before, self.results.values(), self.request, gone)
            if before != after:
                atomic_file.write(self.path, baseline_file.format_baseline(after))
        except (baseline_comparison.Refused, SettingError) as error:
            return str(error), False
        except OSError as error:
            return f"{atomic_file.reason(error)}; the file is unchanged", False
        return baseline_comparison.changes(before, after), True

    @pytest.hookimpl
    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        """Show the comparisons, the changes of the file, and its problems."""
        if self.lines:
            terminalreporter.write_sep("=", "nnx memory baseline", red=any(red for _, red in self.lines))
            for line, red in self.lines:
                terminalreporter.write_line(line, red=red)
