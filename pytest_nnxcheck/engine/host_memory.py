"""The arguments of a GPU's program in the memory of the host, and what the device needs for them.

Without the device its compiler takes such an argument for one of the chip, unless an output on the host takes its place, and reads it where it lies.
With the device, what the program moves to the chip gets a buffer there (jax 0.11.2 and 0.12.0.1, an H200). The compiler of a TPU knows both.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from pytest_nnxcheck.compat.arrays import HOST_MEMORY
from pytest_nnxcheck.core.peak import Split
from pytest_nnxcheck.jaxprs import flow
from pytest_nnxcheck.jaxprs.copies import TracedProgram
from pytest_nnxcheck.xla.hlo import MalformedProto, Module

__tracebackhide__ = True  # pytest shows the frames of the user, not these


@dataclass(frozen=True, slots=True)
class OnHost:
    """The arguments of one program in the memory of the host, and the arrays that it moves to the chip."""

    held: Mapping[int, int] = field(default_factory=dict)
    """The bytes on one device, by number, of those that were compiled as arguments of the chip."""
    reused: int = 0
    """The bytes of those whose place an output on the chip took. On the device it takes none."""
    moved: int = 0
    """The bytes of all arrays that the program moves to the chip, at most as many as the host holds: a mesh may cut them."""

    @classmethod
    def of(cls, traced: TracedProgram, module: Module | None) -> OnHost:
        """Find those of a program as it was traced, and compiled; none where the ``module`` is not known."""
        kinds = (getattr(getattr(leaf, "sharding", None), "memory_kind", None) for leaf in traced.arguments)
        numbers = [number for number, kind in enumerate(kinds) if kind == HOST_MEMORY]
        if module is None or not numbers:
            return cls()
        parameters = module.parameters[module.entry]
        try:
            shapes = {number: module.shape((parameters[number].id, ())) for number in numbers}
        except (MalformedProto, LookupError):
            return cls()
        held = {number: shape.size for number, shape in shapes.items() if not shape.elsewhere}
        reused = sum(held.get(number, 0) for number in module.donated.values())
        moved = min(sum(flow.moved_to_chip(traced.jaxpr)), sum(shape.size for shape in shapes.values()))
        return cls(held, reused, moved)

    def on_device(self, split: Split) -> Split:
        """The totals of a program without these arguments."""
        arguments = split.arguments - sum(self.held.values())
        return replace(split, arguments=arguments, aliased=split.aliased - self.reused)
