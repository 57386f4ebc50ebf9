"""Memory that a call need not spend, by definition on its jaxpr: leaves that are there once more, stacks that nobody reads, policies that name nothing.

Whether XLA spends it, the buffers of the compiled program say: see `invariants/advice`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import jax.numpy as jnp

from pytest_nnxcheck.compat import graph, staging
from pytest_nnxcheck.compat.arrays import array_type, describe, nbytes, quantizes
from pytest_nnxcheck.compat.staging import COPIES, GATHER, JOINS, LOOPS, PARTS, REMATS, SCAN, UPDATES, WHILE
from pytest_nnxcheck.core.text import at_line, format_bytes, some
from pytest_nnxcheck.jaxprs import flow
from pytest_nnxcheck.jaxprs.call_program import handed_in

COMES_FIRST = "value, read = jax.lax.optimization_barrier((value, read))"

TWICE = {
    "old and new at once": "needed beside its new value; keep only the old rows that are overwritten, or write row by row in a loop, and compute there what"
    f" needs both: {COMES_FIRST} puts the read first (jax 0.12 or newer)",
    "read, then written": f"read, and a part of it written in no order with that; read first, {COMES_FIRST}, then write into that value (jax 0.12"
    " or newer)",
    "stacked anew": "taken by a scan step by step, a part written, and stacked anew; carry the whole stack, and write into it in place",
    "joined": "joined into one array; keep them in one Variable, or take each of them separately",
    "cut and joined again": "cut and joined again; write into the whole, in place",
    "reordered": "in another order for a loop; run that with reverse=True, or put a step's part in order inside",
    "permuted": "in another order for a loop; pick a step's part inside, by its index",
    "cast for a loop": "in another dtype, cast before a loop for all its steps; keep the weights in that dtype, or scan over a stack of them and"
    " cast a step's part inside",
    "widened": "in a wider dtype; keep the weights in that, or cast what is computed of them",
}
"""The reasons why all of a leaf is in memory once more, each with the change to make."""


@dataclass(frozen=True, slots=True)
class HeldTwice:
    """All of some leaves once more; as advice, all leaves of a line."""

    leaves: tuple[int, ...]
    """The numbers of the program's inputs."""
    operation: str
    """One of `TWICE`."""
    line: str
    types: tuple[str, ...]
    """The types of the arrays, or of their parts."""
    bytes: int
    names: tuple[str, ...] = ()

    def words(self) -> str:
        whose = self.names[0] if len(self.names) == 1 else f"{self.names[0]} and {len(self.names) - 1} more"
        return f"{format_bytes(self.bytes)}: all of {whose} once more, {TWICE[self.operation]}{at_line(self.line)}"


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
        return f"{format_bytes(self.bytes)} {self.type}: a scan stacks its outputs, {cure}{at_line(self.line)}"


@dataclass(frozen=True, slots=True)
class NamesNothing:
    """A policy of a remat whose names no value has: it is the same as without."""

    line: str
    names: tuple[str, ...]
    known: tuple[str, ...]
    """The names that values of the call have."""
    bytes: ClassVar[int] = 0

    def words(self) -> str:
        known = f", where there are {some(self.known)}" if self.known else ""
        why = f"the policy of a remat is for values of the name {some(self.names)}, and no value of the call has one{known}"
        return f"{why}: it changes nothing; jax.ad_checkpoint.checkpoint_name(x, {self.names[0]}) names a value{at_line(self.line)}"


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
    loop: Any = None
    """The outermost loop that it is in; its inputs are then the same in all steps."""

    def users(self, var: Any) -> list[Any]:
        """The equations that take a variable."""
        return flow.uses(self.jaxpr).takers.get(id(var), [])


def waste(jaxpr: Any, successors: Mapping[int, int]) -> Iterator[HeldTwice | Stack]:
    """The leaves and stacks of a jaxpr, and of those inside it; ``successors`` are the outputs that replace inputs, by the number of the input.

    An input that is quantized is converted on purpose.
    """
    jaxpr = flow.inlined(jaxpr)
    types = {
        number: (array_type(jaxpr.invars[number].aval), array_type(jaxpr.outvars[output].aval))
        for number, output in successors.items()
    }
    quantized = {number for number, (old, new) in types.items() if quantizes(old, new)}
    for level in levels(jaxpr, [(var, number) for number, var in enumerate(jaxpr.invars)]):
        yield from (
            fact for fact in casts(level) if fact.operation != "widened" or not quantized.issuperset(fact.leaves)
        )
        for facts in (joined, reordered, stacks):
            yield from facts(level)
    for number, output in successors.items():
        yield from needed_beside(jaxpr, number, number, output)


