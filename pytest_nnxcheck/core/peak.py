"""The memory of one program as plain data: totals, buffers and lines of the peak, its bound; and from how many bytes on anything counts.

Bytes are those of one device. Nothing here imports jax, flax, hypothesis or pytest.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Literal

FLOOR = 64 * 1024
"""Bytes that are never reported: below them a program has nothing to win."""

COPY_SHARE = 0.05
"""The share of the state's bytes from which a copy counts. Healthy programs hold no copies at all, so that it can be small: one stack of a few layers'
parameters, beside the moments of Adam."""

LEAF = 4 * 1024
"""Bytes from which a second buffer of a whole leaf counts. XLA needs none for its own arithmetic, whose temporaries are judged from `FLOOR` on."""

SHOWN = 10
"""Buffers, and leaves, that are kept of each nesting: the largest."""

SHOWN_LINES = 40
"""Lines that are kept of each nesting: the largest."""

LARGE = 0.05
"""The share of a line's bytes from which a buffer is large: smaller ones do not decide what called the line."""

UNRECORDED = {"record": False}
"""Marks a field that reports leave out."""


DEFAULT_FACTOR = 2
"""Times the expected peak. No healthy model of 48 passed 1.18 of it in 1131 nested programs, on any version."""


def default_budget(expected: int) -> int:
    """The most bytes that a program may take where nobody set a budget."""
    return DEFAULT_FACTOR * expected + FLOOR


def least_copy(state: int, *, whole: bool = False) -> int:
    """Bytes of copies that count, for a state of so many bytes a device; ``whole`` for copies that are whole leaves."""
    return max(round(COPY_SHARE * state), LEAF if whole else FLOOR)


@dataclass(frozen=True, slots=True)
class Split:
    """The parts of a peak."""

    arguments: int
    outputs: int
    temporaries: int
    aliased: int
    constants: int

    @property
    def peak(self) -> int:
        """Arguments + outputs + temporaries - aliased + captured constants."""
        return self.arguments + self.outputs + self.temporaries - self.aliased + self.constants

    @property
    def parts(self) -> dict[str, int]:
        """The parts by name."""
        return {part.name: getattr(self, part.name) for part in fields(Split)}


@dataclass(frozen=True, slots=True)
class Live:
    """A buffer from the first instruction that needs it to the last, by their numbers in program order."""

    bytes: int
    kind: str
    """Argument, output, temporary or constant."""
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Order:
    """The buffers of a program in the order of its instructions; a loop is one of its steps."""

    length: int
    """The number of instructions."""
    loops: tuple[tuple[int, int], ...]
    """The first and the last instruction of each loop's step."""
    held: tuple[Live, ...]

    @property
    def peak(self) -> int:
        """The first instruction at which the most bytes are alive."""
        total = self.totals()
        return max(range(self.length + 1), key=total.__getitem__)

    def totals(self, kind: str = "") -> list[int]:
        """The bytes alive at each instruction, of one kind or of all but constants, which the sums of a compiler do not count."""
        change = [0] * (self.length + 2)
        for live in self.held:
            if live.kind == kind or (not kind and live.kind != "constant"):
                change[live.start] += live.bytes
                change[live.end + 1] -= live.bytes
        return list(itertools.accumulate(change))[:-1]


Part = Literal["", "gradients", "saved for the backward pass", "casts"]
"""The part of a temporary: a gradient has the type of a parameter, and is made by the backward pass; what is saved is made before that, and read by it; a cast
is all of an argument in another dtype."""


