"""The measured peaks of a test against those of the baseline: what grew, what shrank, what is new or stale, and the text of it.

Pure functions over plain data: nothing here imports jax, flax, hypothesis or pytest.
"""

from __future__ import annotations

import shlex
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from fractions import Fraction
from typing import Any, Literal

from pytest_nnxcheck.core.outcome import Outcome
from pytest_nnxcheck.core.peak import SHOWN, Buffer, Split
from pytest_nnxcheck.core.settings import flag
from pytest_nnxcheck.core.text import Row, counted, lay_out
from pytest_nnxcheck.reporting import baseline_file, report
from pytest_nnxcheck.reporting.baseline_file import Buffers, Entry

HEADLINE = "nnx memory baseline exceeded"
UPDATE, NEW_ONLY, ANY_STAMP = map(flag, ("baseline_update", "baseline_update_new_only", "baseline_any_stamp"))
Update = Literal["", "all", "new"]
_ALSO = 5
"""Further nestings that grew, and buffers of each kind, that are named."""


@dataclass(frozen=True, slots=True)
class Request:
    """What a run does with its baseline, which messages call ``shown``: an update measures ``all`` anew, or adds what is ``new``."""

    shown: str
    tolerance: Fraction
    update: Update = ""
    any_stamp: bool = False

    def compares(self, differences: str) -> bool:
        """Whether peaks are held against a file whose stamp has these differences from that of the run."""
        return self.update != "all" and (self.any_stamp or not differences)

    def grew(self, before: int, now: int) -> bool:
        """Whether a peak grew by more than is tolerated."""
        return now > before * (1 + self.tolerance)

    def shrank(self, before: int, now: int) -> bool:
        """Whether a peak shrank by more than that."""
        return now < before * (1 - self.tolerance)


@dataclass(frozen=True, slots=True)
class Measured:
    """What one nesting of this run is compared with: its outcome, and the entry that would be written of it.

    A ``fleeting`` one was drawn in a way that varies from run to run: it is compared, and not kept.
    """

    outcome: Outcome
    entry: Entry
    fleeting: bool = False

    @property
    def buffers(self) -> tuple[Buffer, ...]:
        return self.outcome.evidence.buffers if self.outcome.evidence else ()


@dataclass(frozen=True, slots=True)
class Comparison:
    """One test against the baseline, nestings as text: what ``grew`` the smallest first, ``stale`` what is known and neither was drawn nor ran.

    ``new_on_targets`` are peaks on targets that an entry does not have, ``other_wheels`` says of which targets another compiler counted them.
    """

    compared: int = 0
    grew: tuple[str, ...] = ()
    shrank: tuple[str, ...] = ()
    new: tuple[str, ...] = ()
    stale: tuple[str, ...] = ()
    new_on_targets: int = 0
    other_wheels: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Result:
    """What the end of a run needs to know of a test: plain values, which cross processes as `dataclasses.asdict` makes them.

    One that passed has a ``stamp``, and the ``lines`` that would be written of it: of all its nestings, or of the one that was ``replayed``.
    ``differences`` are those of its stamp from that of the file.
    """

    test: str
    stamp: tuple[str, ...] = ()
    differences: str = ""
    lines: tuple[str, ...] = ()
    replayed: bool = False
    comparison: Comparison = Comparison()

    @classmethod
    def from_wire(cls, wire: Mapping[str, Any]) -> Result:
        """What `dataclasses.asdict` made plain."""
        return cls(**{**wire, "comparison": Comparison(**wire["comparison"])})

    def of_failure(self) -> Result:
        """What is left where the test failed after all: what was compared, and nothing to keep."""
        done = self.comparison
        comparison = Comparison(done.compared, done.grew, other_wheels=done.other_wheels)
        return Result(self.test, differences=self.differences, comparison=comparison)

    def entries(self) -> dict[str, Entry]:
        """The entries to write, by nesting."""
        return {nesting: entry for (_, nesting), entry in map(baseline_file.parse_line, self.lines)}


def lines_of(test: str, measured: Mapping[str, Measured]) -> tuple[str, ...]:
    """What would be written of a test."""
    kept = {nesting: now.entry for nesting, now in measured.items() if not now.fleeting}
    return tuple(baseline_file.format_line((test, nesting), entry) for nesting, entry in kept.items())


