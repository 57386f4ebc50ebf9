"""The arrays that a call captures: the first line that uses each, and where the user's code keeps it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from pytest_nnxcheck import compat
from pytest_nnxcheck.core.evidence import FLOOR, Captured
from pytest_nnxcheck.subject import jaxpr_flow

SMALLEST = 2
"""Elements from which on XLA makes a constant of equal ones a broadcast."""


def captured(closed: Any, kept: tuple[tuple[str, Any], ...]) -> tuple[Captured, ...]:
    """The constants of a jaxpr that take up memory, largest first; ``kept`` are the arrays of the user's code, each with its name."""
    constants = [
        Captured(
            const.nbytes,
            f"{const.dtype}[{','.join(map(str, const.shape))}]",
            line_of(closed, const),
            name_of(const, kept),
        )
        for const in arrays(closed)
    ]
    return tuple(sorted(constants, key=lambda constant: -constant.bytes))


def arrays(closed: Any) -> list[Any]:
    """The constants of a jaxpr that take up memory."""
    return [const for const in jaxpr_flow.constants(closed) if not is_filled(const)]


def is_filled(const: Any) -> bool:
    """Whether an array of NumPy's holds one value alone, ``np.zeros(n)`` say: XLA keeps that value, and no array of it."""
    if not isinstance(const, np.ndarray) or const.size < SMALLEST or const.dtype == object:
        return False
    return bool((const == const.flat[0]).all())


def uniform_bytes(closed: Any) -> int:
    """Bytes of the captured arrays of jax that hold one value alone: a table of ones stands for another in a test, and XLA folds it away."""
    constants = arrays(closed)
    if sum(const.nbytes for const in constants) < FLOOR:
        return 0
    return sum(const.nbytes for const in constants if is_uniform(const))


def is_uniform(const: Any) -> bool:
    """Whether an array of this process holds one value alone."""
    if isinstance(const, jax.core.Tracer) or const.size < SMALLEST or compat.is_key(const):
        return False
    if not getattr(const, "is_fully_addressable", True):
        return False
    values = np.asarray(const)
    return bool((values == values.flat[0]).all())


def line_of(closed: Any, const: Any) -> str:
    """The user's line of the first equation that a constant goes into; empty where jax keeps none."""
    for jaxpr in jaxpr_flow.all_jaxprs(closed):
        opened = compat.open_jaxpr(jaxpr)
        for var, value in zip(opened.constvars, compat.captured_values(jaxpr), strict=False):
            if value is const:
                return next(filter(None, lines(opened, var)), "")
    return ""


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
