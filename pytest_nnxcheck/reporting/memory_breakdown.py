"""The bytes of a peak by the line that made them: rows of a message, largest first. Pure functions of the evidence."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from pytest_nnxcheck.core.facts import Evidence
from pytest_nnxcheck.core.ledger import Ledger
from pytest_nnxcheck.core.peak import FLOOR, SHOWN, Buffer, Captured, PeakLine, Split
from pytest_nnxcheck.core.text import Row, format_bytes

BUFFERS = (2, 1, 0)
"""Buffers that are shown of each of the first three lines: as many rows as people read within a minute. Reports hold the rest."""

CAPTURED = 2
"""Captured arrays that are shown: with one line of the user's the others are found as well."""

SHARE = 0.05
"""The part of a whole below which a line, a buffer or a summand is not shown: who cures it gains nothing that they would notice."""

HELD = 0.01
"""The part of a peak below which a head of its ledger is added to the rest."""

LEAST = 1024
"""Bytes below which a line is not shown, however small the program is."""

NOTHING = Split(0, 0, 0, 0, 0)

OUTER = 3
"""Callers of a line that are shown."""


def rows(evidence: Evidence) -> tuple[Row, ...]:
    """The rows of a peak: the un-nested program beside it, the lines with their largest buffers, what is captured."""
    split = evidence.split
    if split is None:
        return ()
    return (*held(evidence), *beside(evidence, split), *where(evidence, split), *captured(evidence, split))


def held(evidence: Evidence) -> Iterator[Row]:
    """The ledger of the peak: what is in memory."""
    if evidence.ledger:
        yield "holds", in_words(evidence.ledger)


def in_words(ledger: Ledger) -> str:
    """The heads of a ledger, the largest first, and the sum of the small ones: ``state 516.0 KiB, outputs 2.0 KiB, the rest 24 B``."""
    least = HELD * sum(size for _, size in ledger)
    # What is in the same memory is less than nothing, and comes last.
    heads = [(name, size) for name, size in sorted(ledger, key=lambda head: -head[1]) if abs(size) >= least]
    texts = [f"{'-' * (size < 0)}{format_bytes(abs(size))}" for _, size in heads]
    rest = sum(size for _, size in ledger) - sum(size for _, size in heads)
    small = [f"the rest {format_bytes(rest)}"] if rest > 0 else []
    return ", ".join([*(f"{name} {text}" for (name, _), text in zip(heads, texts, strict=True)), *small])


def of_un_nested(name: str, evidence: Evidence) -> tuple[Row, ...]:
    """The rows of the un-nested call under a jit: its peak, and the lines that hold most of it."""
    split = evidence.split or NOTHING
    return (("un-nested", f"{name}: peak {format_bytes(split.peak)}"), *where(evidence, split))


def beside(evidence: Evidence, split: Split) -> Iterator[Row]:
    """The peak of the un-nested program, and what the nesting adds to it."""
    if evidence.un_nested is None:
        return
    peak, more = format_bytes(evidence.un_nested.peak), split.peak - evidence.un_nested.peak
    if more > 0:
        added = parts(difference(split, evidence.un_nested))
        yield (
            "un-nested",
            f"peak {peak} under a plain jax.jit, which is not judged; the nesting adds {format_bytes(more)} ({added})",
        )
    else:
        yield "un-nested", f"peak {peak} under a plain jax.jit, which is not judged; the nesting adds nothing"


def difference(after: Split, before: Split) -> dict[str, int]:
    """The parts of a peak less those of another; an output in the buffer of an argument counts as the argument."""
    return {
        "arguments": after.arguments - before.arguments,
        "outputs": (after.outputs - after.aliased) - (before.outputs - before.aliased),
        "temporaries": after.temporaries - before.temporaries,
        "constants": after.constants - before.constants,
    }


def parts(sizes: dict[str, int]) -> str:
    """``temporaries +1.0 MiB, outputs -4 B``, the largest first, without what hardly matters."""
    least = SHARE * max(map(abs, sizes.values()))
    order = sorted(sizes.items(), key=lambda item: -abs(item[1]))
    return ", ".join(
        f"{name} {'-' if size < 0 else '+'}{format_bytes(abs(size))}" for name, size in order if abs(size) > least
    )


def formula(sizes: Mapping[str, int]) -> str:
    """``arguments 1.0 MiB + temporaries 512 B - 4 B donated and reused``: the sum of some parts of a peak, in words."""
    added = " + ".join(f"{name} {format_bytes(size)}" for name, size in sizes.items() if name != "aliased")
    return added + (f" - {format_bytes(sizes['aliased'])} donated and reused" if "aliased" in sizes else "")


