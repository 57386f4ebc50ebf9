"""The one record of each test, in the process that reports. It leaves a worker of xdist with pytest's report of the test, and all else when the worker ends.

Without xdist a process is its own controller. Like `hooks`, this imports pytest and light modules only, until a marked test runs.
"""

from __future__ import annotations

import os
import traceback
from collections.abc import Generator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from pytest_nnxcheck.core.settings import MARKER
from pytest_nnxcheck.plugin.pytest_internals import OUR_CLASS, tell_junit

if TYPE_CHECKING:
    from pytest_nnxcheck.core.facts import Stamp
    from pytest_nnxcheck.core.nesting import Nesting
    from pytest_nnxcheck.core.outcome import NestingFinished
    from pytest_nnxcheck.reporting.records import NestingRecord, Place, Record
    from pytest_nnxcheck.runner.run import Run

RECORD = "nnx_record"
"""The attribute of a report of pytest that holds the record of a marked test, as plain JSON."""
_WIRE = "nnxcheck"
_WHOLE = {pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED, pytest.ExitCode.NO_TESTS_COLLECTED}
_ENDS = {"passed", "failed", "skipped", "error", "xfailed", "xpassed"}
"""The outcomes of tests that have ended; one that pytest-rerunfailures runs again has not."""
IN_BODY: pytest.StashKey[bool] = pytest.StashKey()
"""True while the body of a marked test runs: a subtest in it reports as if the call had ended."""
_nodeid = pytest.StashKey[str]()
_gathered = pytest.StashKey["Gathered"]()


def is_worker(config: pytest.Config) -> bool:
    """True if the process is a worker of xdist, whose controller writes files and reports results."""
    return hasattr(config, "workerinput")


def nodeid(item: pytest.Item) -> str:
    """The node id as it was when this was first asked: for --dist=loadgroup xdist adds to it on older versions of pytest."""
    return item.stash.setdefault(_nodeid, item.nodeid)


def of(config: pytest.Config) -> Gathered:
    """The records of a run; the first call starts to gather them."""
    if _gathered not in config.stash:
        config.stash[_gathered] = Gathered(config)
        config.pluginmanager.register(config.stash[_gathered], "nnxcheck_gathered")
    return config.stash[_gathered]


@dataclass(slots=True)
class Running:
    """A marked test that has begun."""

    run: Run
    first: dict[Nesting, NestingFinished] = field(default_factory=dict)
    """The first run of each nesting: with arguments of the user's that hypothesis draws, further ones are others each time."""
    measured: tuple[NestingRecord, ...] = ()
    """The figures to compare with those of other runs, where this one has a baseline."""

    def listen(self, event: object) -> None:
        """Keep the first run of a nesting."""
        from pytest_nnxcheck.core.outcome import NestingFinished

        if isinstance(event, NestingFinished):
            self.first.setdefault(event.nesting, event)

    def record(self, folder: Path, *, whole: bool) -> Record:
        """The record so far; unless ``whole``, without its nestings."""
        from pytest_nnxcheck.reporting import report

        drawn = [nesting for nesting, event in self.first.items() if event.drawn]
        record = report.record(self.run.report(), folder, drawn=drawn, whole=whole)
        known = stamp() if self.run.outcomes else None
        return replace(record, measured=self.measured, repeats=self.run.repeats, stamp=known)

    def stopped(self, folder: Path, *, whole: bool) -> Record:
        """The record of a test that was interrupted: it says what was not run, and never that the test passed."""
        from pytest_nnxcheck.reporting import report
        from pytest_nnxcheck.runner import strategies

        record, (_, planned) = self.record(folder, whole=whole), strategies.planned(self.run.settings)
        left = record.head.not_run or max(planned - len(self.run.outcomes), 0)
        has_failed = record.head.verdict in {"violated", "failed"}
        verdict, message = (record.head.verdict, record.head.message) if has_failed else ("", "")
        head = replace(record.head, outcome="interrupted", verdict=verdict, not_run=left)
        summary = report.summary_of(head)
        return replace(record, head=replace(head, summary=summary, message="\n".join(filter(None, [summary, message]))))


