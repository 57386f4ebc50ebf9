"""What the run of one nesting measured, as plain data: reports, baselines and explanations are made of it.

Pure data: nothing here imports jax, flax, hypothesis or pytest.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal

FLOOR = 64 * 1024
"""Bytes that are never reported: below them a program has nothing to win."""

COPY_SHARE = 0.05
"""Of the state's bytes. Healthy programs hold no copies at all, so that the least that is worth telling can be small: one stack of a few layers' parameters,
beside the moments of Adam."""

SHOWN = 10
"""Buffers, and leaves, that are kept of each nesting: the largest."""


def least_copy(state: int) -> int:
    """Bytes of copies that count, for a state of so many bytes a device."""
    return max(round(COPY_SHARE * state), FLOOR)


@dataclass(frozen=True, slots=True)
class Split:
    """The parts of a peak: bytes a device."""

    arguments: int
    outputs: int
    temporaries: int
    aliased: int
    constants: int

    @property
    def peak(self) -> int:
        """Arguments + outputs + temporaries - aliased + captured constants."""
        return self.arguments + self.outputs + self.temporaries - self.aliased + self.constants


@dataclass(frozen=True, slots=True)
class Bound:
    """What a nesting should cost, and what it may: bytes a device.

    The budget is a ``multiple`` of the expected peak, written ``2x``, or bytes: then ``axes`` were added to it for the nesting's own,
    and ``written`` is what the user wrote, in powers of 1000.
    """

    expected: int
    budget: int
    multiple: str = ""
    axes: int = 0
    default: bool = False
    written: str = ""


@dataclass(frozen=True, slots=True)
class Held:
    """A buffer that is live at the peak, largest first in `Evidence.buffers`: bytes a device.

    ``kind`` is argument, output, temporary or constant. ``stack`` are the user's lines ``path:line``, the innermost first; where a
    generated layer made the buffer there are none, and ``layer`` names it. ``inserted`` says that XLA put the buffer in: for the loop
    at these lines, or in this layer, and without either it does not say what for.

    ``name`` is the argument that the buffer is made of by copies only, ``whole`` says that it is all of it, ``through`` are the
    operations of the copy, from the argument on, ``joined`` are further arguments that stand in it, all of each, beside the first. ``added`` says that the
    un-nested program has no such buffer: from the same place, of that shape, a copy of the same.
    """

    bytes: int
    shape: str
    kind: str
    operation: str
    stack: tuple[str, ...] = ()
    name: str = ""
    whole: bool = False
    through: tuple[str, ...] = ()
    joined: tuple[str, ...] = ()
    layer: str = ""
    inserted: bool = False
    added: bool = False

    @property
    def place(self) -> str:
        """What buffers are grouped by: the innermost line of the user, or the layer; empty for captured constants and where XLA says neither."""
        return self.stack[0] if self.stack else self.layer


@dataclass(frozen=True, slots=True)
class Place:
    """One line of the user's at the peak: bytes a device of all buffers that were made there, those of arguments aside.

    ``line`` is ``path:line``, or the generated layer, or empty: see `Held.place`. ``outer`` are the lines that called it for all of its
    large buffers, ``inserted`` says that XLA inserted them all; ``count`` is how many buffers there are, ``un_nested`` what the same place
    holds in the un-nested program.
    """

    line: str
    outer: tuple[str, ...]
    inserted: bool
    count: int
    temporaries: int
    outputs: int
    constants: int
    un_nested: int

    @property
    def bytes(self) -> int:
        return self.temporaries + self.outputs + self.constants


@dataclass(frozen=True, slots=True)
class Captured:
    """An array that the call captures: bytes a device, its type, the first line that uses it, and where it is kept (a global, a closure)."""

    bytes: int
    type: str
    line: str = ""
    name: str = ""


@dataclass(frozen=True, slots=True)
class Recast:
    """All of a leaf, by the number of the program's input, in another dtype: bytes of the new array; ``looped`` where a loop takes it."""

    leaf: int
    line: str
    dtype: str
    type: str
    bytes: int
    widens: bool
    looped: bool
    name: str = ""


Twice = Literal[
    "old and new at once",
    "read, then written",
    "stacked anew",
    "joined",
    "cut and joined again",
    "reordered",
]
"""How it comes about that all of a leaf is held once more: a word of `reporting.hints.TWICE`."""


@dataclass(frozen=True, slots=True)
class HeldTwice:
    """All of some leaves once more, by the numbers of the program's inputs: bytes of what is held, and ``types`` of the arrays, or of their parts.

    As advice, all leaves of a line, with their names.
    """

    leaves: tuple[int, ...]
    operation: Twice
    line: str
    types: tuple[str, ...]
    bytes: int
    names: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Saved:
    """What the scans of a line save for their backward pass: bytes of all steps, and of those what the carry needs, which a remat saves as well."""

    line: str
    steps: int
    bytes: int
    carried: int


@dataclass(frozen=True, slots=True)
class Stack:
    """A stacked output of a scan, of which nothing or one step is read: bytes of all steps."""

    line: str
    type: str
    bytes: int
    read: bool


