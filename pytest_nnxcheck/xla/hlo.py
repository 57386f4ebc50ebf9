"""The HLO module of a compiled program, read from its serialized proto: instructions, shapes, frames.

The first half reads the wire format of protobuf without a library: one message at a time, its nested messages still serialized. Unknown fields are
kept, so that a new field in a new jaxlib costs nothing. Field numbers are those of ``xla/service/hlo.proto`` and ``xla/xla_data.proto``.
"""

from __future__ import annotations

import functools
import math
import re
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from pytest_nnxcheck.compat.owner import Owner, of_file
from pytest_nnxcheck.compat.staging import serialized_hlo_module

Message = dict[int, list["int | bytes"]]
"""Field number to the values of that field, in the order of the wire."""

_FIXED = {1: 8, 5: 4}

_GROUPS = (3, 4, 6, 7)


class MalformedProto(ValueError):
    """The bytes are no message of the kind that was expected."""


def varint(data: bytes, at: int) -> tuple[int, int]:
    """The number that starts at an offset, and the offset after it. Raises `MalformedProto`."""
    number, shift, end = 0, 0, min(len(data), at + 10)
    while at < end:
        byte = data[at]
        at += 1
        if byte < 0x80:
            return number | byte << shift, at
        number |= (byte & 0x7F) << shift
        shift += 7
    raise MalformedProto("a number has no end")


def fields(data: bytes) -> Message:
    """One message, its nested messages still serialized. Raises `MalformedProto`."""
    at, end, message = 0, len(data), Message()
    while at < end:
        # Most numbers are one byte long, and a call for each would double the time.
        key, at = (data[at], at + 1) if data[at] < 0x80 else varint(data, at)
        kind = key & 7
        value: int | bytes
        if kind in _FIXED:
            size = _FIXED[kind]
        else:
            size, at = (data[at], at + 1) if at < end and data[at] < 0x80 else varint(data, at)
        if kind == 0:
            value = size
        else:
            value, at = data[at : at + size], at + size
        if at > end or kind in _GROUPS:
            raise MalformedProto("a field reaches past the end")
        if (key := key >> 3) in message:
            message[key].append(value)
        else:
            message[key] = [value]
    return message


def number(message: Message, field: int) -> int:
    """A number, the last one given as protobuf has it, 0 where there is none. Raises `MalformedProto`."""
    value = message[field][-1] if field in message else 0
    if not isinstance(value, int):
        raise MalformedProto(f"field {field} is not a number")
    return value


def raw(message: Message, field: int) -> bytes:
    """A nested message, still serialized; an empty one where there is none. Raises `MalformedProto`."""
    return embedded(message[field][-1]) if field in message else b""


def embedded(value: int | bytes) -> bytes:
    """A value that is a nested message, still serialized, or a string. Raises `MalformedProto` for a number."""
    if isinstance(value, int):
        raise MalformedProto("a number in place of a message")
    return value


def text(message: Message, field: int) -> str:
    """A string. Raises `MalformedProto`."""
    return raw(message, field).decode(errors="replace")


def messages(message: Message, field: int) -> Iterator[Message]:
    """Nested messages, read. Raises `MalformedProto`."""
    for value in message.get(field, ()):
        yield fields(embedded(value))


