"""Rewrite a program without the copies that it holds because it hands values back unchanged.

`nnx.scan` over `nnx.remat` returns every parameter that it was given, and XLA allocates the whole stack once more (google/flax#4871).
A forwarded program takes each such value from its source. Bytes that the compiled program no longer holds then were a copy of the state.
XLA inserts copies for reasons of its own into both programs, so that nothing has to be excused.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from pytest_nnxcheck.compat import staging
from pytest_nnxcheck.compat.arrays import nbytes
from pytest_nnxcheck.compat.primitives import (
    BARRIER,
    COND,
    CONSTRAINT,
    COPIES,
    READ_SLICE,
    RESHAPES,
    SCAN,
    UPDATE_SLICE,
    WHILE,
)
from pytest_nnxcheck.jaxprs.flow import all_equations, all_jaxprs, called, handed_through, sources, uses

FORWARDED = COPIES - {BARRIER, CONSTRAINT}
"""Equations that return their operand, so that a program can do without them.

It needs a barrier, whose meaning is the order, and a constraint, whose meaning is the devices.
"""


def forwarded(jaxpr: Any) -> Any:
    """The jaxpr in which a value that an equation hands through is the equation's operand, inside loops and calls too; as open or closed as it is."""
    open_jaxpr = staging.open_jaxpr(jaxpr)
    if open_jaxpr is not jaxpr:
        return jaxpr.replace(jaxpr=forwarded(open_jaxpr))
    origin: dict[int, Any] = {}
    put_back = _put_back(jaxpr)
    equations = []
    for eqn in jaxpr.eqns:
        operands = [origin.get(id(var), var) for var in eqn.invars]
        params = {name: _forwarded_inside(value) for name, value in eqn.params.items()}
        equations.append(eqn.replace(invars=operands, params=params))
        origin |= {id(out): operands[number] for out, number in _handed(equations[-1])}
        whole = ((out, put_back[id(out)]) for out in eqn.outvars if id(out) in put_back)
        origin |= {id(out): origin.get(id(var), var) for out, var in whole}
    outputs = [origin.get(id(var), var) for var in jaxpr.outvars]
    return staging.without_dead_code(jaxpr.replace(eqns=equations, outvars=outputs))


def _forwarded_inside(value: Any) -> Any:
    """A parameter of an equation with its jaxprs forwarded. A named tuple holds none, and cannot be made of a list."""
    if type(value) in (tuple, list):
        return type(value)(map(_forwarded_inside, value))
    return forwarded(value) if hasattr(staging.open_jaxpr(value), "eqns") else value


def _put_back(jaxpr: Any) -> dict[int, Any]:
    """The results of an open jaxpr that are an array with a slice of it written where it was read, by id, each with that array.

    `jax.lax.scan` over references reads the slice of each step, and writes it back whatever the step does with it.
    """
    if not any(eqn.primitive.name == UPDATE_SLICE for eqn in all_equations(jaxpr)):
        return {}
    # By the id of a variable what it is: itself, or an object of its own for each time that a call is made.
    value: dict[int, Any] = {}
    # By the id of that, for a slice, what it was cut from, where, and its shape.
    cut: dict[Any, list[Any]] = {}

    def follow(jaxpr: Any, *, inside: bool) -> None:
        for eqn in jaxpr.eqns:
            operands = [value.get(id(var), var) for var in eqn.invars]
            if (inner := called(eqn)) is not None:
                value.update(zip(map(id, inner.invars), operands, strict=True))
                follow(inner, inside=True)
                pairs = zip(eqn.outvars, inner.outvars, strict=True)
                value.update({id(out): value.get(id(var), var) for out, var in pairs})
                continue
            value.update({id(out): object() if inside else out for out in eqn.outvars})
            name, first, result = eqn.primitive.name, id(next(iter(operands), None)), next(iter(eqn.outvars), eqn)
            place = [str(each.val) if hasattr(each, "val") else id(each) for each in operands]
            if name == READ_SLICE:
                cut[id(value[id(result)])] = [*place, result.aval.shape]
            elif name in RESHAPES and first in cut:
                cut[id(value[id(result)])] = cut[first]
            elif name == UPDATE_SLICE and cut.get(place.pop(1)) == [*place, eqn.invars[1].aval.shape]:
                value[id(result)] = operands[0]

    follow(jaxpr, inside=False)
    own = {id(var): var for var in (*jaxpr.invars, *(out for eqn in jaxpr.eqns for out in eqn.outvars))}
    same = {key: value.get(key, var) for key, var in own.items()}
    return {key: var for key, var in same.items() if id(var) in {*own} - {key} and var.aval == own[key].aval}


def _handed(eqn: Any) -> list[tuple[Any, int]]:
    """The outputs of an equation that are one of its operands, type and all, each with the number of that."""
    pairs = zip(eqn.outvars, handed_through(eqn, FORWARDED), strict=True)
    return [(out, number) for out, number in pairs if number is not None and out.aval == eqn.invars[number].aval]


def handed_bytes(jaxpr: Any) -> int:
    """Bytes of all values that loops and branches hand through, and of arrays that get back their own slice: no program holds more copies.

    A call is inlined, and hands on the very buffer.
    """
    every = (eqn for eqn in all_equations(jaxpr) if eqn.primitive.name in (SCAN, WHILE, COND))
    return sum(nbytes(out.aval) for eqn in every for out, _ in _handed(eqn)) + puts_back(jaxpr)


def puts_back(jaxpr: Any) -> int:
    """Bytes of the arrays that get back their own slice in a loop, or anywhere else."""
    return sum(nbytes(var.aval) for inner in all_jaxprs(jaxpr) for var in _put_back(staging.open_jaxpr(inner)).values())


def handed_inputs(jaxpr: Any) -> frozenset[int]:
    """The numbers of the inputs of an open jaxpr that its equations hand through."""
    same = uses(jaxpr).same
    return frozenset(number for number, var in enumerate(jaxpr.invars) if len(same(var)) > 1)


def returned_twice(jaxpr: Any, numbers: frozenset[int]) -> list[int]:
    """The inputs that come out unchanged more than once, each as often as there is one too many."""
    times = Counter(source for source in sources(staging.open_jaxpr(jaxpr)) if source in numbers)
    return [*(times - Counter(numbers)).elements()]
