"""Plain data about one call: the facts of a run, the memory of the un-nested call, the evidence that reports keep.

Nothing here imports jax, flax, hypothesis or pytest.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, NamedTuple

from pytest_nnxcheck.core.ledger import Ledger
from pytest_nnxcheck.core.memory_picture import Picture
from pytest_nnxcheck.core.nesting import Layer, Nesting
from pytest_nnxcheck.core.on_target import OnTarget
from pytest_nnxcheck.core.peak import NO_COPIES, UNRECORDED, Buffer, Captured, Copies, Memory, PeakLine, Split

if TYPE_CHECKING:
    import jax


Path = tuple[Any, ...]
"""The place of a leaf in a state: the keys that lead to it."""

Pairs = tuple[tuple[str, str], ...]
"""Pairs of names."""


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
    """The user's line that made it."""
    layer: str
    """The layer that leaked it; empty for the call itself."""
    place: str = field(default="", metadata=UNRECORDED)
    """Tells a plain value apart, and an `nnx.State` in one: of a ``module`` itself, of an ``object`` that a module holds, or ``outside`` of the modules.

    What a Variable holds, a dict of arrays too, is in a ``variable``, or in a ``variable outside`` of the modules. ``returned`` is what only the caller has, and a plain value of a module in that is of
    a ``returned module``.
    """
    before: bool = field(default=False, metadata=UNRECORDED)
    """True if it was there before the call, which then did not leak it."""
    keeper: str = field(default="", metadata=UNRECORDED)
    """The path of the object that keeps a function which captured it."""
    kept_at: str = field(default="", metadata=UNRECORDED)
    """The user's line that keeps it, of a tracer that no line of the user's made: an argument of a traced function."""

    def words(self) -> str:
        """Its place, as the cause of a failure."""
        return ", ".join([f"tracer left in {self.path}: {self.type}", *filter(None, [self.where])])

    @property
    def where(self) -> str:
        """The line that made it, or else the one that keeps it; empty where neither is known."""
        if self.line:
            return f"created at {self.line}"
        return f"an argument, kept at {self.kept_at}" if self.kept_at else ""

    @property
    def outside(self) -> bool:
        """True if what holds it is no part of the modules."""
        return self.place in ("outside", "variable outside")

    @property
    def captured(self) -> bool:
        """True if the layer that leaked it captured the module."""
        return bool(self.layer) and Layer.parse(self.layer).captures


@dataclass(frozen=True, slots=True)
class InnerDonation:
    """The donations of the jits inside an un-nested call, by the names of leaves and inputs."""

    consumed: frozenset[str] = frozenset()
    """The names whose arrays are deleted."""
    kept: frozenset[str] = frozenset()
    """The names that the call left as they were handed in, or returned."""
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
    recorded: tuple[Leak, ...] = ()
    """Tracers that a mock was handed: no state, but worth a note."""
    mutated: tuple[tuple[Layer, str], ...] = ()
    memory: Memory | None = None
    copies: Copies = NO_COPIES
    moves: tuple[Move, ...] = ()
    reused: frozenset[int] = frozenset()
    """The pointers of all arrays that came back."""
    abstract: bool = False
    """True if the program was not run: its pointers are the addresses that XLA's aliasing gives, and its output is abstract."""
    proves: bool = True
    """False for a trace that tells too little of a run, so that the nesting has to be run."""
    shared: bool = False
    """True if the program was compiled for another one of the same text, whose lines its buffers name."""
    earlier: bool = False
    """True if an earlier run found out the facts of the program, so that it was neither compiled nor run."""
    keep: Callable[[], None] = lambda: None
    """Keeps the facts of the program for later runs."""
    still: tuple[Path, ...] = ()
    """The leaves that the un-nested call changes, and that came back as the very arrays that went in."""
    output_names: tuple[str, ...] = ()
    rebuild: Callable[[tuple[Any, ...]], Any] = tuple
    """Gives the arrays of ``output`` the structure that the user returned."""
    compiled: jax.stages.Compiled | None = None
    """The program of the outermost jit."""
    inside: InnerDonation = InnerDonation()
    """The donations of the jits of the un-nested call itself."""
    targets: tuple[OnTarget, ...] = ()
    """The program on each target that it was compiled for."""
    refused: str = ""
    """The words, in one line, with which this platform refused a program that ``targets`` alone can lower."""

    @property
    def settled(self) -> bool:
        """True if the run ended, and leaked no tracers: its state and its output can be handed on."""
        return self.error is None and not self.leaks