def numbers(message: Message, field: int) -> tuple[int, ...]:
    """Repeated numbers, packed or not. Raises `MalformedProto`."""
    values: list[int] = []
    for value in message.get(field, ()):
        if isinstance(value, int):
            values.append(value)
            continue
        at = 0
        while at < len(value):
            item, at = varint(value, at)
            values.append(item)
    return tuple(values)


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
    """An array shape."""

    dtype: str
    dimensions: tuple[int, ...]
    order: tuple[int, ...]
    """The layout, minor to major, of the axes longer than one."""
    padded: int = 0
    """The number of elements that there is room for: a TPU fills up the tiles of its layout."""
    elsewhere: bool = False
    """True if the array is not in the device's main memory, but in a fast one beside it or on the host."""

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.dimensions))}]"

    @property
    def elements(self) -> int:
        """The number of elements of an array of this shape."""
        return math.prod(self.dimensions)

    @property
    def size(self) -> int:
        """The bytes of an array of this shape, without padding."""
        return -(-self.elements * self.bits // 8)

    @property
    def room(self) -> int:
        """The bytes that an array of this shape takes in the device's main memory."""
        return 0 if self.elsewhere else -(-self.padded * self.bits // 8)

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
            message = fields(embedded(message[4][part]))
        kind, dimensions = number(message, 2), numbers(message, 3)
        layout = fields(raw(message, 5))
        dtype = DTYPES[kind] if kind < len(DTYPES) else f"type{kind}"
        tile = next((numbers(tile, 1) for tile in messages(layout, 6)), ())
        return cls(
            dtype,
            dimensions,
            order=tuple(axis for axis in numbers(layout, 1) if dimensions[axis] != 1),
            padded=_padded(dimensions, numbers(layout, 1), tile),
            elsewhere=number(layout, 8) != 0,
        )


def _padded(dimensions: Sequence[int], order: Sequence[int], tile: Sequence[int]) -> int:
    """The elements of an array whose last axes, those that are minor in memory, are filled up to a tile."""
    sizes = [dimensions[axis] for axis in order]
    for at, part in enumerate(reversed(tile)):
        if at < len(sizes) and part > 0:  # a negative part joins axes, and pads none
            sizes[at] = -(-sizes[at] // part) * part
    return math.prod(sizes) if order else math.prod(dimensions)


@functools.lru_cache(maxsize=4096)
def leaves(shape: bytes) -> tuple[tuple[int, ...], ...]:
    """The indices of the arrays in a shape: ``((),)`` for that of an array. Raises `MalformedProto`."""
    message = fields(shape)
    if DTYPES[number(message, 2)] != "tuple":
        return ((),)
    parts = enumerate(message.get(4, ()))
    return tuple((at, *index) for at, part in parts for index in leaves(embedded(part)))


_DETAIL = {"constant": 8, "custom-call": 28, "while": 43, "compare": 63, "send": 68}
"""One more field of an instruction, by opcode: a literal, the function that is called, the configuration for the compiler, the direction, attributes of the runtime."""
_LONGEST_DETAIL = 2**16


class Instruction(NamedTuple):
    """One instruction of a program.

    A program has thousands. A tuple is made in a third of the time of a dataclass, and shape and metadata stay serialized until they are needed.
    """

    id: int
    opcode: str
    computation: int
    operands: tuple[int, ...]
    called: tuple[int, ...]
    parameter: int
    tuple_index: int
    shape: bytes
    metadata: bytes
    aliases: tuple[tuple[tuple[int, ...], Position], ...] = ()
    """The outputs of a custom call or fusion, by index, that are written in place of an operand: its number and index."""
    detail: bytes = b""
    """One more field, for a few opcodes: see `_DETAIL`."""
    channel: int = 0
    """The number of the channel between devices that it uses; 0 for none."""

    @classmethod
    def read(cls, message: Message, computation: int) -> Instruction:
        """One ``HloInstructionProto``. Raises `MalformedProto`."""
        opcode = text(message, 2)
        detail = raw(message, _DETAIL[opcode]) if opcode in _DETAIL else b""
        return cls(
            id=number(message, 35),
            opcode=opcode,
            computation=computation,
            operands=numbers(message, 36),
            called=numbers(message, 38),
            parameter=number(message, 9),
            tuple_index=number(message, 13),
            shape=raw(message, 3),
            metadata=raw(message, 7),
            aliases=()
            if 74 not in message
            else tuple((numbers(alias, 1), (number(alias, 2), numbers(alias, 3))) for alias in messages(message, 74)),
            detail=detail if len(detail) <= _LONGEST_DETAIL else b"",  # a captured array
            channel=number(message, 26) if 26 in message else 0,
        )


@dataclass(frozen=True, slots=True)
class Frame:
    """One frame of the Python stack that made an instruction."""

    path: str
    line: int
    function: str

    @property
    def owner(self) -> Owner:
        """The owner of its file. Frames further out than ours called the plugin, and made nothing of the program."""
        return of_file(self.path)


@dataclass(frozen=True, slots=True)
class Module:
    """A compiled program."""

    instructions: dict[int, Instruction]
    """The instructions by id."""
    roots: dict[int, int]
    """The id of the root instruction, by computation."""
    callers: dict[int, list[Instruction]]
    """The instructions that call a computation, by its id."""
    users: dict[int, list[Instruction]]
    """The instructions that take an instruction, by its id."""
    entry: int
    """The computation that the program begins with."""
    frames: list[tuple[Frame, int]]
    """Each frame, and the number of the one that called it: numbers begin at one, and the outermost frame has parent zero."""
    schedule: dict[int, tuple[int, ...]]
    """The ids of the instructions of a computation in the order in which they run."""
    donated: dict[int, int]
    """The entry parameter whose buffer an output takes, by the numbers of both."""
    parameters: dict[int, dict[int, Instruction]]
    """The parameters of each computation, by its id and their number."""
    stacks: dict[bytes, list[Frame]] = field(default_factory=dict, repr=False)
    """Cache of `frames_of`, by metadata, which many instructions share."""
    plainest: dict[int, Instruction | None] = field(default_factory=dict, repr=False)
    """Cache of `plainest_of`, by computation."""
    subject: str | None = None
    """The name of the frames of the subject's program, if the plugin staged it: see `subject.subject.labelled`."""

    @classmethod
    def read(cls, data: bytes, subject: str | None = None) -> Module:
        """One ``HloModuleProto``. Raises `MalformedProto`."""
        message = fields(data)
        computations = tuple(messages(message, 3))
        roots = {number(computation, 5): number(computation, 6) for computation in computations}
        read = [Instruction.read(op, number(parent, 5)) for parent in computations for op in messages(parent, 2)]
        order = messages(fields(raw(message, 7)), 1)
        schedule = {number(entry, 1): numbers(fields(raw(entry, 2)), 1) for entry in order}
        callers, users = defaultdict[int, list[Instruction]](list), defaultdict[int, list[Instruction]](list)
        parameters = defaultdict[int, dict[int, Instruction]](dict)
        for instruction in read:
            if instruction.opcode == "parameter":
                parameters[instruction.computation][instruction.parameter] = instruction
            for computation in instruction.called:
                callers[computation].append(instruction)
            for operand in instruction.operands:
                users[operand].append(instruction)
        frames = _frames(fields(raw(message, 17)))
        donated = _aliases(message)
        by_id = {op.id: op for op in read}
        return cls(
            by_id, roots, callers, users, number(message, 6), frames, schedule, donated, parameters, subject=subject
        )

    def shape(self, position: Position) -> Shape:
        """The shape of a value. Raises `LookupError` or `MalformedProto`."""
        return Shape.read(self.instructions[position[0]].shape, position[1])

    def name(self, instruction: Instruction) -> str:
        """The name that jax gives, ``jit(f)/while/body/add``; empty if XLA inserted the instruction."""
        return text(fields(instruction.metadata), 2)

    def operation(self, instruction: Instruction) -> str:
        """The opcode. For a fusion or a call the name that jax gives, or else the operation of its root."""
        seen: set[int] = set()
        while instruction.opcode in ("fusion", "call") and instruction.id not in seen:
            seen.add(instruction.id)
            name = self.name(instruction).rpartition("/")[2]
            if name:
                return name
            instruction = self.instructions[self.roots[instruction.called[0]]]
        return instruction.opcode

    def frames_of(self, instruction: Instruction) -> list[Frame]:
        """The frames that made an instruction, innermost first; none if XLA inserted it."""
        key = instruction.metadata
        if key not in self.stacks:
            metadata = fields(key)
            stack, at = list[Frame](), number(metadata, 15)
            while 0 < at <= len(self.frames) and len(stack) < len(self.frames):
                frame, at = self.frames[at - 1]
                stack.append(frame)
            if not stack and number(metadata, 4):
                stack = [Frame(text(metadata, 3), number(metadata, 4), "")]
            self.stacks[key] = stack
        return self.stacks[key]

    def plainest_of(self, computation: int) -> Instruction | None:
        """The instruction of a computation with the fewest frames; `None` if none has any."""
        if computation not in self.plainest:
            every = (op for op in self.instructions.values() if op.computation == computation)
            framed = filter(self.frames_of, every)
            self.plainest[computation] = min(framed, key=lambda op: len(self.frames_of(op)), default=None)
        return self.plainest[computation]


def reached(start: Instruction, steps: Callable[[Instruction], Iterable[Instruction]]) -> Iterator[Instruction]:
    """The instructions that steps from one lead to, nearest first, each once."""
    ahead, seen = deque([start]), {start.id}
    while ahead:
        for op in steps(ahead.popleft()):
            if op.id not in seen:
                seen.add(op.id)
                ahead.append(op)
                yield op


def _frames(index: Message) -> list[tuple[Frame, int]]:
    """The frames of a ``StackFrameIndexProto``. Raises `LookupError` or `MalformedProto`."""
    paths, functions = ([embedded(name).decode(errors="replace") for name in index.get(field, ())] for field in (1, 2))
    locations = [
        Frame(paths[number(location, 1) - 1], number(location, 3), functions[number(location, 2) - 1])
        for location in messages(index, 3)
    ]
    return [(locations[number(frame, 1) - 1], number(frame, 2)) for frame in messages(index, 4)]


def module_of(compiled: Any) -> Module | None:
    """Read a compiled program; `None` where its compiler does not give it, or its format has changed."""
    data = serialized_hlo_module(compiled)
    try:
        return None if data is None else Module.read(data)
    except (MalformedProto, LookupError):
        return None


def aliases(compiled: Any) -> dict[int, int] | None:
    """Map each output of a compiled program to the donated parameter whose buffer it takes, both by their flat numbers; `None` where its compiler does not tell.

    Raises `MalformedProto`.
    """
    module = serialized_hlo_module(compiled)
    if module is None:
        return None
    return _aliases(fields(module))


def _aliases(module: Message) -> dict[int, int]:
    """The aliases of a ``HloModuleProto``: those of `aliases`. Raises `MalformedProto`."""
    entries = messages(fields(raw(module, 8)), 1)
    return {next(iter(numbers(entry, 1)), 0): number(entry, 2) for entry in entries}
