"""What was observed of one nesting: leaves and where their buffers went, the memory of the program, tracers that were left.

Plain data: nothing here imports jax or flax.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from pytest_nnxcheck.core.evidence import OnTarget, Split
from pytest_nnxcheck.core.nesting import Layer, Nesting

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
    """One array of the state: its type, its sharding, one pointer a shard; no pointer for a host value."""

    path: str
    type: ArrayType
    sharding: jax.sharding.Sharding | None
    pointers: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Move:
    """A donated leaf before the program and after it: the state's own path, or the output that is an input's new value.

    ``after`` is None where nothing came back for it.
    """

    before: Leaf
    after: Leaf | None


@dataclass(frozen=True, slots=True)
class Buffer:
    """One buffer that is live at the peak, on one device.

    ``kind`` is argument, output, temporary or constant; ``shape`` is written ``float32[50,200,200]``; ``stack`` are
    ``path:line`` of the user's frames, innermost first; where a generated layer made the buffer there are none, and ``layer`` names it.
    A buffer that XLA ``inserted`` for a loop has the lines, or the layer, of that loop; any other that it inserted has neither. A ``broadcast``
    repeats far fewer elements, and computes nothing.

    ``parameters`` are the numbers of the program's parameters that the buffer is, or is made of by copies only, the operations in
    ``through``; ``whole`` says that it is a copy of all of them: of one, or of several behind one another. Parameter numbers are those
    of the flat arguments where the program was lowered with ``keep_unused``.
    """

    bytes: int
    shape: str
    kind: str
    operation: str
    stack: tuple[str, ...] = ()
    parameters: tuple[int, ...] = ()
    whole: bool = False
    through: tuple[str, ...] = ()
    layer: str = ""
    inserted: bool = False
    broadcast: bool = False


@dataclass(frozen=True, slots=True)
class Memory(Split):
    """The memory of a compiled program, and the buffers live at its peak, largest first.

    ``named`` is false where this jaxlib does not give the buffers: totals only then, with the constants unknown (0). ``names`` are
    those of the program's flat parameters, in order, as far as they are known.
    """

    buffers: tuple[Buffer, ...] = ()
    named: bool = False
    names: tuple[str, ...] = ()

    @property
    def split(self) -> Split:
        """The totals alone."""
        return Split(self.arguments, self.outputs, self.temporaries, self.aliased, self.constants)


@dataclass(frozen=True, slots=True)
class Leak:
    """A tracer that outlived its trace: where it is, what it is, the line that made it, and the layer that left it.

    ``place`` tells a plain value apart, and an `nnx.State` in one: of a ``module`` itself, of an ``object`` that a module holds, or ``outside`` of the modules;
    what a Variable holds, a dict of arrays too, is in a ``variable``. ``returned`` is what only the caller has, and a plain value of a module in that is of
    a ``returned module``. One that was there ``before`` the call was not left by it.
    ``keeper`` is the path of what keeps a function that captured it.
    """

    path: str
    holder: str
    kind: str
    type: str
    line: str
    layer: Layer | None
    place: str = ""
    before: bool = False
    keeper: str = ""


@dataclass(frozen=True, slots=True)
class InnerDonation:
    """What the jits inside an un-nested call donated, by the names of leaves and inputs.

    The arrays of those ``consumed`` are deleted. ``kept`` are those that a call left as they were handed in, or returned. ``orphans`` are the
    leaves that it left with a deleted array, which went in at another leaf: each with that one.
    """

    consumed: frozenset[str] = frozenset()
    kept: frozenset[str] = frozenset()
    orphans: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class Copies:
    """Bytes of copies of the state in a compiled program: what it holds since it hands values back unchanged, and outputs that are state."""

    handed_back: int = 0
    returned: int = 0

    @property
    def bytes(self) -> int:
        """Those of both."""
        return self.handed_back + self.returned


@dataclass(frozen=True, slots=True)
class Observation:
    """The facts of one run; ``state`` is the copy that ran.

    ``parameters`` names the flat state parameters of the program. ``returned`` is what the
    program gave, ``output`` the un-nested output in it. ``reused`` are the pointers of all that came back, outputs and state.

    ``dropped`` are tracers that a layer left in a module which died with its trace: no harm, but worth a note. An ``abstract``
    program was not run: its pointers are the addresses that XLA's aliasing gives, and its output is abstract. A ``shared`` program was
    compiled for another one of the same text, whose lines its buffers name. ``still`` are the leaves that the un-nested call changes,
    and that came back as the very arrays that went in. ``rebuild`` gives the arrays of ``output``, named ``output_names``, the structure that
    the user returned. ``compiled`` is the program of the outermost jit.
    ``inside`` is what the jits of the un-nested call itself donated.
    """

    nesting: Nesting
    state: Any
    output: Any = None
    returned: Any = None
    error: Exception | None = None
    leaks: tuple[Leak, ...] = ()
    dropped: tuple[Leak, ...] = ()
    mutated: tuple[tuple[Layer, str], ...] = ()
    memory: Memory | None = None
    copies: Copies = Copies()
    parameters: tuple[str, ...] = ()
    moves: tuple[Move, ...] = ()
    reused: frozenset[int] = frozenset()
    abstract: bool = False
    shared: bool = False
    still: tuple[Path, ...] = ()
    output_names: tuple[str, ...] = ()
    rebuild: Callable[[tuple[Any, ...]], Any] = tuple
    compiled: jax.stages.Compiled | None = None
    inside: InnerDonation = InnerDonation()
    targets: tuple[OnTarget, ...] = ()
    """The program on each target that it was compiled for."""


@dataclass(frozen=True, slots=True, repr=False)
class NestedCall:
    """One call under its nesting, as an invariant of your own sees it.

    ``before`` and ``after`` are the arrays of the state by path (``model.layers[0].kernel``), ``kinds`` the types of the Variables that hold
    them, ``outputs`` the arrays of the un-nested output, each named ``output`` with its place. ``memory`` and ``compiled`` are there where the
    outermost layer is a jit: what the program needs, and the program. An ``abstract`` call was not run: its arrays are types alone.
    """

    nesting: Nesting
    before: Mapping[str, Any]
    after: Mapping[str, Any]
    kinds: Mapping[str, str]
    outputs: Mapping[str, Any]
    memory: Memory | None = None
    compiled: jax.stages.Compiled | None = None
    abstract: bool = False

    def __repr__(self) -> str:
        return f"<NestedCall {self.nesting}>"
