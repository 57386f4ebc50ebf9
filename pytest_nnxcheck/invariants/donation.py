"""Every donated buffer is reused for the new value of its leaf, shard by shard."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any

from pytest_nnxcheck.core.facts import ArrayType, Leaf, Move
from pytest_nnxcheck.core.nesting import Nesting
from pytest_nnxcheck.core.notes import BufferPlace, BufferRetyped, Fact, Note
from pytest_nnxcheck.core.outcome import (
    Finding,
    LossCause,
    LostBuffer,
    LostOnTarget,
    Orphaned,
    SharedBuffer,
    UpdateDropped,
    ViewedBuffer,
)
from pytest_nnxcheck.invariants.case import Case, Donation, Judgement


def judge(case: Case) -> Judgement:
    """Judge the donation by the generated jit, or, for the un-nested call, that by its own jits."""
    call = case.donation
    findings = of_program(case) if call.moves or call.dropped else of_jits_inside(call)
    on_targets = (LostOnTarget(on.lost[0], on=on) for on in case.targets if on.lost)
    return Judgement.of("donation", (*findings, *on_targets))


def of_program(case: Case) -> tuple[Finding, ...]:
    """Donated leaves that lost their buffer, and those that cannot be donated: in a buffer of another leaf, or of a view."""
    call = case.donation
    after = {move.before.path: move.after for move in call.moves}
    return (
        *(finding for one, two in call.shared if (finding := sharing(one, two, call))),
        *(ViewedBuffer(leaf, holder=holder) for holder, leaf in call.views if leaf in after),
        *(lost_buffer(leaf, after[leaf.path], case) for leaf in call.lost),
        *map(UpdateDropped, call.dropped),
    )


def of_jits_inside(call: Donation) -> tuple[Finding, ...]:
    """Leaves whose array a jit of the call's own takes away from them, since it donates another leaf that has the same: a target network's."""
    return (
        *(
            SharedBuffer(one, other=two, twice=pair <= call.inside.consumed, inside=True)
            for one, two in call.shared
            if takes_away(pair := {one, two}, call)
        ),
        *(Orphaned(path, other=other) for path, other in call.inside.orphans),
    )


def takes_away(pair: set[str], call: Donation) -> bool:
    """True if a jit of the call's own donates one of two leaves in one buffer, and the other one, or its holder, goes on with it."""
    others = pair - call.inside.consumed
    return len(others) < len(pair) and not others & call.renewed


def sharing(one: str, two: str, call: Donation) -> SharedBuffer | None:
    """Two leaves in one buffer, where XLA refuses the program: both donated, or one donated and the other one used beside it."""
    donated = {move.before.path for move in call.moves}
    if {one, two} <= donated or not call.inputs & {one, two}:
        return SharedBuffer(one, other=two, twice=True)
    # A leaf that the call leaves alone is donated by the generated jit only.
    return SharedBuffer(one, other=two, twice=False) if {one, two} & donated & call.changed else None


def lost_leaves(moves: Sequence[Move], reused: AbstractSet[int]) -> tuple[Leaf, ...]:
    """The donated leaves to name for the buffers that were lost; ``reused`` are the pointers of all that came back."""
    after = {move.before.path: move.after for move in moves if move.after}
    return without_successor([move.before for move in moves], after, reused)


def lost_buffer(before: Leaf, after: Leaf | None, case: Case) -> LostBuffer:
    """The finding on a donated leaf that lost its buffer."""
    if after is None:
        return LostBuffer(before.path, type=before.type, cause="not returned")
    return LostBuffer(
        before.path,
        type=before.type,
        cause="reference" if before.path in case.donation.references else cause(before, after, case.nesting),
        new=as_called(after, before, case.nesting),
        output=before.path != after.path,
        shardings=(written(before.sharding), written(after.sharding)),
        pointers=(*before.pointers[:1], *after.pointers[:1]),
        line=case.donation.promoted.get(before.path, ""),
        abstract=case.donation.abstract,
        debug_nans=case.donation.debug_nans,
    )


def cause(before: Leaf, after: Leaf, nesting: Nesting) -> LossCause:
    """The cause of a lost buffer."""
    if before.type != after.type:
        old, new = as_called(before, after, nesting), as_called(after, before, nesting)
        return "dtype" if old.dtype != new.dtype and old.shape == new.shape else "shape"
    return "sharding" if resharded(before, after) else "not reused"


def as_called(leaf: Leaf, other: Leaf, nesting: Nesting) -> ArrayType:
    """The type that the call sees: scan and vmap give the program's own inputs, and the outputs that are their new values, a leading axis each."""
    axes = sum(bool(layer.row.axis) for layer in nesting.layers)
    return leaf.type if leaf.path == other.path else leaf.type.without_axes(axes)


