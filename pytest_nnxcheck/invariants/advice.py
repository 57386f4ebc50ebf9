"""Advice on the memory of the un-nested call, where nobody set a bound: buffers that most authors would avoid, with their lines.

A note, and a violation only where ``memory_advice`` asks for it. Each rule was tried on the healthy models of this repository and
those of published packages: see docs/memory.md. Below the pieces with their words: the rules that decide which of them
matter at a peak, and the facts of the jaxpr and of the state that they are made of.
"""

from __future__ import annotations

import inspect
import itertools
import math
import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import jax.numpy as jnp

from pytest_nnxcheck.compat import graph, staging
from pytest_nnxcheck.compat.arrays import array_type, describe, nbytes
from pytest_nnxcheck.compat.staging import COPIES, JOINS, LOOPS, PARTS, SCAN, UPDATES, WHILE
from pytest_nnxcheck.core.facts import Evidence, Path
from pytest_nnxcheck.core.notes import Note, texts
from pytest_nnxcheck.core.outcome import Finding, UnNested
from pytest_nnxcheck.core.peak import FLOOR, SHOWN, SHOWN_LINES, Buffer, Memory, by_line
from pytest_nnxcheck.core.text import Row, beginning, format_bytes, some
from pytest_nnxcheck.engine.ran import Ran
from pytest_nnxcheck.jaxprs import flow
from pytest_nnxcheck.reporting.memory_breakdown import listed
from pytest_nnxcheck.subject.profile import Profile, StateUse, common, keys, successors
from pytest_nnxcheck.subject.subject import Nodes, Subject, users_function

# --- the pieces: bytes a device, and the user's line, empty where there is none


@dataclass(frozen=True, slots=True)
class Recast:
    """All of a leaf in another dtype."""

    leaf: int
    """The number of the program's input."""
    line: str
    dtype: str
    type: str
    bytes: int
    """The size of the new array."""
    widens: bool
    looped: bool
    """True if a loop takes it."""
    name: str = ""

    def words(self) -> str:
        cure = "cast it inside the loop, a step's part at a time" if self.looped else f"keep it in {self.dtype}"
        what = f"all of {self.name or 'an input'} once more in another dtype"
        return f"{format_bytes(self.bytes)} {self.type}: {what}; {cure}{at(self.line)}"


Twice = Literal[
    "old and new at once",
    "read, then written",
    "stacked anew",
    "joined",
    "cut and joined again",
    "reordered",
]
"""The reason why all of a leaf is in memory once more."""

COMES_FIRST = "value, read = jax.lax.optimization_barrier((value, read))"

TWICE: dict[Twice, str] = {
    "old and new at once": "needed beside its new value; keep only the old rows that are overwritten, or write row by row in a loop, and compute there what"
    f" needs both: {COMES_FIRST} puts the read first (jax 0.12 or newer)",
    "read, then written": f"read, and a part of it written in no order with that; read first, {COMES_FIRST}, then write into that value (jax 0.12"
    " or newer)",
    "stacked anew": "taken by a scan step by step, a part written, and stacked anew; carry the whole stack, and write into it in place",
    "joined": "joined into one array; keep them in one Variable, or take each of them separately",
    "cut and joined again": "cut and joined again; write into the whole, in place",
    "reordered": "in another order for a loop; run that with reverse=True, or put a step's part in order inside",
}
"""The ways in which all of a leaf is in memory once more, each with the change to make."""


@dataclass(frozen=True, slots=True)
class HeldTwice:
    """All of some leaves once more; as advice, all leaves of a line."""

    leaves: tuple[int, ...]
    """The numbers of the program's inputs."""
    operation: Twice
    line: str
    types: tuple[str, ...]
    """The types of the arrays, or of their parts."""
    bytes: int
    names: tuple[str, ...] = ()

    def words(self) -> str:
        whose = listed(self.names[0], self.names[1:])
        return f"{format_bytes(self.bytes)}: all of {whose} once more, {TWICE[self.operation]}{at(self.line)}"