CPU = ""
"""The CPU, among the names of targets."""


def peaks(before: Entry, now: Entry, request: Request) -> dict[str, tuple[int, int]]:
    """The peaks to compare, by target: of one that another compiler counted only where any stamp is compared."""
    known = {on.target: on for on in before.targets}
    both = [(known[on.target], on) for on in now.targets if on.target in known]
    same = {new.target: (old.peak, new.peak) for old, new in both if request.any_stamp or old.wheel == new.wheel}
    return {CPU: (before.peak, now.peak), **same}


def compare(
    earlier: Mapping[str, Entry], measured: Mapping[str, Measured], request: Request, excused: Collection[str] = ()
) -> Comparison:
    """Hold what was measured against the entries of the same test; ``excused`` nestings ran, and are expected to fail."""
    entries = {name: (earlier[name], now.entry) for name, now in measured.items() if name in earlier}
    both = {name: peaks(*pair, request).values() for name, pair in entries.items()}
    grew = [name for name, pairs in both.items() if any(request.grew(*pair) for pair in pairs)]
    shrank = [name for name, pairs in both.items() if any(request.shrank(*pair) for pair in pairs)]
    wheels = {name: {on.target: on.wheel for on in before.targets} for name, (before, _) in entries.items()}
    on_targets = [(wheels[name].get(on.target, ""), on) for name, (_, now) in entries.items() for on in now.targets]
    others = (f"{on.target} {wheel} -> {on.wheel}" for wheel, on in on_targets if wheel not in ("", on.wheel))
    return Comparison(
        compared=len(both),
        grew=tuple(sorted(grew, key=lambda name: measured[name].outcome.nesting.plainness)),
        shrank=tuple(shrank),
        new=tuple(name for name, now in measured.items() if name not in earlier and not now.fleeting),
        stale=tuple(
            name for name, entry in earlier.items() if not entry.drawn and name not in measured and name not in excused
        ),
        new_on_targets=sum(not wheel for wheel, _ in on_targets),
        other_wheels=tuple(dict.fromkeys(others)),
    )


# --- the text ------------------------------------------------------------------------------------------------------------


def summary(request: Request, results: Collection[Result], *, exists: bool) -> Iterator[str]:
    """What a run compared, a line each; ``exists`` says whether there was a file."""
    comparisons = [result.comparison for result in results]
    differences = next((result.differences for result in results if result.differences), "")
    grew, shrank, new = (
        sum(len(getattr(comparison, name)) for comparison in comparisons) for name in ("grew", "shrank", "new")
    )
    beyond = f"by more than {percent(request.tolerance)}"
    if differences and request.update != "all":
        advice = f"nothing was compared: {ANY_STAMP} compares all the same, {UPDATE} measures all anew"
        how = f"compared all the same ({ANY_STAMP})" if request.any_stamp else advice
        yield f"{request.shown} is of another stamp, {differences}; {how}"
    wheels = dict.fromkeys(text for comparison in comparisons for text in comparison.other_wheels)
    if wheels:
        advice = f"not compared: {ANY_STAMP} compares all the same, {UPDATE} measures them anew"
        how = f"compared all the same ({ANY_STAMP})" if request.any_stamp else advice
        yield f"{request.shown} has peaks of another compiler, {', '.join(wheels)}; {how}"
    if exists and request.compares(differences):
        compared = sum(comparison.compared for comparison in comparisons)
        yield f"{request.shown}: {counted(compared, 'nesting')} compared" + (f", {grew} grew {beyond}" if grew else "")
    if shrank:
        yield f"{counted(shrank, 'nesting')} shrank {beyond}: {UPDATE} keeps the gain"
    if new and not request.update:
        yield f"{counted(new, 'nesting')} not in {request.shown}: {NEW_ONLY} adds them"
    on_targets = sum(comparison.new_on_targets for comparison in comparisons)
    if on_targets and not request.update:
        yield f"{counted(on_targets, 'peak')} on targets not in {request.shown}: {NEW_ONLY} adds them"


