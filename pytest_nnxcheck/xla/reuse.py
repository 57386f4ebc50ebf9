"""The memory that the compiler of a GPU uses twice. It gives no assignment of buffers, so that its two rules are followed here.

1. An operation that takes an operand element by element writes its result into it, where the operand is as large and nobody takes it later. A result that a
   later operation must write into, as a loop does, has a buffer of its own.
2. The memory of an output is set aside before the program begins, and holds temporaries until the output is made; that of a donated argument does so from
   the last use of the argument on. The largest comes first, each goes into the smallest that has room and is free at that time. Of temporaries that are as
   large, the one that XLA's order of dependence has first.

They are those of ``xla/service/buffer_assignment.cc`` and of the fusions' hint in ``xla/backends/gpu``. The compiler of a TPU has no such rules at the effort
that it is asked for first: with either, its programs come out too small.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from pytest_nnxcheck.xla.hlo import Instruction, Module, Position, leaves, reached
from pytest_nnxcheck.xla.live_ranges import Held, LiveRanges

__tracebackhide__ = True  # pytest shows the frames of the user, not these

ELEMENTWISE = frozenset(
    "abs add and atan2 cbrt ceil clamp compare convert cosine divide erf exponential exponential-minus-one floor imag is-finite log log-plus-one"
    " logistic maximum minimum multiply negate not or popcnt power real remainder round-nearest-afz round-nearest-even rsqrt select shift-left"
    " shift-right-arithmetic shift-right-logical sign sine sqrt subtract tan tanh xor".split()
)
"""Opcodes whose result at an index needs the operands at that index alone."""


Slot = list[Held]
"""Values in the same memory, one after the other."""


def reused(ranges: LiveRanges, held: Iterable[Held]) -> Iterator[Held]:
    """The buffers of a program for a GPU: temporaries that are written over one another are one, and those in the memory of an output take none of their own."""
    held = list(held)
    at = dict[Position, Slot]()
    for each in held:
        slot = at.setdefault(ranges.buffer(each.values[0]), [])
        slot.append(each)
        at.update((ranges.buffer(value), slot) for value in each.values)
    becomes = _write_in_place(ranges, at)
    donated = {ranges.buffer((ranges.parameters[number].id, ())) for number in ranges.module.donated.values()}
    lent = (each for each in held if each.live.kind == "output" or ranges.buffer(each.values[0]) in donated)
    hosts = sorted(lent, key=lambda each: each.live.bytes)
    busy = {
        id(host): [(piece.start, piece.end) for piece in ranges.pieces[ranges.buffer(host.values[0])]] for host in hosts
    }
    first = _order_of_dependence(ranges)
    temporaries = {id(slot): slot for slot in at.values() if slot[0].live.kind == "temporary"}.values()

    def order(slot: Slot) -> tuple[int, int]:
        return -slot[0].live.bytes, min(first[id_] for each in slot for id_, _ in each.values)

    def has_room(host: Held, each: Held) -> bool:
        # What the output is written over ends with the instruction that makes the output.
        end = each.live.end - (becomes.get(id(each)) is host)
        taken = any(start <= end and each.live.start <= until for start, until in busy[id(host)])
        return host.live.bytes >= each.live.bytes and not taken

    yield from (each for each in held if each.live.kind != "temporary")
    for slot in sorted(temporaries, key=order):
        host = next((host for host in hosts if all(has_room(host, each) for each in slot)), None)
        if host is None:
            yield from slot
        else:
            busy[id(host)] += [(each.live.start, each.live.end) for each in slot]


def _write_in_place(ranges: LiveRanges, at: dict[Position, Slot]) -> dict[int, Held]:
    """Join the temporaries in ``at``, by buffer, that are written over one another; return the outputs that are written over one, by its id."""
    becomes = dict[int, Held]()
    for op in ranges.ran:
        now = ranges.when[op.id]
        for index in leaves(op.shape):
            slot = at.get(ranges.buffer((op.id, index)))
            if slot is None or ranges.made[ranges.buffer((op.id, index))] != [(op.id, index)]:
                continue
            new = slot[0]
            if new.live.kind == "argument":
                continue
            for number, operand in enumerate(op.operands):
                before = at.get(ranges.buffer((operand, ())))
                if before is None or before is slot:
                    continue
                old = before[-1]
                if old.live.kind != "temporary" or old.live.end != now or old.live.bytes != new.live.bytes:
                    continue
                if not _element_by_element(ranges.module, op, number):
                    continue
                if new.live.kind == "output":
                    becomes[id(old)] = new
                else:
                    before[-1] = Held(replace(new.live, start=old.live.start), (*old.values, *new.values))
                    at[ranges.buffer((op.id, index))] = before
                break
    return becomes


def _element_by_element(module: Module, op: Instruction, number: int) -> bool:
    """True if an instruction takes all elements of an operand each for the same element of its results."""
    if op.opcode != "fusion":
        return op.opcode in ELEMENTWISE
    parameter = module.parameters[op.called[0]][number]
    users = reached(parameter, lambda each: module.users.get(each.id, ()))
    return all(user.opcode in ELEMENTWISE or user.opcode in ("bitcast", "copy", "tuple") for user in users)


def _order_of_dependence(ranges: LiveRanges) -> dict[int, int]:
    """The number of each instruction that runs in an order in which its operands come first, as XLA searches them from the result on."""
    numbers = dict[int, int]()
    roots = dict.fromkeys(ranges.module.roots[op.computation] for op in ranges.ran)
    for root in (*roots, *ranges.when):
        ahead = [root]
        while ahead:
            id_ = ahead[-1]
            before = [each for each in ranges.module.instructions[id_].operands if each not in numbers]
            if id_ in numbers or not before:
                numbers.setdefault(ahead.pop(), len(numbers))
            else:
                ahead.append(before[0])
    return numbers
