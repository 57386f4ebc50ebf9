"""Compare a run with the same calls without the nesting, and an un-nested call with itself without its jits."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import jax

from pytest_nnxcheck.compat import flax_modes, graph
from pytest_nnxcheck.compat.arrays import buffer_of, describe
from pytest_nnxcheck.core.catalogue import GRAD, REMAT
from pytest_nnxcheck.core.facts import Observation
from pytest_nnxcheck.core.nesting import Nesting
from pytest_nnxcheck.core.notes import Fact, FactKind
from pytest_nnxcheck.core.text import first_line
from pytest_nnxcheck.engine.observe import unfused
from pytest_nnxcheck.engine.reference import Reference, Start, meaning_of, names_of
from pytest_nnxcheck.subject.profile import Profile
from pytest_nnxcheck.subject.subject import Subject
from pytest_nnxcheck.transforms.compose import primal
from pytest_nnxcheck.values.differences import TIMES, Difference, Nudged, differences, distance, scalars
from pytest_nnxcheck.values.effects import Effect, Facts, read, structure

__tracebackhide__ = True  # pytest shows the frames of the user, not these

DropCause = Literal["attribute", "broadcast", "copy", "reference", "replaced"]
"""The cause of a dropped update: it is of a plain attribute, the state was broadcast, a transform of jax was handed a copy, a transform copied a
reference or wrote to it twice, or the call put another Variable in the place of one in a reference.
"""
Cause = DropCause | Literal[""]
Found = tuple[Difference, ...]
DIRECTIONS = 8
"""Nudged starts. Of 127 steps of Adam with a bias before batch normalization one start was too few for two; five were enough."""
MOST_EQUATIONS = 100_000
"""Equations of the un-nested call that may be made one by one, without jit: a loop of many steps takes minutes."""
THREEFRY = "threefry2x32"
"""The only implementation of random numbers that draws the same for a key alone and for a key in a batch."""
PARITY = ("parity",)
"""The invariants that a note on a call that raises tells of."""
LOST = Difference("", label="dropped", want="the value of the same call on arrays", have="the old one")
"""A reference that a transform of flax inside the call copied: the call writes to the copy."""
AGAIN = Start(again=True)
"""Tried before all nudged starts: where the very same calls give something else, those say nothing of rounding."""


@dataclass(frozen=True, slots=True)
class Differences:
    """The differences from the same calls without the nesting, or from the un-nested call without its jits."""

    left: tuple[tuple[Difference, Cause], ...] = ()
    """Values whose difference neither rounding nor the definition of a layer explains, each with its cause where that is certain."""
    notes: tuple[Fact, ...] = ()
    """Facts about differences that are explained, and about calls that raise."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """A call with its reference."""

    subject: Subject
    facts: Profile
    nesting: Nesting
    reference: Reference
    drawn: bool
    """True if random numbers may differ: values that depend on them are not compared."""

    def differences(self, got: Effect, nudged: Nudged = ()) -> Found:
        """The differences from the reference, without those that nudged starts explain; for an un-nested call in the state alone."""
        state_only = not self.nesting.layers
        return differences(self.reference.wanted, got, nudged, drawn=self.drawn, state_only=state_only)

    def beyond_nudge(self, got: Effect, every: Found) -> Found:
        """The differences that no start a few roundings away explains.

        One start can leave a value where it was by chance: a second moment of Adam is the square of a gradient, which may be noise on both
        sides of zero. So there are several, in opposite directions.
        """
        different, nudged = every, list[Effect]()
        precision = self.facts.program.precision
        nudges = [Start(nudged=True, precision=precision, direction=direction) for direction in range(DIRECTIONS)]
        for start in (AGAIN, *nudges):
            if not any(difference.rounding for difference in different):
                break
            effect = self.reference.from_start(self.subject, start)
            if start == AGAIN and (effect.error or self.differences(replace(effect, before=got.before))):
                # The calls do not repeat, so that no other start tells what rounding does: a number that Python counts up, say.
                break
            if effect.error is None:
                nudged.append(effect)
                different = self.differences(got, tuple(nudged))
        return different

    def beyond_fusion(self, different: Found) -> Found:
        """The differences that remain where XLA fuses no operations of the same program.

        Where two terms cancel to the bit (a published graph network: the `GCN` of jraphx), every start gives zero, and a fused operation, which
        rounds once in place of twice, gives noise, which may lie on the other side of a relu.
        """
        if not (self.nesting.layers and any(map(may_be_fusion, different))):
            return different
        without_fusion = unfused(self.subject, self.facts, self.nesting)
        if without_fusion is None:
            return different
        got = effect_against(self.subject, without_fusion, self.reference.wanted)
        left = {difference.path for difference in self.beyond_nudge(got, self.differences(got))}
        return tuple(each for each in different if each.path in left or not may_be_fusion(each))


def compared(subject: Subject, facts: Profile, observation: Observation, reference: Reference) -> Differences:
    """Compare a run that ended, and leaked no tracer, with its reference.

    The reference makes the same calls without the nesting, or an un-nested call without its jits. The state after an un-nested call
    lacks an update where a transform inside the call made that update to a copy.
    """
    nesting, wanted = observation.nesting, reference.wanted
    lost: list[tuple[Difference, Cause]] = []
    if not nesting.layers:
        lost += [(replace(LOST, path=subject.path(path)), "reference") for path in facts.state.lost]
    if wanted.error is not None:
        kind: FactKind = "raises un-nested" if nesting.layers else "raises without jit"
        return Differences((*lost,), (Fact(kind, PARITY, first_line(wanted.error)),))
    got = effect_against(subject, observation, wanted)
    draws = other_draws(subject, nesting)
    comparison = Comparison(subject, facts, nesting, reference, drawn=draws is not None)
    every = comparison.differences(got)
    moved = comparison.beyond_nudge(got, every)
    set_in_call = attributes_dropped(subject, moved, nesting)
    judged = tuple(difference for difference in moved if difference.path not in set_in_call)
    fused = comparison.beyond_fusion(judged)
    behind = tuple(difference for difference in fused if not is_left_behind(difference, got.before, nesting))
    different = behind if nesting.layers else tuple(each for each in behind if not is_returned(each, wanted, got))
    explained = (
        *([draws] if draws else []),
        *note_on("decided by rounding", every, moved),
        *note_on("decided by fusion", judged, fused),
        *note_on("added, functional", fused, behind),
    )
    numbers = scalars(got.after, got.before)
    # The notes of an un-nested call begin with the numbers: the call itself sets them, whatever the reference does.
    notes = (*explained, *numbers) if nesting.layers else (*numbers, *explained)
    if set_in_call:
        notes = (*notes, Fact("attributes, functional", set_in_call, of_call=True))
    causes = causes_in_refs(comparison)
    left: list[tuple[Difference, Cause]] = [(each, causes.get((each.path, each.label), "")) for each in different]
    return Differences((*left, *lost), notes)


def causes_in_refs(comparison: Comparison) -> dict[tuple[str, str], DropCause]:
    """The certain causes of differences in references, by their paths and labels."""
    layers, state, known = comparison.nesting.layers, comparison.facts.state, dict[tuple[str, str], DropCause]()
    to_copies = any(layer.style == "argument" and not (layer.row.compiles or layer.row.loop) for layer in layers)
    names = [layer.transform for layer in layers]
    twice = GRAD in names and REMAT in names[names.index(GRAD) :]
    for path in state.references:
        name = comparison.subject.path(path)
        if path in state.replaced or (to_copies and flax_modes.mode_flags()[1]):
            known[name, "dropped"] = "replaced" if path in state.replaced else "reference"
        if twice:
            known[name, "differs"] = "reference"
    return known


def attributes_dropped(subject: Subject, different: Found, nesting: Nesting) -> tuple[str, ...]:
    """The Python attributes that differ, where a functional layer hands out the leaves of the state, and by its definition nothing else.

    A value that depends on one, in the next step say, is an output or a leaf, and is compared.
    """
    if not has_functional(nesting):
        return ()
    leaves = {subject.path(path) for path, _ in graph.flat_state(flax_modes.split(subject.state)[1])}
    return tuple(each.path for each in different if each.of == "attribute" and each.path not in leaves)


def may_be_fusion(difference: Difference) -> bool:
    """True if rounding by the compiler may explain a difference: never a dropped update, NaN or infinity."""
    return difference.rounding and difference.label != "dropped"


def is_left_behind(difference: Difference, before: Facts, nesting: Nesting) -> bool:
    """True if the call adds a leaf where a layer of ours hands out the leaves that were there before and no others."""
    return has_functional(nesting) and difference.label == "missing" and difference.path not in before.leaves


def has_functional(nesting: Nesting) -> bool:
    """True if a layer is functional."""
    return any(layer.style == "functional" for layer in nesting.layers)


def note_on(kind: FactKind, every: Found, left: Found) -> tuple[Fact, ...]:
    """A note on the differences that are in ``every`` and not in ``left``."""
    paths = {difference.path for difference in left}
    names = tuple(difference.path for difference in every if difference.path not in paths)
    return (Fact(kind, names),) if names else ()


def effect_against(subject: Subject, observation: Observation, wanted: Effect) -> Effect:
    """The output of a run and its copy of the state, with the names of the reference's outputs."""
    return Effect(
        returned=primal(observation.nesting.layers, observation.returned),
        names=names_of(meaning_of(observation.nesting), wanted.structure.names),
        output=observation.output,
        structure=structure(observation.output_names, observation.rebuild, observation.output),
        before=read(subject, subject.state),
        after=read(subject, observation.state),
    )