@dataclass(frozen=True, slots=True)
class Buffer:
    """One buffer that is live at the peak."""

    bytes: int
    shape: str
    """Written ``float32[50,200,200]``."""
    kind: str
    """Argument, output, temporary or constant."""
    operation: str
    stack: tuple[str, ...] = ()
    """The user's lines ``path:line``, the innermost first; none where a generated layer made the buffer."""
    name: str = ""
    """The argument that the buffer is, or is made of by copies only."""
    whole: bool = False
    """True if it is a copy of all of that argument, and of those that are ``joined`` to it."""
    through: tuple[str, ...] = ()
    """The operations of the copy, from the argument on."""
    joined: tuple[str, ...] = ()
    """Further arguments that are in it, all of each, behind the first."""
    layer: str = ""
    """The generated layer that made the buffer."""
    inserted: bool = False
    """True if XLA put the buffer in: for the loop at these lines, or in this layer; without either XLA does not say what for."""
    added: bool = False
    """True if the un-nested program has no such buffer: from the same place, of that shape, a copy of the same."""
    parameters: tuple[int, ...] = field(default=(), metadata=UNRECORDED)
    """The numbers of the arguments that it is made of. They are those of the flat arguments where the program was lowered with ``keep_unused``."""
    broadcast: bool = field(default=False, metadata=UNRECORDED)
    """True if it repeats far fewer elements, and computes nothing."""
    part: Part = field(default="", metadata=UNRECORDED)
    """Its part in a training step or a loop, where it has one."""
    live: Live | None = field(default=None, metadata=UNRECORDED, compare=False)
    """The instructions for which it is alive; `None` for a constant that is part of a fusion."""

    @property
    def place(self) -> str:
        """The key that groups buffers: the innermost line of the user, or the layer; empty for captured constants and where XLA says neither."""
        return self.stack[0] if self.stack else self.layer

    @property
    def made_of(self) -> str:
        """Say how it is made of the argument that it names."""
        return "cast of" if self.part == "casts" else "copy of" if self.whole else "part of"

    @property
    def label(self) -> str:
        """Its type, what it is, and where it was made: ``float32[8,64] copy of model.kernel, model.py:7``."""
        what = f"{self.made_of} {self.name}" if self.name else self.operation
        return f"{self.shape} {what}" + (f", {self.place.rpartition('/')[2]}" if self.place else "")

    @property
    def group(self) -> tuple[str, bool, bool]:
        """The place, apart from captured constants, and without one what XLA inserted apart from the rest."""
        return self.place, self.kind == "constant", self.inserted and not self.place


@dataclass(frozen=True, slots=True)
class Memory(Split):
    """The memory of a compiled program, and the buffers live at its peak."""

    buffers: tuple[Buffer, ...] = ()
    """The largest first."""
    order: Order | None = field(default=None, compare=False)
    """All buffers with the time of each; `None` where this jaxlib does not give the program, so that there are totals only, with the constants unknown (0)."""

    @property
    def split(self) -> Split:
        """The totals alone."""
        return Split(**self.parts)

    @property
    def named(self) -> bool:
        """True if the buffers are known."""
        return self.order is not None

    @property
    def made(self) -> tuple[Buffer, ...]:
        """The buffers that are no arguments: those are what the program was handed."""
        return tuple(buffer for buffer in self.buffers if buffer.kind != "argument")

    def with_names(self, names: Sequence[str]) -> Memory:
        """The same, where each buffer says by name which of the program's flat arguments it is made of, as far as they have names."""
        return replace(self, buffers=tuple(_with_names(buffer, names) for buffer in self.buffers))


def _with_names(buffer: Buffer, names: Sequence[str]) -> Buffer:
    if not buffer.parameters:
        return buffer
    copied = [names[number] for number in buffer.parameters if number < len(names)]
    through = buffer.through if copied else ()
    return replace(buffer, name=copied[0] if copied else "", joined=tuple(copied[1:]), through=through)


def marked_as_added(after: Iterable[Buffer], before: Iterable[Buffer]) -> tuple[Buffer, ...]:
    """The buffers of a program, each marked that has no partner among those of the un-nested one."""
    unmatched = Counter((buffer.place, buffer.shape, buffer.name) for buffer in before)
    marked = []
    for buffer in after:
        key = (buffer.place, buffer.shape, buffer.name)
        marked.append(buffer if unmatched[key] else replace(buffer, added=True))
        unmatched[key] -= unmatched[key] > 0
    return tuple(marked)