@dataclass(frozen=True, slots=True)
class Finished:
    """A check that was made elsewhere, and is reported now."""

    given: Record

    def record(self, folder: Path, *, whole: bool) -> Record:  # noqa: ARG002 - as `Running` has it
        """The record of that time."""
        return self.given

    stopped = record


def stamp() -> Stamp:
    """The versions and devices of this process."""
    from pytest_nnxcheck import devices

    return devices.stamp()


class Gathered:
    """The hooks that gather the records of the tests, and what the processes of a run collected."""

    def __init__(self, config: pytest.Config) -> None:
        self.pluginmanager = config.pluginmanager
        self.root, self.folder, self.is_worker = config.rootpath, config.invocation_params.dir, is_worker(config)
        self.whole = False
        """True if the records have their nestings, for a report."""
        self.running: dict[str, Running | Finished] = {}
        """The marked tests of this process that have not ended, by node id."""
        self.tests: dict[str, Record] = {}
        """The records of all tests that ended, or were interrupted, in whichever process."""
        self.interrupted = False
        self.ended = False
        """True if one of the processes finished its collection."""
        self.broken = False
        """True if tests may be missing, since a file could not be collected."""
        self.collected: set[str] = set()
        """Every marked test that was collected, deselected or not."""
        self.skipped: set[str] = set()
        """Files and classes that were skipped as a whole: nobody knows which tests are in them."""
        self._items: list[pytest.Item] = []

    def saw_all(self, exit_status: int) -> bool:
        """True if everything was collected that the run was asked for, and the tests ran until they passed or failed."""
        return exit_status in _WHOLE and not self.interrupted and self.ended and not self.broken

    # --- what there is ---

    @pytest.hookimpl
    def pytest_itemcollected(self, item: pytest.Item) -> None:
        """Keep the node id as it is now."""
        nodeid(item)
        self._items.append(item)

    @pytest.hookimpl
    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Remember where tests may be missing."""
        self.broken |= report.failed
        if report.skipped:
            self.skipped.add(report.nodeid)

    @pytest.hookimpl
    def pytest_collection_finish(self) -> None:
        """Note which tests there are: some have been marked since they were collected."""
        self.collected.update(nodeid(item) for item in self._items if item.get_closest_marker(MARKER) is not None)
        self.ended = True
        self._items.clear()

    # --- a test ---

    # Innermost: the run is forgotten behind it.
    @pytest.hookimpl(wrapper=True, trylast=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """Put the record of a marked test into its report, which goes to the controller of xdist as it is."""
        report = yield
        if item.get_closest_marker(MARKER) is None:
            return report
        has_ended = report.when == "call" and not item.stash.get(IN_BODY, False)
        if has_ended or (report.when == "setup" and not report.passed):
            from pytest_nnxcheck.reporting import records

            setattr(report, RECORD, records.plain(self._record(item, call)))
        if has_ended:
            self.running.pop(item.nodeid, None)
        return report

    def _record(self, item: pytest.Item, call: pytest.CallInfo[None]) -> Record:
        from pytest_nnxcheck.reporting import records

        running = self.running.get(item.nodeid)
        record = records.Record(records.Head(records.plain(nodeid(item))))
        try:
            record = running.record(self.folder, whole=self.whole) if running else record
        except Exception as error:  # noqa: BLE001 - a fault of ours must not take the run with it
            why = f"nnx report: cannot record this test: {type(error).__name__}: {error}"
            return replace(record, head=replace(record.head, message=records.plain(why)))
        path, line, _ = item.reportinfo()
        head = replace(record.head, place=self._place(os.fspath(path), line or 0), seconds=call.duration)
        if call.excinfo is not None:
            # The innermost line of the test's own file that the exception came through: its call of the object that nnx_wrap returned.
            lines = [each.lineno for each in call.excinfo.traceback if os.fspath(each.path) == os.fspath(item.path)]
            failed_at = self._place(os.fspath(item.path), lines[-1]) if lines else head.place
            head = replace(head, message=records.plain(text_of(call.excinfo.value)), failed_at=failed_at)
        return replace(record, head=head)

    def _place(self, path: str, line: int) -> Place:
        """A line of a file, handed in counted from 0: relative to pytest's root directory where it lies below, and counted from 1."""
        from pytest_nnxcheck.reporting import records

        file = Path(path)
        inside = file.is_relative_to(self.root)
        return records.Place(records.plain((file.relative_to(self.root) if inside else file).as_posix()), line + 1)

    # Outermost: whoever reads the records at the end of a run finds them.
    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Gather the record of a test of this process, or of a worker; of one that ran again, the last."""
        wire, record = getattr(report, RECORD, None), self.tests.get(report.nodeid)
        # Of a test in which its worker crashed, or was interrupted, xdist writes a report that is of no phase.
        is_crash = report.when not in {"setup", "call", "teardown"}
        if self.is_worker or (
            wire is None and not is_crash and not (report.when == "teardown" and report.failed and record)
        ):
            return
        from pytest_nnxcheck.reporting import records

        if wire is not None:
            record = records.made(records.Record, wire)
            self.tests[report.nodeid] = replace(record, head=replace(record.head, outcome=_outcome(report)))
            return
        record = record or records.Record(records.Head(records.plain(report.nodeid)))
        if not is_crash or record.head.outcome != "interrupted":
            text = "\n".join(filter(None, [record.head.message, records.plain(report.longreprtext)]))
            self.tests[report.nodeid] = replace(record, head=replace(record.head, outcome="error", message=text))

    # --- the end ---

    @pytest.hookimpl
    def pytest_keyboard_interrupt(self) -> None:
        """Ctrl-C, or `pytest.exit`, which may give any exit status."""
        self.interrupted = True

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Add the test that was interrupted; in a worker, hand over everything: xdist sends it when the session has ended."""
        stopped = []
        if self.running:
            from pytest_nnxcheck.reporting import records

            of_running = (running.stopped(self.folder, whole=self.whole) for running in self.running.values())
            stopped = [records.plain(record) for record in of_running]
        wire = {
            "ended": self.ended,
            "broken": self.broken,
            "collected": sorted(self.collected),
            "skipped": sorted(self.skipped),
            "stopped": stopped,
        }
        output = getattr(session.config, "workeroutput", None)
        if output is not None:
            output[_WIRE] = wire
        elif not self.is_worker:
            self._absorb(wire)

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        """Take over what a worker saw; one that crashed says nothing."""
        if wire := getattr(node, "workeroutput", {}).get(_WIRE):
            self._absorb(wire)

    def _absorb(self, wire: dict[str, Any]) -> None:
        self.ended |= wire["ended"]
        self.broken |= wire["broken"]
        self.collected.update(wire["collected"])
        self.skipped.update(wire["skipped"])
        for each in wire["stopped"]:
            from pytest_nnxcheck.reporting import records, report

            record = records.made(records.Record, each)
            # What a test told when it ended stays.
            earlier = self.tests.get(record.head.nodeid)
            if earlier is None or not earlier.head.summary or earlier.head.outcome not in _ENDS:
                self.tests[record.head.nodeid] = record
                tell_junit(self.pluginmanager, record.head.nodeid, record.head.summary, report.properties(record.head))


def text_of(error: BaseException) -> str:
    """The exception as the terminal shows it, with its notes."""
    text = "".join(traceback.format_exception_only(error)).rstrip()
    if isinstance(error, pytest.fail.Exception | pytest.skip.Exception):
        return text.partition(": ")[2]
    return OUR_CLASS.sub("", text)


def _outcome(report: pytest.TestReport) -> Any:
    """The outcome as reports name it."""
    if hasattr(report, "wasxfail"):
        return "xpassed" if report.passed else "xfailed"
    return "error" if report.when == "setup" and report.failed else str(report.outcome)
