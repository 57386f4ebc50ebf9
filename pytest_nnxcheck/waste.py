"""What the jaxpr of a call spends memory on by its own structure: a state leaf in another dtype, what scans save, stacks that nobody reads.

Facts only, with their lines; whether they matter is decided where the peak is known, by `advice`.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pytest_nnxcheck import compat
from pytest_nnxcheck.dataflow import CALLS, handed_through, inner_jaxprs

LOOPS = frozenset({"scan", "while"})
ONE_STEP = frozenset({"slice", "dynamic_slice", "gather", "squeeze"})
"""Equations that take one element of a stack where their result is no larger than one."""


@dataclass(frozen=True, slots=True)
class Recast:
    """All of a leaf, by the number of the program's input, in another dtype: bytes of the new array; ``looped`` where a loop takes it."""

    leaf: int
    line: str
    dtype: str
    type: str
    bytes: int
    widens: bool
    looped: bool


@dataclass(frozen=True, slots=True)
class Saved:
    """What a scan saves for its backward pass: bytes of all steps, and of those what its carry needs, which a remat saves as well."""

    line: str
    steps: int
    bytes: int
    carried: int


@dataclass(frozen=True, slots=True)
class Stack:
    """A stacked output of a scan, of which nothing or one step is read: bytes of all steps."""

    line: str
    type: str
    bytes: int
    read: bool


@dataclass(frozen=True, slots=True)
class Waste:
    """The facts of one call."""

    recasts: tuple[Recast, ...] = ()
    saved: tuple[Saved, ...] = ()
    stacks: tuple[Stack, ...] = ()


NOTHING = Waste()


def waste(jaxpr: Any) -> Waste:
    """The facts of a jaxpr, and of the jits and remats inside it."""
    leaves = {id(var): number for number, var in enumerate(jaxpr.invars)}
    return Waste(tuple(recasts(jaxpr, leaves)), tuple(saved(jaxpr)), tuple(stacks(jaxpr)))


def recasts(jaxpr: Any, leaves: Mapping[int, int]) -> Iterator[Recast]:
    """``leaves`` gives the number of each variable that is an input as it came in."""
    known, users = dict(leaves), users_of(jaxpr)
    for eqn in jaxpr.eqns:
        for var, operand in zip(eqn.outvars, handed_through(eqn), strict=True):
            if operand is not None and id(eqn.invars[operand]) in known:
                known[id(var)] = known[id(eqn.invars[operand])]
        if eqn.primitive.name == "convert_element_type" and id(eqn.invars[0]) in known:
            (out,), before = eqn.outvars, eqn.invars[0].aval.dtype
            yield Recast(
                leaf=known[id(eqn.invars[0])],
                line=compat.equation_line(eqn),
                dtype=out.aval.dtype.name,
                type=type_of(out.aval),
                bytes=size_of(out.aval),
                widens=out.aval.dtype.itemsize > before.itemsize,
                looped=any(user.primitive.name in LOOPS for user in users[id(out)]),
            )
        for inner, arguments in called(eqn):
            yield from recasts(inner, {id(var): known[arg] for var, arg in arguments if arg in known})


def saved(jaxpr: Any) -> Iterator[Saved]:
    """Stacked outputs of a scan that a scan in the other direction takes again, step by step."""
    users = users_of(jaxpr)
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "scan" and not eqn.params["reverse"]:
            size = sum(size_of(var.aval) for var in stacked(eqn) if any(goes_back(user) for user in users[id(var)]))
            if size:
                steps = int(eqn.params["length"])
                yield Saved(compat.equation_line(eqn), steps, size, steps * sum(map(size_of, carried(eqn))))
        for inner, _ in called(eqn):
            yield from saved(inner)


def stacks(jaxpr: Any) -> Iterator[Stack]:
    """Stacked outputs of a scan that nobody reads, or one step of."""
    users, returned = users_of(jaxpr), {id(var) for var in jaxpr.outvars}
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "scan" and eqn.params["length"] > 1:
            for var in stacked(eqn):
                readers = users[id(var)]
                if id(var) not in returned and all(takes_one(user, var) for user in readers):
                    yield Stack(compat.equation_line(eqn), type_of(var.aval), size_of(var.aval), bool(readers))
        for inner, _ in called(eqn):
            yield from stacks(inner)


def called(eqn: Any) -> Iterator[tuple[Any, list[tuple[Any, int]]]]:
    """The jaxpr of a jit, remat or custom rule, with its variables and the identities of what they are handed."""
    inner = next(inner_jaxprs(eqn), None) if eqn.primitive.name in CALLS else None
    if inner is not None and len(inner.invars) == len(eqn.invars):
        yield inner, list(zip(inner.invars, map(id, eqn.invars), strict=True))


def stacked(eqn: Any) -> list[Any]:
    """The outputs of a scan that have an axis for its steps."""
    _, carry = compat.scan_layout(eqn)
    return list(eqn.outvars[carry:])


def carried(eqn: Any) -> list[Any]:
    """The abstract values that a scan carries."""
    _, carry = compat.scan_layout(eqn)
    return [var.aval for var in eqn.outvars[:carry]]


def goes_back(eqn: Any) -> bool:
    return eqn.primitive.name == "scan" and bool(eqn.params["reverse"])


def takes_one(eqn: Any, stack: Any) -> bool:
    """Whether an equation takes one step of a stack, or less."""
    least = math.prod(stack.aval.shape[1:])
    return eqn.primitive.name in ONE_STEP and all(math.prod(var.aval.shape) <= least for var in eqn.outvars)


def users_of(jaxpr: Any) -> defaultdict[int, list[Any]]:
    """The equations that take each variable."""
    users: defaultdict[int, list[Any]] = defaultdict(list)
    for eqn in jaxpr.eqns:
        for var in eqn.invars:
            users[id(var)].append(eqn)
    return users


def size_of(aval: Any) -> int:
    """Bytes of an abstract array."""
    return int(math.prod(aval.shape) * aval.dtype.itemsize)


def type_of(aval: Any) -> str:
    """``float32[8,64]``, as buffers are told."""
    return f"{aval.dtype.name}[{','.join(map(str, aval.shape))}]"