def message(
    result: Comparison,
    earlier: Mapping[str, Entry],
    measured: Mapping[str, Measured],
    request: Request,
    checked: report.Report,
) -> str:
    """The text of a failure: the smallest nesting that grew, and what in it did. The options of the report name the baseline."""
    smallest, *further = result.grew
    before, now = earlier[smallest], measured[smallest]

    def grown_in(name: str) -> dict[str, str]:
        """What grew in a nesting, by target."""
        pairs = peaks(earlier[name], measured[name].entry, request)
        return {on: change(*pair) for on, pair in pairs.items() if request.grew(*pair)}

    also = {name: ", ".join(f"{on} {text}".strip() for on, text in grown_in(name).items()) for name in further[:_ALSO]}
    grown = [
        (on or "peak", f"{text}, tolerance {percent(request.tolerance)}") for on, text in grown_in(smallest).items()
    ]
    if grown[0][0] == "peak":
        buffers = (("buffer", text) for text in buffer_rows(before, now))
        grown[1:1] = [*split_rows(before.split, now.entry.split), *buffers]
    more = [f"and {len(further) - _ALSO} more"] if further[_ALSO:] else []
    rows = [
        ("nesting", f"{smallest}   smallest of {len(result.grew)} that grew, {result.compared} compared"),
        *grown,
        *(("also grew", text) for text in (*(f"{name}   {text}" for name, text in also.items()), *more)),
        ("accept", f"pytest {shlex.quote(checked.argument)} {checked.options} {UPDATE}".replace("  ", " ")),
        ("replay", report.replay(checked, now.outcome.nesting)),
    ]
    return lay_out(HEADLINE, checked.test_id, rows)


def change(before: int, now: int) -> str:
    """``22528 B, was 20480 B: +2048 B (+10.0 %)``."""
    part = f" ({100 * (now - before) / before:+.1f} %)" if before else ""
    return f"{now} B, was {before} B: {now - before:+} B{part}"


def percent(part: Fraction) -> str:
    """``5%``, as it is typed."""
    return f"{float(100 * part):g}%"


def split_rows(before: Split | None, now: Split | None) -> Iterator[Row]:
    """The parts of the peak that are not what they were."""
    if before is None or now is None:
        return
    for part in fields(Split):
        pair = getattr(before, part.name), getattr(now, part.name)
        if pair[0] != pair[1]:
            yield part.name, change(*pair)


def buffer_rows(before: Entry, now: Measured) -> Iterator[str]:
    """Buffers that are there in greater number than before, with their lines, and those that are gone.

    Entry and evidence name the largest buffers only: a smaller one may have been there unnamed, or still be.
    """
    if before.split is None or now.entry.split is None:
        return
    there = baseline_file.alike(now.buffers)
    unnamed = before.buffers[-1].bytes if len(before.buffers) >= baseline_file.FEW else 0
    yield from (f"+ {text}" for text in _more(before.buffers, there, unnamed, _lines(now.buffers)))
    unnamed = there[-1].bytes if len(now.buffers) >= SHOWN else 0
    yield from (f"- {text}" for text in _more(there, before.buffers, unnamed, {}))


def _more(
    before: Iterable[Buffers], now: Iterable[Buffers], unnamed: int, lines: Mapping[tuple[int, str], str]
) -> list[str]:
    """What there is more of now than before, the largest; of ``unnamed`` bytes or less nothing is known but by name."""
    counts = {(buffer.bytes, buffer.label): buffer.count for buffer in before}
    rows = []
    for buffer in now:
        key = (buffer.bytes, buffer.label)
        more = buffer.count - counts.get(key, 0)
        if more > 0 and (buffer.bytes > unnamed or key in counts):
            text = f"{more} x " * (more != 1) + f"{buffer.bytes} B {buffer.label}"
            rows.append(f"{text}   {lines[key]}" if lines.get(key) else text)
    return rows[:_ALSO]


def _lines(buffers: Iterable[Buffer]) -> dict[tuple[int, str], str]:
    """The line of the first buffer of each kind."""
    return {
        (buffer.bytes, baseline_file.label(buffer)): buffer.stack[0]
        for buffer in reversed(tuple(buffers))
        if buffer.stack
    }
