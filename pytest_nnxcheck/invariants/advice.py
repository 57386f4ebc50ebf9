"""Advice on the memory of the un-nested call, where nobody set a bound: what most authors would change, with line and buffer.

A note, and a violation only where ``memory_advice`` asks for it. Each rule was held against the healthy models of this repository and
those of published packages: see docs/memory.md.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from pytest_nnxcheck.core.evidence import FLOOR, Advice, Held, Joined, LargeLine, Recast, Reordered, Restacked
from pytest_nnxcheck.subject.waste import Waste

SHARE = 0.25
"""Of the state: a leaf that is smaller is not worth a line."""

TIMES = 2
"""All that goes in and comes out: an array of a line that is no larger is what a layer makes four times as wide inside, of what it is handed and returns."""

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


def advice(
    peak: int, live: Sequence[Held], spent: Waste, leaves: Sequence[str], inputs: Sequence[str], sizes: Sizes
) -> tuple[Advice, ...]:
    """All pieces, the largest first: of the peak of the un-nested program and the buffers ``live`` at it.

    ``leaves`` are the names of the flat leaves of the state, ``inputs`` those of the flat inputs, which follow them.
    """
    types = {held.shape for held in live if held.kind in ("temporary", "output")}
    pieces: list[Advice] = [
        *(named(leaf, [*leaves, *inputs]) for leaf in spent.recasts if is_waste(leaf, sizes) and leaf.type in types),
        *joined(live, frozenset(leaves), sizes),
        *(scan for scan in spent.saved if scan.bytes - scan.carried >= max(FLOOR, LARGEST * peak)),
        *(stack for stack in spent.stacks if stack.bytes >= FLOOR and stack.type in types),
        *in_other_order([leaf for leaf in spent.reordered if leaf.type in types], leaves, sizes),
        *stacked_anew([leaf for leaf in spent.restacked if leaf.type in types], leaves, sizes),
    ]
    # A scan that saves little, or as little as it can, holds that on its own line.
    lines = {piece.line for piece in pieces} | {scan.line for scan in spent.saved}
    pieces += [outgrown(line, made, sizes) for line, made in larger_than_all(live, sizes) if line not in lines]
    return tuple(sorted(dict.fromkeys(pieces), key=lambda piece: -piece.bytes))


def is_waste(leaf: Recast, sizes: Sizes) -> bool:
    """Whether a leaf in another dtype is large, and more than what mixed precision asks for."""
    return leaf.bytes >= max(FLOOR, SHARE * sizes.state) and (leaf.widens or leaf.looped)


def in_other_order(candidates: Sequence[Reordered], leaves: Sequence[str], sizes: Sizes) -> Iterator[Reordered]:
    """The large leaves of the state among them: a batch is put in order for its scan by most authors, and is small."""
    for leaf in candidates:
        if leaf.leaf < len(leaves) and leaf.bytes >= max(FLOOR, SHARE * sizes.state):
            yield replace(leaf, name=leaves[leaf.leaf])


def stacked_anew(candidates: Sequence[Restacked], leaves: Sequence[str], sizes: Sizes) -> Iterator[Restacked]:
    """The leaves of the state that the scans of a line stack anew, where they are large together: the keys and the values of a cache.

    Of an input, which nobody donates, the output is another array anyway.
    """
    lines: dict[str, dict[int, Restacked]] = {}
    for leaf in candidates:
        if leaf.leaf < len(leaves):
            lines.setdefault(leaf.line, {})[leaf.leaf] = leaf
    for first, *others in (list(of_line.values()) for of_line in lines.values()):
        size = sum(leaf.bytes for leaf in (first, *others))
        if size >= max(FLOOR, SHARE * sizes.state):
            rest = tuple(leaves[leaf.leaf] for leaf in others)
            yield replace(first, name=leaves[first.leaf], others=rest, bytes=size)


def joined(live: Sequence[Held], leaves: frozenset[str], sizes: Sizes) -> Iterator[Joined]:
    """The temporaries that are nothing but large leaves of the state, one behind the other."""
    for held in live:
        if held.kind != "temporary" or not held.joined or held.bytes < max(FLOOR, SHARE * sizes.state):
            continue
        if leaves >= {held.name, *held.joined}:
            yield Joined(held.place, held.shape, held.bytes, held.name, held.joined)


def larger_than_all(live: Sequence[Held], sizes: Sizes) -> Iterator[tuple[str, list[Held]]]:
    """The user's lines with a temporary far larger than all that the call is handed and returns; what XLA inserted by itself is not theirs.

    Not the sum: a line that calls a model has what each of its layers leaves for the backward pass.
    """
    lines: dict[str, list[Held]] = {}
    for held in live:
        if held.kind == "temporary" and held.stack and not held.inserted:
            lines.setdefault(held.place, []).append(held)
    for line, made in lines.items():
        if max(held.bytes for held in made) > max(FLOOR, TIMES * sizes.handed):
            yield line, made


def size_of(made: Sequence[Held]) -> int:
    return sum(held.bytes for held in made)


def named(leaf: Recast, names: Sequence[str]) -> Recast:
    return replace(leaf, name=names[leaf.leaf]) if leaf.leaf < len(names) else leaf


def outgrown(line: str, made: Sequence[Held], sizes: Sizes) -> LargeLine:
    largest = max(made, key=lambda held: held.bytes)
    return LargeLine(line, size_of(made), type=largest.shape, operation=largest.operation, handed=sizes.handed)
