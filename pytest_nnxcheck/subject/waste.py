"""What the jaxpr of a call spends memory on by its own structure: a state leaf in another dtype, what scans save, stacks that nobody reads, or that were there before.

Facts only, with their lines; whether they matter is decided where the peak is known, by `advice`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp

from pytest_nnxcheck import compat
from pytest_nnxcheck.compat.arrays import describe
from pytest_nnxcheck.compat.primitives import LOOPS, SCAN, UPDATES
from pytest_nnxcheck.core.evidence import Recast, Reordered, Restacked, Saved, Stack
from pytest_nnxcheck.jaxprs import flow
from pytest_nnxcheck.jaxprs.flow import handed_through

ONE_STEP = frozenset({"slice", "dynamic_slice", "gather", "squeeze"})
"""Equations that take one element of a stack where their result is no larger than one."""


MOVES = frozenset({"rev", "transpose", "gather"})
"""Equations that put the elements of an array in another order, where the result is as large as the array."""


@dataclass(frozen=True, slots=True)
class Waste:
    """The facts of one call."""

    recasts: tuple[Recast, ...] = ()
    saved: tuple[Saved, ...] = ()
    stacks: tuple[Stack, ...] = ()
    restacked: tuple[Restacked, ...] = ()
    reordered: tuple[Reordered, ...] = ()


NOTHING = Waste()


@dataclass(frozen=True, slots=True)
class Level:
    """One jaxpr of a call, and which of its variables are inputs of the call as they came in, by number."""

    jaxpr: Any
    inputs: Mapping[int, int]

    def users(self, var: Any) -> list[Any]:
        """The equations that take a variable."""
        return flow.uses(self.jaxpr).takers.get(id(var), [])


def waste(jaxpr: Any) -> Waste:
    """The facts of a jaxpr, and of the jits and remats inside it."""
    every = list(levels(jaxpr, {id(var): number for number, var in enumerate(jaxpr.invars)}))
    return Waste(
        tuple(recast for level in every for recast in recasts(level)),
        tuple(residual for level in every for residual in saved(level)),
        tuple(stack for level in every for stack in stacks(level)),
        tuple(leaf for level in every for leaf in restacked(level)),
        tuple(leaf for level in every for leaf in reordered(level)),
    )


def levels(jaxpr: Any, inputs: Mapping[int, int]) -> Iterator[Level]:
    """A jaxpr and those of the jits, remats and custom rules inside it."""
    numbers = dict(inputs)
    for eqn in jaxpr.eqns:
        for var, operand in zip(eqn.outvars, handed_through(eqn), strict=True):
            if operand is not None and id(eqn.invars[operand]) in numbers:
                numbers[id(var)] = numbers[id(eqn.invars[operand])]
    yield Level(jaxpr, numbers)
    for eqn in jaxpr.eqns:
        if (inner := flow.called(eqn)) is not None:
            handed = zip(inner.invars, eqn.invars, strict=True)
            yield from levels(inner, {id(var): numbers[id(own)] for var, own in handed if id(own) in numbers})


def recasts(level: Level) -> Iterator[Recast]:
    """All of an input of floats in another dtype."""
    for eqn in level.jaxpr.eqns:
        if eqn.primitive.name == "convert_element_type" and id(eqn.invars[0]) in level.inputs:
            (out,), before = eqn.outvars, eqn.invars[0].aval.dtype
            if not jnp.issubdtype(before, jnp.inexact) or before.itemsize == 1:  # quantized on purpose
                continue
            yield Recast(
                leaf=level.inputs[id(eqn.invars[0])],
                line=compat.equation_line(eqn),
                dtype=out.aval.dtype.name,
                type=describe(out.aval),
                bytes=size_of(out.aval),
                widens=out.aval.dtype.itemsize > before.itemsize,
                looped=any(user.primitive.name in LOOPS for user in level.users(out)),
            )


def saved(level: Level) -> Iterator[Saved]:
    """Stacked outputs of a scan that a scan in the other direction takes again, step by step."""
    for eqn in level.jaxpr.eqns:
        if eqn.primitive.name == SCAN and not eqn.params["reverse"]:
            size = sum(size_of(var.aval) for var in stacked(eqn) if any(map(goes_back, level.users(var))))
            if size:
                steps = int(eqn.params["length"])
                yield Saved(compat.equation_line(eqn), steps, size, steps * sum(map(size_of, carried(eqn))))


def stacks(level: Level) -> Iterator[Stack]:
    """Stacked outputs of a scan that nobody reads, or one step of."""
    returned = {id(var) for var in level.jaxpr.outvars}
    for eqn in level.jaxpr.eqns:
        if eqn.primitive.name != SCAN or eqn.params["length"] == 1:
            continue
        for var in stacked(eqn):
            readers = level.users(var)
            if id(var) not in returned and all(takes_one(user, var) for user in readers):
                yield Stack(compat.equation_line(eqn), describe(var.aval), size_of(var.aval), bool(readers))


def restacked(level: Level) -> Iterator[Restacked]:
    """Inputs that a scan takes step by step and stacks anew, where its body writes a part of each step's: the old stack is there until the last step."""
    for eqn in level.jaxpr.eqns:
        if eqn.primitive.name != SCAN or eqn.params["length"] == 1:
            continue
        body = compat.open_jaxpr(eqn.params["jaxpr"])
        consts, carry = compat.scan_layout(eqn)
        leaves: dict[int | None, int] = {
            number: level.inputs[id(var)]
            for number, var in enumerate(eqn.invars)
            if number >= consts + carry and id(var) in level.inputs
        }
        for out, (number, written) in zip(stacked(eqn), inputs_of(body, body.outvars[carry:]), strict=True):
            if written and number in leaves:
                yield Restacked(leaves[number], compat.equation_line(eqn), describe(out.aval), size_of(out.aval))