@dataclass(frozen=True, slots=True)
class LargeLine:
    """A line whose arrays are larger than all that goes into the call and comes out of it, ``handed``; type and operation of the largest."""

    line: str
    bytes: int
    type: str
    operation: str
    handed: int


@dataclass(frozen=True, slots=True)
class Unused:
    """State that the call neither reads nor writes: the names of the largest parts that are unused as a whole."""

    names: tuple[str, ...]
    bytes: int
    line: str = ""


@dataclass(frozen=True, slots=True)
class NotDonated:
    """State that the call changes, where the wrapped function is itself a jit that does not donate it: bytes that lie there old and new.

    ``jit`` is how one writes it, ``line`` where the function begins; ``arguments`` are those that hold the state, ``donate`` is the option that donates all
    that changes.
    """

    function: str
    jit: str
    line: str
    arguments: tuple[str, ...]
    donate: str
    bytes: int


Advice = HeldTwice | Recast | LargeLine | Saved | Stack | Unused | NotDonated
"""What the un-nested call spends memory on: bytes a device, and the user's line, empty where there is none."""


@dataclass(frozen=True, slots=True)
class Growth:
    """What the peak gains with each further step of a generated loop, or element of an axis: ``layer``.

    ``per_step`` are bytes a device: the difference of the splits of the same program with ``steps`` and with twice as many, a step.
    """

    layer: str
    steps: int
    per_step: Split


@dataclass(frozen=True, slots=True)
class Residue:
    """A tracer that outlived its trace: ``layer`` left it, empty for the call itself; ``line`` is where it was made."""

    path: str
    holder: str
    kind: str
    type: str
    line: str
    layer: str


@dataclass(frozen=True, slots=True)
class Moved:
    """A donated leaf that lost its buffer: its type before and after, empty where nothing came back."""

    path: str
    before: str
    after: str


@dataclass(frozen=True, slots=True)
class OnTarget:
    """One program as the compiler of a target made it, which ran nothing: bytes a device."""

    target: str
    """The chip, or the slice of the program's mesh: ``v5e``, ``v5e:2x4``."""
    limit: int = 0
    """What a program may use there: the compiler's own limit on a TPU, a share of the memory on a GPU."""
    share: float = 1.0
    """Of the memory of a GPU: the part that jax takes."""
    fits: bool = True
    """On a TPU whether its compiler took the program, on a GPU whether ``peak`` is within ``limit``."""
    peak: int | None = None
    """What is compared with ``limit``; `None` where this compiler gives no totals, or refused the program."""
    split: Split | None = None
    """The totals of the compiler. Their sum is ``peak`` on a GPU, and more on a TPU."""
    unpadded: int | None = None
    """Of ``peak`` on a TPU: what would be left without the padding of its tiles."""
    copies: int = 0
    """Bytes of copies of the state, by forwarding."""
    state: int = 0
    """Bytes of one copy of the state, as the CPU counts them."""
    donated: int = 0
    """Leaves that the program donates."""
    lost: tuple[str, ...] = ()
    """Names of those whose buffer no output takes over, there and not on the CPU."""
    lost_too: int = 0
    """How many lose their buffer there and on the CPU."""
    refused: str = ""
    """What the compiler said of a program that does not fit, in one line."""
    left_out: str = ""
    """Why this program cannot be compiled for the target, in one line: jax's own words, or that a mesh has no such slice."""
    effort: str = ""
    """What the compiler of a TPU was asked for: ``O0``, which is fast, or ``default``."""
    wheel: str = ""
    """The compiler: ``libtpu 0.0.50.1``."""
    seconds: float = field(default=0.0, compare=False)
    """What it took to lower and compile."""

    @classmethod
    def of_json(cls, found: Mapping[str, Any]) -> OnTarget:
        """Read what JSON holds of one. Raises `LookupError` or `TypeError`."""
        return cls(**{**found, "split": found["split"] and Split(**found["split"]), "lost": tuple(found["lost"])})


@dataclass(frozen=True, slots=True)
class Evidence:
    """What one nesting left; ``un_nested`` is the split of the un-nested program beside it, ``expected`` the expected peak.

    ``buffers`` are the largest that are no arguments; ``places`` groups all of them, the small ones too, by the line that made them, and keeps the 40 largest. ``captured`` are the arrays that the call captures, largest first,
    ``growth`` is measured only where memory is violated under one generated loop.
    ``reusable`` names the inputs that were not donated, though an output has their type and could take their buffer.
    """

    split: Split | None = None
    expected: int | None = None
    un_nested: Split | None = None
    buffers: tuple[Held, ...] = ()
    places: tuple[Place, ...] = ()
    captured: tuple[Captured, ...] = ()
    growth: Growth | None = None
    leaks: tuple[Residue, ...] = ()
    moves: tuple[Moved, ...] = ()
    reusable: tuple[str, ...] = ()
    targets: tuple[OnTarget, ...] = ()
    """The same program on each target that it was compiled for."""


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
