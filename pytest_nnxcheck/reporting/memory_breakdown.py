"""Where the bytes of a peak are: rows of a message, largest first, by the line that made them. Pure functions of the evidence."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from pytest_nnxcheck.core.evidence import FLOOR, Captured, Evidence, Held, Place, Split
from pytest_nnxcheck.core.nesting import Layer
from pytest_nnxcheck.core.outcome import Outcome
from pytest_nnxcheck.core.text import Row, format_bytes

BUFFERS = (2, 1, 0)
"""Rows that people read within a minute: three lines, and so many buffers of each. The evidence holds the rest."""

CAPTURED = 2
"""Captured arrays that are shown."""

SHARE = 0.05
"""Of what a program holds beyond its arguments: what is smaller is summed up."""

LEAST = 1024
"""Bytes that are never told."""

OUTER = 3
"""Lines that are shown of those that called a line."""


def located(outcome: Outcome) -> Outcome:
    """The outcome, its violations of memory with the rows that say where the bytes are."""
    if outcome.evidence is None or not any(each.invariant == "memory" for each in outcome.violations):
        return outcome
    where_rows = rows(outcome.evidence)
    return replace(
        outcome,
        violations=tuple(
            replace(each, details=(*each.details, *where_rows)) if each.invariant == "memory" else each
            for each in outcome.violations
        ),
    )


def rows(known: Evidence) -> tuple[Row, ...]:
    """What made the peak: the un-nested program beside it, the lines with their largest buffers, what is captured, what a step adds."""
    if known.split is None:
        return ()
    return (*beside(known), *where(known), *captured(known), *growth(known))


def of_un_nested(name: str, known: Evidence) -> tuple[Row, ...]:
    """Where the bytes of a call are that runs in no nesting but a jit: its peak, and the lines that hold most of it."""
    peak = known.split.peak if known.split else 0
    return (("un-nested", f"{name}: peak {format_bytes(peak)}"), *where(known))


def beside(known: Evidence) -> Iterator[Row]:
    """The peak of the un-nested program, and what the nesting adds to it."""
    if known.split is None or known.un_nested is None:
        return
    more = known.split.peak - known.un_nested.peak
    peak = format_bytes(known.un_nested.peak)
    if more > 0:
        yield (
            "un-nested",
            f"{peak}; the nesting adds {format_bytes(more)}: {parts(difference(known.split, known.un_nested))}",
        )
    else:
        yield "un-nested", f"{peak}: the nesting adds nothing to the peak"


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


def where(known: Evidence) -> Iterator[Row]:
    """The lines that hold most of the peak beyond the arguments, each with its largest buffers."""
    if known.split is None:
        return
    if not known.places and known.split.temporaries:
        yield "line", "unknown: this jaxlib does not name the buffers"
    total = sum(place.bytes for place in known.places)
    least = max(SHARE * total, LEAST)
    shown = [place for place in known.places if place.bytes >= least][: len(BUFFERS)]
    for place, most in zip(shown, BUFFERS, strict=False):
        yield "line", f"{heading(place)}   {shares(place, known.split)}{un_nested(place, known)}"
        yield from [("buffer", text) for text in buffers(place, known, least)][:most]
    rest = total - sum(place.bytes for place in shown)
    if shown and rest >= least:
        yield "", f"{format_bytes(rest)} more in {len(known.places) - len(shown)} other places"


def heading(place: Place) -> str:
    """The line, and what called it; or why there is none."""
    if not place.line:
        unknown = "inserted by XLA, no line" if place.inserted else "no line of yours"
        return "captured constants" if place.constants else unknown
    if ":" not in place.line:
        return f"the layer {place.line} of the nesting"
    outer = [*place.outer[:OUTER], *(["..."] if len(place.outer) > OUTER else [])]
    return place.line + (f" (called from {', '.join(outer)})" if outer else "")


def shares(place: Place, split: Split) -> str:
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


def un_nested(place: Place, known: Evidence) -> str:
    """What the same line costs in the un-nested program, where that is another one."""
    if known.un_nested is None or known.un_nested == known.split:
        return ""
    return f"; un-nested {format_bytes(place.un_nested)}" if place.un_nested else "; not in the un-nested program"


def buffers(place: Place, known: Evidence, least: float) -> list[str]:
    """The kept buffers of a place that are large enough, largest first, those that say the same together."""
    same: dict[str, list[Held]] = {}
    for each in known.buffers:
        if belongs(each, place):
            same.setdefault(describe(each), []).append(each)
    large = {text: group for text, group in same.items() if sum(each.bytes for each in group) >= least}
    return [counted(text, group) for text, group in large.items()]


def counted(text: str, group: list[Held]) -> str:
    """``2 x 512.0 KiB temporary ...   1 added by the nesting``, where it did not add all or none of them."""
    times, new = len(group), sum(each.added for each in group)
    return (f"{times} x " if times > 1 else "") + text + (f"   {new} added by the nesting" if 0 < new < times else "")


def belongs(held: Held, place: Place) -> bool:
    """Whether a buffer is one of a place's: captured constants have one of their own, and so has what XLA inserted for nothing it names."""
    same = held.place == place.line and (held.kind == "constant") == bool(place.constants)
    return same and (place.line != "" or held.inserted == place.inserted)


def describe(held: Held) -> str:
    """``512.0 KiB temporary float32[8,128,128] dynamic_update_slice   copy of model.kernel by while, dynamic-slice``."""
    text = f"{format_bytes(held.bytes)} {held.kind} {held.shape} {held.operation}"
    if held.name:
        text += f"   {'copy' if held.whole else 'part'} of {held.name}"
        text += f" by {', '.join(held.through)}" if held.through else ""
    return text + ("   inserted by XLA for this loop" if held.inserted and held.place else "")


def captured(known: Evidence) -> Iterator[Row]:
    """The arrays that the call captures, each with the line that uses it first, and where it is kept."""
    if sum(each.bytes for each in known.captured) < FLOOR:
        return
    yield from [("captured", text_of(each)) for each in known.captured][:CAPTURED]


def text_of(each: Captured) -> str:
    name = f"   {each.name}" if each.name else ""
    return f"{each.type} {format_bytes(each.bytes)}{name}   " + (f"used at {each.line}" if each.line else "(no line)")


def growth(known: Evidence) -> Iterator[Row]:
    """What each further step of the generated loop adds to the peak."""
    if known.growth is None:
        return
    each = known.growth
    what = "element" if Layer.parse(each.layer).row.axis == "elements" else "step"
    adds = f"adds {format_bytes(each.per_step.peak)}: {parts(difference(each.per_step, NOTHING))}"
    text = adds if each.per_step.peak > 0 else "adds nothing to the peak"
    yield "growth", f"each further {what} of {each.layer} {text}   (from {each.steps} and {2 * each.steps} {what}s)"


NOTHING = Split(0, 0, 0, 0, 0)
