"""From the observation of a nesting to its evidence: plain data that outlives the program, and crosses processes."""

from __future__ import annotations

from pytest_nnxcheck.compat.arrays import describe
from pytest_nnxcheck.core.facts import Evidence, Lost, Observation
from pytest_nnxcheck.core.peak import SHOWN, SHOWN_LINES, Bound, Memory, by_line, marked_as_added
from pytest_nnxcheck.invariants.donation import lost_leaves
from pytest_nnxcheck.subject.profile import Profile
from pytest_nnxcheck.subject.subject import Subject


def evidence(
    subject: Subject, facts: Profile, observation: Observation, limit: Bound | None, un_nested: Memory | None
) -> Evidence:
    """What reports keep of a nesting; ``un_nested`` is the memory of the un-nested program."""
    before = un_nested.made if un_nested else ()
    after = marked_as_added(observation.memory.made if observation.memory else (), before)
    return Evidence(
        split=observation.memory and observation.memory.split,
        expected=limit.expected if limit else None,
        un_nested=un_nested and un_nested.split,
        buffers=after[:SHOWN],
        places=by_line(after, before)[:SHOWN_LINES],
        captured=facts.captured[:SHOWN],
        leaks=observation.leaks,
        moves=lost_moves(observation),
        reusable=reusable(subject, facts, observation),
        targets=observation.targets,
    )


def un_nested_evidence(memory: Memory) -> Evidence:
    """Where the bytes of an un-nested program are."""
    lines = by_line(memory.made, memory.made)[:SHOWN_LINES]
    return Evidence(split=memory.split, un_nested=memory.split, buffers=memory.made[:SHOWN], places=lines)


def reusable(subject: Subject, facts: Profile, observation: Observation) -> tuple[str, ...]:
    """Inputs of a jit that were not donated, and whose type an output of the call has."""
    donated = {move.before.path for move in observation.moves}
    types = {describe(leaf) for leaf in facts.out}
    inputs = zip(subject.input_names, subject.inputs, strict=False)
    if observation.memory is None:
        return ()
    return tuple(name for name, leaf in inputs if name not in donated and describe(leaf) in types)


def lost_moves(observation: Observation) -> tuple[Lost, ...]:
    """The donated leaves that lost their buffer."""
    lost = {leaf.path for leaf in lost_leaves(observation)}
    moves = [move for move in observation.moves if move.before.path in lost]
    return tuple(
        Lost(move.before.path, str(move.before.type), str(move.after.type) if move.after else "") for move in moves
    )
