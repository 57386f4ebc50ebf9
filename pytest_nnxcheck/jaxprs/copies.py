"""Measure the copies of the state in a compiled program: its peak less the peak of the program that hands back nothing unchanged."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import jax

from pytest_nnxcheck.compat import staging
from pytest_nnxcheck.compat.arrays import discharged, is_ref_type, nbytes
from pytest_nnxcheck.core.peak import Copies, Split, least_copy
from pytest_nnxcheck.jaxprs.forwarding import forwarded, handed_bytes, returned_twice

__tracebackhide__ = True  # pytest shows the frames of the user, not these


@dataclass(frozen=True, slots=True)
class TracedProgram:
    """A program as it was traced."""

    jaxpr: Any
    """The closed jaxpr, with arrays in the place of references: each is an argument that is donated, and one more output."""
    arguments: list[Any]
    """The flat arguments that it was traced for."""
    donated: tuple[int, ...]
    """The numbers of the arguments that it donates."""
    leaves: int = 0
    """The number of arguments, from the first, that are leaves of the state."""
    keep_unused: bool = True
    """True if arguments that nobody reads stay in the program."""

    @classmethod
    def of(
        cls, closed: Any, arguments: Iterable[Any], flags: Iterable[bool], *, leaves: int = 0, keep_unused: bool = True
    ) -> TracedProgram:
        """The program of a closed jaxpr and its flat arguments; the flags are true for those that it donates."""
        references = {number for number, var in enumerate(staging.open_jaxpr(closed).invars) if is_ref_type(var.aval)}
        donated = references | {number for number, is_donated in enumerate(flags) if is_donated}
        arrays = [
            jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding) if number in references else leaf
            for number, leaf in enumerate(arguments)
        ]
        return cls(discharged(closed), arrays, tuple(sorted(donated)), leaves, keep_unused)

    @property
    def hoisted(self) -> bool:
        """True if it has inputs that nobody passes: leaked tracers on jax 0.5, a captured `jax.Ref`."""
        return len(staging.open_jaxpr(self.jaxpr).invars) != len(self.arguments)


def copies_in(program: TracedProgram, held: Split, state: int, split_of: Callable[[Any], Split | None]) -> Copies:
    """The copies that a program holds of a state of so many bytes; ``held`` are its totals.

    Another jitted function of the same arguments is compiled, and ``split_of`` gives its totals, only where the totals, and what the program
    hands through, leave room for copies that count.
    """
    least = least_copy(state)
    if held.temporaries + held.outputs - held.aliased < least:
        return Copies()
    again = returned_twice(program.jaxpr, frozenset(program.donated) & {*range(program.leaves)})
    returned = sum(nbytes(program.arguments[number]) for number in again)
    if program.hoisted or handed_bytes(program.jaxpr) < least:
        return Copies(returned=returned)
    plain = split_of(staging.jitted_jaxpr(forwarded(program.jaxpr), program.donated, keep_unused=program.keep_unused))
    return Copies(max(held.peak - held.constants - plain.peak, 0) if plain else 0, returned)
