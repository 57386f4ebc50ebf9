"""From the observation of a nesting to its evidence: plain data that outlives the program, and crosses processes."""

from __future__ import annotations

from pytest_nnxcheck.buffers import Buffer, Memory
from pytest_nnxcheck.evidence import SHOWN, Evidence, Held, Moved, Residue, Split
from pytest_nnxcheck.invariants.memory import Bound
from pytest_nnxcheck.observe import Leak, Observation
from pytest_nnxcheck.pointers import Move
from pytest_nnxcheck.profile import Profile, describe
from pytest_nnxcheck.subject import Subject


def evidence(
    subject: Subject, facts: Profile, found: Observation, limit: Bound | None, un_nested: Memory | None
) -> Evidence:
    """What an observation leaves to be told; buffers that are plain arguments are what the program was handed."""
    names = (*found.parameters, *found.inputs)
    buffers = [buffer for buffer in found.memory.buffers if buffer.kind != "argument"] if found.memory else []
    return Evidence(
        split=split(found.memory),
        expected=limit.expected if limit else None,
        un_nested=split(un_nested),
        buffers=tuple(held(buffer, names) for buffer in buffers[:SHOWN]),
        leaks=tuple(residue(leak) for leak in found.leaks),
        moves=tuple(moved(move) for move in found.moves if not kept(move)),
        reusable=reusable(subject, facts, found),
    )


def reusable(subject: Subject, facts: Profile, found: Observation) -> tuple[str, ...]:
    """Inputs of a jit that were not donated, and whose type an output of the call has."""
    donated = {move.before.path for move in found.moves}
    types = {describe(leaf) for leaf in facts.out}
    inputs = zip(subject.input_names, subject.inputs, strict=False)
    return tuple(name for name, leaf in inputs if found.memory and name not in donated and describe(leaf) in types)


def split(memory: Memory | None) -> Split | None:
    if memory is None:
        return None
    return Split(memory.arguments, memory.outputs, memory.temporaries, memory.aliased, memory.constants)


def held(buffer: Buffer, names: tuple[str, ...]) -> Held:
    known = buffer.parameter is not None and buffer.parameter < len(names)
    return Held(
        bytes=buffer.bytes,
        shape=buffer.shape,
        kind=buffer.kind,
        operation=buffer.operation,
        stack=(buffer.source,) if buffer.source else (),
        name=names[buffer.parameter or 0] if known else "",
        whole=buffer.whole,
    )


def residue(leak: Leak) -> Residue:
    return Residue(leak.path, leak.holder, leak.kind, leak.type, leak.line, str(leak.layer) if leak.layer else "")


def moved(move: Move) -> Moved:
    return Moved(move.before.path, move.before.type, move.after.type if move.after else "", kept(move))


def kept(move: Move) -> bool:
    """Whether a donated leaf came back in the buffer that it had."""
    return move.after is not None and move.after.pointers == move.before.pointers
