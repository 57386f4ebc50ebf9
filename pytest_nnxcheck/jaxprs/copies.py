"""Copies of the state in a compiled program: its peak less that of the program in which nothing is handed back unchanged."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax

from pytest_nnxcheck import compat
from pytest_nnxcheck.compat.arrays import nbytes
from pytest_nnxcheck.core.evidence import Split, least_copy
from pytest_nnxcheck.core.observation import Copies
from pytest_nnxcheck.inspection.buffers import split_of
from pytest_nnxcheck.jaxprs.forwarding import forwarded, handed_bytes, returned_twice

__tracebackhide__ = True  # pytest shows the frames of the user, not these


@dataclass(frozen=True, slots=True)
class Staged:
    """A program as it was traced."""

    jaxpr: Any
    """Closed."""
    arguments: list[Any]
    """Flat, those that it was traced for."""
    donated: tuple[int, ...]
    """The numbers of those that it donates."""
    leaves: int = 0
    """So many of the first arguments are leaves of the state."""
    keep_unused: bool = True
    """Whether arguments that nobody reads stay in the program."""

    @classmethod
    def of(cls, traced: Any, lowered: Any, arguments: Any, leaves: int) -> Staged:
        """What jax traced and lowered for these arguments."""
        given = enumerate(jax.tree.leaves(lowered.args_info))
        donated = tuple(number for number, info in given if info.donated)
        return cls(traced.jaxpr, jax.tree.leaves(arguments), donated, leaves)


def copies_in(program: Staged, held: Split, state: int, compiled_of: Callable[[Any], Any]) -> Copies:
    """The copies that a program holds of a state of so many bytes; ``held`` are its totals.

    It is compiled once more only where the totals, and what it hands through, leave room for copies that count.
    """
    least = least_copy(state)
    if held.temporaries + held.outputs - held.aliased < least:
        return Copies()
    again = returned_twice(program.jaxpr, frozenset(program.donated) & {*range(program.leaves)})
    returned = sum(nbytes(program.arguments[number]) for number in again)
    hoisted = len(compat.open_jaxpr(program.jaxpr).invars) != len(program.arguments)  # leaked tracers, jax 0.5
    if hoisted or handed_bytes(program.jaxpr) < least:
        return Copies(returned=returned)
    plain = compat.lowered_jaxpr(
        forwarded(program.jaxpr), program.arguments, program.donated, keep_unused=program.keep_unused
    )
    return Copies(max(held.peak - held.constants - split_of(compiled_of(plain)).peak, 0), returned)