def reordered(level: Level) -> Iterator[Reordered]:
    """Inputs that a loop takes with their elements in another order: all of them are moved before its first step."""
    moved_by: dict[int, tuple[int, Any]] = {key: (number, None) for key, number in level.inputs.items()}
    for eqn in level.jaxpr.eqns:
        name = eqn.primitive.name
        if name in LOOPS:
            for var in eqn.invars:
                leaf, move = moved_by.get(id(var), (0, None))
                if move is not None:
                    backwards = move.primitive.name == "rev"
                    yield Reordered(leaf, compat.equation_line(move), describe(var.aval), size_of(var.aval), backwards)
        elif name in MOVES | {"reshape"} and id(eqn.invars[0]) in moved_by and flow.keeps_size(eqn):
            leaf, move = moved_by[id(eqn.invars[0])]
            moved_by[id(eqn.outvars[0])] = leaf, eqn if name in MOVES else move


def inputs_of(jaxpr: Any, variables: Sequence[Any]) -> list[tuple[int | None, bool]]:
    """For each variable the number of the input that it is, but for what was written into a part of it, and whether something was."""
    made_by = flow.uses(jaxpr).maker
    inputs = {id(var): number for number, var in enumerate(jaxpr.invars)}

    def follow(var: Any) -> tuple[int | None, bool]:
        written = False
        while id(var) in made_by:
            eqn, output = made_by[id(var)]
            operand, part = operand_of(eqn, output)
            if operand is None:
                return None, False
            var, written = eqn.invars[operand], written or part
        return inputs.get(id(var)), written

    return [follow(var) for var in variables]


def operand_of(eqn: Any, output: int) -> tuple[int | None, bool]:
    """The number of the operand that an output is, in the same way: here, or in a jit inside."""
    if eqn.primitive.name in UPDATES:
        return 0, True
    inner = flow.called(eqn)
    return inputs_of(inner, [inner.outvars[output]])[0] if inner is not None else (handed_through(eqn)[output], False)


def stacked(eqn: Any) -> list[Any]:
    """The outputs of a scan that have an axis for its steps."""
    _, carry = compat.scan_layout(eqn)
    return list(eqn.outvars[carry:])


def carried(eqn: Any) -> list[Any]:
    """The abstract values that a scan carries."""
    _, carry = compat.scan_layout(eqn)
    return [var.aval for var in eqn.outvars[:carry]]


def goes_back(eqn: Any) -> bool:
    return eqn.primitive.name == SCAN and bool(eqn.params["reverse"])


def takes_one(eqn: Any, stack: Any) -> bool:
    """Whether an equation takes one step of a stack, or less."""
    least = math.prod(stack.aval.shape[1:])
    return eqn.primitive.name in ONE_STEP and all(math.prod(var.aval.shape) <= least for var in eqn.outvars)


def size_of(aval: Any) -> int:
    """Bytes of an abstract array."""
    return int(math.prod(aval.shape) * aval.dtype.itemsize)
