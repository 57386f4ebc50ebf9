"""The memory baseline of a run: hooks that hold every test against the file, gather what was measured, and write it at the end.

Registered as a plugin of pytest where a run has a baseline. Like `hooks`, this imports pytest and light rooms only. Tests are compared where they
run; what they measured crosses to the controller of xdist with their reports, and only the controller writes.
PYTEST_DONT_REWRITE: nothing here is an assertion for pytest to rewrite.
"""

from __future__ import annotations

import shlex
from collections.abc import Generator, Iterator, Mapping
from dataclasses import astuple, replace
from fractions import Fraction
from typing import TYPE_CHECKING, Any

import pytest

from pytest_nnxcheck.core import devices
from pytest_nnxcheck.core.evidence import Stamp
from pytest_nnxcheck.core.nesting import Nesting
from pytest_nnxcheck.core.setting_values import SettingError
from pytest_nnxcheck.core.settings import MARKER, flag
from pytest_nnxcheck.plugin import options, selection
from pytest_nnxcheck.plugin.options import Given
from pytest_nnxcheck.reporting import baseline_comparison, baseline_file
from pytest_nnxcheck.reporting.baseline_comparison import Comparison, Measured
from pytest_nnxcheck.reporting.baseline_file import Baseline, Key
from pytest_nnxcheck.reporting.baseline_update import Refused, Result, changes, renewed

if TYPE_CHECKING:
    from pytest_nnxcheck.runner.run import Run

NAME = "nnxcheck_baseline"
TITLE = "nnx memory baseline"
_UPDATE = flag("baseline_update")
_NEW_ONLY = flag("baseline_update_new_only")
_ANY_STAMP = flag("baseline_any_stamp")
_WIRE = "nnx_baseline"
_FLAGS = ("baseline_update", "baseline_update_new_only", "baseline_any_stamp")
_CUTS = ("nesting", "transforms", "styles", "modes", "max_depth", "max_examples", "sweep", "effort")
"""Settings that change which nestings run."""

_nodeid = pytest.StashKey[str]()
_ledger = pytest.StashKey["Ledger"]()
_wire = pytest.StashKey[dict[str, Any]]()


def start(config: pytest.Config) -> Keeper | None:
    """Register the keeper, if the run has a baseline. Raises `SettingError` that says which option or file is wrong."""
    tolerance = options.value(config, "memory_tolerance")
    given = options.given(config, "baseline")
    asked = [flag(name) for name in _FLAGS if options.asked(config, name)]
    if given is None:
        if asked:
            raise SettingError(
                f"option {asked[0]}: of which file? Add {flag('baseline')} PATH, or nnx_baseline to the ini file"
            )
        return None
    if {_UPDATE, _NEW_ONLY} <= {*asked}:
        raise SettingError(
            f"options {_UPDATE} and {_NEW_ONLY}: the second leaves alone what the first replaces, give one of them"
        )
    update = next((each for each in (_UPDATE, _NEW_ONLY) if each in asked), "")
    try:
        known = baseline_file.read(given.folder / given.value, given.value)
    except SettingError as error:
        raise SettingError(f"{given.origin}: {error}") from None
    keeper = Keeper(given, known, tolerance, update, any_stamp=_ANY_STAMP in asked)
    config.pluginmanager.register(keeper, NAME)
    return keeper


class Ledger:
    """What the first run of each nesting of a test measured: a listener to its run."""

    def __init__(self) -> None:
        self.seen: set[Nesting] = set()
        self.found: dict[Nesting, Measured] = {}
        self.unstable: set[Nesting] = set()

    def begin(self, run: Run, nesting: Nesting) -> None:
        """Nothing is known yet."""

    def end(self, run: Run, nesting: Nesting) -> None:
        """Keep what held, on its first run: with arguments of the user's that hypothesis draws, further ones are others each time."""
        outcome, first = run.outcomes.get(nesting), nesting not in self.seen
        self.seen.add(nesting)
        whole = run.sweeping or run.remembers
        if not first or not whole or outcome is None or outcome.verdict != "held" or outcome.peak is None:
            return
        self.found[nesting] = Measured(
            outcome, baseline_file.entry(outcome.peak, outcome.evidence, drawn=not run.sweeping)
        )
        if not run.sweeping and not run.repeats:
            self.unstable.add(nesting)


