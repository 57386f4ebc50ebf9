"""The buffers at the peak of a compiled program: XLA's buffer assignment, read together with its HLO module.

The totals come from ``memory_analysis()``; captured constants, which no total counts reliably, from the buffer
assignment. jaxlib's own ``peak_memory_in_bytes`` leaves the temporaries out on CPU and is never used.
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from typing import Any

from pytest_nnxcheck.compat.staging import serialized_buffer_assignment, serialized_hlo_module
from pytest_nnxcheck.core.errors import CheckError
from pytest_nnxcheck.core.peak import Buffer, Memory, Split
from pytest_nnxcheck.xla import origins
from pytest_nnxcheck.xla.hlo import Module, Position, Shape
from pytest_nnxcheck.xla.origins import Origin
from pytest_nnxcheck.xla.protobuf import MalformedProto, Message, fields, messages, number, numbers, raw


def read(compiled: Any, subject: str | None = None) -> Memory:
    """Read the memory of a program that ``lowered.compile()`` returned. Raises `CheckError` if the backend gives no totals.

    ``subject`` is the label of a program that the plugin staged: see `subject.subject.labelled`.
    """
    totals = _totals(compiled)
    buffers = _buffers(*serialized_buffer_assignment(totals), serialized_hlo_module(compiled), subject)
    return Memory(
        *_sizes(totals),
        constants=sum(buffer.bytes for buffer in buffers or () if buffer.kind == "constant"),
        buffers=buffers or (),
        named=buffers is not None,
    )


def split_of(compiled: Any) -> Split:
    """The totals of a compiled program, without its constants. Raises `CheckError` if the backend gives none."""
    return Split(*_sizes(_totals(compiled)), constants=0)


def _totals(compiled: Any) -> Any:
    totals = compiled.memory_analysis()
    if totals is None:
        raise CheckError("this backend gives no memory analysis: leave 'memory' out of the invariants or run on CPU")
    return totals


def _sizes(totals: Any) -> tuple[int, int, int, int]:
    """Arguments, outputs, temporaries and aliased bytes, the first fields of a `Split`."""
    return (
        totals.argument_size_in_bytes,
        totals.output_size_in_bytes,
        totals.temp_size_in_bytes,
        totals.alias_size_in_bytes,
    )


FEWER = 8
"""A result that has this many times the elements of its operand is a broadcast, not a copy."""


@dataclass(frozen=True, slots=True)
class Slot:
    """A range of bytes in an allocation."""

    offset: int
    size: int
    values: tuple[Position, ...]
    """The values that live there, one after the other."""


@dataclass(frozen=True, slots=True)
class Allocation:
    """A piece of memory that XLA sets aside."""

    kind: str
    """One of argument, constant, output and temporary."""
    size: int
    parameter: int
    """The number of the parameter that an argument is."""
    slots: tuple[Slot, ...]


def _buffers(
    assignment: bytes | None, wrapped: bool, module: bytes | None, subject: str | None
) -> tuple[Buffer, ...] | None:
    """The buffers at the peak, largest first; `None` if they cannot be read. A ``wrapped`` assignment is part of another message."""
    if not assignment or not module:
        return None
    try:
        if wrapped:
            assignment = raw(fields(assignment), 3)
        reader = _Reader(Module.read(module, subject))
        placed = [buffer for allocation in _allocations(fields(assignment)) for buffer in reader.buffers(allocation)]
        return tuple(sorted((*placed, *reader.fused_constants()), key=lambda buffer: -buffer.bytes))
    except Exception:  # noqa: BLE001 - these formats are XLA's own: if they drift we lose the names, not the user's test
        return None


def _allocations(assignment: Message) -> Iterator[Allocation]:
    """The allocations of a ``BufferAssignmentProto``, without those on the threads' stacks. Raises `MalformedProto` or `LookupError`."""
    values = {
        number(buffer, 1): (number(place, 4), numbers(place, 3))
        for buffer in messages(assignment, 1)
        for place in messages(buffer, 3)
    }
    if not values:
        raise MalformedProto("a buffer assignment without buffers")
    # In this order: a donated parameter that an output takes over is an argument.
    flags = {5: "argument", 12: "constant", 7: "output"}
    for message in messages(assignment, 3):
        if not number(message, 3):
            kind = next((kind for field, kind in flags.items() if number(message, field)), "temporary")
            yield Allocation(kind, number(message, 2), number(message, 6), _slots(message, values))


def _slots(allocation: Message, values: dict[int, Position]) -> tuple[Slot, ...]:
    """The values of one ``BufferAllocationProto``, by the range they share."""
    ranges: dict[tuple[int, int], list[Position]] = {}
    for message in messages(allocation, 9):
        ranges.setdefault((number(message, 2), number(message, 3)), []).append(values[number(message, 1)])
    return tuple(Slot(offset, size, tuple(shared)) for (offset, size), shared in ranges.items())


def _at_peak(slots: Collection[Slot]) -> Iterator[Slot]:
    """Estimate the slots that are live together: the largest, then the next one that overlaps none before it, and so on.

    Newer XLA leaves out the trace of its heap, which says it exactly. The estimate is within 3 % of the temporaries.
    """
    taken: list[tuple[int, int]] = []
    for slot in sorted(slots, key=lambda slot: (-slot.size, slot.offset)):
        start, end = slot.offset, slot.offset + slot.size
        at = bisect(taken, (start, end))
        if not slot.size or (at and taken[at - 1][1] > start) or (at < len(taken) and taken[at][0] < end):
            continue
        taken.insert(at, (start, end))
        yield slot