def where(evidence: Evidence, split: Split) -> Iterator[Row]:
    """The lines that hold most of the peak beyond the arguments, each with its largest buffers."""
    if not evidence.places and split.temporaries:
        yield "line", "unknown: this jaxlib does not name the buffers"
    total = sum(place.bytes for place in evidence.places)
    least = max(SHARE * total, LEAST)
    shown = [place for place in evidence.places if place.bytes >= least][: len(BUFFERS)]
    for place, most in zip(shown, BUFFERS, strict=False):
        yield "line", f"{heading(place)}   {shares(place, split)}{un_nested(place, evidence)}"
        yield from [("buffer", text) for text in buffers(place, evidence, least)][:most]
    rest = total - sum(place.bytes for place in shown)
    if shown and rest >= least:
        yield "", f"{format_bytes(rest)} more in {len(evidence.places) - len(shown)} other places"


def heading(place: PeakLine) -> str:
    """The line, and what called it; or why there is none."""
    if not place.line:
        unknown = "inserted by XLA, no line" if place.inserted else "no line of yours"
        return "captured constants" if place.constants else unknown
    if ":" not in place.line:
        return f"the layer {place.line} of the nesting"
    outer = [*place.outer[:OUTER], *(["..."] if len(place.outer) > OUTER else [])]
    return place.line + (f" (called from {', '.join(outer)})" if outer else "")


def shares(place: PeakLine, split: Split) -> str:
    """``1.0 MiB, 91 % of the temporaries``: of the parts that the place's bytes belong to."""
    of = {
        "temporaries": (place.temporaries, split.temporaries),
        "outputs": (place.outputs, split.outputs - split.aliased),
        "constants": (place.constants, split.constants),
    }
    least = SHARE * place.bytes
    texts = [
        f"{100 * size / whole:.0f} % of the {name}" for name, (size, whole) in of.items() if size > least and whole
    ]
    return ", ".join([format_bytes(place.bytes), *texts])


def un_nested(place: PeakLine, evidence: Evidence) -> str:
    """The bytes of the same line in the un-nested program, if that is another program."""
    is_known = place.line or place.inserted or place.constants
    if evidence.un_nested is None or evidence.un_nested == evidence.split or not is_known:
        return ""
    return (
        f"; {format_bytes(place.un_nested)} in the un-nested program"
        if place.un_nested
        else "; not in the un-nested program"
    )


def buffers(place: PeakLine, evidence: Evidence, least: float) -> list[str]:
    """The kept buffers of a place that are large enough, largest first, those that say the same together."""
    same: dict[str, list[Buffer]] = {}
    for held in evidence.buffers:
        if held.group == place.group:
            same.setdefault(describe(held), []).append(held)
    large = {text: group for text, group in same.items() if sum(held.bytes for held in group) >= least}
    return [counted(text, group) for text, group in large.items()]


def counted(text: str, group: list[Buffer]) -> str:
    """``2 x 512.0 KiB temporary ...   1 of the 2 also in the un-nested program``, where it did not add all or none of them."""
    times, new = len(group), sum(held.added for held in group)
    return (
        (f"{times} x " if times > 1 else "")
        + text
        + (f"   {times - new} of the {times} also in the un-nested program" if 0 < new < times else "")
    )


def describe(held: Buffer) -> str:
    """``512.0 KiB temporary float32[8,128,128] dynamic_update_slice   copy of model.kernel (XLA: while, dynamic-slice)``."""
    text = f"{format_bytes(held.bytes)} {held.kind} {held.shape} {held.operation}"
    if held.name:
        text += f"   {held.made_of} {listed(held.name, held.joined)}"
        text += f" (XLA: {', '.join(held.through)})" if held.through else ""
    return text + ("   inserted by XLA for this loop" if held.inserted and held.place else "")


def listed(first: str, others: Sequence[str]) -> str:
    """``model.q``, ``model.q and model.k``, ``model.q and 2 more``."""
    rest = others[0] if len(others) == 1 else f"{len(others)} more"
    return f"{first} and {rest}" if others else first


def captured(evidence: Evidence, split: Split) -> Iterator[Row]:
    """The arrays that the call captures, each with the line that uses it first, and where it is kept."""
    size = sum(array.bytes for array in evidence.captured)
    if size < FLOOR:
        return
    rows = list(Counter(map(text_of, evidence.captured)).items())
    yield from [("captured", f"{count} x {text}" if count > 1 else text) for text, count in rows][:CAPTURED]
    if others := sum(count for _, count in rows[CAPTURED:]):
        yield "", f"and {others if len(evidence.captured) < SHOWN else 'many'} more"
    if left_out(size, split):
        yield "", f"{kept(split)}: of equal elements it stores one, and of what it computes beforehand the result"


def left_out(captured: int, split: Split) -> bool:
    """True if XLA keeps less than the call captures."""
    return captured - split.constants >= FLOOR


def kept(split: Split) -> str:
    """The captured bytes that are in the program, and so in its peak."""
    return f"XLA keeps {format_bytes(split.constants)} of that in this program"


def text_of(array: Captured) -> str:
    """``float32[512,512] 1.0 MiB   model.TABLE   used at model.py:7``."""
    name = f"   {array.name}" if array.name else ""
    line = f"used at {array.line}" if array.line else "(no line)"
    return f"{array.type} {format_bytes(array.bytes)}{name}   {line}"
