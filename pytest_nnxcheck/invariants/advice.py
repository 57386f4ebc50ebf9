"""Advice on the memory of the un-nested call, where nobody set a bound: buffers that most authors would avoid, with their lines.

A note, and a violation only where ``memory_advice`` asks for it. Each rule was tried on the healthy models of this repository and
those of published packages: see docs/memory.md.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from pytest_nnxcheck.core.facts import (
    Advice,
    HeldTwice,
    LargeLine,
    Recast,
    Saved,
    Twice,
    Waste,
)
from pytest_nnxcheck.core.peak import FLOOR, Buffer

SHARE = 0.25
"""Share of the state: a leaf that is smaller is not worth a line."""

TIMES = 2
"""Times all that goes in and comes out: a layer that is four times as wide inside as its input and output makes arrays up to this size, which need no line."""

TENTH = 0.1
"""Share of the state: less is not worth a line on state that the call does not use, or does not donate."""

LARGEST = 0.5
"""Share of the peak: residuals of a scan are worth a line where they are more than all the rest."""


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
    peak: int,
    live: Sequence[Buffer],
    spent: Waste,
    leaves: Sequence[str],
    inputs: Sequence[str],
    sizes: Sizes,
    of_state: Sequence[Advice] = (),
) -> tuple[Advice, ...]:
    """All pieces, the largest first: of the peak of the un-nested program and the buffers ``live`` at it.

    ``leaves`` are the names of the flat leaves of the state, ``inputs`` those of the flat inputs, which follow them. ``of_state`` are the pieces
    that no buffer has to show.
    """
    types = {held.shape for held in live if held.kind in ("temporary", "output")}
    names = dict(enumerate([*leaves, *inputs]))
    pieces: list[Advice] = [
        *held_twice(spent.twice, live, leaves, sizes),
        *(
            replace(leaf, name=names.get(leaf.leaf, ""))
            for leaf in spent.recasts
            if is_waste(leaf, sizes) and leaf.type in types
        ),
        *(scan for scan in on_one_line(spent.saved) if scan.bytes - scan.carried >= max(FLOOR, LARGEST * peak)),
        *(stack for stack in spent.stacks if stack.bytes >= FLOOR and stack.type in types),
    ]
    # A scan that saves little, or as little as it can, holds that on its own line.
    lines = {piece.line for piece in pieces} | {scan.line for scan in spent.saved}
    pieces += [piece for piece in larger_than_all(live, sizes) if piece.line not in lines]
    pieces += [piece for piece in of_state if piece.bytes >= max(FLOOR, TENTH * (sizes.state or sizes.inputs))]
    return tuple(sorted(dict.fromkeys(pieces), key=lambda piece: -piece.bytes))


def held_twice(
    facts: Sequence[HeldTwice], live: Sequence[Buffer], leaves: Sequence[str], sizes: Sizes
) -> Iterator[HeldTwice]:
    """The leaves of the state that are held once more at the peak, by what happens to them and where, if they are large together.

    Inputs do not count: nobody donates a batch, and putting it in order for a scan costs little. Nor does a copy that XLA avoids: the temporaries of such types count,
    and no more than the leaves have.
    """
    lines: dict[tuple[Twice, str], list[HeldTwice]] = {}
    for fact in dict.fromkeys(facts):
        if max(fact.leaves) < len(leaves):
            lines.setdefault((fact.operation, fact.line), []).append(fact)
    for (operation, line), group in lines.items():
        types = tuple(dict.fromkeys(kind for fact in group for kind in fact.types))
        found = sum(held.bytes for held in live if held.kind == "temporary" and held.shape in types)
        size = min(found, sum(fact.bytes for fact in group))
        if size >= max(FLOOR, SHARE * sizes.state):
            numbers = tuple(dict.fromkeys(number for fact in group for number in fact.leaves))
            yield HeldTwice(numbers, operation, line, types, size, tuple(leaves[number] for number in numbers))


def is_waste(leaf: Recast, sizes: Sizes) -> bool:
    """True if a leaf in another dtype is large, and more than mixed precision asks for."""
    return leaf.bytes >= max(FLOOR, SHARE * sizes.state) and (leaf.widens or leaf.looped)


def on_one_line(scans: Sequence[Saved]) -> Iterator[Saved]:
    """The residuals of the scans of each line together: a line that each layer of a model runs has several."""
    lines: dict[str, list[Saved]] = {}
    for scan in scans:
        lines.setdefault(scan.line, []).append(scan)
    for line, group in lines.items():
        yield Saved(line, *(sum(getattr(scan, name) for scan in group) for name in ("steps", "bytes", "carried")))


def larger_than_all(live: Sequence[Buffer], sizes: Sizes) -> Iterator[LargeLine]:
    """The user's lines with a temporary far larger than all that the call is handed and returns; buffers that XLA inserted are not theirs.

    The largest counts, not the sum: a line that calls a model has the residuals of each of its layers.
    """
    lines: dict[str, list[Buffer]] = {}
    for held in live:
        if held.kind == "temporary" and held.stack and not held.inserted:
            lines.setdefault(held.place, []).append(held)
    for line, made in lines.items():
        largest = max(made, key=lambda held: held.bytes)
        if largest.bytes > max(FLOOR, TIMES * sizes.handed):
            size = sum(held.bytes for held in made)
            yield LargeLine(line, size, largest.shape, largest.operation, sizes.handed)
