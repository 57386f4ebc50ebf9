"""The live range of each buffer of a program, in the order of its schedule.

XLA runs the instructions of a program in the order of its schedule. A buffer is alive from the instruction that makes a value in it to the last one
that takes that value. Before the next value is made there it is free, as the carry of a loop is between its last use and its new value. The computations of loops and branches are laid out where they are called, so that a loop is one of its steps.

Which values share a buffer follows from what their instructions do: a tuple holds what it is made of, a loop hands its carry from step to step, an
update of a slice is written in place. That is XLA's own alias analysis. Where a buffer may take over another that ends there is XLA's choice, which
its compilers make differently: on the CPU the buffer assignment says it, elsewhere it is not known.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from pytest_nnxcheck.core.peak import Live
from pytest_nnxcheck.xla.hlo import Instruction, Module, Position, leaves

__tracebackhide__ = True  # pytest shows the frames of the user, not these

CALLS = frozenset({"while", "call", "conditional", "async-start"})
"""Opcodes whose computations run as instructions of the program. Those of a fusion or a reduction are part of one instruction."""

VIEWS = frozenset(
    {"tuple", "get-tuple-element", "bitcast", "optimization-barrier", "copy-done", "async-update", "async-done", *CALLS}
)
"""Opcodes that make no value, and hand on others."""

DROPPED = frozenset({"tuple", "get-tuple-element", "bitcast"})
"""Views that XLA drops: no buffer is alive for their sake."""

SHOWN = DROPPED | {"optimization-barrier", "call"}
"""Views of one value."""

IN_PLACE = frozenset({"dynamic-update-slice", "scatter"})
"""Opcodes that write into their first operand."""


@dataclass(slots=True)
class Range:
    """The instructions from the first to the last for which a value is alive, by their numbers in program order."""

    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Held:
    """Memory while values are in it, from the first to the last."""

    live: Live
    values: tuple[Position, ...]
    """The values, one after the other."""


class LiveRanges:
    """The ranges of all values of a program; values that share a buffer share their range."""

    def __init__(self, module: Module) -> None:
        self.module = module
        self.when: dict[int, int] = {}
        """The number in program order of each instruction that runs, by id."""
        self.loops: list[tuple[int, int]] = []
        """The first and the last number of each loop's step."""
        self._passed_at: dict[int, list[Position]] = {}
        """The values that computations are called with, by the number of their first instruction."""
        self._shared: dict[Position, Position] = {}
        self._lay_out(module.entry)
        self.ran = [module.instructions[id_] for id_ in self.when]
        self.parameters = module.parameters.get(module.entry, {})
        for op in self.ran:
            for index in leaves(op.shape):
                for other in self._same(op, index):
                    self._join((op.id, index), other)
        for output, parameter in module.donated.items():
            self._join(self.results[output], (self.parameters[parameter].id, ()))
        self.made = dict[Position, list[Position]]()
        """The values that are made in each buffer, in program order, by the name of the buffer: see `buffer`."""
        self.pieces = self._read_pieces()
        """The ranges in which each buffer holds a value that somebody still takes, in order, by the name of the buffer."""

    @functools.cached_property
    def _readers(self) -> dict[Position, list[Instruction]]:
        """The instructions that read each buffer, views aside, by the name of the buffer."""
        found = dict[Position, list[Instruction]]()
        for op in self.ran:
            read = () if op.opcode in VIEWS else op.operands
            parts = ((id_, index) for id_ in read for index in leaves(self.module.instructions[id_].shape))
            for buffer in dict.fromkeys(map(self.buffer, parts)):
                found.setdefault(buffer, []).append(op)
        return found

    def readers(self, value: Position) -> Sequence[Instruction]:
        """The instructions that read the buffer of a value, views aside."""
        return self._readers.get(self.buffer(value), ())

    def range_of(self, value: Position) -> Range | None:
        """The range of the buffer that a value is in; `None` for a value that nothing makes while the program runs."""
        pieces = self.pieces.get(self.buffer(value))
        return None if pieces is None else Range(pieces[0].start, pieces[-1].end)

    def _read_pieces(self) -> dict[Position, list[Range]]:
        entry = (self.buffer((op.id, index)) for op in self.parameters.values() for index in leaves(op.shape))
        pieces = {buffer: [Range(0, 0)] for buffer in entry}

        def hold(taken: Iterable[Position], now: int) -> None:
            for value in taken:
                if (held := pieces.get(self.buffer(value))) is not None:
                    held[-1].end = max(held[-1].end, now)

        for op in self.ran:
            now = self.when[op.id]
            hold(self._passed_at.get(now, ()), now)
            hold(() if op.opcode in DROPPED else self._taken(op), now)
            makes = op.opcode not in VIEWS and (op.opcode != "parameter" or op.computation == self.module.entry)
            for index in leaves(op.shape) if makes else ():
                buffer = self.buffer((op.id, index))
                self.made.setdefault(buffer, []).append((op.id, index))
                held = pieces.setdefault(buffer, [Range(now, now)])
                if op.opcode == "parameter" or held[-1].end >= now - 1:
                    held[-1].end = max(held[-1].end, now)
                else:
                    held.append(Range(now, now))
        hold(self.results, len(self.when))
        return pieces

    def _taken(self, op: Instruction) -> Iterator[Position]:
        """The values that an instruction takes, and those that the computations which it calls end with."""
        roots = (self.module.roots[called] for called in op.called) if op.opcode in CALLS else ()
        for id_ in (*op.operands, *roots):
            for index in leaves(self.module.instructions[id_].shape):
                yield id_, index

    @functools.cached_property
    def results(self) -> list[Position]:
        """The values that the program returns, in order, where they are made."""
        root = self.module.instructions[self.module.roots[self.module.entry]]
        return [self.origin((root.id, index)) for index in leaves(root.shape)]

    def origin(self, value: Position) -> Position:
        """The value that a view shows, which is made by no view."""
        for _ in self.module.instructions:
            op = self.module.instructions[value[0]]
            if op.opcode not in SHOWN:
                return value
            value = next(self._same(op, value[1]))
        return value

    def _lay_out(self, computation: int) -> None:
        """Number the instructions of a computation, and before each those of the computations that it calls."""
        for id_ in self.module.schedule.get(computation, ()):
            op, begin = self.module.instructions[id_], len(self.when)
            if op.opcode in CALLS:
                passed = ((id_, index) for id_ in op.operands for index in leaves(self.module.instructions[id_].shape))
                self._passed_at.setdefault(begin, []).extend(passed)
                for called in op.called:
                    self._lay_out(called)
            if op.opcode == "while":
                self.loops.append((begin, len(self.when)))
            self.when.setdefault(id_, len(self.when))

    def _same(self, op: Instruction, index: tuple[int, ...]) -> Iterator[Position]:
        """Other values that are in the buffer of a value."""
        module = self.module
        yield from ((op.operands[number], part) for output, (number, part) in op.aliases if output == index)
        match op.opcode, index:
            case "get-tuple-element", _:
                yield op.operands[0], (op.tuple_index, *index)
            case "tuple", (at, *rest):
                yield op.operands[at], tuple(rest)
            case "bitcast" | "optimization-barrier" | "async-update", _:
                yield op.operands[0], index
            case "call" | "conditional", _:
                yield from ((module.roots[called], index) for called in op.called)
            case "while", _:
                yield op.operands[0], index
                yield module.roots[op.called[0]], index
            case "parameter", _ if op.computation != module.entry:
                yield from self._passed(op, index)
            case opcode, _ if opcode in IN_PLACE:
                yield op.operands[index[0] if index else 0], ()
            case "fusion", _:
                yield from self._updated(op, index)
            case _:
                yield from self._asynchronous(op, index)

    def _asynchronous(self, op: Instruction, index: tuple[int, ...]) -> Iterator[Position]:
        """The same for an operation in two instructions, which other work may run between. The first gives operands and results together."""
        match op.opcode, index:
            case "copy-start", (1,):  # (the copy, what is copied, ...)
                yield op.operands[0], ()
            case "copy-done", _:
                yield op.operands[0], (0,)
            case "async-start", (0, number, *rest):  # (operands, results, ...)
                yield op.operands[number], tuple(rest)
            case "async-start", (1, *rest):
                yield self.module.roots[op.called[0]], tuple(rest)
            case "async-done", _:
                yield op.operands[0], (1, *index)

    def _passed(self, parameter: Instruction, index: tuple[int, ...]) -> Iterator[Position]:
        """The values that the callers of a computation pass to its parameter."""
        for caller in self.module.callers.get(parameter.computation, ()):
            match caller.opcode:
                case "while":
                    yield caller.id, index
                case "conditional":
                    yield caller.operands[1 + caller.called.index(parameter.computation)], index
                case _:
                    yield caller.operands[parameter.parameter], index

    def _updated(self, fusion: Instruction, index: tuple[int, ...]) -> Iterator[Position]:
        """The operand of a fusion that it writes a part of, in place, to give one of its values."""
        instructions = self.module.instructions
        op = instructions[self.module.roots[fusion.called[0]]]
        if op.opcode == "tuple" and index:
            op = instructions[op.operands[index[0]]]
        written = False
        while op.opcode in IN_PLACE or op.opcode == "bitcast":
            written = written or op.opcode in IN_PLACE
            op = instructions[op.operands[0]]
        if written and op.opcode == "parameter":
            yield fusion.operands[op.parameter], ()

    def buffer(self, value: Position) -> Position:
        """The name of the buffer of a value: one of the values that share it."""
        while (other := self._shared.get(value)) is not None:
            self._shared[value] = above = self._shared.get(other, other)  # halve the way for the next who asks
            value = above
        return value

    def _join(self, one: Position, other: Position) -> None:
        one, other = self.buffer(one), self.buffer(other)
        if one != other:
            self._shared[one] = other
