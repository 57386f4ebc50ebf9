"""The arguments of a GPU's program in the memory of the host, and what the device needs for them.

Without the device its compiler takes such an argument for one of the chip, unless an output on the host takes its place, and reads it where it lies.
With the device, what the program moves to the chip gets a buffer there (jax 0.11.2 and 0.12.0.1, an H200). The compiler of a TPU knows both.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from pytest_nnxcheck.compat.arrays import HOST_MEMORY
from pytest_nnxcheck.core.peak import Split
from pytest_nnxcheck.jaxprs import flow
from pytest_nnxcheck.jaxprs.copies import TracedProgram
from pytest_nnxcheck.xla.buffers import arguments_of
from pytest_nnxcheck.xla.hlo import aliases

__tracebackhide__ = True  # pytest shows the frames of the user, not these


@dataclass(frozen=True, slots=True)
class OnHost:
    """The arguments of one program in the memory of the host, and the arrays that it moves to the chip."""

    held: Mapping[int, int] = field(default_factory=dict)
    """The bytes on one device, by number, of those that were compiled as arguments of the chip."""
    moved: int = 0
    """The bytes that all moves take at most, where none ends before another begins. A mesh may cut what moves: no more moves than the host holds."""

    @classmethod
    def of(cls, traced: TracedProgram, compiled: Any) -> OnHost:
        """Find those of a program as it was traced, and compiled; none where its compiler does not give the program."""
        kinds = (getattr(getattr(leaf, "sharding", None), "memory_kind", None) for leaf in traced.arguments)
        numbers = {number for number, kind in enumerate(kinds) if kind == HOST_MEMORY}
        shapes = arguments_of(compiled) if numbers else {}
        held = {number: shapes[number] for number in numbers & shapes.keys()}
        moved = min(sum(flow.moved_to_chip(traced.jaxpr)), sum(shape.size for shape in held.values()))
        return cls({number: shape.size for number, shape in held.items() if not shape.elsewhere}, moved)

    def on_device(self, split: Split, compiled: Any) -> Split:
        """The totals of a program without these arguments. On the device no output on the chip takes the place of one."""
        reused = (aliases(compiled) or {}).values() if self.held else ()
        return replace(
            split,
            arguments=split.arguments - sum(self.held.values()),
            aliased=split.aliased - sum(self.held.get(number, 0) for number in reused),
        )
