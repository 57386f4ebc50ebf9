"""Measure the copies of the state in a compiled program: its peak less the peak of the program that hands back nothing unchanged.

`nnx.scan` over `nnx.remat` returns every parameter that it was given, and XLA allocates the whole stack once more (google/flax#4871).
A forwarded program takes each such value from its source. Bytes that the compiled program no longer holds then were a copy of the state.
XLA inserts copies for reasons of its own into both programs, so that nothing has to be excused. `forwarded` rewrites a program, `copies_in`
compiles and compares the two.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

from pytest_nnxcheck.compat import staging
from pytest_nnxcheck.compat.arrays import discharged, is_ref_type, nbytes
from pytest_nnxcheck.core.peak import LEAF, Copies, Memory, Split, least_copy
from pytest_nnxcheck.jaxprs.flow import all_equations, called, changed_inside, handed_through

__tracebackhide__ = True  # pytest shows the frames of the user, not these

FORWARDED = staging.COPIES - {staging.BARRIER, staging.CONSTRAINT}
"""Equations that return their operand, so that a program can do without them.

It needs a barrier, whose meaning is the order, and a constraint, whose meaning is the devices.
"""


Value = Any
"""The content of a variable: an object of its own; for a slice the array that it was cut from and the place there; for a number its text."""


def forwarded(jaxpr: Any) -> Any:
    """The jaxpr in which the first variable of a value takes the place of all others, inside loops and calls too; as open or closed as it is."""
    open_jaxpr = staging.open_jaxpr(jaxpr)
    if open_jaxpr is not jaxpr:
        return jaxpr.replace(jaxpr=forwarded(open_jaxpr))
    plain = jaxpr.replace(eqns=[changed_inside(eqn, forwarded) for eqn in jaxpr.eqns])
    values = _values(plain, [object() for _ in jaxpr.invars])
    first = {value: var for var, value in reversed(values.items()) if type(value) is object}

    def same(var: Any) -> Any:
        earlier = first.get(_value(var, values), var)
        return earlier if earlier.aval == var.aval else var

    equations = [eqn.replace(invars=[*map(same, eqn.invars)]) for eqn in plain.eqns]
    return staging.without_dead_code(plain.replace(eqns=equations, outvars=[*map(same, jaxpr.outvars)]))


def _values(jaxpr: Any, inputs: Sequence[Value]) -> dict[Any, Value]:
    """The value of each variable of an open jaxpr that is called with these."""
    values = dict(zip(jaxpr.invars, inputs, strict=True))
    for eqn in jaxpr.eqns:
        operands = [_value(var, values) for var in eqn.invars]
        values.update(zip(eqn.outvars, _results(eqn, operands), strict=True))
    return values


def _value(var: Any, values: dict[Any, Value]) -> Value:
    return str(var.val) if hasattr(var, "val") else values.setdefault(var, object())


def _results(eqn: Any, operands: Sequence[Value]) -> Sequence[Value]:
    """The values that an equation gives for its operands.

    `jax.lax.scan` over references reads the slice of each step, and writes it back whatever the step does with it: that write gives its array.
    """
    if (inner := called(eqn)) is not None:
        inside = _values(inner, operands)
        return [_value(var, inside) for var in inner.outvars]
    name = eqn.primitive.name
    if name in staging.NEUTRAL and (kept := _kept(eqn)) is not None:
        return [operands[kept]]
    if name == staging.READ_SLICE:
        return [(*operands, eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape)]
    if name in staging.RESHAPES and type(operands[0]) is tuple:
        return operands[:1]
    if name == staging.UPDATE_SLICE:
        whole, part, *place = operands
        puts_back = part == (whole, *place, *(var.aval.shape for var in eqn.invars[:2]))
        return [whole if puts_back else object()]
    return [object() if number is None else operands[number] for number in handed_through(eqn, FORWARDED)]


def _kept(eqn: Any) -> int | None:
    """The number of the operand that an operation gives as it is, since the other one is the number that is neutral to it."""
    name = eqn.primitive.name
    numbers: list[Any] = [getattr(var, "val", None) for var in eqn.invars]
    for kept, other in ((0, 1), (1, 0)) if name in ("mul", "add") else ((0, 1),):
        is_neutral = np.ndim(numbers[other]) == 0 and numbers[other] == staging.NEUTRAL[name]
        if is_neutral and eqn.invars[kept].aval == eqn.outvars[0].aval:
            return kept
    return None


def handed_bytes(jaxpr: Any) -> int:
    """Bytes of all values that loops and branches hand through: no program holds more copies.

    A call is inlined, and hands on the very buffer.
    """
    loops = (
        changed_inside(eqn, forwarded)
        for eqn in all_equations(jaxpr)
        if eqn.primitive.name in (staging.SCAN, staging.WHILE, staging.COND)
    )
    every = (pair for eqn in loops for pair in zip(eqn.outvars, handed_through(eqn, FORWARDED), strict=True))
    return sum(nbytes(out.aval) for out, number in every if number is not None)


def output_values(jaxpr: Any) -> tuple[list[Value], list[Value]]:
    """The values of the inputs and of the outputs of an open jaxpr: outputs that are one value are one object, an input that is handed on as well."""
    inputs = [object() for _ in jaxpr.invars]
    values = _values(jaxpr, inputs)
    return inputs, [_value(var, values) for var in jaxpr.outvars]


@dataclass(frozen=True, slots=True)
class TracedProgram:
    """A program as it was traced."""

    jaxpr: Any
    """The closed jaxpr, with arrays in the place of references: each is an argument that is donated, and one more output."""
    arguments: list[Any]
    """The flat arguments that it was traced for."""
    donated: tuple[int, ...]
    """The numbers of the arguments that it donates."""
    outputs: range = range(0)
    """The numbers of the outputs that the call returns; all others are the state."""
    returned: Mapping[int, int] = field(default_factory=dict)
    """The bytes on one device of the outputs that the call returns as the value of a leaf, by number."""

    @classmethod
    def of(cls, closed: Any, arguments: Iterable[Any], flags: Iterable[bool], **further: Any) -> TracedProgram:
        """The program of a closed jaxpr and its flat arguments; the flags are true for those that it donates, and ``further`` are other fields."""
        references = {number for number, var in enumerate(staging.open_jaxpr(closed).invars) if is_ref_type(var.aval)}
        donated = references | {number for number, is_donated in enumerate(flags) if is_donated}
        arrays = [
            jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding) if number in references else leaf
            for number, leaf in enumerate(arguments)
        ]
        return cls(discharged(closed), arrays, tuple(sorted(donated)), **further)

    @property
    def hoisted(self) -> bool:
        """True if it has inputs that nobody passes: leaked tracers on jax 0.5, a captured `jax.Ref`."""
        return len(staging.open_jaxpr(self.jaxpr).invars) != len(self.arguments)

    def returned_bytes(self) -> int:
        """Bytes of the outputs of the call that are the value of a leaf, which the program gives back as well: no two outputs can share a buffer.

        A leaf that it only reads, and does not donate, is an argument and one output more, wherever that goes.
        """
        jaxpr = staging.open_jaxpr(self.jaxpr)
        inputs, values = output_values(jaxpr)
        handed_in = {id(value) for number, value in enumerate(inputs) if number not in self.donated}
        state = {id(value) for number, value in enumerate(values) if number not in self.outputs} - handed_in
        return sum(size for number, size in self.returned.items() if id(values[number]) in state)


def copies_in(program: TracedProgram, held: Split, state: int, split_of: Callable[[Any], Split | None]) -> Copies:
    """The copies that a program holds of a state of so many bytes; ``held`` are its totals.

    Another jitted function of the same arguments is compiled, and ``split_of`` gives its totals, only where the totals, and what the program
    hands through, leave room for copies that count.
    """
    room, whole = held.temporaries + held.outputs - held.aliased, isinstance(held, Memory) and has_leaf_twice(held)
    if room < least_copy(state, whole=True):
        return Copies()
    returned, least = program.returned_bytes(), least_copy(state, whole=whole)
    if program.hoisted or min(room, handed_bytes(program.jaxpr)) < least:
        return Copies(returned=returned)
    plain = split_of(staging.jitted_jaxpr(forwarded(program.jaxpr), program.donated, keep_unused=True))
    return Copies(max(held.peak - held.constants - plain.peak, 0) if plain else 0, returned, whole)


def has_leaf_twice(memory: Memory) -> bool:
    """True if a buffer at the peak is a copy of a whole argument, and large enough to count."""
    return any(buffer.whole and buffer.bytes >= LEAF for buffer in memory.made)