@dataclass(frozen=True, slots=True)
class PeakLine:
    """One line of the user's at the peak: bytes of all buffers that were made there, those of arguments aside."""

    line: str
    """``path:line``, or the generated layer, or empty: see `Buffer.place`."""
    outer: tuple[str, ...]
    """The lines that called it for all of its large buffers."""
    inserted: bool
    """True if XLA inserted all buffers."""
    count: int
    """The number of buffers."""
    temporaries: int
    outputs: int
    constants: int
    un_nested: int
    """Bytes that the same line holds in the un-nested program."""

    @property
    def bytes(self) -> int:
        return self.temporaries + self.outputs + self.constants

    @property
    def group(self) -> tuple[str, bool, bool]:
        """The group of its buffers: `Buffer.group`."""
        return self.line, bool(self.constants), self.inserted and not self.line

    @classmethod
    def of(cls, group: Sequence[Buffer], un_nested: int) -> PeakLine:
        """The line that made a group of buffers."""
        size = Counter[str]()
        for buffer in group:
            size[buffer.kind] += buffer.bytes
        large = [buffer for buffer in group if buffer.bytes >= LARGE * size.total()]
        return cls(
            line=group[0].place,
            outer=tuple(
                line for line in (large[0].stack[1:] if large else ()) if all(line in buffer.stack for buffer in large)
            ),
            inserted=all(buffer.inserted for buffer in group),
            count=len(group),
            temporaries=size["temporary"],
            outputs=size["output"],
            constants=size["constant"],
            un_nested=un_nested,
        )


def by_line(after: Iterable[Buffer], before: Iterable[Buffer]) -> tuple[PeakLine, ...]:
    """All buffers by the line that made them, largest first; ``before`` are those of the un-nested program."""
    groups: dict[tuple[str, bool, bool], list[Buffer]] = {}
    for buffer in after:
        groups.setdefault(buffer.group, []).append(buffer)
    bytes_before = Counter[tuple[str, bool, bool]]()
    for buffer in before:
        bytes_before[buffer.group] += buffer.bytes
    lines = [PeakLine.of(group, bytes_before[key]) for key, group in groups.items()]
    return tuple(sorted(lines, key=lambda line: (-line.bytes, line.line)))


@dataclass(frozen=True, slots=True)
class Bound:
    """The expected peak of a nesting, and its budget."""

    expected: int
    budget: int
    multiple: str = ""
    """The multiple of the expected peak that is the budget, written ``2x``; empty where bytes are."""
    default: bool = False
    """True if nobody set a budget."""
    asked: str = ""
    """The budget in bytes that the user set; empty where he set none."""


PeakCause = Literal[
    "",
    "scan over references",
    "scan writes back",
    "scan writes back, checkpoint",
    "scan writes back, remat",
    "captured constant",
    "constant of the call",
    "mapped branch",
    "returned",
]
"""The cause of a peak, where it is known. A constant of the call is one that nothing outside of it keeps."""


@dataclass(frozen=True, slots=True)
class Figures:
    """The figures that a peak is judged by."""

    split: Split
    bound: Bound
    state: int
    """Bytes of one copy of the state."""
    devices: int
    cause: PeakCause


@dataclass(frozen=True, slots=True)
class Copies:
    """Bytes of copies of the state in a compiled program."""

    handed_back: int = 0
    """Bytes that the program holds since it hands values back unchanged."""
    returned: int = 0
    """Outputs that are state."""
    whole: bool = False
    """True if the program has a buffer that is a copy of a whole leaf."""

    @property
    def bytes(self) -> int:
        """The sum of both."""
        return self.handed_back + self.returned

    def hands_back(self, state: int) -> bool:
        """True if what the program hands back unchanged counts, for a state of so many bytes a device."""
        return self.handed_back >= least_copy(state, whole=self.whole)

    def returns(self, state: int) -> bool:
        """True if the outputs that are state count: each is a whole leaf."""
        return self.returned >= least_copy(state, whole=True)

    def count(self, state: int) -> bool:
        """True if either counts, or both together."""
        return self.hands_back(state) or self.returns(state) or self.bytes >= least_copy(state)


NO_COPIES = Copies()


@dataclass(frozen=True, slots=True)
class Captured:
    """An array that the call captures."""

    bytes: int
    type: str
    line: str = ""
    """The first line that uses it."""
    name: str = ""
    """The place that keeps it: a global, a closure."""
