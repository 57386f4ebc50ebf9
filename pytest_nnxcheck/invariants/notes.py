"""Facts of a nesting that are worth telling, and that no invariant judges."""

from __future__ import annotations

from pytest_nnxcheck.core.errors import CheckError
from pytest_nnxcheck.core.notes import Explanation, Fact, Mapped, Note
from pytest_nnxcheck.core.observation import Observation
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


def of_failure(subject: Subject, facts: Profile, observation: Observation) -> tuple[Explanation, ...]:
    """What explains that a nesting raised."""
    return mapped(subject, facts, observation)


def mapped(subject: Subject, facts: Profile, observation: Observation) -> tuple[Mapped, ...]:
    """What a ``vmap`` that raised was handed with an axis."""
    if not maps_written(observation.nesting) or isinstance(observation.error, CheckError):
        return ()
    names = (*map(subject.path, sorted(facts.changed | facts.restored, key=str)), *subject.input_names)
    return (Mapped(MAPPING, names),)
