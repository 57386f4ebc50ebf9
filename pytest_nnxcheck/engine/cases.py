"""A call under its nesting, and the case that an observation of it makes for the invariants: the last place that knows the subject."""

from __future__ import annotations

from dataclasses import dataclass

import jax

from pytest_nnxcheck.core.catalogue import VALUE_INVARIANTS
from pytest_nnxcheck.core.evidence import Advice
from pytest_nnxcheck.core.nesting import Nesting
from pytest_nnxcheck.core.observation import Memory, Observation
from pytest_nnxcheck.core.settings import Settings
from pytest_nnxcheck.engine.parity import agrees, agrees_inside
from pytest_nnxcheck.engine.session import Session
from pytest_nnxcheck.invariants import Case
from pytest_nnxcheck.invariants.bound import bound
from pytest_nnxcheck.invariants.case import Originals, Written
from pytest_nnxcheck.subject.profile import Profile
from pytest_nnxcheck.subject.state_facts import Effect
from pytest_nnxcheck.subject.subject import Subject
from pytest_nnxcheck.transforms.compose import BASELINE, baseline_for

__tracebackhide__ = True  # pytest shows the frames of the user, not these


@dataclass(frozen=True, slots=True)
class Call:
    """One call of the user's under one nesting, taken apart, with the settings of its check and what the nestings of its test share."""

    subject: Subject
    nesting: Nesting
    settings: Settings
    session: Session
    originals: Originals

    @property
    def compares_values(self) -> bool:
        """Whether an invariant is asked for that is about values."""
        return not VALUE_INVARIANTS.isdisjoint(self.settings.invariants)

    def announce(self, profile: Profile | None) -> None:
        """Tell that the nesting is about to run; without a profile, that the call is about to be traced for the first time."""
        self.session.announce(self.subject, profile, self.nesting, self.settings)

    def un_nested_memory(self) -> Memory | None:
        """The memory of the un-nested program that the nesting is measured by."""
        return self.session.baseline_of(self.subject, self.settings.donate, self.nesting)


def settled(observation: Observation) -> bool:
    """Whether a run ended, and left no tracers: its state and its output can be handed on."""
    return observation.error is None and not observation.leaks


def case_of(call: Call, profile: Profile, observation: Observation, wanted: Effect | None) -> Case:
    """The case of a nesting; ``wanted`` is what the same calls do without it."""
    subject, settings = call.subject, call.settings
    measured = observation.memory is not None and observation.error is None
    baseline = call.un_nested_memory() if measured else None
    compares = call.compares_values and settled(observation)
    return Case(
        observation=observation,
        settings=settings,
        profile=profile,
        originals=call.originals,
        written=written(call, profile, observation),
        bound=bound(observation, profile, baseline, settings.memory_budget) if baseline is not None else None,
        advice=(lambda: advice(call, profile, baseline)) if baseline is not None else tuple,
        debug_nans=bool(jax.config.jax_debug_nans),
        compare=(lambda: agrees(subject, profile, observation, wanted)) if compares else None,
    )


def case_of_un_nested(call: Call, profile: Profile, observation: Observation) -> Case:
    """The case of the call as the user made it: nothing of it is compiled or donated."""
    return Case(
        observation=observation,
        settings=call.settings,
        originals=call.originals,
        compare=lambda: agrees_inside(call.subject, profile, observation),
    )


def written(call: Call, profile: Profile, observation: Observation) -> Written:
    """What the call does to what it is handed, by the user's names."""
    name = call.subject.path
    return Written(
        changed=frozenset(map(name, profile.changed)),
        dropped=tuple(map(name, profile.dropped)) if donates(call, observation) else (),
        inputs=frozenset(call.subject.input_names),
        promoted={name(path): line for path, line in profile.promoted},
    )


def donates(call: Call, observation: Observation) -> bool:
    """Whether the program donates its state: the jit at its root was handed it, compiled it, and left nothing behind."""
    layers = call.nesting.layers
    handed = bool(layers) and layers[0].row.compiles and not layers[0].captures
    return handed and call.settings.donate != "none" and settled(observation)


def advice(call: Call, profile: Profile, baseline: Memory) -> tuple[Advice, ...]:
    """The advice on the un-nested call, where the settings make it a violation of the nestings that are measured by it."""
    if baseline_for(call.nesting) != BASELINE:
        return ()
    pieces = call.session.learn_of_un_nested(call.subject, profile, baseline).advice
    return () if call.settings.memory_advice == "note" else pieces
