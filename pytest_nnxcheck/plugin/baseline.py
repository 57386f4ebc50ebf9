"""The memory baseline of a run: hooks that measure every test, hold it against the file, and at the end write it and say what is stale.

Registered as a plugin of pytest where a run has a baseline. Like `hooks`, this imports pytest and light modules only. What is compared, stale or written
is decided by pure functions in `reporting`. Tests are compared where they run; their results cross to the controller of xdist with their
reports, and only the controller writes.
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
from pytest_nnxcheck.plugin import options, selection, worker_data
from pytest_nnxcheck.reporting import baseline_comparison, baseline_file, baseline_update
from pytest_nnxcheck.reporting.baseline_comparison import (
    ANY_STAMP,
    NEW_ONLY,
    UPDATE,
    Comparison,
    Measured,
    Request,
    Result,
    Update,
)
from pytest_nnxcheck.reporting.baseline_file import Baseline, Key
from pytest_nnxcheck.reporting.baseline_update import RunEnd

if TYPE_CHECKING:
    from pytest_nnxcheck.runner.run import Run

NAME = "nnxcheck_baseline"
TITLE = "nnx memory baseline"
_WIRE = "nnx_baseline"

_measurements = pytest.StashKey["Measurements"]()
_result = pytest.StashKey[Result]()


def start(config: pytest.Config) -> BaselineHooks | None:
    """Register the hooks, if the run has a baseline. Raises `SettingError` that says which option or file is wrong."""
    tolerance = options.value(config, "memory_tolerance")
    given = options.given(config, "baseline")
    asked = [flag(name) for name, row in TABLE.items() if row.of == "baseline" and options.asked(config, name)]
    if given is None:
        if asked:
            raise SettingError(
                f"option {asked[0]}: of which file? Add {flag('baseline')} PATH, or nnx_baseline to the ini file"
            )
        return None
    if {UPDATE, NEW_ONLY} <= {*asked}:
        raise SettingError(
            f"options {UPDATE} and {NEW_ONLY}: the second leaves alone what the first replaces, give one of them"
        )
    update: Update = "all" if UPDATE in asked else "new" if NEW_ONLY in asked else ""
    path, request = given.folder / given.value, Request(given.value, tolerance, update, ANY_STAMP in asked)
    try:
        stored = baseline_file.read(path, given.value)
    except SettingError as error:
        raise SettingError(f"{given.origin}: {error}") from None
    hooks = BaselineHooks(request, path, given.origin, stored)
    config.pluginmanager.register(hooks, NAME)
    worker_data.of(config)
    return hooks


class Measurements:
    """What the first run of each nesting of a test measured."""

    def __init__(self) -> None:
        self.seen: set[Nesting] = set()
        self.held: dict[str, Measured] = {}

    def listen(self, event: object) -> None:
        """Keep what held, on its first run: with arguments of the user's that hypothesis draws, further ones are others each time."""
        if not isinstance(event, NestingFinished):
            return
        outcome, first = event.outcome, event.nesting not in self.seen
        self.seen.add(event.nesting)
        if first and event.whole and outcome is not None and outcome.verdict == "held" and outcome.peak is not None:
            entry = baseline_file.entry_of(outcome.peak, outcome.evidence, drawn=event.drawn)
            self.held[str(event.nesting)] = Measured(outcome, entry, fleeting=not event.repeats)