def levels(jaxpr: Any, inputs: Iterable[tuple[Any, int]], loop: Any = None) -> Iterator[Level]:
    """A jaxpr, and those inside it that are handed inputs of the call. The pairs name the variables that are such inputs, by number."""
    numbers = {key: number for var, number in inputs for key in flow.uses(jaxpr).same(var)}
    yield Level(jaxpr, numbers, loop)
    for eqn in jaxpr.eqns:
        around = loop or (eqn if eqn.primitive.name in LOOPS else None)
        for inner, operands in handed_in(eqn):
            handed = [(var, eqn.invars[number]) for var, number in zip(inner.invars, operands, strict=False)]
            yield from levels(
                flow.inlined(inner), [(var, numbers[id(own)]) for var, own in handed if id(own) in numbers], around
            )


def casts(level: Level) -> Iterator[HeldTwice]:
    """Inputs of floats that a loop needs in another dtype, or that are widened: all of them are converted at once, before the loop."""
    for eqn in level.jaxpr.eqns:
        if eqn.primitive.name == "convert_element_type" and id(eqn.invars[0]) in level.inputs:
            (out,), before = eqn.outvars, eqn.invars[0].aval.dtype
            looped = level.loop or any(user.primitive.name in LOOPS for user in level.users(out))
            # Floats of 8 bits are quantized on purpose: they have to be converted.
            if not jnp.issubdtype(before, jnp.inexact) or before.itemsize == 1:
                continue
            if looped or out.aval.dtype.itemsize > before.itemsize:
                leaf, way = level.inputs[id(eqn.invars[0])], "cast for a loop" if looped else "widened"
                yield twice([leaf], way, level.loop or eqn, out)


def names_nothing(jaxpr: Any) -> Iterator[NamesNothing]:
    """The remats whose policy is for names that no value has, and saves nothing else either."""
    every = [*flow.all_equations(jaxpr)]
    known = {eqn.params["name"] for eqn in every if eqn.primitive.name == "name"}
    for eqn in every:
        policy = eqn.params.get("policy") if eqn.primitive.name in REMATS else None
        names = staging.policy_names(policy)
        if names and not names & known and not any(staging.policy_saves(policy, each) for each in every):
            yield NamesNothing(graph.equation_line(eqn), *(tuple(map(repr, sorted(each))) for each in (names, known)))


def stacks(level: Level) -> Iterator[Stack]:
    """Find the stacked outputs of a scan whose readers, if there are any, each take one step."""
    returned = {id(var) for var in level.jaxpr.outvars}
    for eqn in level.jaxpr.eqns:
        if eqn.primitive.name != SCAN or eqn.params["length"] == 1:
            continue
        for var in eqn.outvars[staging.scan_layout(eqn)[1] :]:
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
    """Inputs whose elements are reordered for a loop: all of them move before its first step. What flax reorders, as `nnx.RNN` does, nobody can write otherwise."""
    for eqn in level.jaxpr.eqns:
        for var in eqn.invars if eqn.primitive.name in LOOPS else ():
            start, way = way_from_input(level, var)
            move = next((each for each in way if each.primitive.name in MOVES), None)
            if move is not None and start.aval.size == var.aval.size and not graph.is_of_flax(move):
                operation = "permuted" if move.primitive.name == GATHER else "reordered"
                yield twice([level.inputs[id(start)]], operation, move, var)


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
        operation = "old and new at once" if needing_both else "read, then written"
        yield twice([leaf], operation, eqn, jaxpr.invars[before])


def inside(eqn: Any, output: int, leaf: int, operand: int) -> Iterator[HeldTwice]:
    """Find such a leaf inside a loop that takes the old value and gives the new one."""
    params = eqn.params
    if eqn.primitive.name == WHILE and operand == params["cond_nconsts"] + params["body_nconsts"] + output:
        body = flow.inlined(staging.open_jaxpr(params["body_jaxpr"]))
        yield from needed_beside(body, leaf, params["body_nconsts"] + output, output)
    elif eqn.primitive.name == SCAN:
        body, (consts, carry) = flow.inlined(staging.open_jaxpr(params["jaxpr"])), staging.scan_layout(eqn)
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
        if eqn.primitive.name in UPDATES:
            write = here
        else:
            operand = uses.through(eqn)[number]
        if operand is None:
            return None, here
        var = eqn.invars[operand]
    return next((number for number, own in enumerate(jaxpr.invars) if own is var), None), write


def twice(leaves: Iterable[int], operation: str, eqn: Any, whole: Any, *parts: Any) -> HeldTwice:
    types = tuple(describe(var.aval) for var in (whole, *parts))
    return HeldTwice(tuple(sorted(leaves)), operation, graph.equation_line(eqn), types, nbytes(whole.aval))


def takes_one(eqn: Any, stack: Any) -> bool:
    """True if an equation takes one step of a stack, or less."""
    least = math.prod(stack.aval.shape[1:])
    return eqn.primitive.name in ONE_STEP and all(math.prod(var.aval.shape) <= least for var in eqn.outvars)
