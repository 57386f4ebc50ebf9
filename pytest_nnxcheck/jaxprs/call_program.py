"""The facts of the traced program of a call, and the arrays that it captures: the first line that uses each, where the user's code keeps it,
and how many of its bytes the program needs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from pytest_nnxcheck.compat import graph, staging
from pytest_nnxcheck.compat.arrays import describe, discharged, is_ref_type, nbytes
from pytest_nnxcheck.compat.staging import COND, GATHER, SCAN, SLICES, WHILE
from pytest_nnxcheck.core.facts import CallProgram
from pytest_nnxcheck.core.peak import Captured
from pytest_nnxcheck.jaxprs import flow
from pytest_nnxcheck.jaxprs.copies import forwarded


def in_arrays(traced: Any) -> Any:
    """The jaxpr with arrays in the place of references among its arguments: what it writes to these as it was read is no change."""
    plain = discharged(traced, last_values=False)
    return traced if plain is traced else forwarded(plain)


def call_program(
    traced: Any, closed: Any, rewritten: Mapping[int, int], kept: Sequence[tuple[str, Any]]
) -> CallProgram:
    """The facts of a jaxpr as it was ``traced``, and ``closed``, with arrays in the place of references.

    ``rewritten`` are the results that are new values of arguments, by the number of the argument; ``kept`` are the arrays of the user's
    code, each with its name.
    """
    jaxpr, own = staging.open_jaxpr(closed), staging.open_jaxpr(traced)
    in_references = any(is_ref_type(var.aval) for var in (*own.invars, *own.constvars))
    return CallProgram(
        captured=captured(closed, kept),
        donated=flow.donated_to_jits(jaxpr),
        inner_donations=flow.inner_donations(closed),
        writes_back=flow.writes_back(traced),
        remat_in_scan=flow.remat_in_scan(traced),
        branches=flow.branches(closed),
        calls_back=flow.calls_back(closed),
        jaxpr=jaxpr,
        rewritten=rewritten,
        precision=flow.lowest_precision(closed),
        equations=flow.equations(closed),
        operations=flow.operations(closed),
        in_references=in_references,
        scans_references=flow.scans_references(traced),
        written_twice=flow.written_twice(traced) if in_references else "",
    )


SMALLEST = 2
"""The least number of equal elements from which XLA makes a constant a broadcast."""


def captured(closed: Any, kept: Sequence[tuple[str, Any]]) -> tuple[Captured, ...]:
    """The constants of a jaxpr that take up memory, largest first; ``kept`` are the arrays of the user's code, each with its name.

    XLA keeps only the slice of a constant that is cut at fixed places, such as a table of positions: the bytes are those of the slice.
    """
    constants = [
        Captured(
            used_bytes(closed, const),
            describe(const),
            line_of(closed, const),
            name_of(const, kept),
        )
        for const in flow.constants(closed)
        if not is_filled(const)
    ]
    return tuple(sorted(constants, key=lambda constant: -constant.bytes))


def is_filled(const: Any) -> bool:
    """True if an array of NumPy holds one value only, such as ``np.zeros(n)``: XLA keeps that value, and no array of it."""
    if not isinstance(const, np.ndarray) or const.size < SMALLEST or const.dtype == object:
        return False
    return bool((const == const.flat[0]).all())


def used_bytes(closed: Any, const: Any) -> int:
    """The bytes of a constant that go into the equations of a jaxpr."""
    if not const.size:
        return 0
    elements = sum(elements_used(jaxpr, var) for jaxpr, var in uses(closed, const))
    return int(nbytes(const) * min(elements, const.size) // const.size)


def uses(closed: Any, const: Any) -> Iterator[tuple[Any, Any]]:
    """The jaxprs that hold a constant, each with its variable for it."""
    for jaxpr in flow.all_jaxprs(closed):
        opened = staging.open_jaxpr(jaxpr)
        for var, value in zip(opened.constvars, staging.captured_values(jaxpr), strict=False):
            if value is const:
                yield opened, var


def line_of(closed: Any, const: Any) -> str:
    """The user's line of the first equation that takes a constant; empty if jax keeps none."""
    return next((line for jaxpr, var in uses(closed, const) for line in lines(jaxpr, var) if line), "")


def lines(jaxpr: Any, var: Any) -> Iterator[str]:
    """The lines of the first equation that a variable goes into, from the innermost call outwards."""
    for eqn in flow.uses(jaxpr).takers.get(id(var), [])[:1]:
        inner = next(flow.inner_jaxprs(eqn), None)
        if inner is not None and len(inner.invars) == len(eqn.invars):
            yield from lines(inner, inner.invars[next(k for k, operand in enumerate(eqn.invars) if operand is var)])
        yield graph.equation_line(eqn)


