"""The arguments of a GPU's program in the memory of the host, as the device has them.

Without the device its compiler takes such an argument for one of the chip, unless an output on the host takes its place, and reads it where it lies: on
the device, what the program moves to the chip takes a buffer there (jax 0.11.2 and 0.12.0.1, an H200). The compiler of a TPU knows both.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from pytest_nnxcheck.compat.arrays import HOST_MEMORY, nbytes
from pytest_nnxcheck.core.peak import Split
from pytest_nnxcheck.jaxprs import flow
from pytest_nnxcheck.jaxprs.copies import TracedProgram
from pytest_nnxcheck.xla.buffers import elsewhere
from pytest_nnxcheck.xla.hlo import aliases

__tracebackhide__ = True  # pytest shows the frames of the user, not these


@dataclass(frozen=True, slots=True)
class OnHost:
    """The arguments of one program that lie there."""

    held: Mapping[int, int] = field(default_factory=dict)
    """The bytes on one device, by number, of those that were compiled as arguments of the chip."""
    moved: tuple[int, ...] = ()
    """The bytes of each array that the program moves to the chip."""

    @classmethod
    def of(cls, traced: TracedProgram, compiled: Any) -> OnHost:
        """Find those of a program as it was traced, and compiled."""
        kinds = (getattr(getattr(leaf, "sharding", None), "memory_kind", None) for leaf in traced.arguments)
        numbers = {number for number, kind in enumerate(kinds) if kind == HOST_MEMORY}
        if not numbers:
            return cls()
        held = {number: nbytes(traced.arguments[number]) for number in numbers - elsewhere(compiled)}
        return cls(held, flow.moved_to_chip(traced.jaxpr))

    @property
    def further_moves(self) -> int:
        """The bytes of all moved arrays but for the largest: the most that they take beside it."""
        return sum(self.moved) - max(self.moved, default=0)

    def on_device(self, split: Split, compiled: Any) -> Split:
        """The totals of a program on the device: without these arguments, whose place no output on the chip takes, and with the largest array that it moves."""
        reused = (aliases(compiled) or {}).values() if self.held else ()
        return replace(
            split,
            arguments=split.arguments - sum(self.held.values()),
            aliased=split.aliased - sum(self.held.get(number, 0) for number in reused),
            temporaries=split.temporaries + max(self.moved, default=0),
        )
