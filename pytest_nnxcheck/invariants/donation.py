"""Every donated buffer is reused for the new value of its leaf, shard by shard."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass

from pytest_nnxcheck.observe import Observation
from pytest_nnxcheck.pointers import Leaf, Move, resharded, spec, spread
from pytest_nnxcheck.verdicts import Violation

SHOWN = 12


@dataclass(frozen=True, slots=True)
class Returned:
    """What the call hands back: (name, type) of its outputs, and the paths of the state that it changes.

    ``dropped`` are leaves of an optimizer whose update went to a copy; ``inputs`` names the call's own arrays.
    """

    outputs: tuple[tuple[str, str], ...]
    changed: frozenset[str]
    dropped: tuple[str, ...]
    inputs: frozenset[str]


def donation(
    observation: Observation,
    shared: tuple[tuple[str, str], ...],
    views: tuple[tuple[str, str], ...],
    call: Returned,
    debug_nans: bool,
) -> tuple[Violation, ...]:
    """Violations for donated leaves that lost their buffer.

    ``shared`` and ``views`` are pairs of paths, found on the user's own arrays beforehand.
    """
    if not observation.moves:
        return ()
    donated = {move.before.path for move in observation.moves}
    rows = [row for one, two in shared if (row := sharing(one, two, donated, call))]
    rows += [
        ("viewed", f"{leaf} is viewed by {holder}: its buffer cannot be reused")
        for holder, leaf in views
        if leaf in donated
    ]
    for move in observation.moves:
        reason = lost(move, observation, call, debug_nans)
        if reason:
            rows.append(("lost", f"{move.before.path}   {move.before.type}   {reason}"))
    rows += [("dropped", f"{path}   not written back: the call updates a copy of the optimizer") for path in call.dropped]
    if not rows:
        return ()
    more = [("", f"and {len(rows) - SHOWN} more")] if len(rows) > SHOWN else []
    return (Violation("donation", rows[0][1], (*rows[:SHOWN], *more), advice(rows[0])),)


def sharing(one: str, two: str, donated: set[str], call: Returned) -> tuple[str, str] | None:
    """Two leaves in one buffer, where XLA refuses the program: both donated, or one donated and the other one used beside it."""
    if {one, two} <= donated or not call.inputs & {one, two}:
        return ("shared", f"{one} and {two} share a buffer: XLA refuses to donate it twice")
    # A leaf that the call leaves alone is donated by the generated jit only.
    if {one, two} & donated & call.changed:
        return ("shared", f"{one} and {two} share a buffer: XLA refuses to donate it and use it beside that")
    return None


def lost(move: Move, observation: Observation, call: Returned, debug_nans: bool) -> str:
    """Why a leaf lost its buffer; empty if it kept it, took another leaf's (a permutation), or never had one."""
    before, after = move.before, move.after
    if not before.pointers:
        return ""
    if after is None:
        return lost_input(before, observation, call)
    if before.type != after.type:
        return f"became {after.type}: {changed_type(before.type, after.type)}"
    if spread(before, after):
        return ""
    if resharded(before, after):
        return f"sharding changed from {spec(before.sharding)} to {spec(after.sharding)}"
    if after.pointers == before.pointers or set(after.pointers) <= donated_pointers(observation):
        return ""
    if observation.abstract:
        return "no output of the compiled program is aliased with it"
    where = (
        f"pointer {before.pointers[0]:#x} before, {after.pointers[0]:#x} after" if after.pointers else "no buffer after"
    )
    return f"{'jax_debug_nans keeps the old value' if debug_nans else 'not reused by XLA'} ({where})"


def lost_input(before: Leaf, observation: Observation, call: Returned) -> str:
    """Why a donated input, or a leaf that is gone, lost its buffer."""
    if set(before.pointers) <= observation.reused:
        return ""
    # An input of several parts comes back under the same name inside the output, if it does: opt_state[0].mu as [1][0].mu.
    inside = re.sub(r"^\w+", "", before.path)
    named = [each for name, each in call.outputs if name.endswith(inside)] if inside else []
    types = named if inside else [each for _, each in call.outputs]
    shape = before.type.partition("[")[2]
    other = next((each for each in types if each.partition("[")[2] == shape and each != before.type), None)
    same = Counter(each for _, each in call.outputs)[before.type]
    wanted = sum(move.before.type == before.type and move.after is None for move in observation.moves)
    if same >= wanted:
        return "not reused by XLA"
    return f"an output is {other}: dtype changed" if other else "not returned"


def donated_pointers(observation: Observation) -> set[int]:
    return {pointer for move in observation.moves for pointer in move.before.pointers}


def permuted(observation: Observation) -> list[str]:
    """Leaves that took another leaf's buffer: reused all the same, so noted and not judged."""
    old = donated_pointers(observation)
    return [
        move.before.path
        for move in observation.moves
        if move.after
        and move.after.type == move.before.type
        and move.after.pointers != move.before.pointers
        and move.after.pointers
        and set(move.after.pointers) <= old
    ]


def placed(observation: Observation) -> list[str]:
    """Leaves that lay on one device and came back on several: noted and not judged."""
    return [move.before.path for move in observation.moves if move.after and spread(move.before, move.after)]


def changed_type(before: str, after: str) -> str:
    dtype, _, shape = before.partition("[")
    new, _, new_shape = after.partition("[")
    return "dtype changed" if dtype != new and shape == new_shape else "shape changed"


def advice(row: tuple[str, str]) -> str:
    """Advice for the first row; a lost buffer without a known reason has none."""
    label, text = row
    if label == "shared":
        return "give one of them an array of its own: jnp.copy(value)"
    if label == "dropped":
        return "update the optimizer that was passed in, or return the copy"
    if label == "viewed":
        return "copy the view: np.array(view), or drop it before the step"
    if "dtype changed" in text:
        return "cast the new value back to the old dtype before it is stored or returned"
    if "sharding changed" in text:
        return "give the new value the old sharding before it is stored: jax.lax.with_sharding_constraint(value, old)"
    return "return the new value of every donated array" if "not returned" in text else ""
