"""Facts of a nesting that are worth telling, and that no invariant judges."""

from __future__ import annotations

from collections.abc import Iterator

from pytest_nnxcheck.core.errors import CheckError
from pytest_nnxcheck.core.facts import Observation
from pytest_nnxcheck.core.notes import Explanation, Fact, Mapped, Note
from pytest_nnxcheck.invariants import donation
from pytest_nnxcheck.subject.profile import Profile
from pytest_nnxcheck.subject.subject import Subject
from pytest_nnxcheck.transforms.compose import MAPPING, maps_written


def of_holding(subject: Subject, facts: Profile, observation: Observation) -> tuple[Note, ...]:
    """Notes on a nesting that was judged."""
    notes = []
    if observation.dropped and observation.error is None:
        leak = observation.dropped[0]
        notes.append(Fact("left in merged", (leak.path,), str(leak.layer)))
    if facts.inner_donations and any(layer.row.compiles for layer in observation.nesting.layers):
        notes.append(Fact("inner donations", count=facts.inner_donations))
    if observation.still:
        notes.append(Fact("not moved", tuple(map(subject.path, observation.still)), str(observation.nesting)))
    return (*notes, *donation.notes(observation))


LITTLE = 10 * 2**20
"""Bytes below which the figures of a target say little: those of its own workspace, 4 MiB for a product of matrices on a GPU."""

MUCH_MORE = 1.5
"""Times the peak of the CPU. Of 96 programs of flax models one in twelve needs more on a TPU, and one in ninety on a GPU."""


def of_targets(observation: Observation) -> Iterator[Fact]:
    """Targets that could not compile the program, and those on which the un-nested program needs far more than on the CPU."""
    held = observation.memory
    for on in observation.targets:
        if on.left_out:
            yield Fact("left out on target", (on.target,), on.left_out)
        if held is None or on.peak is None or len(observation.nesting) > 1:
            continue
        if on.peak > max(MUCH_MORE * held.peak, LITTLE):
            yield Fact("peak on target", (on.target,), peaks=(on.peak, held.peak))


def of_failure(subject: Subject, facts: Profile, observation: Observation) -> tuple[Explanation, ...]:
    """What explains that a nesting raised."""
    return mapped(subject, facts, observation)


def mapped(subject: Subject, facts: Profile, observation: Observation) -> tuple[Mapped, ...]:
    """What a ``vmap`` that raised was handed with an axis."""
    if not maps_written(observation.nesting) or isinstance(observation.error, CheckError):
        return ()
    names = (*map(subject.path, sorted(facts.changed | facts.restored, key=str)), *subject.input_names)
    return (Mapped(MAPPING, names),)