class Keeper:
    """The baseline of a run: what is known, what this run measured, and what is to be said at the end."""

    def __init__(
        self, given: Given, known: Baseline | None, tolerance: Fraction, update: str, *, any_stamp: bool = False
    ) -> None:
        self.path, self.shown, self.origin = given.folder / given.value, given.value, given.origin
        self.known, self.tolerance, self.update, self.any_stamp = known, tolerance, update, any_stamp
        self.of_test = known.by_test() if known else {}
        self.collected = self.broken = self.interrupted = False
        self.failures = 0
        self.items: list[pytest.Item] = []
        self.exists: set[str] = set()
        self.left_out: set[str] = set()
        self.seen: set[str] = set()
        self.wires: dict[str, Mapping[str, Any]] = {}
        self.lines: list[tuple[str, bool]] = []

    @pytest.hookimpl
    def pytest_sessionstart(self, session: pytest.Session) -> None:
        """Stop a run that could not be compared or written; ``pytest --help`` and a collection need no file."""
        config = session.config
        if config.option.collectonly or hasattr(config, "workerinput"):
            return
        if self.known is None and not self.update:
            raise pytest.UsageError(
                f"{self.origin}: there is no file {self.shown}: write it with {_UPDATE}, from a run of all tests"
            )
        if self.update and (reason := baseline_file.unwritable(self.path)):
            raise pytest.UsageError(f"{self.origin}: cannot write {self.shown}: {reason}")

    # --- a test ---

    def listen(self, item: pytest.Item, run: Run) -> None:
        """Note what the nestings of a test measure."""
        item.stash[_ledger] = ledger = Ledger()
        run.listeners.append(ledger)

    def finished(self, item: pytest.Item, run: Run) -> str:
        """Hold a test that is all right in itself against the baseline: the text of its failure, or nothing."""
        ledger, test, stamp = item.stash[_ledger], self.test_of(item), devices.stamp()
        differences = self.known.stamp.differences(stamp) if self.known else ""
        stable = {nesting: each for nesting, each in ledger.found.items() if nesting not in ledger.unstable}
        item.stash[_wire] = wire = {
            "stamp": list(astuple(stamp)),
            "differences": differences,
            "lines": [baseline_file.format_line((test, str(nesting)), each.entry) for nesting, each in stable.items()],
            "replayed": run.settings.nesting is not None,
        }
        if self.known is None or self.update == _UPDATE or (differences and not self.any_stamp):
            return ""
        known = self.of_test.get(test, {})
        result = baseline_comparison.compare(known, ledger.found, self.tolerance)
        excused = {str(outcome.nesting) for outcome in run.outcomes.values() if outcome.verdict == "expected"}
        found = {str(nesting) for nesting in ledger.found}
        wire |= {
            "compared": result.compared,
            "grew": len(result.grew),
            "shrank": len(result.shrank),
            "new": len({*result.new} - {str(nesting) for nesting in ledger.unstable}),
            "stale": [name for name, each in known.items() if not each.drawn and name not in found | excused],
        }
        return self._message(item, run, known, ledger, result) if result.grew else ""

    def _message(
        self, item: pytest.Item, run: Run, known: Mapping[str, baseline_file.Entry], ledger: Ledger, result: Comparison
    ) -> str:
        report = run.report()
        typed = [
            f"{flag(name)} {shlex.quote(value)}"
            for name, value in options.typed(item.config.option, ("baseline", "memory_tolerance")).items()
        ]
        checked = replace(report, options=" ".join([*([report.options] if report.options else []), *typed]))
        return baseline_comparison.message(result, known, ledger.found, tolerance=self.tolerance, checked=checked)

    def test_of(self, item: pytest.Item) -> str:
        return item.stash.get(_nodeid, item.nodeid)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """Send along what was measured; a test that failed sends its name alone."""
        report = yield
        if item.get_closest_marker(MARKER) is not None:
            wire = item.stash.get(_wire, {}) if report.when == "call" else {}
            item.stash[_wire] = {}  # a rerun measures anew
            if not report.passed:
                wire = {name: wire[name] for name in ("differences", "compared", "grew") if name in wire}
            setattr(report, _WIRE, {"test": self.test_of(item), **wire})
        return report

    # --- the collection ---

    @pytest.hookimpl
    def pytest_itemcollected(self, item: pytest.Item) -> None:
        """Keep the node id as it is now: for --dist=loadgroup xdist adds to it on older versions of pytest."""
        item.stash[_nodeid] = item.nodeid
        self.items.append(item)

    @pytest.hookimpl
    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Remember where tests may be missing."""
        self.broken = self.broken or report.failed
        if report.skipped:
            self.left_out.add(report.nodeid)

    @pytest.hookimpl
    def pytest_collection_finish(self) -> None:
        """Note which tests there are, those that are deselected too."""
        self.collected = True
        marked = (item for item in self.items if item.get_closest_marker(MARKER) is not None)
        self.exists.update(map(self.test_of, marked))
        self.items.clear()

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        """Take over what a worker of xdist collected; one that crashed says nothing."""
        wire = getattr(node, "workeroutput", {}).get(_WIRE)
        if wire:
            self.collected |= wire["collected"]
            self.broken |= wire["broken"]
            self.exists.update(wire["exists"])
            self.left_out.update(wire["left_out"])

    # --- the end of the run ---

    @pytest.hookimpl
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Gather what the tests measured, wherever they ran."""
        self.failures += report.failed
        wire = getattr(report, _WIRE, None)
        if wire:
            self.seen.add(wire["test"])
            if len(wire) > 1:
                self.wires[wire["test"]] = wire

    @pytest.hookimpl
    def pytest_keyboard_interrupt(self) -> None:
        """Ctrl-C, or `pytest.exit`, which may give any exit status."""
        self.interrupted = True

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Write, and say what is stale; a worker of xdist hands over what it saw instead."""
        config = session.config
        output = getattr(config, "workeroutput", None)
        if output is not None:
            output[_WIRE] = {
                "collected": self.collected,
                "broken": self.broken,
                "exists": sorted(self.exists),
                "left_out": sorted(self.left_out),
            }
            return
        if config.option.collectonly:
            return
        self.lines = [*self._compared(), *self._ended(session)]

    def _compared(self) -> Iterator[tuple[str, bool]]:
        differences = next((wire["differences"] for wire in self.wires.values() if wire.get("differences")), "")
        if differences and self.update != _UPDATE:
            how = f"compared all the same ({_ANY_STAMP})" if self.any_stamp else "nothing was compared"
            advice = "" if self.any_stamp else f": {_ANY_STAMP} compares all the same, {_UPDATE} measures all anew"
            yield f"{self.shown} is of another stamp, {differences}; {how}{advice}", False
        sums = {
            name: sum(wire.get(name, 0) for wire in self.wires.values())
            for name in ("compared", "grew", "shrank", "new")
        }
        if self.known is not None and self.update != _UPDATE and (not differences or self.any_stamp):
            grew = (
                f", {sums['grew']} grew by more than {baseline_comparison.percent(self.tolerance)}"
                if sums["grew"]
                else ""
            )
            yield f"{self.shown}: {nestings(sums['compared'])} compared{grew}", False
        if sums["shrank"]:
            yield (
                f"{nestings(sums['shrank'])} shrank by more than {baseline_comparison.percent(self.tolerance)}: {_UPDATE} keeps the gain",
                False,
            )
        if sums["new"] and not self.update:
            yield f"{nestings(sums['new'])} not in {self.shown}: {_NEW_ONLY} adds them", False

    def _ended(self, session: pytest.Session) -> Iterator[tuple[str, bool]]:
        gone = self._gone(session)
        if self.update != _UPDATE:
            stale = [*self._stale_lines(session, gone)]
            if stale:
                yield f"ERROR {self.shown} has stale entries, {_UPDATE} removes them:", True
                yield from ((f"  {line}", True) for line in stale)
                _fail(session)
        if not self.update:
            return
        reason = self._not_written(session) or self._write(gone)
        if reason:
            yield f"{self.shown} is not written: {reason}", True
            _fail(session)
        else:
            yield f"{self.shown} is written, {self.written}", False

    def _gone(self, session: pytest.Session) -> list[Key]:
        """The entries whose test is no more, as far as the run can tell."""
        config = session.config
        whole = {pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED, pytest.ExitCode.NO_TESTS_COLLECTED}
        known = self.known if session.exitstatus in whole and self.collected and not self.broken else None
        if (
            known is None
            or self.interrupted
            or selection.narrowed(config)
            or config.getoption("nnx_nesting") is not None
        ):
            return []
        selected = selection.Selection.of(config)
        return [
            key
            for key in known.entries
            if key[0] not in self.exists
            and selected.covers(key[0].partition("::")[0])
            and not any(key[0].startswith(place) for place in self.left_out)
        ]

    def _stale_lines(self, session: pytest.Session, gone: list[Key]) -> Iterator[str]:
        """What is stale, a line a test; where nothing was compared, nothing is known of it."""
        if any(wire.get("differences") for wire in self.wires.values()):
            return
        for test in dict.fromkeys(test for test, _ in gone):
            yield f"{baseline_file.quoted(test)}: there is no such test"
        typed = [str(arg).partition("=")[0] for arg in session.config.invocation_params.args]
        if selection.narrowed(session.config) or {*typed} & {flag(name) for name in _CUTS}:
            return
        for test, wire in sorted(self.wires.items()):
            if wire.get("stale") and not wire.get("replayed"):
                yield f"{baseline_file.quoted(test)}: did not run under {', '.join(wire['stale'])}"

    def _not_written(self, session: pytest.Session) -> str:
        """Why a run must not leave a baseline; empty if it may."""
        if self.broken:
            return "not every test could be collected"
        if self.interrupted or session.exitstatus == pytest.ExitCode.INTERRUPTED:
            return "the run was interrupted"
        if self.failures:
            return f"{self.failures} test{'s' * (self.failures != 1)} failed"
        if session.exitstatus != pytest.ExitCode.OK:
            return f"the run failed (exit status {int(session.exitstatus)})"
        return ""

    def _write(self, gone: list[Key]) -> str:
        """Put the new baseline in its place, on top of what the file is by now; why not, if not."""
        results = {test: _result(wire) for test, wire in self.wires.items() if "stamp" in wire}
        try:
            before = baseline_file.read(self.path, self.shown)
            after = renewed(before, results, gone=gone, seen=self.seen, new_only=self.update == _NEW_ONLY)
            if before is None or baseline_file.format_baseline(before) != baseline_file.format_baseline(after):
                baseline_file.write(self.path, after)
        except (Refused, SettingError) as error:
            return str(error)
        except OSError as error:
            return f"{error.strerror or error}, what was there is as it was"
        self.written = changes(before, after)
        return ""

    @pytest.hookimpl
    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        """What was compared, what was written, and what is wrong with the file."""
        if self.lines:
            terminalreporter.write_sep("=", TITLE, red=any(red for _, red in self.lines))
            for line, red in self.lines:
                terminalreporter.write_line(line, red=red)


def _fail(session: pytest.Session) -> None:
    if session.exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def _result(wire: Mapping[str, Any]) -> Result:
    pairs = [baseline_file.parse_line(line) for line in wire["lines"]]
    return Result(Stamp(*wire["stamp"]), {nesting: entry for (_, nesting), entry in pairs}, wire["replayed"])


def nestings(count: int) -> str:
    return f"{count} nesting{'s' * (count != 1)}"