@dataclass(frozen=True, slots=True, repr=False)
class NestedCall:
    """One call under its nesting, as the function of an `Invariant` gets it."""

    nesting: Nesting
    """The nesting; ``str(call.nesting)`` is ``un-nested`` or ``jit > scan``."""
    before: Mapping[str, Any]
    """The arrays of the state before the call, by path (``model.layers[0].kernel``)."""
    after: Mapping[str, Any]
    """The arrays of the state after the call, by path."""
    kinds: Mapping[str, str]
    """The name of the Variable's type (``Param``), by path."""
    outputs: Mapping[str, Any]
    """The arrays that one call returns, by name: ``output``, ``output[0]``."""
    memory: Memory | None = None
    """The memory of the compiled program, if the outermost layer is a jit."""
    compiled: jax.stages.Compiled | None = None
    """The compiled program, if the outermost layer is a jit."""
    abstract: bool = False
    """True if the call was not run, so that its arrays are types without values."""

    def __repr__(self) -> str:
        return f"<NestedCall {self.nesting}>"


@dataclass(frozen=True, slots=True)
class CallProgram:
    """The traced program of the un-nested call: a function of the leaves of the state and the inputs."""

    captured: tuple[Captured, ...] = ()
    """The arrays that it captures, which a compiled program holds as constants: the largest first."""
    donated: tuple[bool | None, ...] = ()
    """True for each leaf, and each input behind them, that a jit at the top of the call donates; None where none takes it."""
    inner_donations: int = 0
    """The number of arrays that the jits inside donate."""
    writes_back: bool = False
    """True if a scan hands out its stacked inputs as they were."""
    remat_in_scan: bool = False
    branches: bool = False
    """True if it has a conditional."""
    calls_back: bool = False
    """True if it runs Python code, or may raise, while the program runs."""
    jaxpr: Any = None
    """The program itself; `None` where it is not known."""
    rewritten: Mapping[int, int] = field(default_factory=dict)
    """The results that are new values of arguments, by the number of the argument."""
    precision: float = 0.0
    """The distance between one and the next number of the lowest precision that it computes in: also that of a chip's products."""
    equations: int = 0
    """The number of equations that it runs, each step of a scan counted."""
    operations: int = 0
    """The number of different operations among them."""
    in_references: bool = False
    """True if a leaf, or an array that it captures, is a `jax.Ref`: only a run writes it."""
    scans_references: bool = False
    """True if a scan takes references step by step."""
    written_twice: str = ""
    """The line of a `jax.checkpoint` whose writes to a reference a gradient makes a second time; empty without one."""


# --- what reports keep


@dataclass(frozen=True, slots=True)
class Evidence:
    """The evidence that reports keep of one nesting."""

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
    leaks: tuple[Leak, ...] = ()
    moves: tuple[Lost, ...] = ()
    """The donated leaves that lost their buffer."""
    reusable: tuple[str, ...] = ()
    """Names of inputs that were not donated, though an output has their type and could take their buffer."""
    targets: tuple[OnTarget, ...] = ()
    """The same program on each target that it was compiled for."""
    ledger: Ledger = ()
    """The bytes of the peak by head; where it has a picture."""
    picture: Picture | None = None
    """The picture of its memory: of a plain jit, and where ``memory`` is broken."""


@dataclass(frozen=True, slots=True)
class Stamp:
    """The versions and devices that the figures depend on, beside the code: ``devices`` is the number of simulated ones, 1 if there are none."""

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
