"""Plain data about one call: what a run left, what the un-nested call uses memory for, what reports keep.

Nothing here imports jax, flax, hypothesis or pytest.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from pytest_nnxcheck.core.nesting import Layer, Nesting
from pytest_nnxcheck.core.peak import (
    NO_COPIES,
    UNRECORDED,
    Buffer,
    Captured,
    Copies,
    Growth,
    Memory,
    OnTarget,
    PeakLine,
    Split,
)

if TYPE_CHECKING:
    import jax


Path = tuple[Any, ...]
"""Where a leaf is in a state: the keys that lead to it."""


class ArrayType(NamedTuple):
    """The type of an array, written ``float32[8,64]``; a Python number has no shape."""

    dtype: str
    shape: tuple[int, ...] | None

    def __str__(self) -> str:
        return self.dtype if self.shape is None else f"{self.dtype}[{','.join(map(str, self.shape))}]"

    def without_axes(self, count: int) -> ArrayType:
        """The same without the first so many axes."""
        return ArrayType(self.dtype, self.shape and self.shape[count:])


@dataclass(frozen=True, slots=True)
class Leaf:
    """One array of the state."""

    path: str
    type: ArrayType
    sharding: jax.sharding.Sharding | None
    pointers: tuple[int, ...]
    """One a shard; none for a host value."""


@dataclass(frozen=True, slots=True)
class Move:
    """A donated leaf before the program and after it."""

    before: Leaf
    after: Leaf | None
    """The state's own leaf, or the output that is an input's new value; None where nothing came back."""


@dataclass(frozen=True, slots=True)
class Lost:
    """A donated leaf that lost its buffer."""

    path: str
    before: str
    """Its type."""
    after: str
    """Its type after the program; empty where nothing came back."""


@dataclass(frozen=True, slots=True)
class Leak:
    """A tracer that outlived its trace."""

    path: str
    holder: str
    kind: str
    type: str
    line: str
    """Where it was made."""
    layer: str
    """The layer that left it; empty for the call itself."""
    place: str = field(default="", metadata=UNRECORDED)
    """Tells a plain value apart, and an `nnx.State` in one: of a ``module`` itself, of an ``object`` that a module holds, or ``outside`` of the modules.

    What a Variable holds, a dict of arrays too, is in a ``variable``. ``returned`` is what only the caller has, and a plain value of a module in that is of
    a ``returned module``.
    """
    before: bool = field(default=False, metadata=UNRECORDED)
    """Whether it was there before the call, which did not leave it then."""
    keeper: str = field(default="", metadata=UNRECORDED)
    """The path of what keeps a function that captured it."""

    @property
    def captured(self) -> bool:
        """Whether the layer that left it captured the module."""
        return bool(self.layer) and Layer.parse(self.layer).captures


@dataclass(frozen=True, slots=True)
class InnerDonation:
    """What the jits inside an un-nested call donated, by the names of leaves and inputs."""

    consumed: frozenset[str] = frozenset()
    """Those whose arrays are deleted."""
    kept: frozenset[str] = frozenset()
    """Those that the call left as they were handed in, or returned."""
    orphans: tuple[tuple[str, str], ...] = ()
    """The leaves that it left with a deleted array, which went in at another leaf: each with that one."""


@dataclass(frozen=True, slots=True)
class Observation:
    """The facts of one run."""

    nesting: Nesting
    state: Any
    """The copy that ran."""
    output: Any = None
    """The un-nested output in what was ``returned``."""
    returned: Any = None
    error: Exception | None = None
    leaks: tuple[Leak, ...] = ()
    dropped: tuple[Leak, ...] = ()
    """Tracers that a layer left in a module which died with its trace: no harm, but worth a note."""
    mutated: tuple[tuple[Layer, str], ...] = ()
    memory: Memory | None = None
    copies: Copies = NO_COPIES
    moves: tuple[Move, ...] = ()
    reused: frozenset[int] = frozenset()
    """The pointers of all that came back, outputs and state."""
    abstract: bool = False
    """Whether the program was not run: its pointers are the addresses that XLA's aliasing gives, and its output is abstract."""
    shared: bool = False
    """Whether the program was compiled for another one of the same text, whose lines its buffers name."""
    still: tuple[Path, ...] = ()
    """The leaves that the un-nested call changes, and that came back as the very arrays that went in."""
    output_names: tuple[str, ...] = ()
    rebuild: Callable[[tuple[Any, ...]], Any] = tuple
    """Gives the arrays of ``output`` the structure that the user returned."""
    compiled: jax.stages.Compiled | None = None
    """The program of the outermost jit."""
    references: frozenset[str] = frozenset()
    """The leaves that went in as a `jax.Ref`."""
    inside: InnerDonation = InnerDonation()
    """What the jits of the un-nested call itself donated."""
    targets: tuple[OnTarget, ...] = ()
    """The program on each target that it was compiled for."""

    @property
    def settled(self) -> bool:
        """Whether the run ended, and left no tracers: its state and its output can be handed on."""
        return self.error is None and not self.leaks


