"""The HLO module of a compiled program, read from its serialized proto: instructions, shapes, frames.

Field numbers are those of ``xla/service/hlo.proto`` and ``xla/xla_data.proto``.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from pytest_nnxcheck.xla.protobuf import Message, fields, messages, number, numbers, raw, text

Position = tuple[int, tuple[int, ...]]
"""A value: the id of the instruction that gives it, and the index into that instruction's tuple shape."""

DTYPES = (
    "invalid bool int8 int16 int32 int64 uint8 uint16 uint32 uint64 float16 float32 float64 tuple opaque complex64 "
    "bfloat16 token complex128 float8_e5m2 float8_e4m3fn int4 uint4 float8_e4m3b11fnuz float8_e5m2fnuz "
    "float8_e4m3fnuz int2 uint2 float8_e4m3 float8_e3m4 int1 uint1 float4_e2m1fn float8_e8m0fnu"
).split()
"""XLA's ``PrimitiveType``, by number, in the names of jax."""


@dataclass(frozen=True, slots=True)
class Shape:
    """An array shape; ``order`` is the layout, minor to major, of the axes longer than one."""

    dtype: str
    dimensions: tuple[int, ...]
    order: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.dimensions))}]"

    @property
    def elements(self) -> int:
        """How many elements an array of this shape has."""
        return math.prod(self.dimensions)

    @property
    def size(self) -> int:
        """The bytes of an array of this shape."""
        return -(-self.elements * self.bits // 8)

    @property
    def bits(self) -> int:
        """The bits of an element: every dtype but bool says its own."""
        bits = re.search(r"\d+", self.dtype)
        return int(bits[0]) if bits else 8

    @classmethod
    @functools.lru_cache(maxsize=4096)
    def read(cls, data: bytes, index: tuple[int, ...]) -> Shape:
        """The shape at an index of a tuple shape. Raises `MalformedProto` or `IndexError`."""
        message = fields(data)
        for part in index:
            message = fields(raw({4: [message[4][part]]}, 4))
        kind, dimensions = number(message, 2), numbers(message, 3)
        order = numbers(fields(raw(message, 5)), 1)
        dtype = DTYPES[kind] if kind < len(DTYPES) else f"type{kind}"
        return cls(dtype, dimensions, tuple(axis for axis in order if dimensions[axis] != 1))


class Instruction(NamedTuple):
    """One instruction; shape and metadata stay serialized until somebody asks. A program has thousands, and a tuple is made in a third of the time."""

    id: int
    opcode: str
    computation: int
    operands: tuple[int, ...]
    called: tuple[int, ...]
    parameter: int
    tuple_index: int
    shape: bytes
    metadata: bytes

    @classmethod
    def read(cls, message: Message, computation: int) -> Instruction:
        """One ``HloInstructionProto``. Raises `MalformedProto`."""
        return cls(
            id=number(message, 35),
            opcode=text(message, 2),
            computation=computation,
            operands=numbers(message, 36),
            called=numbers(message, 38),
            parameter=number(message, 9),
            tuple_index=number(message, 13),
            shape=raw(message, 3),
            metadata=raw(message, 7),
        )


@dataclass(frozen=True, slots=True)
class Frame:
    """One frame of the Python stack that made an instruction."""

    path: str
    line: int
    function: str


@dataclass(frozen=True, slots=True)
class Module:
    """A compiled program: its instructions by id, and the root and the callers of each computation by its id."""

    instructions: dict[int, Instruction]
    roots: dict[int, int]
    callers: dict[int, list[Instruction]]
    entry: int
    frames: Message
    frames_read: dict[int, tuple[Frame, int]] = field(default_factory=dict, repr=False)
    """Frames that were read before, each with its parent's number, by its own."""
    frames_by_metadata: dict[bytes, list[Frame]] = field(default_factory=dict, repr=False)
    """The frames of instructions that were asked for, by their metadata, which many instructions share."""
    stacks: dict[bytes, list[Frame]] = field(default_factory=dict, repr=False)
    """Of these those that `origins.frames` has left of them."""
    plainest: dict[int, Instruction | None] = field(default_factory=dict, repr=False)
    """The instruction with the fewest frames, by the computation that was asked for."""
    subject: str | None = None
    """What frames of the subject's program are called, where the plugin staged the program: see `origins.labelled`."""

    @classmethod
    def read(cls, data: bytes, subject: str | None = None) -> Module:
        """One ``HloModuleProto``. Raises `MalformedProto`."""
        message = fields(data)
        computations = tuple(messages(message, 3))
        roots = {number(computation, 5): number(computation, 6) for computation in computations}
        read = [Instruction.read(op, number(parent, 5)) for parent in computations for op in messages(parent, 2)]
        callers: dict[int, list[Instruction]] = {}
        for instruction in read:
            for computation in instruction.called:
                callers.setdefault(computation, []).append(instruction)
        frames = fields(raw(message, 17))
        return cls({op.id: op for op in read}, roots, callers, number(message, 6), frames, subject=subject)

    def shape(self, position: Position) -> Shape:
        """The shape of a value. Raises `LookupError` or `MalformedProto`."""
        return Shape.read(self.instructions[position[0]].shape, position[1])

    def name(self, instruction: Instruction) -> str:
        """The name that jax gives, ``jit(f)/while/body/add``; empty where XLA inserted the instruction."""
        return text(fields(instruction.metadata), 2)

    def operation(self, instruction: Instruction) -> str:
        """The opcode; of a fusion or call, which says nothing, jax's own name or else what its result comes out of."""
        seen: set[int] = set()
        while instruction.opcode in ("fusion", "call") and instruction.id not in seen:
            seen.add(instruction.id)
            name = self.name(instruction).rpartition("/")[2]
            if name:
                return name
            instruction = self.instructions[self.roots[instruction.called[0]]]
        return instruction.opcode

    def frames_of(self, instruction: Instruction) -> list[Frame]:
        """The frames that made an instruction, innermost first: none where XLA inserted it."""
        key = instruction.metadata
        if key not in self.frames_by_metadata:
            metadata = fields(instruction.metadata)
            frames = list(self._frames(number(metadata, 15)))
            if not frames and number(metadata, 4):
                frames = [Frame(text(metadata, 3), number(metadata, 4), "")]
            self.frames_by_metadata[key] = frames
        return self.frames_by_metadata[key]

    def plainest_of(self, computation: int) -> Instruction | None:
        """The instruction of a computation with the fewest frames; `None` where no instruction of it has any."""
        if computation not in self.plainest:
            every = (op for op in self.instructions.values() if op.computation == computation)
            framed = filter(self.frames_of, every)
            self.plainest[computation] = min(framed, key=lambda op: len(self.frames_of(op)), default=None)
        return self.plainest[computation]

    def _frames(self, number: int) -> Iterator[Frame]:
        """Frames count from one and name their parent; zero ends."""
        every = self.frames.get(4, [])
        for _ in every:
            if not 0 < number <= len(every):
                return
            if number not in self.frames_read:
                self.frames_read[number] = self._frame(number)
            frame, number = self.frames_read[number]
            yield frame

    def _frame(self, at: int) -> tuple[Frame, int]:
        """One frame and the number of its parent. Raises `LookupError` or `MalformedProto`."""
        message = fields(raw({1: [self.frames[4][at - 1]]}, 1))
        location = fields(raw({1: [self.frames[3][number(message, 1) - 1]]}, 1))
        path = text({1: [self.frames[1][number(location, 1) - 1]]}, 1)
        function = text({1: [self.frames[2][number(location, 2) - 1]]}, 1)
        return Frame(path, number(location, 3), function), number(message, 2)


def aliases(module: bytes) -> dict[int, int]:
    """Flat output number to the number of the donated parameter whose buffer it takes, from a ``HloModuleProto``. Raises `MalformedProto`."""
    config = fields(raw(fields(module), 8))
    return {next(iter(numbers(entry, 1)), 0): number(entry, 2) for entry in messages(config, 1)}
