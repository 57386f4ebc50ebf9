"""Every donated buffer is reused for the new value of its leaf, shard by shard."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from pytest_nnxcheck import hints
from pytest_nnxcheck.observe import Observation
from pytest_nnxcheck.pointers import Leaf, Move, resharded, spec, spread
from pytest_nnxcheck.program import STACKED
from pytest_nnxcheck.verdicts import Violation

SHOWN = 12


@dataclass(frozen=True, slots=True)
class Returned:
    """What the call hands back: (name, type) of its outputs, and the paths of the state that it changes.

    ``dropped`` are leaves of an optimizer whose update went to a copy; ``inputs`` names the call's own arrays, ``promoted`` the line at
    which a leaf got another dtype, by its path.
    """

    outputs: tuple[tuple[str, str], ...]
    changed: frozenset[str]
    dropped: tuple[str, ...]
    inputs: frozenset[str]
    promoted: Mapping[str, str] = field(default_factory=dict)


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
    if not observation.moves and not call.dropped:
        return ()
    donated = {move.before.path for move in observation.moves}
    rows = [row for one, two in shared if (row := sharing(one, two, donated, call))]
    given = given_to_outputs(observation)
    rows += [
        ("viewed", f"{leaf} is viewed by {holder}: its buffer cannot be reused")
        for holder, leaf in views
        if leaf in donated
    ]
    for move in observation.moves:
        reason = "" if move.before.path in given else lost(move, observation, call, debug_nans)
        if reason:
            rows.append(("lost", f"{move.before.path}   {move.before.type}   {reason}"))
    rows += [
        ("dropped", f"{path}   not written back: the call updates a copy of the optimizer") for path in call.dropped
    ]
    if not rows:
        return ()
    more = [("", f"and {len(rows) - SHOWN} more")] if len(rows) > SHOWN else []
    return (
        Violation(
            "donation",
            rows[0][1],
            (*rows[:SHOWN], *more),
            hints.lost_buffer(*rows[0], call.promoted.get(rows[0][1].partition(" ")[0], "")),
        ),
    )


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
    if not keys(before.path):
        return lost_array(before, observation, call)
    inputs = [move.before for move in observation.moves if move.after is None]
    returned = owners(call.outputs, [each.path for each in inputs if keys(each.path)])
    if before.path not in returned:
        return "not returned"
    own, other = without_axes(before.type, observation), returned[before.path]
    if own != other:
        return f"an output is {other}: {changed_type(own, other)}"
    swapped = any(each.type == before.type and each.path not in returned for each in inputs)
    return "" if swapped or set(before.pointers) <= observation.reused else "not reused by XLA"


def without_axes(kind: str, observation: Observation) -> str:
    """The type of an input as the call gets it: scan and vmap give the program's own arrays a leading axis each."""
    dtype, _, shape = kind.rstrip("]").partition("[")
    axes = sum(layer.transform in STACKED for layer in observation.nesting.layers)
    return f"{dtype}[{','.join(shape.split(',')[axes:])}]"


def lost_array(before: Leaf, observation: Observation, call: Returned) -> str:
    """The same for an argument that is one array: nothing but its type tells which output is its new value."""
    if set(before.pointers) <= observation.reused:
        return ""
    types = [each for _, each in call.outputs]
    shape = before.type.partition("[")[2]
    other = next((each for each in types if each.partition("[")[2] == shape and each != before.type), None)
    wanted = sum(move.before.type == before.type and move.after is None for move in observation.moves)
    if types.count(before.type) >= wanted:
        return "not reused by XLA"
    return f"an output is {other}: dtype changed" if other else "not returned"


def keys(path: str) -> list[str]:
    """The steps of a path behind its root: ``opt_state[0].mu['kernel']`` has three."""
    return re.findall(r"\.\w+|\[[^\]]*\]", path)


def owners(outputs: tuple[tuple[str, str], ...], inputs: list[str]) -> dict[str, str]:
    """The donated inputs that come back, with the type of the output: the one that ends in the most of the same keys.

    ``opt_state[0].mu['kernel']`` comes back as ``[1][0].mu['kernel']``, and ``params['kernel']`` as ``[0]['kernel']``.
    """
    found: dict[str, str] = {}
    for name, kind in outputs:
        given = keys(name)
        scored = [(*closeness(keys(path), given), -number, path) for number, path in enumerate(inputs)]
        best = max(scored, default=(0, 0, 0, ""))
        if best[0]:
            found.setdefault(best[3], kind)
    return found


def closeness(one: list[str], other: list[str]) -> tuple[int, int]:
    """How many keys two paths have in common at their ends, and (less is nearer) how many the first has beside them."""
    common = next((n for n, (a, b) in enumerate(zip(one[::-1], other[::-1], strict=False)) if a != b), None)
    common = min(len(one), len(other)) if common is None else common
    return common, common - len(one)


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