class _Reader:
    """Reader of one module, which names its buffers."""

    def __init__(self, module: Module) -> None:
        self.module = module
        entry = (op for op in module.instructions.values() if op.computation == module.entry)
        self.parameters = {op.parameter: op for op in entry if op.opcode == "parameter"}
        self.results = frozenset(_results(module))

    def buffers(self, allocation: Allocation) -> Iterator[Buffer]:
        """The buffers of one allocation that are live at the peak. A tuple is a table of pointers, and no buffer here."""
        if allocation.kind == "argument":
            shape, parameters = self._shape(allocation.parameter), (allocation.parameter,)
            yield Buffer(allocation.size, str(shape), "argument", "parameter", parameters=parameters)
            return
        for slot in _at_peak(allocation.slots):
            values = tuple(value for value in slot.values if self.module.shape(value).dtype != "tuple")
            if values:
                yield self._buffer(values, slot.size, allocation.kind)

    def fused_constants(self) -> Iterator[Buffer]:
        """Constants that XLA wrote into a fusion, where no allocation counts them; a single number is part of the code."""
        every = self.module.instructions.values()
        fused = {computation for op in every if op.opcode == "fusion" for computation in op.called}
        for op in every:
            if op.opcode == "constant" and op.computation in fused:
                shape = self.module.shape((op.id, ()))
                if shape.elements > 1:
                    yield Buffer(shape.size, str(shape), "constant", "constant")

    def _buffer(self, values: tuple[Position, ...], size: int, kind: str) -> Buffer:
        """A slot as one buffer, named by the value in it that explains most: a copy of a whole parameter, or one with a line."""
        if kind == "output":
            values = tuple(value for value in values if value in self.results) or values
        origin_of = {value: origins.origin(self.module, value) for value in values}
        named = [self._named(value, size, kind, origin_of) for value in values]
        chosen = max(
            named, key=lambda buffer: (buffer.whole, not buffer.inserted, buffer.stack != (), buffer.layer != "")
        )
        large = [value for value in values if 2 * self.module.shape(value).size > size]
        return replace(chosen, broadcast=bool(large) and all(map(self._is_broadcast, large)))

    def _is_broadcast(self, value: Position) -> bool:
        """True if a value repeats far fewer elements, and computes nothing."""
        instruction = self.module.instructions[value[0]]
        for _ in self.module.instructions:
            match instruction.opcode:
                case "fusion" | "call":
                    instruction = self.module.instructions[self.module.roots[instruction.called[0]]]
                case "bitcast":
                    instruction = self.module.instructions[instruction.operands[0]]
                case _:
                    break
        if instruction.opcode != "broadcast":
            return False
        repeated = self.module.shape((instruction.operands[0], ()))
        return repeated.elements * FEWER <= self.module.shape(value).elements

    def _named(self, value: Position, size: int, kind: str, origin_of: dict[Position, Origin]) -> Buffer:
        shape, instruction = self.module.shape(value), self.module.instructions[value[0]]
        parameters = self._copied(value, origin_of)
        maker, inserted = origins.made(self.module, instruction)
        stack, layer = origins.place(self.module, maker)
        return Buffer(
            bytes=size,
            shape=str(shape),
            kind=kind,
            operation=self.module.operation(instruction),
            stack=stack,
            parameters=parameters,
            whole=bool(parameters) and shape.elements == self._elements(parameters),
            through=origin_of[value].operations if parameters else (),
            layer=layer,
            inserted=inserted,
        )

    def _copied(self, value: Position, origin_of: dict[Position, Origin]) -> tuple[int, ...]:
        """The parameters that a value is a copy of, in their dtype; none if that is ambiguous."""
        here, shape = origin_of[value], self.module.shape(value)
        parameters = tuple(sorted(here.parameters))
        # A value with fewer elements than its parameters together is one of them, or parts of several: nothing says which.
        if not here.copied or (len(parameters) > 1 and shape.elements != self._elements(parameters)):
            return ()
        # Slices of one parameter, joined: a reorder.
        if len(parameters) == 1 and "concatenate" in here.operations:
            return ()
        # A later value in the slot updates this one by a computation: the slot is no copy.
        if any(value in other.through and not other.copied for other in origin_of.values()):
            return ()
        return parameters if all(self._shape(parameter).dtype == shape.dtype for parameter in parameters) else ()

    def _shape(self, parameter: int) -> Shape:
        return self.module.shape((self.parameters[parameter].id, ()))

    def _elements(self, parameters: tuple[int, ...]) -> int:
        return sum(self._shape(parameter).elements for parameter in parameters)


def _results(module: Module) -> Iterator[Position]:
    """The positions at which the values that a program returns are defined."""
    root = module.instructions[module.roots[module.entry]]
    for operand in root.operands if root.opcode == "tuple" else (root.id,):
        yield _defined(module, (operand, ()))


def _defined(module: Module, at: Position) -> Position:
    """The position at which a value is defined. XLA gives no buffer to tuples, bitcasts and calls."""
    for _ in module.instructions:
        instruction, index = module.instructions[at[0]], at[1]
        match instruction.opcode:
            case "get-tuple-element":
                at = (instruction.operands[0], (instruction.tuple_index, *index))
            case "bitcast" | "optimization-barrier":
                at = (instruction.operands[0], index)
            case "tuple" if index:
                at = (instruction.operands[index[0]], index[1:])
            case "call":
                at = (module.roots[instruction.called[0]], index)
            case _:
                return at
    return at
