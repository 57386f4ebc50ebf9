"""Every donated buffer is reused for the new value of its leaf, shard by shard."""

from __future__ import annotations

from pytest_nnxcheck.core.observation import Leaf, Observation
from pytest_nnxcheck.core.outcome import Cause, Finding, Violation
from pytest_nnxcheck.core.text import Row
from pytest_nnxcheck.inspection.pointers import resharded, spec, spread, without_successor
from pytest_nnxcheck.invariants import hints
from pytest_nnxcheck.invariants.case import Case, Judgement, Written

SHOWN = 12


def judge(case: Case) -> Judgement:
    """Donated leaves that lost their buffer, and those that cannot be donated: in a buffer of another leaf, or of a view."""
    observation, call = case.observation, case.written
    if not observation.moves and not call.dropped:
        return Judgement()
    donated = {move.before.path for move in observation.moves}
    found: list[tuple[Finding, Row]] = [
        row for one, two in case.originals.shared if (row := sharing(one, two, donated, call))
    ]
    found += [
        (
            Finding("viewed buffer", leaf),
            ("viewed", f"{leaf} is viewed by {holder}: its buffer cannot be reused"),
        )
        for holder, leaf in case.originals.views
        if leaf in donated
    ]
    after = {move.before.path: move.after for move in observation.moves}
    lost = lost_leaves(observation)
    for leaf in lost:
        finding = Finding("lost buffer", leaf.path, cause(leaf, after[leaf.path], observation))
        reason = why(leaf, after[leaf.path], observation, case.debug_nans)
        found.append((finding, ("lost", f"{leaf.path}   {leaf.type}   {reason}")))
    found += [
        (
            Finding("update dropped", path),
            ("dropped", f"{path}   not written back: the call updates a copy of the optimizer"),
        )
        for path in call.dropped
    ]
    if not found:
        return Judgement()
    findings, rows = zip(*found, strict=True)
    more = [("", f"and {len(rows) - SHOWN} more")] if len(rows) > SHOWN else []
    dtypes = {leaf.path: leaf.type.partition("[")[0] for leaf in lost}
    first = findings[0]
    hint = hints.lost_buffer(first, dtypes.get(first.path, ""), call.promoted.get(first.path, ""))
    return Judgement((Violation("donation", rows[0][1], (*rows[1:SHOWN], *more), hint, findings),))


def sharing(one: str, two: str, donated: set[str], call: Written) -> tuple[Finding, Row] | None:
    """Two leaves in one buffer, where XLA refuses the program: both donated, or one donated and the other one used beside it."""
    if {one, two} <= donated or not call.inputs & {one, two}:
        text = f"{one} and {two} share a buffer: XLA refuses to donate it twice"
        return Finding("shared buffer", one), ("shared", text)
    # A leaf that the call leaves alone is donated by the generated jit only.
    if {one, two} & donated & call.changed:
        text = f"{one} and {two} share a buffer: XLA refuses to donate it and use it beside that"
        return Finding("shared buffer", one), ("shared", text)
    return None


def lost_leaves(observation: Observation) -> tuple[Leaf, ...]:
    """The donated leaves to name for the buffers that were lost."""
    before = [move.before for move in observation.moves]
    after = {move.before.path: move.after for move in observation.moves if move.after}
    return without_successor(before, after, observation.reused)


def cause(before: Leaf, after: Leaf | None, observation: Observation) -> Cause:
    """Why a leaf lost its buffer."""
    if after is None:
        return "not returned"
    if before.type != after.type:
        old, new = types_of(before, after, observation)
        dtype, _, shape = old.partition("[")
        new_dtype, _, new_shape = new.partition("[")
        return "dtype" if dtype != new_dtype and shape == new_shape else "shape"
    return "sharding" if resharded(before, after) else "not reused"


def why(before: Leaf, after: Leaf | None, observation: Observation, debug_nans: bool) -> str:
    """The same for the reader."""
    if after is None:
        return "not returned"
    changed = cause(before, after, observation)
    if changed in ("dtype", "shape"):
        given = before.path != after.path  # an input: the output that is its new value has a path of its own
        _, new = types_of(before, after, observation)
        return f"{'an output is' if given else 'became'} {new}: {changed} changed"
    if changed == "sharding":
        return f"sharding changed from {spec(before.sharding)} to {spec(after.sharding)}"
    if observation.abstract:
        return "no output of the compiled program is aliased with it"
    where = (
        f"pointer {before.pointers[0]:#x} before, {after.pointers[0]:#x} after" if after.pointers else "no buffer after"
    )
    return f"{'jax_debug_nans keeps the old value' if debug_nans else 'not reused by XLA'} ({where})"


def types_of(before: Leaf, after: Leaf, observation: Observation) -> tuple[str, str]:
    """The types of a leaf as the call sees them."""
    if before.path == after.path:
        return before.type, after.type
    return without_axes(before.type, observation), without_axes(after.type, observation)


def without_axes(kind: str, observation: Observation) -> str:
    """The type that the call sees: scan and vmap give the program's own inputs and outputs a leading axis each."""
    dtype, _, shape = kind.rstrip("]").partition("[")
    axes = sum(bool(layer.row.axis) for layer in observation.nesting.layers)
    return f"{dtype}[{','.join(shape.split(',')[axes:])}]"


def notes(observation: Observation) -> tuple[str, ...]:
    """What became of donated leaves that lost nothing, and is worth telling all the same."""
    lost = {leaf.path for leaf in lost_leaves(observation)}
    moves = [(move.before, move.after) for move in observation.moves if move.after and move.before.path not in lost]
    state = [(before, after) for before, after in moves if before.path == after.path]
    old = donated_pointers(observation)
    return (
        *(f"{before.path} took another leaf's buffer" for before, after in state if swapped(before, after, old)),
        *(
            f"{before.path} lay on one device, and the program spreads it over all"
            for before, after in moves
            if spread(before, after)
        ),
        *(
            f"{before.path} is in a new buffer: an output of the call took a donated one"
            for before, after in state
            if displaced(before, after, old)
        ),
        *(
            f"{before.path}   {before.type}   {why(before, after, observation, debug_nans=False)}, {where}"
            for before, after in moves
            if before.type != after.type and (where := place(before, after, old, in_state=(before, after) in state))
        ),
    )


def donated_pointers(observation: Observation) -> set[int]:
    return {pointer for move in observation.moves for pointer in move.before.pointers}


def swapped(before: Leaf, after: Leaf, old: set[int]) -> bool:
    """Whether a leaf took another leaf's buffer: reused all the same, so noted and not judged."""
    moved = before.type == after.type and before.pointers != after.pointers
    return moved and bool(after.pointers) and set(after.pointers) <= old


def displaced(before: Leaf, after: Leaf, old: set[int]) -> bool:
    """Whether a leaf is in a new buffer though none was lost: an output of the call took a donated one of its type.

    Flax returns the state after the output where it hands out no graph updates, and XLA gives buffers away in that order.
    """
    same = (before.type, before.sharding) == (after.type, after.sharding)
    return same and bool(before.pointers and after.pointers) and not set(after.pointers) <= old


def place(before: Leaf, after: Leaf, old: set[int], *, in_state: bool) -> str:
    """Where the new value of a leaf lies whose type changed, and whose buffer was not lost: newer jax lets XLA take over any that fits.

    Of an input nothing is said but what the pointers prove: which output is its new value is a guess.
    """
    if before.pointers and before.pointers == after.pointers:
        return "in the same buffer"
    if after.pointers and set(after.pointers) <= old:
        return "in the buffer of another leaf"
    return "in a new buffer: an output of the call took its own" if in_state else ""
