"""From the observation of a nesting to its evidence: plain data that outlives the program, and crosses processes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import fields, replace

from pytest_nnxcheck.compat.arrays import describe
from pytest_nnxcheck.core.evidence import SHOWN, Bound, Evidence, Growth, Held, Moved, Place, Residue, Split
from pytest_nnxcheck.core.observation import Buffer, Leak, Memory, Observation
from pytest_nnxcheck.invariants.donation import lost_leaves
from pytest_nnxcheck.subject.profile import Profile
from pytest_nnxcheck.subject.subject import Subject

PLACES = 40
"""Lines that are kept: the largest."""

LARGE = 0.05
"""Of a line's bytes: smaller buffers do not decide what called the line."""


def evidence(
    subject: Subject, facts: Profile, observation: Observation, limit: Bound | None, un_nested: Memory | None
) -> Evidence:
    """What an observation leaves to be told; buffers that are plain arguments are what the program was handed."""
    before = buffers(un_nested)
    after = added(buffers(observation.memory), before)
    return Evidence(
        split=split(observation.memory),
        expected=limit.expected if limit else None,
        un_nested=split(un_nested),
        buffers=after[:SHOWN],
        places=places(after, before)[:PLACES],
        captured=facts.captured[:SHOWN],
        leaks=left(observation).leaks,
        moves=lost_moves(observation),
        reusable=reusable(subject, facts, observation),
        targets=observation.targets,
    )


def un_nested_evidence(memory: Memory) -> Evidence:
    """Where the bytes of an un-nested program are."""
    every = buffers(memory)
    return Evidence(
        split=split(memory), un_nested=split(memory), buffers=every[:SHOWN], places=places(every, every)[:PLACES]
    )


def reusable(subject: Subject, facts: Profile, observation: Observation) -> tuple[str, ...]:
    """Inputs of a jit that were not donated, and whose type an output of the call has."""
    donated = {move.before.path for move in observation.moves}
    types = {describe(leaf) for leaf in facts.out}
    inputs = zip(subject.input_names, subject.inputs, strict=False)
    if observation.memory is None:
        return ()
    return tuple(name for name, leaf in inputs if name not in donated and describe(leaf) in types)


def left(observation: Observation) -> Evidence:
    """The evidence of a program of which nothing was measured."""
    return Evidence(leaks=tuple(map(residue, observation.leaks)))


def split(memory: Memory | None) -> Split | None:
    return memory.split if memory else None


def growth(layer: str, steps: int, short: Split, long: Split | None) -> Growth | None:
    """What a step adds, from the same program with so many steps and with twice as many."""
    if long is None:
        return None
    parts = {part.name: (getattr(long, part.name) - getattr(short, part.name)) // steps for part in fields(Split)}
    return Growth(layer, steps, Split(**parts))


def buffers(memory: Memory | None) -> tuple[Held, ...]:
    """The buffers at the peak that are no arguments, largest first."""
    every = memory.buffers if memory else ()
    return tuple(held(buffer, memory.names if memory else ()) for buffer in every if buffer.kind != "argument")


def held(buffer: Buffer, names: tuple[str, ...]) -> Held:
    copied = [names[number] for number in buffer.parameters if number < len(names)]
    return Held(
        bytes=buffer.bytes,
        shape=buffer.shape,
        kind=buffer.kind,
        operation=buffer.operation,
        stack=buffer.stack,
        name=copied[0] if copied else "",
        whole=buffer.whole,
        through=buffer.through if copied else (),
        joined=tuple(copied[1:]),
        layer=buffer.layer,
        inserted=buffer.inserted,
    )


def added(after: Iterable[Held], before: Iterable[Held]) -> tuple[Held, ...]:
    """The buffers of a program, each marked that has no partner among those of the un-nested one."""
    unmatched = Counter((buffer.place, buffer.shape, buffer.name) for buffer in before)
    marked = []
    for buffer in after:
        key = (buffer.place, buffer.shape, buffer.name)
        marked.append(buffer if unmatched[key] else replace(buffer, added=True))
        unmatched[key] -= unmatched[key] > 0
    return tuple(marked)


def places(after: Iterable[Held], before: Iterable[Held]) -> tuple[Place, ...]:
    """All buffers by the line that made them, largest first."""
    groups: dict[Group, list[Held]] = {}
    for buffer in after:
        groups.setdefault(_group(buffer), []).append(buffer)
    bytes_before: Counter[Group] = Counter()
    for buffer in before:
        bytes_before[_group(buffer)] += buffer.bytes
    by_line = [place(group, bytes_before[key]) for key, group in groups.items()]
    return tuple(sorted(by_line, key=lambda place: (-place.bytes, place.line)))


Group = tuple[str, bool, bool]
"""What buffers are grouped by: the line, apart from captured constants, and without one what XLA inserted apart from the rest."""


def _group(held: Held) -> Group:
    return held.place, held.kind == "constant", held.inserted and not held.place


def place(group: list[Held], un_nested: int) -> Place:
    size = Counter[str]()
    for buffer in group:
        size[buffer.kind] += buffer.bytes
    return Place(
        line=group[0].place,
        outer=outer([buffer for buffer in group if buffer.bytes >= LARGE * sum(size.values())]),
        inserted=all(buffer.inserted for buffer in group),
        count=len(group),
        temporaries=size["temporary"],
        outputs=size["output"],
        constants=size["constant"],
        un_nested=un_nested,
    )


def outer(group: list[Held]) -> tuple[str, ...]:
    """The lines that called this one for every one of these buffers."""
    return tuple(line for line in group[0].stack[1:] if all(line in buffer.stack for buffer in group)) if group else ()


def residue(leak: Leak) -> Residue:
    return Residue(leak.path, leak.holder, leak.kind, leak.type, leak.line, str(leak.layer) if leak.layer else "")


def lost_moves(observation: Observation) -> tuple[Moved, ...]:
    """The donated leaves that lost their buffer."""
    lost = {leaf.path for leaf in lost_leaves(observation)}
    moves = [move for move in observation.moves if move.before.path in lost]
    return tuple(
        Moved(move.before.path, str(move.before.type), str(move.after.type) if move.after else "") for move in moves
    )
