"""The notes of a report as plain data: each explains a failure, or states a fact that no invariant judges.

The sentences are those of `reporting.notes`. Pure data: nothing here imports jax, flax, hypothesis or pytest.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

from pytest_nnxcheck.core.facts import ArrayType, Leak
from pytest_nnxcheck.core.nesting import Layer

# --- what explains a failure


class CapturedNode(NamedTuple):
    """A graph node that a function captured."""

    name: str
    """The name by which it is captured; empty where it is the function itself."""
    type: str
    is_argument: bool = True
    """True if the transforms of flax take it as it is."""

    def __str__(self) -> str:
        return f"{self.name} ({self.type})" if self.name else self.type


@dataclass(frozen=True, slots=True)
class CapturedBy:
    """A transform inside the call, or around it, whose function captured graph nodes."""

    transform: str
    """Empty where the call itself captured them."""
    line: str
    nodes: tuple[CapturedNode, ...]
    leaks: bool = False
    """True if one of them held tracers when the call was over."""


@dataclass(frozen=True, slots=True)
class MergedVariables:
    """An `nnx.merge` inside the call that took over the Variables of another trace, which flax refuses to write."""

    line: str
    node: str
    paths: tuple[str, ...]
    """The paths of the Variables in the node."""


@dataclass(frozen=True, slots=True)
class Mapped:
    """The state and the inputs that a layer gives an axis; it broadcasts the rest."""

    layer: Layer
    names: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class RaisedUnNested:
    """The exception that the call raises without a nesting, in one line."""

    text: str


@dataclass(frozen=True, slots=True)
class ValueAsked:
    """Python asked for a value that is traced: by an ``if``, a ``range``, an index."""


Explanation = Leak | CapturedBy | MergedVariables | Mapped | RaisedUnNested | ValueAsked | str
"""A possible cause of a failure. Reports print a text, such as the exception that the call raised, as it is."""


# --- facts that nothing judges

FactKind = Literal[
    "abstract", "partly abstract", "raises un-nested", "raises without jit", "adds state", "added, functional", "attributes, functional", "other draws",
    "decided by rounding", "decided by fusion", "many equations", "number",
    "in another buffer", "in memory of NumPy", "on all devices", "in a new buffer", "left in merged", "inner donations", "not moved",
    "walked in part", "not put back", "mode closed", "untrained", "in one array",
    "peak on target", "left out on target", "nothing on target", "asks for devices", "leaked", "made anew", "lost in copies", "beside references", "nothing in references", "written twice",
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class Fact:
    """A fact about leaves, places, subjects, invariants or targets."""

    kind: FactKind
    names: tuple[str, ...] = ()
    of: str = ""
    """A type, a layer, a nesting or what is raised, in one line."""
    count: float = 0
    peaks: tuple[int, int] | None = None
    """Two figures to compare, in bytes a device: that of the target, and the CPU's."""


BufferPlace = Literal["same", "another", "new"]
"""A buffer: the leaf's own, that of another leaf, or a new one."""


@dataclass(frozen=True, slots=True)
class BufferRetyped:
    """A donated leaf of another dtype or shape, whose buffer was not lost."""

    path: str
    type: ArrayType
    new: ArrayType
    """Its type after the call."""
    cause: str
    output: bool
    """True if the new value is an output, for an input."""
    place: BufferPlace


@dataclass(frozen=True, slots=True)
class InMappedFile:
    """Leaves of a subject that lie in a memory-mapped file."""

    paths: tuple[str, ...]
    name: str
    file: str


@dataclass(frozen=True, slots=True)
class StateAdded:
    """The state that the call adds, and the layers that cannot carry it."""

    paths: tuple[str, ...]
    layers: tuple[Layer, ...]


Note = Explanation | Fact | BufferRetyped | InMappedFile | StateAdded