def name_of(const: Any, kept: Sequence[tuple[str, Any]]) -> str:
    """The user's name for a constant. A constant is the very array of jax, or a view of the array of NumPy."""
    for name, array in kept:
        if array is const:
            return name
        if isinstance(array, np.ndarray) and not hasattr(const, "addressable_shards"):
            seen = np.asarray(const)
            if seen.shape == array.shape and seen.ctypes.data == array.ctypes.data:
                return name
    return ""


def elements_used(jaxpr: Any, var: Any, fixed: frozenset[int] = frozenset()) -> int:
    """The number of elements of an array that a jaxpr needs: if it is only cut, at fixed places, those of the slices.

    ``fixed`` are the ids of further variables that are the same in each call. An unknown equation needs all.
    """
    still = {id(const) for const in jaxpr.constvars} | fixed
    made_of = {id(var)}
    used = 0
    for eqn in jaxpr.eqns:
        same = [id(operand) in still | made_of or hasattr(operand, "val") for operand in eqn.invars]
        numbers = [number for number, operand in enumerate(eqn.invars) if id(operand) in made_of]
        if numbers and all(same) and keeps_all(eqn):
            made_of.add(id(eqn.outvars[0]))
            continue
        used += sum(elements_of_operand(eqn, number, same) for number in numbers)
        if all(same):
            still.update(map(id, eqn.outvars))
    return used + sum(int(out.aval.size) for out in jaxpr.outvars if id(out) in made_of)


def keeps_all(eqn: Any) -> bool:
    """True if an equation makes one array of one, element by element: a cast, a reshape, a sine."""
    sizes = [var.aval.size for var in (*eqn.invars, *eqn.outvars)]
    return len(sizes) == 2 and sizes[0] == sizes[1]


def elements_of_operand(eqn: Any, number: int, same: list[bool]) -> int:
    """The number of elements of one operand that an equation needs; ``same`` says which operands are the same in each call."""
    inside = [(inner, numbers) for inner, numbers in handed_in(eqn) if number in numbers]
    if inside:
        return sum(elements_used_inside(inner, numbers, number, same) for inner, numbers in inside)
    if number == 0 and is_cut(eqn) and all(same[1:]):
        return int(eqn.outvars[0].aval.size)
    return int(eqn.invars[number].aval.size)


def elements_used_inside(jaxpr: Any, numbers: range, number: int, same: list[bool]) -> int:
    """The number of elements of one operand that a jaxpr inside an equation needs; its first inputs are the operands of these numbers."""
    fixed = frozenset(id(var) for var, operand in zip(jaxpr.invars, numbers, strict=False) if same[operand])
    return elements_used(jaxpr, jaxpr.invars[numbers.index(number)], fixed)


def is_read(jaxpr: Any, var: Any) -> bool:
    """True if an operation takes a variable, in the jaxpr or in one that it is handed to. A ``while_loop`` reads what it carries."""
    for eqn in flow.uses(jaxpr).takers.get(id(var), ()):
        scan = eqn.primitive.name == SCAN
        inside = [(staging.open_jaxpr(eqn.params["jaxpr"]), range(len(eqn.invars)))] if scan else handed_in(eqn)
        for number in (number for number, operand in enumerate(eqn.invars) if operand is var):
            taken = [inner.invars[numbers.index(number)] for inner, numbers in inside if number in numbers]
            if not taken or any(is_read(inner, one) for (inner, _), one in zip(inside, taken, strict=False)):
                return True
    return False


def handed_in(eqn: Any) -> list[tuple[Any, range]]:
    """The jaxprs inside an equation, each with the numbers of the operands that are its first inputs: all of a call, the constants of a loop."""
    name, everything = eqn.primitive.name, range(len(eqn.invars))
    if name == SCAN:
        return [(staging.open_jaxpr(eqn.params["jaxpr"]), everything[: staging.scan_layout(eqn)[0]])]
    if name == WHILE:
        before, after = eqn.params["cond_nconsts"], eqn.params["cond_nconsts"] + eqn.params["body_nconsts"]
        consts = {"cond_jaxpr": everything[:before], "body_jaxpr": everything[before:after]}
        return [(staging.open_jaxpr(eqn.params[key]), numbers) for key, numbers in consts.items()]
    if name == COND:
        return [(staging.open_jaxpr(branch), everything[1:]) for branch in eqn.params["branches"]]
    inner = flow.called(eqn)
    return [] if inner is None else [(inner, everything)]


def is_cut(eqn: Any) -> bool:
    """True if an equation takes one slice of its first operand; older jax writes some of them as a gather of one index."""
    if eqn.primitive.name == GATHER:
        return int(np.prod(eqn.invars[1].aval.shape[:-1])) == 1
    return eqn.primitive.name in SLICES
