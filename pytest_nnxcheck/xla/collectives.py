"""The operations between the devices of a program in one call, from its HLO: by kind their number and their bytes, those of loops in each step.

The number of a loop's steps is that which the compiler of a GPU writes beside it, or follows from its counter: it begins with a constant, and is compared
with another one. Between slices of TPUs the compiler turns an operation into a transfer of the runtime, which keeps its name.
"""

from __future__ import annotations

import functools
import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from pytest_nnxcheck.core.on_target import Collective, Network
from pytest_nnxcheck.xla.hlo import Instruction, MalformedProto, Module, Shape, fields, leaves, messages, numbers, text

__tracebackhide__ = True  # pytest shows the frames of the user, not these

KINDS = (
    "all-reduce",
    "all-gather",
    "reduce-scatter",
    "all-to-all",
    "ragged-all-to-all",
    "collective-permute",
    "collective-broadcast",
)
_START = "-start"
_SEND, _TRANSFER = "send", "_xla_megascale_transfer_type"
"""The opcode of a transfer between slices, and the attribute that has the kind of operation."""
_LITERALS = (4, 5, 6, 7)
"""Fields of a ``LiteralProto`` with integers of 32 and 64 bits."""
_WAITS = ("async-update", "async-done")
"""Opcodes that name a computation which another instruction has called."""


@dataclass(frozen=True, slots=True)
class Traffic:
    """The operations between the devices of a program, and whether it has loops."""

    collectives: tuple[Collective, ...] = ()
    loops: bool = True


def traffic(module: Module | None, *, slices: bool) -> Traffic:
    """Count the operations of a compiled program; ``slices`` if it is one of several slices of TPUs. Nothing without a program, or where its format has changed."""
    if module is None:
        return Traffic()
    steps = _Steps(module)
    try:
        found = tuple(_counted(steps, slices=slices))
    except (MalformedProto, LookupError, ValueError):
        return Traffic()
    return Traffic(found, any(op.opcode == "while" for op in module.instructions.values()))


def _counted(steps: _Steps, *, slices: bool) -> Iterator[Collective]:
    """The operations, each kind once for each network, those with the most bytes first."""
    counts, bytes_of = Counter[tuple[Network, str]](), Counter[tuple[Network, str]]()
    at_least, fused = set[tuple[Network, str]](), set[tuple[int, int]]()
    for op in steps.module.instructions.values():
        kind = _kind(steps.module, op)
        # The compiler of a TPU spreads one operation over several fusions, which overlap with other work: all use its channel.
        places = {(op.channel, caller.computation) for caller in steps.module.callers[op.computation] if _fuses(caller)}
        if not kind or places & fused:
            continue
        fused |= places
        times, known = steps.of(op.computation)
        key: tuple[Network, str] = ("dcn" if op.opcode == _SEND else "ici" if slices else "", kind)
        counts[key] += times
        bytes_of[key] += times * _bytes(steps.module, op)
        at_least |= set() if known else {key}
    for key, size in bytes_of.most_common():
        network, kind = key
        yield Collective(kind, counts[key], size, network, key in at_least)


def _kind(module: Module, op: Instruction) -> str:
    """The kind of an operation between devices; empty for any other instruction."""
    if op.opcode == _SEND:
        attributes = {text(entry, 1): text(entry, 2) for entry in messages(fields(op.detail), 1)}
        return attributes.get(_TRANSFER, "").lower().replace("_", "-")
    kind = op.opcode.removesuffix(_START)
    if kind not in KINDS:
        return ""
    # The compiler of a TPU writes a reduce-scatter as a fusion of an all-reduce and a slice.
    fused = any(map(_fuses, module.callers[op.computation]))
    return "reduce-scatter" if fused and kind == "all-reduce" else kind


def _fuses(caller: Instruction) -> bool:
    return caller.opcode == "fusion"


def _bytes(module: Module, op: Instruction) -> int:
    """The bytes of a device that take part: those of the operands or of the results, whichever are more."""
    results = [Shape.read(op.shape, index).size for index in leaves(op.shape)]
    if op.opcode == _SEND:
        return results[0]
    shapes = [module.instructions[id_].shape for id_ in op.operands]
    taken = sum(Shape.read(shape, index).size for shape in shapes for index in leaves(shape))
    # An operation that is started, to end later, has its operands among its results.
    return max(taken, sum(results) - (taken if op.opcode.endswith(_START) else 0))


class _Steps:
    """The number of times that each computation of a program runs, and whether it is known: once for a loop whose steps are not."""

    def __init__(self, module: Module) -> None:
        self.module = module
        self.of = functools.cache(self._of)

    def _of(self, computation: int) -> tuple[int, bool]:
        times, known = int(computation == self.module.entry), True
        for op in self.module.callers[computation]:
            if op.opcode in _WAITS:
                continue
            outer, sure = self.of(op.computation)
            steps = self._steps(op) if op.opcode == "while" else 1
            times, known = times + outer * (steps or 1), known and sure and steps is not None
        return times, known

    def _steps(self, loop: Instruction) -> int | None:
        """The number of steps of a loop; `None` where it is not known."""
        if loop.detail:
            count = json.loads(loop.detail).get("known_trip_count", {}).get("n")
            return None if count is None else int(count)
        roots = {id_: self.module.instructions[self.module.roots[id_]] for id_ in loop.called}
        condition = next((root for root in roots.values() if root.opcode == "compare"), None)
        body = next((root for root in roots.values() if root.opcode == "tuple"), None)
        if condition is None or body is None or condition.detail != b"LT":
            return None
        counter, bound = (self._source(id_) for id_ in condition.operands)
        first = self._source(loop.operands[0])
        if counter.opcode != "get-tuple-element" or first.opcode != "tuple":
            return None
        place = counter.tuple_index
        more = self._source(body.operands[place])
        start, end = _constant(self._source(first.operands[place])), _constant(bound)
        added = [_constant(self._source(id_)) for id_ in more.operands] if more.opcode == "add" else []
        step = next((number for number in added if number), None)
        return None if start is None or end is None or not step else max(0, -((start - end) // step))

    def _source(self, id_: int) -> Instruction:
        """The instruction whose value another one hands on."""
        op = self.module.instructions[id_]
        while op.opcode in ("copy", "bitcast"):
            op = self.module.instructions[op.operands[0]]
        return op


def _constant(op: Instruction) -> int | None:
    """The number that a constant is; `None` for any other instruction."""
    if op.opcode != "constant":
        return None
    literal = fields(op.detail)
    return next((number for field in _LITERALS for number in numbers(literal, field)), None)
