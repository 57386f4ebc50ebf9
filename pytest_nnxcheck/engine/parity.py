"""Parity, asserted: a run held against its reference, or an un-nested call against itself with its transforms made transparent."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

import jax
import numpy as np

from pytest_nnxcheck import compat
from pytest_nnxcheck.compat.arrays import describe
from pytest_nnxcheck.compat.frames import NNX_TWINS
from pytest_nnxcheck.core.catalogue import ROWS
from pytest_nnxcheck.core.nesting import Nesting
from pytest_nnxcheck.core.notes import Fact, FactKind
from pytest_nnxcheck.core.observation import Observation
from pytest_nnxcheck.core.outcome import DropCause, DroppedInside, ValueDiffers, Violation
from pytest_nnxcheck.core.text import first_line
from pytest_nnxcheck.engine import traced
from pytest_nnxcheck.engine.dropped_updates import Drop, TransparentCall, differ
from pytest_nnxcheck.engine.reference import (
    Evaluated,
    Reference,
    Start,
    TransparentReference,
    meaning_of,
    names_of,
)
from pytest_nnxcheck.invariants import Judgement
from pytest_nnxcheck.invariants.parity import HALF, WIDEST, Shaken, Slack, by_name, compare, differences, scalars
from pytest_nnxcheck.subject.profile import Profile
from pytest_nnxcheck.subject.state_facts import Effect, Facts, read, structure, type_of
from pytest_nnxcheck.subject.subject import Subject
from pytest_nnxcheck.transforms.compose import primal

__tracebackhide__ = True  # pytest shows the frames of the user, not these

Differences = tuple[ValueDiffers, ...]
FLOAT32 = 2.0**-23
"""The distance between one and the next number of float32, the lowest precision whose roundings the first nudge has."""
DIRECTIONS = 8
"""Nudged starts of one distance. Of 127 steps of Adam with a bias before batch normalization one start was too few for two; five were enough."""
THREEFRY = "threefry2x32"
BROADCASTING = tuple(row.name for row in ROWS if row.axis and not row.pair)
PARITY = ("parity",)


@dataclass(frozen=True, slots=True)
class Comparison:
    """A run and the reference that it is held against; ``before`` is the state that both started from.

    ``drawn`` excepts what random numbers decide; ``inside`` says that both are the un-nested call.
    """

    subject: Subject
    facts: Profile
    nesting: Nesting
    reference: Reference
    before: Facts
    drawn: bool = False
    inside: bool = False

    def differences(self, got: Effect, shaken: Shaken | None = None) -> Differences:
        """What the reference did not do, but for what the ``shaken`` starts explain."""
        wanted = self.reference.wanted
        return differences(wanted, got, self.before, shaken, drawn=self.drawn, inside=self.inside)


def agrees(subject: Subject, facts: Profile, observation: Observation, reference: Reference) -> Judgement:
    """The violations of parity of a nesting that ran to its end and left no tracer."""
    nesting, wanted = observation.nesting, reference.wanted
    if wanted.error is not None:
        return Judgement(notes=(Fact("raises un-nested", PARITY, first_line(wanted.error)),))
    got = effect_against(subject, observation, wanted)
    before = got.before
    draws = other_draws(subject, nesting)
    comparison = Comparison(subject, facts, nesting, reference, before, drawn=bool(draws))
    different, rounded = beyond_rounding(comparison, got)
    notes: tuple[Fact, ...] = (*([draws] if draws else []), *rounded)
    if added := left_behind(different, before, nesting):
        different = tuple(difference for difference in different if difference.path not in added)
        notes += (Fact("added, functional", tuple(added)),)
    notes += scalars(got.after, before)
    return Judgement(violations(different, cause(different, nesting)), notes)


def left_behind(different: Differences, before: Facts, nesting: Nesting) -> list[str]:
    """The paths of what the call adds, where a layer of ours hands out the leaves that were there before and no others."""
    if not any(layer.style == "functional" for layer in nesting.layers):
        return []
    missing = (difference.path for difference in different if difference.label == "missing")
    return [path for path in missing if path not in before.leaves]


def beyond_rounding(comparison: Comparison, got: Effect) -> tuple[Differences, tuple[Fact, ...]]:
    """The differences that no rounding explains, with notes on what it decides.

    A sign of Adam's where the gradient is noise, a kink: a start a few roundings away goes as far, or the program does where XLA fuses nothing.
    """
    different = comparison.differences(got)
    left = beyond_nudge(comparison, got, different)
    unfused = beyond_fusion(comparison, left)
    return unfused, (
        *decided("decided by rounding", different, left),
        *decided("decided by fusion", left, unfused),
    )


def beyond_nudge(comparison: Comparison, got: Effect, different: Differences) -> Differences:
    """The differences that no start which is a few roundings away explains."""
    if not any(difference.rounding for difference in different):
        return different
    subject, reference = comparison.subject, comparison.reference
    if not comparison.inside and comparison.differences(reference.from_start(subject, Start(again=True))):
        # The calls do not repeat, so that no other start tells what rounding does: a number that Python counts up, say.
        return different
    nudged: list[Effect] = []
    for start in nudged_starts(comparison.facts.precision):
        if not any(may_move(difference, start) for difference in different):
            break
        effect = reference.from_start(subject, start)
        if effect.error is None:
            nudged.append(effect)
            different = comparison.differences(
                got, Shaken(tuple(nudged), HALF if start.precision > FLOAT32 else WIDEST)
            )
    return different


def nudged_starts(precision: float) -> Iterator[Start]:
    """Starts a few roundings away: of the values' own types first, then of the lowest precision inside, then in other directions.

    One start can leave a value where it was by chance: a second moment of Adam is the square of a gradient, which may be noise on both sides of zero.
    """
    yield Start(nudged=True)
    lowest = precision if precision > FLOAT32 else 0.0
    if lowest:
        yield Start(nudged=True, precision=lowest)
    for direction in range(1, DIRECTIONS):
        yield Start(nudged=True, precision=lowest, direction=direction)


def may_move(difference: ValueDiffers, start: Start) -> bool:
    """Whether a start may explain a difference: an update that was dropped is told by the first ones, which are made anyway."""
    return difference.rounding and not (start.direction and difference.label == "dropped")


def beyond_fusion(comparison: Comparison, different: Differences) -> Differences:
    """The differences that are left where XLA fuses no operations of the same program."""
    if not any(map(may_be_fusion, different)):
        return different
    unfused = traced.unfused(comparison.subject, comparison.facts, comparison.nesting)
    if unfused is None:
        return different
    got = effect_of(comparison.subject, unfused, comparison.reference.wanted.names)
    left = beyond_nudge(comparison, got, comparison.differences(got))
    paths = {difference.path for difference in left}
    return tuple(difference for difference in different if difference.path in paths or not may_be_fusion(difference))


def may_be_fusion(difference: ValueDiffers) -> bool:
    """Whether the roundings of the compiler may be all of a difference: of finite floats, or of an index that was chosen among some.

    An update that was dropped is none, nor what became NaN or infinite.
    """
    is_number = difference.rounding or (difference.elements > 0 and difference.allowed is None)
    return is_number and difference.label != "dropped"


def decided(kind: FactKind, candidates: Differences, left: Differences) -> tuple[Fact, ...]:
    """A note on the differences that are no longer left."""
    paths = {difference.path for difference in left}
    gone = tuple(difference.path for difference in candidates if difference.path not in paths)
    return (Fact(kind, gone),) if gone else ()


def effects(subject: Subject, observation: Observation, wanted: Effect) -> tuple[Effect, Effect]:
    """What the same calls did, and what the nesting did, to be held against it."""
    return wanted, effect_against(subject, observation, wanted)


def effect_against(subject: Subject, observation: Observation, wanted: Effect) -> Effect:
    """What a nesting returned and left, to be held against what the same calls did."""
    got = effect_of(subject, observation, names_of(meaning_of(observation.nesting), wanted.structure.names))
    return replace(got, before=read(subject, subject.state))


def effect_of(subject: Subject, observation: Observation, names: Any) -> Effect:
    """What a nesting returned and left in its copy of the state."""
    return Effect(
        returned=primal(observation.nesting.layers, observation.returned),
        names=names,
        output=observation.output,
        structure=structure(observation.output_names, observation.rebuild, observation.output),
        after=read(subject, observation.state),
    )


def other_draws(subject: Subject, nesting: Nesting) -> Fact | None:
    """Why random numbers differ under vmap: only threefry draws, for each element of a batch of keys, what it draws for the key."""
    if not any(layer.row.axis == "elements" for layer in nesting.layers):
        return None
    leaves = [(subject.path(path), value) for path, value in compat.raw_leaves(subject.state)]
    for name, leaf in [*leaves, *zip(subject.input_names, subject.inputs, strict=False)]:
        if hasattr(leaf, "dtype") and compat.is_key(leaf) and str(jax.random.key_impl(leaf)) not in (THREEFRY, "fry"):
            return Fact("other draws", (name,), describe(leaf))
    default = str(jax.config.jax_default_prng_impl)
    return None if default == THREEFRY else Fact("other draws", ("jax_default_prng_impl",), default)


def violations(different: Differences, cause: DropCause | Literal["", "inside"]) -> tuple[Violation, ...]:
    """The violation that the differences make; ``cause`` is why the first is there, where that is known."""
    if not different:
        return ()
    first = replace(different[0], cause=cause, variable=compat.variable_name(different[0].of))
    return (Violation("parity", findings=(first, *different[1:])),)


def cause(different: Differences, nesting: Nesting) -> DropCause | Literal[""]:
    """Why a value differs: transforms carry no attribute out, and a layer that broadcasts the state drops its updates."""
    if not different:
        return ""
    first = different[0]
    if first.of == "attribute" and first.label in ("dropped", "attribute"):
        return "attribute"
    loops = any(layer.transform in BROADCASTING for layer in nesting.layers)
    return "broadcast" if first.label == "dropped" and loops else ""


# --- inside the call


def agrees_inside(
    subject: Subject, facts: Profile, observation: Observation, transparent_call: TransparentCall
) -> Judgement:
    """The violations of parity of the un-nested call: updates that its own transforms drop."""
    wanted = transparent_call.effect
    if wanted.error is not None:
        return Judgement(notes=(Fact("raises without jit", PARITY, first_line(wanted.error)),))
    before = read(subject, subject.state)
    got = effect_of(subject, observation, wanted.names)
    reference = TransparentReference((), wanted, Evaluated())
    different, rounded = beyond_rounding(Comparison(subject, facts, Nesting(), reference, before, inside=True), got)
    notes = (*scalars(got.after, before), *rounded)
    different = tuple(left for difference in different if (left := not_returned(difference, wanted, got, before)))
    paths = [difference.path for difference in different]
    drops = transparent_call.drops or [drop for drop in transparent_call.branches if drop.path in paths]
    if drops:
        return Judgement((Violation("parity", findings=tuple(map(dropped_inside, drops))),), notes)
    copied = different and is_update(different[0], before)
    return Judgement(violations(different, "copy" if copied else "inside"), notes)


def is_update(difference: ValueDiffers, before: Facts) -> bool:
    """Whether a value of the state was not updated, or not as often as with the jits off."""
    is_array = difference.path in before.leaves and before.leaves[difference.path].kind != "attribute"
    return difference.label == "dropped" or (difference.label == "differs" and is_array)


def not_returned(difference: ValueDiffers, wanted: Effect, got: Effect, before: Facts) -> ValueDiffers | None:
    """What is left of an update that is missing in the state: nothing where the call returns it, as one in functional style does.

    Where it returns a copy of the module with another value, that value is what differs.
    """
    leaf = wanted.after.leaves.get(difference.path)
    if difference.label != "dropped" or leaf is None:
        return difference
    for name, array in returned_copies(difference.path, got, before):
        if differ(before.leaves[difference.path].value, array):
            return compare(name, leaf.value, array, None, Slack(), "")
    is_returned = any(compare("", leaf.value, array, None, Slack(), "") is None for array in got.output)
    return None if is_returned else difference


def returned_copies(path: str, got: Effect, before: Facts) -> Iterator[tuple[str, Any]]:
    """A leaf of the state in the outputs that are a copy of its module: such an output comes in its arrays, all under one name."""
    root = re.sub(r"\W.*", "", path)
    beside = [other for other in before.leaves if re.match(rf"{root}\b", other)]
    if path not in beside:
        return
    shapes = [np.shape(before.leaves[other].value) for other in beside]
    for name, arrays in by_name(got, whole=False).items():
        if list(map(np.shape, arrays)) == shapes:
            yield f"{name}{path.removeprefix(root)}", arrays[beside.index(path)]


def dropped_inside(drop: Drop) -> DroppedInside:
    kind = drop.new.kind
    if kind == "attribute":
        return DroppedInside(drop.path, of=kind, where=drop.where, cause="attribute", cure=type_of(drop.new.value))
    if drop.transform.startswith("nnx."):
        return DroppedInside(drop.path, of=kind, where=drop.where, cause="broadcast", cure=compat.variable_name(kind))
    return DroppedInside(drop.path, of=kind, where=drop.where, cause="copy", cure=NNX_TWINS.get(drop.transform, ""))
