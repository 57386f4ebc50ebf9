"""Every donated buffer is reused for the new value of its leaf, shard by shard."""

from __future__ import annotations

from pytest_nnxcheck.core.facts import ArrayType, Leaf, Observation
from pytest_nnxcheck.core.notes import BufferRetyped, Fact, Note, Place
from pytest_nnxcheck.core.outcome import (
    Finding,
    LossCause,
    LostBuffer,
    LostOnTarget,
    Orphaned,
    SharedBuffer,
    UpdateDropped,
    ViewedBuffer,
    Violation,
)
from pytest_nnxcheck.invariants.case import Case, Judgement, Written
from pytest_nnxcheck.xla.pointers import resharded, spec, spread, without_successor


def judge(case: Case) -> Judgement:
    """What donation breaks: that of the generated jit, or, of the un-nested call, that of its own."""
    measured = case.observation.moves or case.written.dropped
    findings = of_program(case) if measured else of_jits_inside(case)
    findings += tuple(LostOnTarget(on.lost[0], on=on) for on in case.observation.targets if on.lost)
    return Judgement((Violation("donation", findings=findings),) if findings else ())


def of_program(case: Case) -> tuple[Finding, ...]:
    """Donated leaves that lost their buffer, and those that cannot be donated: in a buffer of another leaf, or of a view."""
    observation, call = case.observation, case.written
    donated = {move.before.path for move in observation.moves}
    after = {move.before.path: move.after for move in observation.moves}
    return (
        *(finding for one, two in case.originals.shared if (finding := sharing(one, two, donated, call))),
        *(ViewedBuffer(leaf, holder=holder) for holder, leaf in case.originals.views if leaf in donated),
        *(lost_buffer(leaf, after[leaf.path], case) for leaf in lost_leaves(observation)),
        *map(UpdateDropped, call.dropped),
    )


def of_jits_inside(case: Case) -> tuple[Finding, ...]:
    """Leaves whose array a jit of the call's own takes away from them, since it donates another leaf that has the same: a target network's."""
    inside = case.observation.inside
    return (
        *(
            SharedBuffer(one, other=two, twice=pair <= inside.consumed, inside=True)
            for one, two in case.originals.shared
            if takes_away(pair := {one, two}, case)
        ),
        *(Orphaned(path, other=other) for path, other in inside.orphans),
    )


def takes_away(pair: set[str], case: Case) -> bool:
    """Whether a jit of the call's own donates one of two leaves in one buffer, and the other one, or its holder, goes on with it."""
    others = pair - case.observation.inside.consumed
    return len(others) < len(pair) and not others & case.written.renewed


def sharing(one: str, two: str, donated: set[str], call: Written) -> SharedBuffer | None:
    """Two leaves in one buffer, where XLA refuses the program: both donated, or one donated and the other one used beside it."""
    if {one, two} <= donated or not call.inputs & {one, two}:
        return SharedBuffer(one, other=two, twice=True)
    # A leaf that the call leaves alone is donated by the generated jit only.
    return SharedBuffer(one, other=two, twice=False) if {one, two} & donated & call.changed else None


def lost_leaves(observation: Observation) -> tuple[Leaf, ...]:
    """The donated leaves to name for the buffers that were lost."""
    before = [move.before for move in observation.moves]
    after = {move.before.path: move.after for move in observation.moves if move.after}
    return without_successor(before, after, observation.reused)


def lost_buffer(before: Leaf, after: Leaf | None, case: Case) -> LostBuffer:
    """What became of a donated leaf that lost its buffer."""
    if after is None:
        return LostBuffer(before.path, type=before.type, cause="not returned")
    return LostBuffer(
        before.path,
        type=before.type,
        cause=cause(before, after, case.observation),
        new=as_called(after, before, case.observation),
        output=before.path != after.path,
        shardings=(spec(before.sharding), spec(after.sharding)),
        pointers=(*before.pointers[:1], *after.pointers[:1]),
        line=case.written.promoted.get(before.path, ""),
        abstract=case.observation.abstract,
        debug_nans=case.debug_nans,
    )


def cause(before: Leaf, after: Leaf, observation: Observation) -> LossCause:
    """Why a leaf lost its buffer."""
    if before.type != after.type:
        old, new = as_called(before, after, observation), as_called(after, before, observation)
        return "dtype" if old.dtype != new.dtype and old.shape == new.shape else "shape"
    return "sharding" if resharded(before, after) else "not reused"


def as_called(leaf: Leaf, other: Leaf, observation: Observation) -> ArrayType:
    """The type that the call sees: scan and vmap give the program's own inputs, and the outputs that are their new values, a leading axis each."""
    axes = sum(bool(layer.row.axis) for layer in observation.nesting.layers)
    return leaf.type if leaf.path == other.path else leaf.type.without_axes(axes)


def notes(observation: Observation) -> tuple[Note, ...]:
    """What became of donated leaves that lost nothing, and is worth telling all the same."""
    lost = {leaf.path for leaf in lost_leaves(observation)}
    moves = [(move.before, move.after) for move in observation.moves if move.after and move.before.path not in lost]
    state = [(before, after) for before, after in moves if before.path == after.path]
    old = donated_pointers(observation)
    took_another = tuple(before.path for before, after in state if swapped(before, after, old))
    on_all = tuple(before.path for before, after in moves if spread(before, after))
    in_a_new_one = tuple(before.path for before, after in state if displaced(before, after, old))
    facts = (
        Fact("in another buffer", took_another),
        Fact("on all devices", on_all),
        Fact("in a new buffer", in_a_new_one),
    )
    return (
        *(fact for fact in facts if fact.names),
        *(
            retyped(before, after, observation, where)
            for before, after in moves
            if before.type != after.type and (where := place(before, after, old, in_state=(before, after) in state))
        ),
    )


def retyped(before: Leaf, after: Leaf, observation: Observation, where: Place) -> BufferRetyped:
    new, why = as_called(after, before, observation), cause(before, after, observation)
    return BufferRetyped(before.path, before.type, new, why, before.path != after.path, where)


def donated_pointers(observation: Observation) -> set[int]:
    return {pointer for move in observation.moves for pointer in move.before.pointers}


def swapped(before: Leaf, after: Leaf, old: set[int]) -> bool:
    """Whether a leaf took another leaf's buffer: reused all the same, so noted and not judged."""
    moved = before.type == after.type and before.pointers != after.pointers
    return moved and bool(after.pointers) and set(after.pointers) <= old


def displaced(before: Leaf, after: Leaf, old: set[int]) -> bool:
    """Whether a leaf of one type is in a buffer that was not donated."""
    same = (before.type, before.sharding) == (after.type, after.sharding)
    return same and bool(before.pointers and after.pointers) and not set(after.pointers) <= old


def place(before: Leaf, after: Leaf, old: set[int], *, in_state: bool) -> Place | None:
    """Where the new value of a leaf lies whose type changed, and whose buffer was not lost: newer jax lets XLA take over any that fits.

    Of an input nothing is said but what the pointers prove: which output is its new value is a guess.
    """
    if before.pointers and before.pointers == after.pointers:
        return "same"
    if after.pointers and set(after.pointers) <= old:
        return "another"
    return "new" if in_state else None
