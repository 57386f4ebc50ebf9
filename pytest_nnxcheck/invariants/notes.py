"""Facts of a nesting that are worth telling, and that no invariant judges."""

from __future__ import annotations

from pytest_nnxcheck.compat.arrays import array_type
from pytest_nnxcheck.core.errors import CheckError
from pytest_nnxcheck.core.observation import Observation
from pytest_nnxcheck.core.outcome import Explanation, FedBack
from pytest_nnxcheck.core.text import some
from pytest_nnxcheck.invariants.donation import notes
from pytest_nnxcheck.subject.profile import Profile
from pytest_nnxcheck.subject.subject import Subject
from pytest_nnxcheck.transforms.compose import MAPPING, maps_written


def of_holding(subject: Subject, facts: Profile, observation: Observation) -> tuple[str, ...]:
    """Notes on a nesting that was judged."""
    texts = []
    if observation.dropped and observation.error is None:
        leak = observation.dropped[0]
        texts.append(f"{leak.layer} left tracers in {leak.path} of the module merged inside; they died with it")
    if facts.inner_donations and any(layer.row.compiles for layer in observation.nesting.layers):
        texts.append(
            f"{facts.inner_donations} donated operands of a jit inside the call: the outer jit drops that in silence"
        )
    if observation.still:
        paths = [subject.path(path) for path in observation.still]
        texts.append(f"{some(paths)} did not move under {observation.nesting}: the un-nested call changes it")
    return (*texts, *notes(observation))


def of_failure(subject: Subject, facts: Profile, observation: Observation) -> tuple[Explanation, ...]:
    """What explains that a nesting raised."""
    return (*mapped(subject, facts, observation), *fed_back(subject, facts, observation))


def mapped(subject: Subject, facts: Profile, observation: Observation) -> tuple[str, ...]:
    """What a ``vmap`` that raised was handed with an axis."""
    if not maps_written(observation.nesting) or isinstance(observation.error, CheckError):
        return ()
    names = [*map(subject.path, sorted(facts.changed | facts.restored, key=str)), *subject.input_names]
    return (f"{MAPPING} maps {some(names, 5)}, and broadcasts the rest",)


def fed_back(subject: Subject, facts: Profile, observation: Observation) -> tuple[FedBack, ...]:
    """What an iterate that raised could not feed back: an output of another dtype than the input whose place it takes."""
    layers = [layer for layer in observation.nesting.layers if layer.row.iterates]
    if not layers or not facts.widened:
        return ()
    number, line = facts.widened[0]
    given, out = array_type(subject.inputs[number]), array_type(facts.out[number])
    return (FedBack(layers[0], subject.input_names[number], given, facts.out_names[number], out, line),)
