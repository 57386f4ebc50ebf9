"""The arrays that a call captures: the first line that uses each, and where the user's code keeps it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from pytest_nnxcheck import compat
from pytest_nnxcheck.core.evidence import Captured
from pytest_nnxcheck.subject import jaxpr_flow

SMALLEST = 2
"""Elements from which on XLA makes a constant of equal ones a broadcast."""


def captured(closed: Any, kept: tuple[tuple[str, Any], ...]) -> tuple[Captured, ...]:
    """The constants of a jaxpr that take up memory, largest first; ``kept`` are the arrays of the user's code, each with its name.

    Of a constant that is cut, a table of positions say, XLA keeps the slice: the bytes are those that are used.
    """
    constants = [
        Captured(
            used_bytes(closed, const),
            f"{const.dtype}[{','.join(map(str, const.shape))}]",
            line_of(closed, const),
            name_of(const, kept),
        )
        for const in jaxpr_flow.constants(closed)
        if not is_filled(const)
    ]
    return tuple(sorted(constants, key=lambda constant: -constant.bytes))


def is_filled(const: Any) -> bool:
    """Whether an array of NumPy's holds one value alone, ``np.zeros(n)`` say: XLA keeps that value, and no array of it."""
    if not isinstance(const, np.ndarray) or const.size < SMALLEST or const.dtype == object:
        return False
    return bool((const == const.flat[0]).all())


def used_bytes(closed: Any, const: Any) -> int:
    """The bytes of a constant that go into the equations of a jaxpr."""
    if not const.size:
        return 0
    elements = sum(jaxpr_flow.elements_used(jaxpr, var) for jaxpr, var in uses(closed, const))
    return int(const.nbytes * min(elements, const.size) // const.size)


def uses(closed: Any, const: Any) -> Iterator[tuple[Any, Any]]:
    """The jaxprs that hold a constant, each with its variable for it."""
    for jaxpr in jaxpr_flow.all_jaxprs(closed):
        opened = compat.open_jaxpr(jaxpr)
        for var, value in zip(opened.constvars, compat.captured_values(jaxpr), strict=False):
            if value is const:
                yield opened, var


def line_of(closed: Any, const: Any) -> str:
    """The user's line of the first equation that a constant goes into; empty where jax keeps none."""
    return next((line for jaxpr, var in uses(closed, const) for line in lines(jaxpr, var) if line), "")


def lines(jaxpr: Any, var: Any) -> Iterator[str]:
    """The lines of the first equation that a variable goes into, from the innermost call outwards."""
    for eqn in jaxpr.eqns:
        numbers = [number for number, operand in enumerate(eqn.invars) if operand is var]
        if not numbers:
            continue
        inner = next(jaxpr_flow.inner_jaxprs(eqn), None)
        if inner is not None and len(inner.invars) == len(eqn.invars):
            yield from lines(inner, inner.invars[numbers[0]])
        yield compat.equation_line(eqn)
        return


def name_of(const: Any, kept: tuple[tuple[str, Any], ...]) -> str:
    """The name of the array that a constant is: jax hands its own arrays through, and views of those of NumPy."""
    for name, array in kept:
        if array is const:
            return name
        if isinstance(array, np.ndarray) and not hasattr(const, "addressable_shards") and same_memory(array, const):
            return name
    return ""


def same_memory(array: np.ndarray[Any, Any], const: Any) -> bool:
    seen = np.asarray(const)
    return seen.shape == array.shape and seen.ctypes.data == array.ctypes.data