@dataclass(frozen=True, slots=True, repr=False)
class NestedCall:
    """One call under its nesting, as an invariant of your own sees it."""

    nesting: Nesting
    before: Mapping[str, Any]
    """The arrays of the state by path (``model.layers[0].kernel``)."""
    after: Mapping[str, Any]
    """The same when the call has ended."""
    kinds: Mapping[str, str]
    """The types of the Variables that hold them."""
    outputs: Mapping[str, Any]
    """The arrays of the un-nested output, each named ``output`` with its place."""
    memory: Memory | None = None
    """What the program needs, where the outermost layer is a jit."""
    compiled: jax.stages.Compiled | None = None
    """The program, where the outermost layer is a jit."""
    abstract: bool = False
    """Whether the call was not run: its arrays are types alone."""

    def __repr__(self) -> str:
        return f"<NestedCall {self.nesting}>"


# --- what the un-nested call spends memory on: bytes a device, and the user's line, empty where there is none


@dataclass(frozen=True, slots=True)
class Recast:
    """All of a leaf in another dtype."""

    leaf: int
    """The number of the program's input."""
    line: str
    dtype: str
    type: str
    bytes: int
    """Those of the new array."""
    widens: bool
    looped: bool
    """Whether a loop takes it."""
    name: str = ""


Twice = Literal[
    "old and new at once",
    "read, then written",
    "stacked anew",
    "joined",
    "cut and joined again",
    "reordered",
]
"""Why all of a leaf is in memory once more: a word of `reporting.hints.TWICE`."""


@dataclass(frozen=True, slots=True)
class HeldTwice:
    """All of some leaves once more; as advice, all leaves of a line."""

    leaves: tuple[int, ...]
    """The numbers of the program's inputs."""
    operation: Twice
    line: str
    types: tuple[str, ...]
    """Those of the arrays, or of their parts."""
    bytes: int
    names: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Saved:
    """What the scans of a line save for their backward pass."""

    line: str
    steps: int
    bytes: int
    """Those of all steps."""
    carried: int
    """Of these bytes what the carry needs, which a remat saves as well."""


@dataclass(frozen=True, slots=True)
class Stack:
    """A stacked output of a scan whose steps nothing reads, or one of them."""

    line: str
    type: str
    bytes: int
    """Those of all steps."""
    read: bool


@dataclass(frozen=True, slots=True)
class Waste:
    """What the jaxpr of a call spends memory on by its own structure."""

    recasts: tuple[Recast, ...] = ()
    saved: tuple[Saved, ...] = ()
    stacks: tuple[Stack, ...] = ()
    twice: tuple[HeldTwice, ...] = ()


NO_WASTE = Waste()


@dataclass(frozen=True, slots=True)
class LargeLine:
    """A line whose arrays are larger than all that goes into the call and comes out of it."""

    line: str
    bytes: int
    type: str
    """That of the largest."""
    operation: str
    """That of the largest."""
    handed: int
    """Bytes of all that goes in and comes out."""


@dataclass(frozen=True, slots=True)
class Unused:
    """State that the call neither reads nor writes."""

    names: tuple[str, ...]
    """The largest parts that are unused as a whole."""
    bytes: int
    line: str = ""


@dataclass(frozen=True, slots=True)
class NotDonated:
    """State that the call changes, where the wrapped function is itself a jit that does not donate it."""

    function: str
    jit: str
    """How one writes it."""
    line: str
    """Where the function begins."""
    arguments: tuple[str, ...]
    """Those that hold the state."""
    donate: str
    """The option that donates all that changes."""
    bytes: int
    """Those that lie there old and new."""


Advice = HeldTwice | Recast | LargeLine | Saved | Stack | Unused | NotDonated
"""One thing that most authors would change."""


# --- what reports keep


@dataclass(frozen=True, slots=True)
class Evidence:
    """What is kept of one nesting."""

    split: Split | None = None
    expected: int | None = None
    """The expected peak."""
    un_nested: Split | None = None
    """The split of the un-nested program."""
    buffers: tuple[Buffer, ...] = ()
    """The largest that are no arguments."""
    places: tuple[PeakLine, ...] = ()
    """All of them, the small ones too, by the line that made them: the largest lines."""
    captured: tuple[Captured, ...] = ()
    """The arrays that the call captures, largest first."""
    growth: Growth | None = None
    """Measured only where memory is violated under one generated loop."""
    leaks: tuple[Leak, ...] = ()
    moves: tuple[Lost, ...] = ()
    """The donated leaves that lost their buffer."""
    reusable: tuple[str, ...] = ()
    """Names of inputs that were not donated, though an output has their type and could take their buffer."""
    targets: tuple[OnTarget, ...] = ()
    """The same program on each target that it was compiled for."""


@dataclass(frozen=True, slots=True, eq=False)
class UnNested:
    """Where the bytes of the un-nested program of one call are, and advice on them. An equal one is of another call: both are kept."""

    name: str
    evidence: Evidence
    advice: tuple[Advice, ...]


@dataclass(frozen=True, slots=True)
class Stamp:
    """What the figures depend on, beside the code: ``devices`` is the number of simulated ones, 1 if there are none."""

    jax: str
    jaxlib: str
    flax: str
    platform: str
    device: str
    devices: str = "1"

    def differences(self, other: Stamp) -> str:
        """``jax 0.5.3 -> 0.6.2, flax 0.10.2 -> 0.10.7``; empty where nothing differs."""
        pairs = [(field.name, getattr(self, field.name), getattr(other, field.name)) for field in fields(self)]
        return ", ".join(f"{name} {before} -> {after}" for name, before, after in pairs if before != after)
