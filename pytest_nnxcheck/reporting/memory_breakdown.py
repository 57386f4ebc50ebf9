"""Where the bytes of a peak are: rows of a message, largest first, by the line that made them. Pure functions of the evidence."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from pytest_nnxcheck.core.facts import Advice, Evidence, HeldTwice, LargeLine, NotDonated, Recast, Saved, Stack, Unused
from pytest_nnxcheck.core.nesting import Layer
from pytest_nnxcheck.core.peak import FLOOR, SHOWN, Buffer, Captured, PeakLine, Split
from pytest_nnxcheck.core.text import Row, format_bytes, some
from pytest_nnxcheck.reporting import hints

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


def rows(evidence: Evidence) -> tuple[Row, ...]:
    """What made the peak: the un-nested program beside it, the lines with their largest buffers, what is captured, what a step adds."""
    if evidence.split is None:
        return ()
    return (*beside(evidence), *where(evidence), *captured(evidence), *growth(evidence))


def of_un_nested(name: str, evidence: Evidence) -> tuple[Row, ...]:
    """Where the bytes of a call are that runs in no nesting but a jit: its peak, and the lines that hold most of it."""
    peak = evidence.split.peak if evidence.split else 0
    return (("un-nested", f"{name}: peak {format_bytes(peak)}"), *where(evidence))


def beside(evidence: Evidence) -> Iterator[Row]:
    """The peak of the un-nested program, and what the nesting adds to it."""
    if evidence.split is None or evidence.un_nested is None:
        return
    more = evidence.split.peak - evidence.un_nested.peak
    peak = format_bytes(evidence.un_nested.peak)
    if more > 0:
        yield (
            "un-nested",
            f"{peak}; the nesting adds {format_bytes(more)}: {parts(difference(evidence.split, evidence.un_nested))}",
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


def where(evidence: Evidence) -> Iterator[Row]:
    """The lines that hold most of the peak beyond the arguments, each with its largest buffers."""
    if evidence.split is None:
        return
    if not evidence.places and evidence.split.temporaries:
        yield "line", "unknown: this jaxlib does not name the buffers"
    total = sum(place.bytes for place in evidence.places)
    least = max(SHARE * total, LEAST)
    shown = [place for place in evidence.places if place.bytes >= least][: len(BUFFERS)]
    for place, most in zip(shown, BUFFERS, strict=False):
        yield "line", f"{heading(place)}   {shares(place, evidence.split)}{un_nested(place, evidence)}"
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
    """What the same line costs in the un-nested program, where that is another one."""
    is_known = place.line or place.inserted or place.constants
    if evidence.un_nested is None or evidence.un_nested == evidence.split or not is_known:
        return ""
    return f"; un-nested {format_bytes(place.un_nested)}" if place.un_nested else "; not in the un-nested program"


def buffers(place: PeakLine, evidence: Evidence, least: float) -> list[str]:
    """The kept buffers of a place that are large enough, largest first, those that say the same together."""
    same: dict[str, list[Buffer]] = {}
    for held in evidence.buffers:
        if belongs(held, place):
            same.setdefault(describe(held), []).append(held)
    large = {text: group for text, group in same.items() if sum(held.bytes for held in group) >= least}
    return [counted(text, group) for text, group in large.items()]


def counted(text: str, group: list[Buffer]) -> str:
    """``2 x 512.0 KiB temporary ...   1 added by the nesting``, where it did not add all or none of them."""
    times, new = len(group), sum(held.added for held in group)
    return (f"{times} x " if times > 1 else "") + text + (f"   {new} added by the nesting" if 0 < new < times else "")


def belongs(held: Buffer, place: PeakLine) -> bool:
    """Whether a buffer is one of a place's: captured constants have one of their own, and so has what XLA inserted for nothing it names."""
    same = held.place == place.line and (held.kind == "constant") == bool(place.constants)
    return same and (place.line != "" or held.inserted == place.inserted)