def other_draws(subject: Subject, nesting: Nesting) -> Fact | None:
    """A note on random numbers that differ under vmap: only threefry draws the same for a key alone and for a key in a batch."""
    if not any(layer.row.axis == "elements" for layer in nesting.layers):
        return None
    leaves = [(subject.path(path), value) for path, value in graph.raw_leaves(subject.state)]
    for name, held in [*leaves, *zip(subject.input_names, subject.inputs, strict=False)]:
        leaf = buffer_of(held)
        if hasattr(leaf, "dtype") and graph.is_key(leaf) and str(jax.random.key_impl(leaf)) not in (THREEFRY, "fry"):
            return Fact("other draws", (name,), describe(leaf))
    default = str(jax.config.jax_default_prng_impl)
    return None if default == THREEFRY else Fact("other draws", ("jax_default_prng_impl",), default)


def is_returned(difference: Difference, wanted: Effect, got: Effect) -> bool:
    """True if the call returns the new value of a leaf, as one in functional style does: an output lies far nearer to it than the old value."""
    leaf, old = wanted.after.leaves.get(difference.path), got.before.leaves.get(difference.path)
    if leaf is None or old is None:
        return False
    moved = distance(leaf.value, old.value)
    outputs = (array for array in got.output if describe(array) == describe(leaf.value))
    return any(TIMES * distance(leaf.value, array) <= moved for array in outputs)
