"""The comparison of measured peaks with those of the baseline: the message of a test that grew, the summary of a run, and the file after it.

Pure functions over plain data: nothing here imports jax, flax, hypothesis or pytest.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Literal

from pytest_nnxcheck.core.facts import Stamp
from pytest_nnxcheck.core.nesting import Nesting
from pytest_nnxcheck.core.peak import SHOWN, Buffer, Split
from pytest_nnxcheck.core.settings import flag
from pytest_nnxcheck.core.text import Row, counted, lay_out
from pytest_nnxcheck.reporting import baseline_file, report
from pytest_nnxcheck.reporting.baseline_file import Baseline, Entry, TargetPeak

UPDATE, NEW_ONLY, ANY_STAMP = map(flag, ("baseline_update", "baseline_update_new_only", "baseline_any_stamp"))

_ALSO = 5
"""The number of further nestings that grew, and of buffers of each kind, that a message names."""


@dataclass(frozen=True, slots=True)
class Request:
    """The use that a run makes of its baseline."""

    shown: str
    """The file, as messages call it."""
    tolerance: Fraction
    update: Literal["", "all", "new"] = ""
    """The entries that the run writes: all, measured anew, or new ones."""
    any_stamp: bool = False
    replayed: bool = False
    """True if the run replays one nesting: it knows nothing of the others."""

    def compares(self, differences: str) -> bool:
        """True if the run compares with a file whose stamp has these differences from its own."""
        return self.update != "all" and (self.any_stamp or not differences)

    def grew(self, before: int, now: int) -> bool:
        """True if a peak grew by more than is tolerated."""
        return now > before * (1 + self.tolerance)

    def shrank(self, before: int, now: int) -> bool:
        """True if a peak shrank by more than is tolerated."""
        return now < before * (1 - self.tolerance)


@dataclass(frozen=True, slots=True)
class Measured:
    """The measurement of one nesting of this run."""

    entry: Entry
    buffers: tuple[Buffer, ...] = ()
    """The largest ones, with their lines."""
    fleeting: bool = False
    """True if it was drawn in a way that varies from run to run: then it is compared, and not kept."""


@dataclass(frozen=True, slots=True)
class Result:
    """One test against its entries of the baseline, nestings as text: plain values, which cross processes as `dataclasses.asdict` makes them."""

    test: str
    stamp: tuple[str, ...] = ()
    """The stamp of the run; empty where the test did not pass."""
    differences: str = ""
    """The differences between the stamps of the file and of the run."""
    lines: tuple[str, ...] = ()
    """The lines to write for it."""
    compared: int = 0
    grew: tuple[str, ...] = ()
    """The nestings that grew, the smallest first."""
    shrank: int = 0
    new: int = 0
    stale: tuple[str, ...] = ()
    """Nestings that have an entry, were not drawn, and did not run."""
    new_on_targets: int = 0
    """Peaks on targets that no entry has."""
    other_wheels: tuple[str, ...] = ()
    """Targets whose peaks another compiler counted, ``v5e libtpu 0.0.40 -> libtpu 0.0.50.1``."""

    def entries(self) -> dict[str, Entry]:
        """The entries to write, by nesting."""
        return {nesting: entry for _, nesting, entry in map(baseline_file.parse_line, self.lines)}


CPU = ""
"""The CPU, among the names of targets."""


def peaks(before: Entry, now: Entry, request: Request) -> dict[str, tuple[int, int]]:
    """The peaks to compare, by target: of one that another compiler counted only where any stamp is compared."""
    known = {on.target: on for on in before.targets}
    both = [(known[on.target], on) for on in now.targets if on.target in known]
    same = {new.target: (old.peak, new.peak) for old, new in both if request.any_stamp or old.wheel == new.wheel}
    return {CPU: (before.peak, now.peak), **same}


def compare(
    test: str,
    earlier: Mapping[str, Entry],
    measured: Mapping[str, Measured],
    request: Request,
    excused: Collection[str] = (),
) -> Result:
    """Compare what was measured with the entries of the same test; ``excused`` nestings ran, and are expected to fail."""
    both = {name: (earlier[name], now.entry) for name, now in measured.items() if name in earlier}
    pairs = {name: peaks(*entries, request).values() for name, entries in both.items()}
    grew = [name for name, of in pairs.items() if any(request.grew(*pair) for pair in of)]
    not_run = [] if request.replayed else [name for name in earlier if name not in {*measured, *excused}]
    on_targets = [
        ({old.target: old.wheel for old in before.targets}.get(on.target, ""), on)
        for before, now in both.values()
        for on in now.targets
    ]
    others = (f"{on.target} {wheel} -> {on.wheel}" for wheel, on in on_targets if wheel not in ("", on.wheel))
    return Result(
        test,
        compared=len(both),
        grew=tuple(sorted(grew, key=lambda name: Nesting.parse(name).plainness)),
        shrank=sum(any(request.shrank(*pair) for pair in of) for of in pairs.values()),
        new=sum(name not in earlier and not now.fleeting for name, now in measured.items()),
        stale=tuple(name for name in not_run if not earlier[name].drawn),
        new_on_targets=sum(not wheel for wheel, _ in on_targets),
        other_wheels=tuple(dict.fromkeys(others)),
    )


# --- the message of a test -----------------------------------------------------------------------------------------------


def message(
    result: Result,
    earlier: Mapping[str, Entry],
    measured: Mapping[str, Measured],
    request: Request,
    checked: report.Report,
) -> str:
    """The text of a failure: the smallest nesting that grew, and what in it did. The options of the report name the baseline."""
    smallest, *further = result.grew
    before, now = earlier[smallest], measured[smallest]

    def grown_in(name: str) -> dict[str, str]:
        """The growth in a nesting, by target."""
        pairs = peaks(earlier[name], measured[name].entry, request)
        return {on: change(*pair) for on, pair in pairs.items() if request.grew(*pair)}

    rows: list[Row] = [
        ("nesting", f"{smallest}   smallest of {len(result.grew)} that grew, {result.compared} compared")
    ]
    for on, text in grown_in(smallest).items():
        rows.append((on or "peak", f"{text}, tolerance {percent(request.tolerance)}"))
        if on == CPU:
            rows += split_rows(before.split, now.entry.split)
            rows += [("buffer", buffer) for buffer in buffer_rows(before, now)]
    for name in further[:_ALSO]:
        grown = ", ".join(f"{on} {text}".strip() for on, text in grown_in(name).items())
        rows.append(("also grew", f"{name}   {grown}"))
    if further[_ALSO:]:
        rows.append(("also grew", f"and {len(further) - _ALSO} more"))
    rows.append(("accept", report.command(checked, UPDATE)))
    rows.append(("replay", report.replay(checked, Nesting.parse(smallest))))
    return lay_out("nnx memory baseline exceeded", checked.test_id, rows)


def change(before: int, now: int) -> str:
    """``22528 B, was 20480 B: +2048 B (+10.0 %)``."""
    part = f" ({100 * (now - before) / before:+.1f} %)" if before else ""
    return f"{now} B, was {before} B: {now - before:+} B{part}"


def percent(part: Fraction) -> str:
    """``5%``, as it is typed."""
    return f"{float(100 * part):g}%"


def split_rows(before: Split | None, now: Split | None) -> Iterator[Row]:
    """The parts of the peak that changed."""
    if before is None or now is None:
        return
    for name, size in before.parts.items():
        if now.parts[name] != size:
            yield name, change(size, now.parts[name])


def buffer_rows(before: Entry, now: Measured) -> Iterator[str]:
    """Buffers that are there in greater number than before, with their lines, and those that are gone."""
    if before.split is None or now.entry.split is None:
        return
    old = Counter({(kind.bytes, kind.label): kind.count for kind in before.buffers})
    new = Counter({(kind.bytes, kind.label): kind.count for kind in baseline_file.alike(now.buffers)})
    lines = {(held.bytes, baseline_file.label(held)): held.stack[0] for held in reversed(now.buffers) if held.stack}
    # Entry and evidence hold the largest buffers only: smaller ones may have been there unnamed, or still be.
    unnamed = before.buffers[-1].bytes if len(before.buffers) >= baseline_file.FEW else 0
    gone_unnamed = min(new)[0] if len(now.buffers) >= SHOWN else 0
    for sign, more, fewer, least in (("+", new, old, unnamed), ("-", old, new, gone_unnamed)):
        kinds = [kind for kind in more if more[kind] > fewer[kind] and (kind[0] > least or kind in fewer)]
        for kind in kinds[:_ALSO]:
            count = more[kind] - fewer[kind]
            times = f"{count} x " if count > 1 else ""
            line = f"   {lines[kind]}" if sign == "+" and kind in lines else ""
            yield f"{sign} {times}{kind[0]} B {kind[1]}{line}"


# --- the end of a run ----------------------------------------------------------------------------------------------------


def summary(request: Request, results: Collection[Result], *, exists: bool) -> Iterator[str]:
    """The comparisons of a run, a line each; ``exists`` is true if there was a file."""
    differences = next((result.differences for result in results if result.differences), "")
    wheels = ", ".join(dict.fromkeys(text for result in results for text in result.other_wheels))
    compared, grew = sum(result.compared for result in results), sum(len(result.grew) for result in results)
    passed = [result for result in results if result.stamp]
    shrank, new, on_targets = (
        sum(getattr(result, name) for result in passed) for name in ("shrank", "new", "new_on_targets")
    )
    beyond = f"by more than {percent(request.tolerance)}"

    def how(not_compared: str, anew: str) -> str:
        if request.any_stamp:
            return f"compared all the same ({ANY_STAMP})"
        return f"{not_compared}: {ANY_STAMP} compares all the same, {UPDATE} measures {anew} anew"

    if differences and request.update != "all":
        yield f"{request.shown} is of another stamp, {differences}; {how('nothing was compared', 'all')}"
    if wheels:
        yield f"{request.shown} has peaks of another compiler, {wheels}; {how('not compared', 'them')}"
    if exists and request.compares(differences):
        yield f"{request.shown}: {counted(compared, 'nesting')} compared" + (f", {grew} grew {beyond}" if grew else "")
    if shrank:
        yield f"{counted(shrank, 'nesting')} shrank {beyond}: {UPDATE} keeps the gain"
    if new and not request.update:
        yield f"{counted(new, 'nesting')} not in {request.shown}: {NEW_ONLY} adds them"
    if on_targets and not request.update:
        yield f"{counted(on_targets, 'peak')} on targets not in {request.shown}: {NEW_ONLY} adds them"


class Refused(Exception):
    """Raised where no new baseline can be made of a run; the text says why."""


def renewed(
    baseline: Baseline | None, results: Collection[Result], request: Request, gone: Collection[str] = ()
) -> Baseline:
    """Make the baseline that follows a run. Raises `Refused`.

    A test that passed gets what the run measured. Any other test keeps its entries, unless it is ``gone``.
    """
    passed, new_only = [result for result in results if result.stamp], request.update == "new"
    stamp, known = _stamp(baseline, passed), baseline.tests if baseline else {}
    if baseline is not None and (differences := baseline.stamp.differences(stamp)):
        if new_only:
            raise Refused(f"its entries are of another stamp, {differences}: write all anew with {UPDATE}")
        # All entries of a file have one stamp: a test that did not run, or was replayed, cannot keep its entries.
        ran = () if request.replayed else (result.test for result in results)
        if rest := known.keys() - {*gone} - {*ran}:
            raise Refused(
                f"its stamp would change, {differences}, and {counted(len(rest), 'test')} in it did not run"
                f" ({on_one_line(min(rest))}{', ...' * (len(rest) > 1)}): run all of them"
            )
        known = {}
    tests = {test: entries for test, entries in known.items() if new_only or test not in gone}
    for result in passed:
        earlier, measured = known.get(result.test, {}), result.entries()
        if new_only:
            added = {name: _with_targets(earlier.get(name, entry), entry.targets) for name, entry in measured.items()}
            tests[result.test] = {**earlier, **added}
            continue
        chips = {on.chip for entry in measured.values() for on in entry.targets}
        for nesting, entry in measured.items():
            before = earlier.get(nesting, entry)
            # A replay does not know which nestings hypothesis would draw. A run without a chip does not know the peaks there.
            drawn = before.drawn or nesting not in earlier if request.replayed else entry.drawn
            others = (on for on in before.targets if on.chip not in chips)
            measured[nesting] = _with_targets(replace(entry, drawn=drawn), others)
        tests[result.test] = {**earlier, **measured} if request.replayed else measured
    return Baseline(stamp, {test: entries for test, entries in tests.items() if entries})


def _stamp(baseline: Baseline | None, passed: Collection[Result]) -> Stamp:
    stamps = [Stamp(*stamp) for stamp in dict.fromkeys(result.stamp for result in passed)]
    if stamps[1:]:
        raise Refused(f"its processes are not of the same versions and devices: {stamps[0].differences(stamps[1])}")
    if stamps:
        return stamps[0]
    if baseline is None:
        raise Refused("no test that uses nnx_wrap passed")
    return baseline.stamp


def _with_targets(entry: Entry, more: Iterable[TargetPeak]) -> Entry:
    """The entry with those peaks on targets that it lacks."""
    there = {on.target: on for on in (*more, *entry.targets)}
    return replace(entry, targets=tuple(there[name] for name in sorted(there)))


def on_one_line(test: str) -> str:
    """A node id, escaped where a terminal could not show it."""
    return test if test.isprintable() else ascii(test)


def changes(before: Baseline | None, after: Baseline) -> str:
    """``40 entries: 3 new, 2 changed, 1 removed``."""
    old, new = (
        {(test, nesting): entry for test, entries in tests.items() for nesting, entry in entries.items()}
        for tests in (before.tests if before else {}, after.tests)
    )
    counts = {
        "new": len(new.keys() - old.keys()),
        "changed": sum(old[key] != new[key] for key in old.keys() & new.keys()),
        "removed": len(old.keys() - new.keys()),
    }
    changes = ", ".join(f"{count} {word}" for word, count in counts.items() if count)
    return f"{len(new)} entr{'y' if len(new) == 1 else 'ies'}: {changes or 'nothing changed'}"