def describe(held: Buffer) -> str:
    """``512.0 KiB temporary float32[8,128,128] dynamic_update_slice   copy of model.kernel by while, dynamic-slice``."""
    text = f"{format_bytes(held.bytes)} {held.kind} {held.shape} {held.operation}"
    if held.name:
        text += f"   {'copy' if held.whole else 'part'} of {listed(held.name, held.joined)}"
        text += f" by {', '.join(held.through)}" if held.through else ""
    return text + ("   inserted by XLA for this loop" if held.inserted and held.place else "")


def listed(first: str, others: Sequence[str]) -> str:
    """``model.q``, ``model.q and model.k``, ``model.q and 2 more``."""
    rest = others[0] if len(others) == 1 else f"{len(others)} more"
    return f"{first} and {rest}" if others else first


def captured(evidence: Evidence) -> Iterator[Row]:
    """The arrays that the call captures, each with the line that uses it first, and where it is kept."""
    if sum(array.bytes for array in evidence.captured) < FLOOR:
        return
    rows = list(Counter(map(text_of, evidence.captured)).items())
    yield from [("captured", f"{count} x {text}" if count > 1 else text) for text, count in rows][:CAPTURED]
    if others := sum(count for _, count in rows[CAPTURED:]):
        yield "", f"and {others if len(evidence.captured) < SHOWN else 'many'} more"
    if evidence.split is not None and left_out(sum(array.bytes for array in evidence.captured), evidence.split):
        yield "", f"{kept(evidence.split)}: one of equal elements, and the results of what it computes beforehand"


def left_out(captured: int, split: Split) -> bool:
    """Whether XLA keeps less than the call captures."""
    return captured - split.constants >= FLOOR


def kept(split: Split) -> str:
    """The captured bytes that are in the program, and so in its peak."""
    return f"XLA keeps {format_bytes(split.constants)} of that in this program"


def text_of(array: Captured) -> str:
    name = f"   {array.name}" if array.name else ""
    return f"{array.type} {format_bytes(array.bytes)}{name}   " + (
        f"used at {array.line}" if array.line else "(no line)"
    )


def growth(evidence: Evidence) -> Iterator[Row]:
    """What each further step of the generated loop adds to the peak."""
    if evidence.growth is None:
        return
    gain = evidence.growth
    what = "element" if Layer.parse(gain.layer).row.axis == "elements" else "step"
    adds = f"adds {format_bytes(gain.per_step.peak)}: {parts(difference(gain.per_step, NOTHING))}"
    text = adds if gain.per_step.peak > 0 else "adds nothing to the peak"
    yield "growth", f"each further {what} of {gain.layer} {text}   (from {gain.steps} and {2 * gain.steps} {what}s)"


NOTHING = Split(0, 0, 0, 0, 0)


def advice(piece: Advice) -> str:
    """What most authors would change in the un-nested call."""
    at = f" ({piece.line})" if piece.line else ""
    size = format_bytes(piece.bytes)
    match piece:
        case Recast():
            cure = "cast it inside the loop, a step's part at a time" if piece.looped else f"keep it in {piece.dtype}"
            return f"{size} {piece.type}: all of {piece.name or 'an input'} once more in another dtype; {cure}{at}"
        case HeldTwice():
            whose = listed(piece.names[0], piece.names[1:])
            return f"{size}: all of {whose} once more, {hints.TWICE[piece.operation]}{at}"
        case Saved():
            return (
                f"{size}, the largest part of the peak: what {piece.steps} steps of a scan save for the backward pass,"
                f" {format_bytes(piece.bytes // piece.steps)} each; wrap its body in nnx.remat, or let the policy save less{at}"
            )
        case Stack():
            cure = (
                "of which one step is read; carry that one" if piece.read else "which nothing reads; do not return it"
            )
            return f"{size} {piece.type}: a scan stacks its outputs, {cure}{at}"
        case LargeLine():
            handed = format_bytes(piece.handed)
            what = f"one line holds more than state, inputs and outputs together, {handed}"
            return f"{size}, {piece.type} {piece.operation}: {what}{at}"
        case Unused():
            return f"{size}: the call neither reads nor writes {some(piece.names)}; hand it only what it uses"
        case NotDonated():
            why = f"{piece.function} is a jit that changes {' and '.join(piece.arguments)}, and does not donate that"
            return f"{size}: {why}: old and new lie side by side; write {piece.donate} in its {piece.jit}{at}"
