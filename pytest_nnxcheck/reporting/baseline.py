"""The memory baseline: the peaks of an earlier report, compared with those of this run; the message of a test that grew, the summary, the file after it.

Pure functions over records: nothing here imports jax, flax, hypothesis or pytest.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from fractions import Fraction
from pathlib import Path
from typing import Literal

from pytest_nnxcheck.core.errors import SettingError
from pytest_nnxcheck.core.facts import Stamp
from pytest_nnxcheck.core.nesting import Nesting
from pytest_nnxcheck.core.on_target import OnTarget
from pytest_nnxcheck.core.outcome import NestingFinished
from pytest_nnxcheck.core.peak import SHOWN
from pytest_nnxcheck.core.settings import flag
from pytest_nnxcheck.core.text import Row, counted, lay_out
from pytest_nnxcheck.reporting import earlier, report
from pytest_nnxcheck.reporting.memory_breakdown import listed
from pytest_nnxcheck.reporting.records import NAME, VERSION, BufferRecord, Head, NestingRecord, Record, made, plain

UPDATE, NEW_ONLY, ANY_STAMP = map(flag, ("baseline_update", "baseline_update_new_only", "baseline_any_stamp"))
ANEW = f"take back what changed the file, or delete it and write it anew with {UPDATE}, from a run of all tests"

FEW = 3
"""Kinds of buffers that a baseline names of a nesting, the largest: a line has to be short enough to be read in a review."""

_ALSO = 5
"""The number of further nestings that grew, and of buffers of each kind, that a message names."""

CPU = ""
"""The CPU, among the names of targets."""


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


Entries = Mapping[str, NestingRecord]
"""The figures of a test, by nesting."""


@dataclass(frozen=True, slots=True)
class Baseline:
    """The peaks of an earlier report."""

    stamp: Stamp
    """The versions and devices under which all were measured."""
    tests: Mapping[str, Entries] = field(default_factory=dict)
    """The figures of each test, by node id."""
    heads: tuple[Head, ...] = ()
    """The expected failures that are in the same file."""
    old_form: bool = field(default=False, compare=False)
    """True if the file has the form of 0.1.0."""


def read(path: Path, shown: str) -> Baseline | None:
    """The baseline in a file, which errors call ``shown``; `None` where there is no such file. Raises `SettingError`."""
    found = earlier.read(path, shown, ANEW)
    if found is None:
        return None
    if found.run.stamp is None:
        raise SettingError(f"{shown}: this is no baseline of pytest-nnxcheck, its run has no stamp: {ANEW}")
    tests = {
        record.head.nodeid: {n.nesting: kept(n) for n in record.nestings if n.peak is not None and n.verdict == "held"}
        for record in found.records
    }
    if bad := [f"{test!r} under {name!r}" for test, of in tests.items() for name, n in of.items() if (n.peak or 0) < 0]:
        raise SettingError(f"{shown}: the peak of {bad[0]} is negative: {ANEW}")
    heads = (Head(each.head.nodeid, expected_failures=each.head.expected_failures) for each in found.records)
    return Baseline(
        found.run.stamp,
        {test: of for test, of in tests.items() if of},
        tuple(head for head in heads if head.expected_failures),
        found.old_form,
    )


def render(baseline: Baseline) -> str:
    """The text of the file: a report with a line for each nesting, in which no key has its default."""
    nestings = [of[name] for _, of in sorted(baseline.tests.items()) for name in sorted(of)]
    head = {"schema": NAME, "version": VERSION, "run": {"stamp": plain(baseline.stamp)}}
    return f"{_json(head)[:-1]},\n{_lines('tests', baseline.heads)},\n{_lines('nestings', nestings)}}}\n"


def _lines(key: str, parts: Iterable[Head | NestingRecord]) -> str:
    lines = ",".join(f"\n{_json(plain(part, whole=False))}" for part in parts)
    return f'"{key}": [{lines}\n]' if lines else f'"{key}": []'


def _json(value: object) -> str:
    """Readable JSON, in which characters that a terminal cannot show are escaped."""
    text = json.dumps(value, ensure_ascii=False)
    return text if text.isprintable() else json.dumps(value)


# --- the figures of a test -----------------------------------------------------------------------------------------------


def measured(test: str, first: Iterable[NestingFinished], *, whole: bool) -> tuple[NestingRecord, ...]:
    """The figures of a test: of the first run of each nesting that held; unless a nesting is the ``whole`` example, of those that were not drawn."""
    found = []
    for event in first:
        outcome, nesting = event.outcome, str(event.nesting)
        if outcome is None or (event.drawn and not whole):
            continue
        if outcome.verdict == "expected":
            found.append(NestingRecord(plain(test), nesting, verdict="expected"))
        elif outcome.verdict == "held" and outcome.peak is not None:
            figures = plain(outcome.evidence) if outcome.evidence else {}
            more = {"nodeid": plain(test), "nesting": nesting, "peak": outcome.peak, "drawn": event.drawn}
            found.append(
                made(
                    NestingRecord,
                    {**{key: figures.get(key) for key in ("split", "buffers", "targets") if key in figures}, **more},
                )
            )
    return tuple(found)


def kept(nesting: NestingRecord) -> NestingRecord:
    """The part of a record that a baseline keeps."""
    targets = (
        OnTarget(on.target, peak=on.peak, wheel=on.wheel) for on in nesting.targets if on.peak is not None and on.wheel
    )
    # Of two calls in one nesting the parts may be those of the one with the smaller peak.
    split = nesting.split if nesting.split and nesting.split.peak == nesting.peak else None
    return NestingRecord(
        nesting.nodeid,
        nesting.nesting,
        drawn=nesting.drawn,
        verdict=nesting.verdict,
        peak=nesting.peak,
        split=split,
        buffers=alike(nesting.buffers)[:FEW] if split else (),
        targets=tuple(targets),
    )


def alike(buffers: Iterable[BufferRecord]) -> tuple[BufferRecord, ...]:
    """The buffers, those that look alike as one, the largest first."""
    counts = Counter[BufferRecord]()
    for held in buffers:
        kind = BufferRecord(held.bytes, held.shape, held.kind, held.operation, name=held.name, joined=held.joined)
        counts[kind] += held.count
    kinds = sorted(counts, key=lambda kind: (-kind.bytes, label(kind)))
    return tuple(replace(kind, count=counts[kind]) for kind in kinds)


def label(buffer: BufferRecord) -> str:
    """``temporary float32[8,128,128] dynamic_update_slice, copy of model.kernel``."""
    words = " ".join(word for word in (buffer.kind, buffer.shape, buffer.operation) if word)
    return f"{words}, copy of {listed(buffer.name, buffer.joined)}" if buffer.name else words


# --- comparison ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Compared:
    """The peaks of one test beside those of the baseline."""

    compared: int = 0
    grew: Mapping[str, Mapping[str, tuple[int, int]]] = field(default_factory=dict)
    """The nestings that grew, the smallest first, each with its peaks before and now, by target."""
    shrank: int = 0
    new: int = 0
    stale: tuple[str, ...] = ()
    """Nestings that have an entry, were not drawn, and did not run."""
    new_on_targets: int = 0
    """Peaks on targets that no entry has."""
    other_wheels: tuple[str, ...] = ()
    """Targets whose peaks another compiler counted, ``v5e libtpu 0.0.40 -> libtpu 0.0.50.1``."""


def compare(record: Record, baseline: Baseline | None, request: Request) -> Compared:
    """Compare the figures of a test with those of the baseline; nothing where their stamps differ."""
    if baseline is None or record.stamp is None or not request.compares(baseline.stamp.differences(record.stamp)):
        return Compared()
    before, grew, shrank, new_on_targets = baseline.tests.get(record.head.nodeid, {}), {}, 0, 0
    now = {each.nesting: each for each in record.measured if each.peak is not None}
    wheels = list[str]()
    for name in sorted(before.keys() & now.keys(), key=lambda name: Nesting.parse(name).plainness):
        old = {on.target: on for on in before[name].targets}
        peaks = {CPU: (before[name].peak or 0, now[name].peak or 0)}
        for on in now[name].targets:
            if on.peak is None or not on.wheel:
                continue
            known = old.get(on.target)
            new_on_targets += known is None
            if known and known.wheel != on.wheel:
                wheels.append(f"{on.target} {known.wheel} -> {on.wheel}")
            # Peaks that another compiler counted are compared only where any stamp is.
            if known and (request.any_stamp or known.wheel == on.wheel):
                peaks[on.target] = (known.peak or 0, on.peak)
        if more := {on: pair for on, pair in peaks.items() if request.grew(*pair)}:
            grew[name] = more
        shrank += any(request.shrank(*pair) for pair in peaks.values())
    ran = {each.nesting for each in record.measured}
    return Compared(
        len(before.keys() & now.keys()),
        grew,
        shrank,
        sum(name not in before and not is_fleeting(each, record) for name, each in now.items()),
        () if request.replayed else tuple(name for name in before if name not in ran and not before[name].drawn),
        new_on_targets,
        tuple(dict.fromkeys(wheels)),
    )


def is_fleeting(nesting: NestingRecord, record: Record) -> bool:
    """True if it was drawn in a way that varies from run to run: then it is compared, and not kept."""
    return nesting.drawn and not record.repeats


def message(compared: Compared, before: Entries, now: Entries, request: Request, checked: report.Report) -> str:
    """The text of a failure: the smallest nesting that grew, and what in it did. The options of the report name the baseline."""
    (smallest, grown), *further = compared.grew.items()
    rows: list[Row] = [
        ("nesting", f"{smallest}   smallest of {len(compared.grew)} that grew, {compared.compared} compared")
    ]
    for on, pair in grown.items():
        rows.append((on or "peak", f"{_change(*pair)}, tolerance {_percent(request.tolerance)}"))
        if on == CPU:
            rows += _changed_parts(before[smallest], now[smallest])
    for name, pairs in further[:_ALSO]:
        changes = ", ".join(f"{on} {_change(*pair)}".strip() for on, pair in pairs.items())
        rows.append(("also grew", f"{name}   {changes}"))
    if further[_ALSO:]:
        rows.append(("also grew", f"and {len(further) - _ALSO} more"))
    rows.append(("accept", report.command(checked, UPDATE)))
    rows.append(("replay", report.replay(checked, Nesting.parse(smallest))))
    return lay_out("nnx memory baseline exceeded", checked.test_id, rows)


def _change(before: int, now: int) -> str:
    """``22528 B, was 20480 B: +2048 B (+10.0 %)``."""
    part = f" ({100 * (now - before) / before:+.1f} %)" if before else ""
    return f"{now} B, was {before} B: {now - before:+} B{part}"


def _percent(part: Fraction) -> str:
    """``5%``, as it is typed."""
    return f"{float(100 * part):g}%"


def _changed_parts(before: NestingRecord, now: NestingRecord) -> Iterator[Row]:
    """The parts of the peak that changed; buffers that are there in greater number than before, with their lines, and those that are gone."""
    if before.split is None or now.split is None:
        return
    for name, size in before.split.parts.items():
        if now.split.parts[name] != size:
            yield name, _change(size, now.split.parts[name])
    old, new = ({(kind.bytes, label(kind)): kind.count for kind in alike(each.buffers)} for each in (before, now))
    lines = {(held.bytes, label(held)): held.stack[0] for held in reversed(now.buffers) if held.stack}
    # Both hold the largest buffers only: smaller ones may have been there unnamed, or still be.
    unnamed = min(old)[0] if len(old) >= FEW else 0
    gone_unnamed = min(new)[0] if len(now.buffers) >= SHOWN else 0
    for sign, more, fewer, least in (("+", new, old, unnamed), ("-", old, new, gone_unnamed)):
        kinds = [kind for kind in more if more[kind] > fewer.get(kind, 0) and (kind[0] > least or kind in fewer)]
        for kind in kinds[:_ALSO]:
            count = more[kind] - fewer.get(kind, 0)
            times = f"{count} x " if count > 1 else ""
            line = f"   {lines[kind]}" if sign == "+" and kind in lines else ""
            yield "buffer", f"{sign} {times}{kind[0]} B {kind[1]}{line}"


# --- the end of a run ----------------------------------------------------------------------------------------------------


def has_passed(record: Record) -> bool:
    """True if what a test measured may be kept."""
    return record.head.outcome in {"passed", "xpassed"} and record.stamp is not None


def summary(request: Request, baseline: Baseline | None, records: Collection[Record]) -> Iterator[str]:
    """The comparisons of a run, a line each."""
    pairs = [(record, compare(record, baseline, request)) for record in records]
    differences = [d for each in records if baseline and each.stamp and (d := baseline.stamp.differences(each.stamp))]
    wheels = dict.fromkeys(text for _, each in pairs for text in each.other_wheels)
    passed = [compared for record, compared in pairs if has_passed(record)]
    shown, beyond = request.shown, f"by more than {_percent(request.tolerance)}"
    how = f"{{}}: {ANY_STAMP} compares all the same, {UPDATE} measures {{}} anew"
    if request.any_stamp:
        how = f"compared all the same ({ANY_STAMP})"
    if differences and request.update != "all":
        yield f"{shown} is of another stamp, {differences[0]}; {how.format('nothing was compared', 'all')}"
    if wheels:
        yield f"{shown} has peaks of another compiler, {', '.join(wheels)}; {how.format('not compared', 'them')}"
    if baseline is not None and request.compares("".join(differences[:1])):
        grew = sum(len(each.grew) for _, each in pairs)
        more = f", {grew} grew {beyond}" if grew else ""
        yield f"{shown}: {counted(sum(each.compared for _, each in pairs), 'nesting')} compared{more}"
    if shrank := sum(each.shrank for each in passed):
        yield f"{counted(shrank, 'nesting')} shrank {beyond}: {UPDATE} keeps the gain"
    for name, what in (("new", "nesting"), ("new_on_targets", "peak")):
        if (new := sum(getattr(each, name) for each in passed)) and not request.update:
            on_targets = " on targets" if what == "peak" else ""
            yield f"{counted(new, what)}{on_targets} not in {shown}: {NEW_ONLY} adds them"


class Refused(Exception):
    """Raised where no new baseline can be made of a run; the text says why."""


def renewed(
    baseline: Baseline | None, records: Collection[Record], request: Request, gone: Collection[str] = ()
) -> Baseline:
    """Make the baseline that follows a run. Raises `Refused`.

    A test that passed gets what the run measured. Any other test keeps its entries, unless it is ``gone``.
    """
    passed = [record for record in records if has_passed(record)]
    stamps = list(dict.fromkeys(record.stamp for record in passed if record.stamp is not None))
    if stamps[1:]:
        raise Refused(f"its processes are not of the same versions and devices: {stamps[0].differences(stamps[1])}")
    before = baseline or (Baseline(stamps[0]) if stamps else None)
    if before is None:
        raise Refused("no test that uses nnx_wrap passed")
    stamp, known = stamps[0] if stamps else before.stamp, before.tests
    if differences := before.stamp.differences(stamp):
        _refuse_two_stamps(differences, before, records, request, gone)
        known = {}
    tests = {test: of for test, of in known.items() if request.update == "new" or test not in gone}
    for record in passed:
        now = {
            each.nesting: each for each in record.measured if each.peak is not None and not is_fleeting(each, record)
        }
        tests[record.head.nodeid] = _merged(known.get(record.head.nodeid, {}), now, request)
    return replace(before, stamp=stamp, tests={test: of for test, of in tests.items() if of})


def _refuse_two_stamps(
    differences: str, before: Baseline, records: Collection[Record], request: Request, gone: Collection[str]
) -> None:
    """Refuse to keep an entry of another stamp: all entries of a file have one. Raises `Refused`."""
    if request.update == "new":
        raise Refused(f"its entries are of another stamp, {differences}: write all anew with {UPDATE}")
    # A test that did not run, or was replayed, cannot keep its entries.
    ran = () if request.replayed else (record.head.nodeid for record in records)
    if rest := before.tests.keys() - {*gone} - {*ran}:
        raise Refused(
            f"its stamp would change, {differences}, and {counted(len(rest), 'test')} in it did not run"
            f" ({on_one_line(min(rest))}{', ...' * (len(rest) > 1)}): run all of them"
        )


def _merged(before: Entries, now: Entries, request: Request) -> Entries:
    """The entries of a test that passed: what the run measured, and what it could not know."""
    chips = {on.target.partition(":")[0] for each in now.values() for on in each.targets}
    found = {}
    for name, each in now.items():
        old = before.get(name, each)
        if request.update == "new":
            found[name] = _with_targets(old, each.targets)
            continue
        # A replay does not know which nestings hypothesis would draw. A run without a chip does not know the peaks there.
        drawn = old.drawn or name not in before if request.replayed else each.drawn
        others = (on for on in old.targets if on.target.partition(":")[0] not in chips)
        found[name] = _with_targets(replace(each, drawn=drawn), others)
    return {**before, **found} if request.replayed or request.update == "new" else found


def _with_targets(nesting: NestingRecord, more: Iterable[OnTarget]) -> NestingRecord:
    """The nesting with those peaks on targets that it lacks."""
    there = {on.target: on for on in (*more, *nesting.targets)}
    return replace(nesting, targets=tuple(there[name] for name in sorted(there)))


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
