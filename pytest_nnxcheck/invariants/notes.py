"""Facts of a nesting that are worth telling, and that no invariant judges."""

from __future__ import annotations

from pytest_nnxcheck.compat.arrays import describe
from pytest_nnxcheck.core.errors import CheckError
from pytest_nnxcheck.core.observation import Observation
from pytest_nnxcheck.core.text import some
from pytest_nnxcheck.invariants import hints
from pytest_nnxcheck.invariants.donation import notes
from pytest_nnxcheck.subject.profile import Profile
from pytest_nnxcheck.subject.subject import Subject
from pytest_nnxcheck.transforms.compose import MAPPING, maps_written


def of_holding(subject: Subject, facts: Profile, found: Observation) -> tuple[str, ...]:
    """Notes on a nesting that was judged."""
    texts = []
    if found.dropped and found.error is None:
        leak = found.dropped[0]
        texts.append(f"{leak.layer} left tracers in {leak.path} of the module merged inside; they died with it")
    if facts.inner_donations and any(layer.row.compiles for layer in found.nesting.layers):
        texts.append(
            f"{facts.inner_donations} donated operands of a jit inside the call: the outer jit drops that in silence"
        )
    if found.still:
        paths = [subject.path(path) for path in found.still]
        texts.append(f"{some(paths)} did not move under {found.nesting}: the un-nested call changes it")
    return (*texts, *notes(found))


def of_failure(subject: Subject, facts: Profile, found: Observation) -> tuple[str, ...]:
    """Notes on a nesting that raised."""
    return (*mapped(subject, facts, found), *fed_back(subject, facts, found))


def mapped(subject: Subject, facts: Profile, found: Observation) -> tuple[str, ...]:
    """What a ``vmap`` that raised was handed with an axis."""
    if not maps_written(found.nesting) or isinstance(found.error, CheckError):
        return ()
    names = [*map(subject.path, sorted(facts.changed | facts.restored, key=str)), *subject.input_names]
    return (f"{MAPPING} maps {some(names, 5)}, and broadcasts the rest",)


def fed_back(subject: Subject, facts: Profile, found: Observation) -> tuple[str, ...]:
    """What an iterate that raised could not feed back: an output of another dtype than the input whose place it takes."""
    layers = [layer for layer in found.nesting.layers if layer.row.iterates]
    if not layers or not facts.widened:
        return ()
    number, line = facts.widened[0]
    given, out = subject.inputs[number], facts.out[number]
    advice = hints.hint("dtype", dtype=given.dtype.name, line=f" ({line})" if line else "")
    types = f"{subject.input_names[number]} is {describe(given)}, output{facts.out_names[number]} is {describe(out)}"
    return (f"{layers[0]} feeds the output back: {types}", advice)
