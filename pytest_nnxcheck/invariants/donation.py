"""Every donated buffer is reused for the new value of its leaf, shard by shard."""

from __future__ import annotations

from collections import Counter

from pytest_nnxcheck.observe import Observation
from pytest_nnxcheck.pointers import Leaf, Move, resharded, spec, spread
from pytest_nnxcheck.verdicts import Violation

SHOWN = 6


def donation(
    observation: Observation,
    shared: tuple[tuple[str, str], ...],
    views: tuple[tuple[str, str], ...],
    outputs: tuple[str, ...],
    debug_nans: bool,
) -> tuple[Violation, ...]:
    """Violations for donated leaves that lost their buffer.

    ``shared`` and ``views`` are pairs of paths, found on the user's own arrays beforehand; ``outputs`` are the types of the
    program's outputs, for donated inputs.
    """
    if not observation.moves:
        return ()
    donated = {move.before.path for move in observation.moves}
    rows = [("shared", f"{one} and {two} share a buffer: XLA refuses to donate it twice") for one, two in shared]
    given = given_to_outputs(observation)
    rows += [
        ("viewed", f"{leaf} is viewed by {holder}: its buffer cannot be reused")
        for holder, leaf in views
        if leaf in donated
    ]
    for move in observation.moves:
        reason = "" if move.before.path in given else lost(move, observation, outputs, debug_nans)
        if reason:
            rows.append(("lost", f"{move.before.path}   {move.before.type}   {reason}"))
    if not rows:
        return ()
    more = [("", f"and {len(rows) - SHOWN} more")] if len(rows) > SHOWN else []
    return (Violation("donation", rows[0][1], (*rows[:SHOWN], *more), advice(rows[0])),)


def lost(move: Move, observation: Observation, outputs: tuple[str, ...], debug_nans: bool) -> str:
    """Why a leaf lost its buffer; empty if it kept it, took another leaf's (a permutation), or never had one."""
    before, after = move.before, move.after
    if not before.pointers:
        return ""
    if after is None:
        return lost_input(before, observation, outputs)
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


def lost_input(before: Leaf, observation: Observation, outputs: tuple[str, ...]) -> str:
    """Why a donated input, or a leaf that is gone, lost its buffer."""
    if set(before.pointers) <= observation.reused:
        return ""
    shape = before.type.partition("[")[2]
    other = next((each for each in outputs if each.partition("[")[2] == shape and each != before.type), None)
    same = Counter(outputs)[before.type]
    wanted = sum(move.before.type == before.type and move.after is None for move in observation.moves)
    if same >= wanted:
        return "not reused by XLA"
    return f"an output is {other}: dtype changed" if other else "not returned"


def donated_pointers(observation: Observation) -> set[int]:
    return {pointer for move in observation.moves for pointer in move.before.pointers}


def given_to_outputs(observation: Observation) -> list[str]:
    """Leaves in a new buffer because an output of the call took a donated one of their type: as many are reused, so it is noted, not judged.

    Flax returns the state after the output where it hands out no graph updates, and XLA gives buffers away in that order.
    """
    old = donated_pointers(observation)
    kept = [move for move in observation.moves if move.after and move.before.pointers and move.after.pointers]
    taken = Counter(move.before.type for move in kept if set(move.before.pointers) <= observation.reused)
    paths = []
    for move in kept:
        fresh = not set(move.after.pointers) <= old if move.after else False
        if fresh and same_type(move) and taken[move.before.type]:
            taken[move.before.type] -= 1
            paths.append(move.before.path)
    return paths


def same_type(move: Move) -> bool:
    return move.after is not None and (move.before.type, move.before.sharding) == (move.after.type, move.after.sharding)


def permuted(observation: Observation) -> list[str]:
    """Leaves that took another leaf's buffer: reused all the same, so noted and not judged."""
    old = donated_pointers(observation)
    return [
        move.before.path
        for move in observation.moves
        if move.after
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
    if label == "viewed":
        return "copy the view: np.array(view), or drop it before the step"
    if "dtype changed" in text:
        return "cast the new value back to the old dtype before it is stored or returned"
    if "sharding changed" in text:
        return "give the new value the old sharding before it is stored: jax.lax.with_sharding_constraint(value, old)"
    return "return the new value of every donated array" if "not returned" in text else ""