def devices_of(leaf: Leaf) -> int:
    """The number of devices that a leaf lies on; an abstract leaf on one device has no sharding."""
    return 1 if leaf.sharding is None else leaf.sharding.num_devices


def resharded(before: Leaf, after: Leaf) -> bool:
    """True if a leaf came back in other shards."""
    if before.sharding is None or after.sharding is None:
        return devices_of(before) != devices_of(after)
    return not before.sharding.is_equivalent_to(after.sharding, len(before.type.shape or ()))


def in_other_shards(before: Leaf, after: Leaf) -> bool:
    """True if a leaf of the state came back with its type, but in other shards: an output for an input has a path of its own."""
    same = (before.path, before.type) == (after.path, after.type)
    return same and resharded(before, after) and not spread(before, after)


def spread(before: Leaf, after: Leaf) -> bool:
    """True if a leaf that lay on one device came back on several: it was never placed, and jit placed it."""
    return devices_of(before) == 1 < devices_of(after)


def written(sharding: Any) -> str:
    """A sharding as its user writes it: ``P(None, 'model')``."""
    if sharding is not None and hasattr(sharding, "spec"):
        return f"P({', '.join(map(repr, sharding.spec))})"
    return "one device" if sharding is None or sharding.num_devices == 1 else str(sharding)


def without_successor(before: Sequence[Leaf], after: Mapping[str, Leaf], held: AbstractSet[int]) -> tuple[Leaf, ...]:
    """The donated leaves to name for the buffers that nothing came back in; ``held`` are the pointers of all that came back.

    Pointers say whether a buffer was lost, whatever the names and types of what came back. XLA gives donated buffers to outputs by
    their type, so that it may be the buffer of another leaf that is left over. The new value of that one took a buffer, whose leaf is asked
    next, and the last one is named: it came back with another type, in a new buffer, or not at all. A leaf of the state that came back in
    other shards is named whatever their buffers: they hold another part of it.
    """
    owner = {pointer: leaf for leaf in before for pointer in leaf.pointers}
    named: dict[str, Leaf] = {}
    for lost in before:
        new = after.get(lost.path)
        if lost.pointers and new is not None and in_other_shards(lost, new):
            named[lost.path] = lost
        if set(lost.pointers) <= held:
            continue
        leaf, passed = lost, {lost.path}
        while (new := after.get(leaf.path)) and new.type == leaf.type and new.pointers:
            taken = owner.get(new.pointers[0])
            if taken is None or taken.path in passed:
                break
            leaf = taken
            passed.add(leaf.path)
        new = after.get(leaf.path)
        if new is None or not spread(leaf, new):
            named[leaf.path] = leaf
    return tuple(leaf for leaf in before if leaf.path in named)


# --- notes on leaves that lost nothing


def notes(nesting: Nesting, donated: Sequence[Move], lost: Sequence[Leaf]) -> tuple[Note, ...]:
    """Notes on donated leaves that are not among those that ``lost`` their buffer."""
    named = {leaf.path for leaf in lost}
    moves = [(move.before, move.after) for move in donated if move.after and move.before.path not in named]
    old = {pointer for move in donated for pointer in move.before.pointers}
    kept = [(before, after) for before, after in moves if before.path == after.path and before.type == after.type]
    facts = (
        # Reused all the same, so noted and not judged.
        Fact("in another buffer", tuple(leaf.path for leaf, after in kept if place(leaf, after, old) == "another")),
        Fact("on all devices", tuple(leaf.path for leaf, after in moves if spread(leaf, after))),
        Fact("in a new buffer", tuple(leaf.path for leaf, after in kept if is_displaced(leaf, after, old))),
    )
    retyped = (
        BufferRetyped(
            before.path,
            type=before.type,
            new=as_called(after, before, nesting),
            cause=cause(before, after, nesting),
            output=before.path != after.path,
            place=where,
        )
        for before, after in moves
        if before.type != after.type and (where := place(before, after, old))
    )
    return (*(fact for fact in facts if fact.names), *retyped)


def is_displaced(before: Leaf, after: Leaf, old: set[int]) -> bool:
    """True if a leaf that lies on the same devices is in a buffer that was not donated."""
    has_buffers = bool(before.pointers and after.pointers)
    return has_buffers and before.sharding == after.sharding and place(before, after, old) == "new"


def place(before: Leaf, after: Leaf, old: set[int]) -> BufferPlace | None:
    """The buffer of the new value of a leaf whose old buffer was not lost: newer jax lets XLA take over any that fits.

    For an input only pointers count, since its new value among the outputs is a guess.
    """
    if before.pointers and before.pointers == after.pointers:
        return "same"
    if after.pointers and set(after.pointers) <= old:
        return "another"
    return "new" if before.path == after.path else None
