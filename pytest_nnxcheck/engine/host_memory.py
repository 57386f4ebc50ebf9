"""The arguments of a program for a chip that lie in the memory of the host.

The compiler of a TPU knows them. That of a GPU takes them for arrays of the chip, unless the device is there (jax 0.11.2 and 0.12.0.1, an H200).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from pytest_nnxcheck.compat.arrays import HOST_MEMORY, nbytes
from pytest_nnxcheck.core.peak import Split
from pytest_nnxcheck.jaxprs import flow
from pytest_nnxcheck.jaxprs.copies import TracedProgram
from pytest_nnxcheck.xla.hlo import aliases

__tracebackhide__ = True  # pytest shows the frames of the user, not these


@dataclass(frozen=True, slots=True)
class OnHost:
    """The arguments of one program that lie there."""

    held: Mapping[int, int] = field(default_factory=dict)
    """Their bytes on one device, by their number."""
    moved: tuple[int, ...] = ()
    """The bytes of each array that the program moves to the chip, into a buffer of its own."""

    @classmethod
    def of(cls, traced: TracedProgram) -> OnHost:
        """Find them among the arguments of a traced program."""
        kinds = (getattr(getattr(leaf, "sharding", None), "memory_kind", None) for leaf in traced.arguments)
        numbers = [number for number, kind in enumerate(kinds) if kind == HOST_MEMORY]
        held = {number: nbytes(traced.arguments[number]) for number in numbers}
        return cls(held, flow.moved_to_chip(traced.jaxpr)) if held else cls()

    @property
    def bytes(self) -> int:
        """The bytes of all of them."""
        return sum(self.held.values())

    @property
    def further_moves(self) -> int:
        """The bytes of all moved arrays but for the largest: the most that they take beside it."""
        return sum(self.moved) - max(self.moved, default=0)

    def left(self, split: Split, compiled: Any) -> Split:
        """The totals of a program without these arguments, and with the largest array that it moves."""
        aliased = sum(self.held.get(number, 0) for number in (aliases(compiled) or {}).values())
        return replace(
            split,
            arguments=split.arguments - self.bytes,
            outputs=split.outputs - aliased,
            aliased=split.aliased - aliased,
            temporaries=split.temporaries + max(self.moved, default=0),
        )