class BaselineHooks:
    """The baseline that is known, the results of the tests so far, and what is to be said at the end."""

    def __init__(self, request: Request, path: Path, origin: str, stored: Baseline | None) -> None:
        self.request, self.path, self.origin, self.stored = request, path, origin, stored
        self.entries = stored.by_test() if stored else {}
        self.results: dict[str, Result] = {}
        self.failures = 0
        self.lines: list[tuple[str, bool]] = []

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
        """Note what the nestings of a test measure."""
        item.stash[_measurements] = measurements = Measurements()
        run.listeners.append(measurements.listen)

    def finished(self, item: pytest.Item, run: Run) -> str:
        """Hold a test that is all right in itself against the baseline: the text of its failure, or nothing."""
        test, measured, stamp = worker_data.nodeid(item), item.stash[_measurements].held, devices.stamp()
        entries, comparison = self.entries.get(test, {}), Comparison()
        differences = self.stored.stamp.differences(stamp) if self.stored else ""
        if self.stored is not None and self.request.compares(differences):
            excused = {str(outcome.nesting) for outcome in run.outcomes.values() if outcome.verdict == "expected"}
            comparison = baseline_comparison.compare(entries, measured, self.request, excused)
        lines, replayed = baseline_comparison.lines_of(test, measured), run.settings.nesting is not None
        item.stash[_result] = Result(test, astuple(stamp), differences, lines, replayed, comparison)
        if not comparison.grew:
            return ""
        checked = run.report()
        typed = options.typed(item.config.option, ("baseline", "memory_tolerance"))
        words = [checked.options, *(f"{flag(name)} {shlex.quote(value)}" for name, value in typed.items())]
        checked = replace(checked, options=" ".join(filter(None, words)))
        return baseline_comparison.message(comparison, entries, measured, self.request, checked)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """Send the result along."""
        report = yield
        if item.get_closest_marker(MARKER) is not None:
            nothing = Result(worker_data.nodeid(item))
            result = item.stash.get(_result, nothing) if report.when == "call" else nothing
            item.stash[_result] = nothing  # a rerun measures anew
            setattr(report, _WIRE, asdict(result if report.passed else result.of_failure()))
        return report

    # --- the end of the run ---

    @pytest.hookimpl
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Gather the results, wherever the tests ran."""
        self.failures += report.failed
        wire = getattr(report, _WIRE, None)
        if wire and (report.when == "call" or wire["test"] not in self.results):
            self.results[wire["test"]] = Result.from_wire(wire)

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Write, and say what is stale, where the results of all processes are."""
        if session.config.option.collectonly or worker_data.is_worker(session.config):
            return
        results, end = self.results.values(), self._end(session)
        compared = baseline_comparison.summary(self.request, results, exists=self.stored is not None)
        self.lines = [*((line, False) for line in compared), *self._ended(end)]
        if any(red for _, red in self.lines) and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def _end(self, session: pytest.Session) -> RunEnd:
        config, status = session.config, session.exitstatus
        data, selected = worker_data.of(config), selection.Selection.of(config)
        return RunEnd(
            exit_status=int(status),
            failures=self.failures,
            interrupted=data.interrupted or status == pytest.ExitCode.INTERRUPTED,
            broken=data.collection.broken,
            complete=data.saw_all(status),
            tests=data.collection.tests,
            skipped=data.collection.skipped,
            whole_files=frozenset(filter(selected.covers, map(baseline_update.file_of, self.entries))),
            narrowed=selection.narrowed(config),
            fewer_nestings=not selection.typed(config).isdisjoint(
                flag(name) for name, row in TABLE.items() if row.narrows
            ),
            replayed=config.getoption("nnx_nesting") is not None,
        )

    def _ended(self, end: RunEnd) -> Iterator[tuple[str, bool]]:
        """What is stale, and what became of the file: lines, and whether one is bad news."""
        shown, results = self.request.shown, self.results.values()
        removed = baseline_update.gone(self.stored, end) if self.stored else []
        stale = [] if self.request.update == "all" else [*baseline_update.stale_lines(removed, results, end)]
        if stale:
            yield f"ERROR {shown} has stale entries, {UPDATE} removes them:", True
            yield from ((f"  {line}", True) for line in stale)
        if self.request.update:
            refusal = baseline_update.refusal(end, stale=bool(stale))
            sentence, written = (refusal, False) if refusal else self._write(removed)
            yield f"{shown} is {'written, ' if written else 'not written: '}{sentence}", not written

    def _write(self, removed: list[Key]) -> tuple[str, bool]:
        """Put the new baseline in its place, on top of what the file is by now: what changed, or why nothing did."""
        try:
            before = baseline_file.read(self.path, self.request.shown)
            after = baseline_update.renewed(
                before, self.results.values(), removed, new_only=self.request.update == "new"
            )
            if before != after:
                atomic_file.write(self.path, baseline_file.format_baseline(after))
        except (baseline_update.Refused, SettingError) as error:
            return str(error), False
        except OSError as error:
            return f"{atomic_file.reason(error)}, what was there is as it was", False
        return baseline_update.changes(before, after), True

    @pytest.hookimpl
    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        """What was compared, what was written, and what is wrong with the file."""
        if self.lines:
            terminalreporter.write_sep("=", TITLE, red=any(red for _, red in self.lines))
            for line, red in self.lines:
                terminalreporter.write_line(line, red=red)
