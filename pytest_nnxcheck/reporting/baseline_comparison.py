"""The measured peaks of a test against those of the baseline: what grew, what shrank, what is new or gone, and the text of it.

Pure functions over plain data: nothing here imports jax, flax, hypothesis or pytest.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from fractions import Fraction

from pytest_nnxcheck.core.evidence import SHOWN, Held, Split
from pytest_nnxcheck.core.nesting import Nesting
from pytest_nnxcheck.core.outcome import Outcome
from pytest_nnxcheck.core.text import Row
from pytest_nnxcheck.reporting import baseline_file, report
from pytest_nnxcheck.reporting.baseline_file import Buffers, Entry

HEADLINE = "nnx memory baseline exceeded"
_ALSO = 5
"""Further nestings that grew, and buffers of each kind, that are named."""


@dataclass(frozen=True, slots=True)
class Measured:
    """What one nesting of this run is compared with: its outcome, and the entry that would be written of it."""

    outcome: Outcome
    entry: Entry

    @property
    def buffers(self) -> tuple[Held, ...]:
        return self.outcome.evidence.buffers if self.outcome.evidence else ()


@dataclass(frozen=True, slots=True)
class Comparison:
    """One test against the baseline: nestings as text, the smallest first."""

    compared: int = 0
    grew: tuple[Nesting, ...] = ()
    shrank: tuple[str, ...] = ()
    new: tuple[str, ...] = ()


def compare(known: Mapping[str, Entry], found: Mapping[Nesting, Measured], tolerance: Fraction) -> Comparison:
    """Hold what was measured against the entries of the same test."""
    pairs = [
        (nesting, known[str(nesting)].peak, each.entry.peak) for nesting, each in found.items() if str(nesting) in known
    ]
    grew = [nesting for nesting, before, now in pairs if now > before * (1 + tolerance)]
    return Comparison(
        compared=len(pairs),
        grew=tuple(sorted(grew, key=lambda nesting: nesting.plainness)),
        shrank=tuple(str(nesting) for nesting, before, now in pairs if now < before * (1 - tolerance)),
        new=tuple(str(nesting) for nesting in found if str(nesting) not in known),
    )


def message(
    result: Comparison,
    known: Mapping[str, Entry],
    found: Mapping[Nesting, Measured],
    *,
    tolerance: Fraction,
    checked: report.Report,
) -> str:
    """The text of a failure: the smallest nesting that grew, and what in it did. The options of the report name the baseline."""
    shown = result.grew[0]
    before, now = known[str(shown)], found[shown]
    rows = [
        ("nesting", f"{shown!s:<38} smallest of {len(result.grew)} that grew, {result.compared} compared"),
        ("peak", f"{change(before.peak, now.entry.peak)}, tolerance {percent(tolerance)}"),
        *split_rows(before.split, now.entry.split),
        *(("buffer", text) for text in buffer_rows(before, now)),
        *(("also grew", text) for text in also(result.grew[1:], known, found)),
        ("accept", f"pytest {shlex.quote(checked.test_id)} {checked.options} --nnx-baseline-update".replace("  ", " ")),
        ("replay", report.replay(checked, shown)),
    ]
    return report.lay_out(HEADLINE, checked.test_id, rows)


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
    counts = {(each.bytes, each.label): each.count for each in before}
    rows = []
    for each in now:
        key = (each.bytes, each.label)
        more = each.count - counts.get(key, 0)
        if more > 0 and (each.bytes > unnamed or key in counts):
            text = baseline_file.show_buffers(Buffers(each.bytes, each.label, more), each.label)
            rows.append(f"{text}   {lines[key]}" if lines.get(key) else text)
    return rows[:_ALSO]


def _lines(buffers: Iterable[Held]) -> dict[tuple[int, str], str]:
    """The line of the first buffer of each kind."""
    return {(each.bytes, baseline_file.label(each)): each.stack[0] for each in reversed(tuple(buffers)) if each.stack}


def also(nestings: Iterable[Nesting], known: Mapping[str, Entry], found: Mapping[Nesting, Measured]) -> Iterator[str]:
    """One line for each further nesting that grew."""
    names = tuple(nestings)
    for nesting in names[:_ALSO]:
        yield f"{nesting}   {change(known[str(nesting)].peak, found[nesting].entry.peak)}"
    if names[_ALSO:]:
        yield f"and {len(names) - _ALSO} more"
