"""Advice on the memory of the un-nested call, where nobody set a bound: what most authors would change, with line and buffer.

A note, and a violation only where ``memory_advice`` asks for it. Each rule was held against the healthy models of this repository and
those of published packages: see docs/memory.md.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from pytest_nnxcheck.core.evidence import FLOOR, Held
from pytest_nnxcheck.core.text import format_bytes
from pytest_nnxcheck.subject.waste import Recast, Saved, Stack, Waste

SHARE = 0.25
"""Of the state: a leaf that is smaller is not worth a line."""

LARGEST = 0.5
"""Of the peak: what a scan saves is told where it is more than all the rest."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """Bytes of one call: its state, its inputs, its outputs."""

    state: int
    inputs: int
    outputs: int

    @property
    def handed(self) -> int:
        """All that goes in and comes out."""
        return self.state + self.inputs + self.outputs


@dataclass(frozen=True, slots=True)
class Advice:
    """One piece: what it is about, the bytes that it is about, the user's line (empty where there is none), and the sentence."""

    kind: str
    bytes: int
    line: str
    text: str


def advice(peak: int, live: Sequence[Held], spent: Waste, names: Sequence[str], sizes: Sizes) -> tuple[Advice, ...]:
    """All pieces, the largest first: of the peak of the un-nested program and the buffers ``live`` at it, ``names`` being those of its flat leaves."""
    types = {each.shape for each in live if each.kind in ("temporary", "output")}
    pieces = [
        *(recast(each, names) for each in spent.recasts if is_waste(each, sizes) and each.type in types),
        *(saves(each) for each in spent.saved if each.bytes - each.carried >= max(FLOOR, LARGEST * peak)),
        *(unread(each) for each in spent.stacks if each.bytes >= FLOOR and each.type in types),
    ]
    # A scan that saves little, or as little as it can, holds that on its own line.
    lines = {piece.line for piece in pieces} | {each.line for each in spent.saved}
    pieces += [outgrown(line, made, sizes) for line, made in larger_than_all(live, sizes) if line not in lines]
    return tuple(sorted(dict.fromkeys(pieces), key=lambda piece: -piece.bytes))


def is_waste(each: Recast, sizes: Sizes) -> bool:
    """Whether a leaf in another dtype is large, and more than what mixed precision asks for."""
    return each.bytes >= max(FLOOR, SHARE * sizes.state) and (each.widens or each.looped)


def larger_than_all(live: Sequence[Held], sizes: Sizes) -> Iterator[tuple[str, list[Held]]]:
    """The user's lines whose temporaries are larger than all that the call is handed and returns; what XLA inserted by itself is not theirs."""
    lines: dict[str, list[Held]] = {}
    for each in live:
        if each.kind == "temporary" and each.stack and not each.inserted:
            lines.setdefault(each.place, []).append(each)
    yield from ((line, made) for line, made in lines.items() if size_of(made) > max(FLOOR, sizes.handed))


def size_of(made: Sequence[Held]) -> int:
    return sum(each.bytes for each in made)


def recast(each: Recast, names: Sequence[str]) -> Advice:
    name = names[each.leaf] if each.leaf < len(names) else "an input"
    cure = "cast it inside the loop, a step's part at a time" if each.looped else f"keep it in {each.dtype}"
    text = f"{format_bytes(each.bytes)} {each.type}: all of {name} once more in another dtype; {cure}{at(each.line)}"
    return Advice("recast", each.bytes, each.line, text)


def saves(each: Saved) -> Advice:
    step = format_bytes(each.bytes // each.steps)
    text = (
        f"{format_bytes(each.bytes)}, the largest part of the peak: what {each.steps} steps of a scan save for the backward pass, {step}"
        f" each; wrap its body in nnx.remat, or let the policy save less{at(each.line)}"
    )
    return Advice("saved", each.bytes, each.line, text)


def unread(each: Stack) -> Advice:
    cure = "of which one step is read; carry that one" if each.read else "which nothing reads; do not return it"
    text = f"{format_bytes(each.bytes)} {each.type}: a scan stacks its outputs, {cure}{at(each.line)}"
    return Advice("unread", each.bytes, each.line, text)


def outgrown(line: str, made: Sequence[Held], sizes: Sizes) -> Advice:
    largest = max(made, key=lambda each: each.bytes)
    text = (
        f"{format_bytes(size_of(made))}, {largest.shape} {largest.operation}: one line holds more than state, inputs and outputs together,"
        f" {format_bytes(sizes.handed)}{at(line)}"
    )
    return Advice("line", size_of(made), line, text)


def at(line: str) -> str:
    return f" ({line})" if line else ""
