"""Advice on the memory of the un-nested call, where nobody set a bound: what most authors would change, with line and buffer.

A note, and a violation only where ``memory_advice`` asks for it. Each rule was held against the healthy models of this repository and
those of published packages: see docs/memory.md.
"""

from __future__ import annotations

import inspect
import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pytest_nnxcheck.compat import compilation, flax_modes, graph
from pytest_nnxcheck.compat.arrays import array_type, nbytes
from pytest_nnxcheck.core.facts import (
    Advice,
    HeldTwice,
    LargeLine,
    NotDonated,
    Path,
    Recast,
    Saved,
    Twice,
    Unused,
    Waste,
)
from pytest_nnxcheck.core.peak import FLOOR, Buffer
from pytest_nnxcheck.core.text import near
from pytest_nnxcheck.invariants.successors import common, keys, successors
from pytest_nnxcheck.subject.inner_jits import plain
from pytest_nnxcheck.subject.profile import Profile
from pytest_nnxcheck.subject.subject import Nodes, Subject

SHARE = 0.25
"""Of the state: a leaf that is smaller is not worth a line."""

TIMES = 2
"""All that goes in and comes out: an array of a line that is no larger is what a layer makes four times as wide inside, of what it is handed and returns."""

TENTH = 0.1
"""Of the state: what the call does not use, or does not donate, is told from there on."""

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

    Not inputs: nobody donates a batch, and putting it in order for a scan costs little. Nor what XLA does without: the temporaries of such types count,
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
    """Whether a leaf in another dtype is large, and more than what mixed precision asks for."""
    return leaf.bytes >= max(FLOOR, SHARE * sizes.state) and (leaf.widens or leaf.looped)


def on_one_line(scans: Sequence[Saved]) -> Iterator[Saved]:
    """What the scans of each line save together: a line that each layer of a model runs has several."""
    lines: dict[str, list[Saved]] = {}
    for scan in scans:
        lines.setdefault(scan.line, []).append(scan)
    for line, group in lines.items():
        yield Saved(line, *(sum(getattr(scan, name) for scan in group) for name in ("steps", "bytes", "carried")))


def larger_than_all(live: Sequence[Buffer], sizes: Sizes) -> Iterator[LargeLine]:
    """The user's lines with a temporary far larger than all that the call is handed and returns; what XLA inserted by itself is not theirs.

    Not the sum: a line that calls a model has what each of its layers leaves for the backward pass.
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


# --- of the state that is handed in: what the call does not use, and what it changes and does not donate


def of_state(subject: Subject, profile: Profile) -> Iterator[Advice]:
    """What is wrong with the state that a call is handed, whatever its size."""
    sizes = [nbytes(leaf) for _, leaf in graph.flat_state(flax_modes.split(subject.state)[1])]
    used = {path for number, path in enumerate(profile.state_paths) if number not in profile.unused}
    unused = [number for number, path in enumerate(profile.state_paths) if path not in used]
    if unused:
        # Several objects are named one by one: nothing is the name of all.
        least = int(isinstance(subject.state, Nodes))
        parts = whole_parts((profile.state_paths[number] for number in unused), used, least)
        names = dict.fromkeys(map(subject.path, parts))
        yield Unused(tuple(names), sum(sizes[number] for number in unused))
    if jit := compilation.jitted(subject.function):
        yield from not_donated(subject, profile, sizes, jit)


def whole_parts(paths: Iterable[Path], others: Collection[Path], least: int) -> Iterator[Path]:
    """The shortest paths of ``least`` keys or more that lead to these leaves, and to none of the others."""
    shared = {path[:length] for path in others for length in range(len(path) + 1)}
    for path in paths:
        yield next((path[:length] for length in range(least, len(path)) if path[:length] not in shared), path)


def not_donated(subject: Subject, profile: Profile, sizes: Sequence[int], jit: str) -> Iterator[NotDonated]:
    """State that the wrapped function, a jit, changes and does not donate. What gets another type has no use for its old buffer."""
    names = [*map(subject.path, profile.state_paths), *subject.input_names]
    every = [*sizes, *map(nbytes, subject.inputs)]
    changed = {*changed_leaves(profile), *(len(sizes) + number for number in changed_inputs(subject, profile))}
    by_argument: Counter[str] = Counter()
    for number in sorted(changed):
        if profile.donated[number] is False:
            by_argument[root(names[number])] += every[number]
    if by_argument:
        donated = {root(name) for name, given in zip(names, profile.donated, strict=False) if given}
        function = plain(subject.function)
        code = getattr(function, "__code__", None)
        yield NotDonated(
            function=getattr(function, "__name__", type(function).__name__),
            jit=jit,
            line=near(f"{code.co_filename}:{code.co_firstlineno}") if code else "",
            arguments=tuple(by_argument),
            donate=option(subject.function, {*by_argument, *donated}),
            bytes=by_argument.total(),
        )


def changed_leaves(profile: Profile) -> Iterator[int]:
    """The numbers of the leaves that come back with another value of the same type."""
    moved = profile.changed - {path for path, *_ in profile.retyped} - {*profile.removed}
    return (number for number, path in enumerate(profile.state_paths) if path in moved)


def changed_inputs(subject: Subject, profile: Profile) -> Iterator[int]:
    """The numbers of the inputs that are state, and come back with another value of the same type: arguments, an `nnx.State` say, whose every array an output of the same name follows."""
    new = successors(subject, profile, "all")
    names = subject.input_names
    followed = {
        number: output for number, output in new.items() if common(keys(names[number]), keys(profile.out_names[output]))
    }
    batches = {root(name) for number, name in enumerate(names) if number not in followed}
    for number, output in followed.items():
        same_type = array_type(profile.out[output]) == array_type(subject.inputs[number])
        if root(names[number]) not in batches and same_type and profile.handed_out[output] != number:
            yield number


def root(name: str) -> str:
    """The argument that a name begins with."""
    return re.match(r"\w*", name)[0]  # type: ignore[index]


def option(function: Any, arguments: Collection[str]) -> str:
    """The option of a jit that donates these arguments: the first one is what the object is called that a method belongs to."""
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        parameters = []
    positions = {each.name: number for number, each in enumerate(parameters) if each.kind is not each.KEYWORD_ONLY}
    if any(each.name in arguments for each in parameters if each.kind is each.KEYWORD_ONLY):
        return f"donate_argnames={tuple(sorted(arguments))}"
    numbers = sorted({positions.get(name, 0) for name in arguments})
    return f"donate_argnums={numbers[0] if len(numbers) == 1 else tuple(numbers)}"
