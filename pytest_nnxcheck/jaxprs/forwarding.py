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
from pytest_nnxcheck.compat.primitives import BARRIER, COND, CONSTRAINT, COPIES, SCAN, WHILE
from pytest_nnxcheck.jaxprs.flow import all_equations, handed_through, sources, uses

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
    equations = []
    for eqn in jaxpr.eqns:
        operands = [origin.get(id(var), var) for var in eqn.invars]
        params = {name: _forwarded_inside(value) for name, value in eqn.params.items()}
        equations.append(eqn.replace(invars=operands, params=params))
        origin |= {id(out): operands[number] for out, number in _handed(equations[-1])}
    outputs = [origin.get(id(var), var) for var in jaxpr.outvars]
    return staging.without_dead_code(jaxpr.replace(eqns=equations, outvars=outputs))


def _forwarded_inside(value: Any) -> Any:
    """A parameter of an equation with its jaxprs forwarded. A named tuple holds none, and cannot be made of a list."""
    if type(value) in (tuple, list):
        return type(value)(map(_forwarded_inside, value))
    return forwarded(value) if hasattr(staging.open_jaxpr(value), "eqns") else value


def _handed(eqn: Any) -> list[tuple[Any, int]]:
    """The outputs of an equation that are one of its operands, type and all, each with the number of that."""
    pairs = zip(eqn.outvars, handed_through(eqn, FORWARDED), strict=True)
    return [(out, number) for out, number in pairs if number is not None and out.aval == eqn.invars[number].aval]


def handed_bytes(jaxpr: Any) -> int:
    """Bytes of all values that loops and branches hand through: no program holds more copies. A call is inlined, and hands on the very buffer."""
    every = (eqn for eqn in all_equations(jaxpr) if eqn.primitive.name in (SCAN, WHILE, COND))
    return sum(nbytes(out.aval) for eqn in every for out, _ in _handed(eqn))


def handed_inputs(jaxpr: Any) -> frozenset[int]:
    """The numbers of the inputs of an open jaxpr that its equations hand through."""
    same = uses(jaxpr).same
    return frozenset(number for number, var in enumerate(jaxpr.invars) if len(same(var)) > 1)


def returned_twice(jaxpr: Any, numbers: frozenset[int]) -> list[int]:
    """The inputs that come out unchanged more than once, each as often as there is one too many."""
    times = Counter(source for source in sources(staging.open_jaxpr(jaxpr)) if source in numbers)
    return [*(times - Counter(numbers)).elements()]