@dataclass(frozen=True, slots=True)
class Saved:
    """The values that the scans of a line save for their backward pass."""

    line: str
    steps: int
    bytes: int
    """The sum over all steps."""
    carried: int
    """The part of these bytes that the carry needs, which a remat saves as well."""

    def words(self) -> str:
        size, of_step = format_bytes(self.bytes), format_bytes(self.bytes // self.steps)
        return (
            f"{size}, the largest part of the peak: {self.steps} steps of a scan save it for the backward pass,"
            f" {of_step} each; wrap its body in nnx.remat, or let the policy save less{at(self.line)}"
        )


@dataclass(frozen=True, slots=True)
class Stack:
    """A stacked output of a scan whose steps nothing reads, or one of them."""

    line: str
    type: str
    bytes: int
    """The sum over all steps."""
    read: bool

    def words(self) -> str:
        cure = (
            "and only one step is read; carry that one" if self.read else "and nothing reads them; do not return them"
        )
        return f"{format_bytes(self.bytes)} {self.type}: a scan stacks its outputs, {cure}{at(self.line)}"


@dataclass(frozen=True, slots=True)
class Waste:
    """The memory that the jaxpr of a call spends by its own structure."""

    recasts: tuple[Recast, ...] = ()
    saved: tuple[Saved, ...] = ()
    stacks: tuple[Stack, ...] = ()
    twice: tuple[HeldTwice, ...] = ()


@dataclass(frozen=True, slots=True)
class LargeLine:
    """A line whose arrays are larger than all that goes into the call and comes out of it."""

    line: str
    bytes: int
    type: str
    """The type of the largest."""
    operation: str
    """The operation of the largest."""
    handed: int
    """Bytes of all that goes in and comes out."""

    def words(self) -> str:
        what = f"one line holds more than state, inputs and outputs together, {format_bytes(self.handed)}"
        return f"{format_bytes(self.bytes)}, {self.type} {self.operation}: {what}{at(self.line)}"


@dataclass(frozen=True, slots=True)
class Unused:
    """State that the call neither reads nor writes."""

    names: tuple[str, ...]
    """The largest parts that are unused as a whole."""
    bytes: int
    line: str = ""

    def words(self) -> str:
        unused = f"the call neither reads nor writes {some(self.names)}; hand it only what it uses"
        return f"{format_bytes(self.bytes)}: {unused}"


@dataclass(frozen=True, slots=True)
class NotDonated:
    """State that the call changes, where the wrapped function is itself a jit that does not donate it."""

    function: str
    jit: str
    """The jit as its user writes it."""
    line: str
    """The line where the function begins."""
    arguments: tuple[str, ...]
    """The arguments that hold the state."""
    donate: str
    """The option that donates all that changes."""
    bytes: int
    """The bytes that are in memory old and new."""

    def words(self) -> str:
        why = f"{self.function} is a jit that changes {' and '.join(self.arguments)}, and does not donate that"
        cure = f"write {self.donate} in its {self.jit}"
        return f"{format_bytes(self.bytes)}: {why}: old and new lie side by side; {cure}{at(self.line)}"


Advice = HeldTwice | Recast | LargeLine | Saved | Stack | Unused | NotDonated
"""One thing that most authors would change."""


def at(line: str) -> str:
    """The user's line, behind a piece."""
    return f" ({line})" if line else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryWasted(Finding):
    """Memory that the un-nested call need not spend."""

    OF_PEAK: ClassVar[bool] = True

    advice: tuple[Note, ...]

    def sentence(self) -> str:
        return "the un-nested call spends memory that it need not"

    def rows(self) -> list[Row]:
        return [("advice", text) for text in dict.fromkeys(texts(self.advice))]

    def brief(self, summary: str, evidence: Evidence | None) -> str:
        return texts(self.advice)[0]


# --- what is advised


def advised(ran: Ran) -> tuple[Note, ...]:
    """The advice on the un-nested call, where the settings make it a violation of the nestings that are measured by it.

    The un-nested call is measured whatever breaks, and kept for reports, which show its figures.
    """
    memory, known, baseline = ran.un_nested_memory, ran.call.known, ran.baseline
    if (
        memory is None or baseline is None or len(baseline) > 1
    ):  # where the nesting takes a gradient, it is that of the call
        return ()
    known.un_nested = known.un_nested or un_nested(ran, memory)
    return () if ran.call.settings.memory_advice == "note" else known.un_nested.advice


def un_nested(ran: Ran, memory: Memory) -> UnNested:
    """The memory figures of the un-nested program, and advice on them."""
    subject, profile, program = ran.call.subject, ran.profile, ran.profile.program
    sizes = Sizes(profile.state.bytes, profile.input_bytes, profile.output.bytes)
    spent = Waste() if program.jaxpr is None else waste(program.jaxpr, program.rewritten)
    # Not the program's own names, which are in the order of its parameters.
    leaves, handed = [*map(subject.path, profile.state.paths)], tuple(of_state(subject, profile))
    advised = advice(memory.peak, memory.made, spent, leaves, subject.input_names, sizes, handed)
    lines = by_line(memory.made, memory.made)[:SHOWN_LINES]
    evidence = Evidence(memory.split, un_nested=memory.split, buffers=memory.made[:SHOWN], places=lines)
    return UnNested(subject.name, evidence, advised)


# --- the rules

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


# --- facts of the jaxpr

ONE_STEP = frozenset({"slice", "dynamic_slice", "gather", "squeeze"})
"""Equations that take one element of a stack, if their result is no larger than that."""

MOVES = frozenset({"rev", "transpose", "gather"})
"""Equations that reorder the elements of an array, if their result is as large as the array."""


@dataclass(frozen=True, slots=True)
class Level:
    """The jaxpr of a call, or one inside it."""

    jaxpr: Any
    inputs: Mapping[int, int]
    """The number of the call's input that a variable is, by the id of the variable."""

    def users(self, var: Any) -> list[Any]:
        """The equations that take a variable."""
        return flow.uses(self.jaxpr).takers.get(id(var), [])


def waste(jaxpr: Any, successors: Mapping[int, int]) -> Waste:
    """The facts of a jaxpr, and of the jits and remats inside it; ``successors`` are the outputs that replace inputs, by the number of the input."""
    every = list(levels(jaxpr, [(var, number) for number, var in enumerate(jaxpr.invars)]))
    beside = (needed_beside(jaxpr, number, number, output) for number, output in successors.items())
    return Waste(
        tuple(itertools.chain(*map(recasts, every))),
        tuple(itertools.chain(*map(saved, every))),
        tuple(itertools.chain(*map(stacks, every))),
        tuple(itertools.chain(*map(joined, every), *map(reordered, every), *beside)),
    )


def levels(jaxpr: Any, inputs: Iterable[tuple[Any, int]]) -> Iterator[Level]:
    """A jaxpr, and those of the jits, remats and custom rules inside it. The pairs name the variables that are inputs of the call, by number."""
    numbers = {key: number for var, number in inputs for key in flow.uses(jaxpr).same(var)}
    yield Level(jaxpr, numbers)
    for eqn in jaxpr.eqns:
        if (inner := flow.called(eqn)) is not None:
            handed = zip(inner.invars, eqn.invars, strict=True)
            yield from levels(inner, [(var, numbers[id(own)]) for var, own in handed if id(own) in numbers])


def recasts(level: Level) -> Iterator[Recast]:
    """Inputs of floats that are converted as a whole."""
    for eqn in level.jaxpr.eqns:
        if eqn.primitive.name == "convert_element_type" and id(eqn.invars[0]) in level.inputs:
            (out,), before = eqn.outvars, eqn.invars[0].aval.dtype
            # Floats of 8 bits are quantized on purpose: they have to be converted.
            if not jnp.issubdtype(before, jnp.inexact) or before.itemsize == 1:
                continue
            yield Recast(
                leaf=level.inputs[id(eqn.invars[0])],
                line=graph.equation_line(eqn),
                dtype=out.aval.dtype.name,
                type=describe(out.aval),
                bytes=nbytes(out.aval),
                widens=out.aval.dtype.itemsize > before.itemsize,
                looped=any(user.primitive.name in LOOPS for user in level.users(out)),
            )


def saved(level: Level) -> Iterator[Saved]:
    """The arrays that a scan stacks for a scan in the other direction: the residuals of a backward pass."""
    for eqn in level.jaxpr.eqns:
        if eqn.primitive.name == SCAN and not eqn.params["reverse"]:
            carried, stacked = carried_and_stacked(eqn)
            size = sum(
                nbytes(var.aval)
                for var in stacked
                if any(user.primitive.name == SCAN and user.params["reverse"] for user in level.users(var))
            )
            if size:
                steps = int(eqn.params["length"])
                yield Saved(graph.equation_line(eqn), steps, size, steps * sum(nbytes(var.aval) for var in carried))


def stacks(level: Level) -> Iterator[Stack]:
    """Find the stacked outputs of a scan whose readers, if there are any, each take one step."""
    returned = {id(var) for var in level.jaxpr.outvars}
    for eqn in level.jaxpr.eqns:
        if eqn.primitive.name != SCAN or eqn.params["length"] == 1:
            continue
        for var in carried_and_stacked(eqn)[1]:
            readers = level.users(var)
            if id(var) not in returned and all(takes_one(user, var) for user in readers):
                yield Stack(graph.equation_line(eqn), describe(var.aval), nbytes(var.aval), bool(readers))


def joined(level: Level) -> Iterator[HeldTwice]:
    """Find inputs that the call concatenates as a whole, or that it cuts and joins again."""
    for eqn in level.jaxpr.eqns:
        ways = [way_from_input(level, var) for var in eqn.invars] if eqn.primitive.name in JOINS else []
        sizes = {level.inputs[id(start)]: start.aval.size for start, _ in ways if start is not None}
        if sizes and all(start is not None for start, _ in ways) and sum(sizes.values()) == eqn.outvars[0].aval.size:
            parts = [out for _, way in ways for each in way for out in each.outvars]
            yield twice(sizes, "joined" if len(sizes) > 1 else "cut and joined again", eqn, *eqn.outvars, *parts)


def reordered(level: Level) -> Iterator[HeldTwice]:
    """Inputs whose elements are reordered for a loop: all of them move before its first step."""
    for eqn in level.jaxpr.eqns:
        for var in eqn.invars if eqn.primitive.name in LOOPS else ():
            start, way = way_from_input(level, var)
            move = next((each for each in way if each.primitive.name in MOVES), None)
            if move is not None and start.aval.size == var.aval.size:
                yield twice([level.inputs[id(start)]], "reordered", move, var)


def way_from_input(level: Level, var: Any) -> tuple[Any, list[Any]]:
    """Follow the elements of a variable back to one input.

    Gives the input, or None if there is none, and the equations that take or move the elements, the last first.
    """
    way: list[Any] = []
    while id(var) not in level.inputs:
        eqn, _ = flow.uses(level.jaxpr).maker.get(id(var), (None, 0))
        if eqn is None or eqn.primitive.name not in PARTS | UPDATES | MOVES or var.aval.size > eqn.invars[0].aval.size:
            return None, []
        way.append(eqn)
        var = eqn.invars[0]
    return var, way


def needed_beside(jaxpr: Any, leaf: int, before: int, after: int) -> Iterator[HeldTwice]:
    """Find a leaf whose old value (input ``before``) the call needs while the new one (output ``after``) exists or may exist; or that a scan stacks anew.

    If a part of the leaf is written in place, everybody who reads the old value must come before the write. Only data can order the two: if
    the write does not depend on the read, XLA may copy. If the leaf is made anew as a whole, only an equation that needs both values counts.
    """
    uses, (source, write) = flow.uses(jaxpr), way_back(jaxpr, after)
    if write is None:
        return
    needing_both, reading = list[Any](), list[Any]()
    for eqn, operands in uses.taken(uses.same(jaxpr.invars[before])):
        if eqn is write[0]:
            for operand in operands:
                yield from inside(*write, leaf, operand)
        elif eqn.primitive.name in COPIES:
            continue
        elif depends(jaxpr, eqn, write[0]):
            needing_both.append(eqn)
        elif source == before and not depends(jaxpr, write[0], eqn):
            reading.append(eqn)
    for eqn in (needing_both or reading)[:1]:
        operation: Twice = "old and new at once" if needing_both else "read, then written"
        yield twice([leaf], operation, eqn, jaxpr.invars[before])


def inside(eqn: Any, output: int, leaf: int, operand: int) -> Iterator[HeldTwice]:
    """Find such a leaf inside a call or a loop that takes the old value and gives the new one."""
    params = eqn.params
    if (inner := flow.called(eqn)) is not None:
        yield from needed_beside(inner, leaf, operand, output)
    elif eqn.primitive.name == WHILE and operand == params["cond_nconsts"] + params["body_nconsts"] + output:
        yield from needed_beside(
            staging.open_jaxpr(params["body_jaxpr"]), leaf, params["body_nconsts"] + output, output
        )
    elif eqn.primitive.name == SCAN:
        body, (consts, carry) = staging.open_jaxpr(params["jaxpr"]), staging.scan_layout(eqn)
        if operand == consts + output < consts + carry:
            yield from needed_beside(body, leaf, operand, output)
        elif params["length"] > 1 and operand >= consts + carry and way_back(body, output)[0] == operand:
            yield twice([leaf], "stacked anew", eqn, eqn.outvars[output])


def depends(jaxpr: Any, eqn: Any, other: Any) -> bool:
    """True if an equation needs an output of another one, directly or not."""
    uses, ahead, seen = flow.uses(jaxpr), [other], {id(other)}
    for each in ahead:
        users = (user for out in each.outvars for user in uses.takers.get(id(out), ()))
        new = {id(user): user for user in users if id(user) not in seen and uses.order[id(user)] <= uses.order[id(eqn)]}
        seen.update(new)
        ahead += new.values()
    return id(eqn) in seen


def way_back(jaxpr: Any, output: int) -> tuple[int | None, tuple[Any, int] | None]:
    """Follow an output back through the equations that write a part of it.

    Gives (the input that they write into, the first of these equations with the number of its output). If the output is another value as a
    whole, gives (None, the equation that made it). If nothing writes into the input, gives (the input, None).
    """
    uses = flow.uses(jaxpr)
    var, write = jaxpr.outvars[output], None
    while id(var) in uses.maker:
        here = eqn, number = uses.maker[id(var)]
        operand: int | None = 0
        if (inner := flow.called(eqn)) is not None:
            operand, written = way_back(inner, number)
            write = write if written is None else here
        elif eqn.primitive.name in UPDATES:
            write = here
        else:
            operand = uses.through(eqn)[number]
        if operand is None:
            return None, here
        var = eqn.invars[operand]
    return next((number for number, own in enumerate(jaxpr.invars) if own is var), None), write


def twice(leaves: Iterable[int], operation: Twice, eqn: Any, whole: Any, *parts: Any) -> HeldTwice:
    types = tuple(describe(var.aval) for var in (whole, *parts))
    return HeldTwice(tuple(sorted(leaves)), operation, graph.equation_line(eqn), types, nbytes(whole.aval))


def carried_and_stacked(eqn: Any) -> tuple[list[Any], list[Any]]:
    """The outputs of a scan: those that it carries, and those that have an axis for its steps."""
    _, carry = staging.scan_layout(eqn)
    return eqn.outvars[:carry], eqn.outvars[carry:]


def takes_one(eqn: Any, stack: Any) -> bool:
    """True if an equation takes one step of a stack, or less."""
    least = math.prod(stack.aval.shape[1:])
    return eqn.primitive.name in ONE_STEP and all(math.prod(var.aval.shape) <= least for var in eqn.outvars)


# --- state that the call does not use, and state that it changes and does not donate


def of_state(subject: Subject, profile: Profile) -> Iterator[Advice]:
    """Advice on state that the call does not use, or changes and does not donate, whatever its size."""
    state = profile.state
    used = {path for number, path in enumerate(state.paths) if number not in state.unused}
    unused = [number for number, path in enumerate(state.paths) if path not in used]
    if unused:
        # Several objects are named one by one: nothing is the name of all.
        least = int(isinstance(subject.state, Nodes))
        parts = whole_parts((state.paths[number] for number in unused), used, least)
        names = dict.fromkeys(map(subject.path, parts))
        yield Unused(tuple(names), sum(state.sizes[number] for number in unused))
    if jit := staging.jitted(subject.function):
        yield from not_donated(subject, profile, jit)


def whole_parts(paths: Iterable[Path], others: Collection[Path], least: int) -> Iterator[Path]:
    """The shortest paths of ``least`` keys or more that lead to these leaves, and to none of the others."""
    shared = {path[:length] for path in others for length in range(len(path) + 1)}
    for path in paths:
        yield next((path[:length] for length in range(least, len(path)) if path[:length] not in shared), path)


def not_donated(subject: Subject, profile: Profile, jit: str) -> Iterator[NotDonated]:
    """State that the wrapped function, a jit, changes and does not donate. A leaf that gets another type has no use for its old buffer."""
    names = [*map(subject.path, profile.state.paths), *subject.input_names]
    every, leaves = [*profile.state.sizes, *map(nbytes, subject.inputs)], len(profile.state.paths)
    changed = {*changed_leaves(profile.state), *(leaves + number for number in changed_inputs(subject, profile))}
    by_argument: Counter[str] = Counter()
    for number in sorted(changed):
        if profile.program.donated[number] is False:
            by_argument[argument_of(names[number])] += every[number]
    if by_argument:
        donated = {argument_of(name) for name, given in zip(names, profile.program.donated, strict=False) if given}
        function = users_function(subject.function)
        code = getattr(function, "__code__", None)
        yield NotDonated(
            function=getattr(function, "__name__", type(function).__name__),
            jit=jit,
            line=beginning(code) if code else "",
            arguments=tuple(by_argument),
            donate=option(subject.function, {*by_argument, *donated}),
            bytes=by_argument.total(),
        )


def changed_leaves(state: StateUse) -> Iterator[int]:
    """The numbers of the leaves that come back with another value of the same type."""
    moved = state.changed - {leaf.path for leaf in state.retyped} - {*state.removed}
    return (number for number, path in enumerate(state.paths) if path in moved)


def changed_inputs(subject: Subject, profile: Profile) -> Iterator[int]:
    """The numbers of the inputs that are state, and come back with another value of the same type: arguments, an `nnx.State` say, whose every array an output of the same name follows."""
    new = successors(subject, profile, "all")
    names, outputs = subject.input_names, profile.output
    followed = {
        number: output for number, output in new.items() if common(keys(names[number]), keys(outputs.names[output]))
    }
    batches = {argument_of(name) for number, name in enumerate(names) if number not in followed}
    for number, output in followed.items():
        same_type = array_type(outputs.types[output]) == array_type(subject.inputs[number])
        if argument_of(names[number]) not in batches and same_type and outputs.handed_out[output] != number:
            yield number


def argument_of(name: str) -> str:
    """The argument that a name begins with."""
    return re.match(r"\w*", name)[0]  # type: ignore[index]


def option(function: Any, arguments: Collection[str]) -> str:
    """The option of a jit that donates these arguments; a name that is no parameter is that of a method's object, the first argument."""
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        parameters = []
    positions = {each.name: number for number, each in enumerate(parameters) if each.kind is not each.KEYWORD_ONLY}
    if any(each.name in arguments for each in parameters if each.kind is each.KEYWORD_ONLY):
        return f"donate_argnames={tuple(sorted(arguments))}"
    numbers = sorted({positions.get(name, 0) for name in arguments})
    return f"donate_argnums={numbers[0] if len(numbers) == 1 else tuple(numbers)}"
