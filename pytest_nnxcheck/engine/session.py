"""What the nestings of one test have in common: what was found out of its calls, and the places that they may change."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from pytest_nnxcheck import compat
from pytest_nnxcheck.compat.arrays import describe, nbytes
from pytest_nnxcheck.core.evidence import Advice, Evidence, Growth, Split
from pytest_nnxcheck.core.nesting import Nesting
from pytest_nnxcheck.core.observation import Memory
from pytest_nnxcheck.core.outcome import Outcome
from pytest_nnxcheck.core.settings import Settings
from pytest_nnxcheck.engine.evidence import buffers, growth, split, un_nested_evidence
from pytest_nnxcheck.engine.observe import measure, observe
from pytest_nnxcheck.engine.reference import References
from pytest_nnxcheck.inspection.snapshot import Places
from pytest_nnxcheck.invariants.advice import Sizes, advice
from pytest_nnxcheck.subject.profile import Profile, profile, restored_leaves
from pytest_nnxcheck.subject.subject import Subject
from pytest_nnxcheck.subject.uncomputed import Values
from pytest_nnxcheck.transforms import differentiable
from pytest_nnxcheck.transforms.compose import baseline_for
from pytest_nnxcheck.transforms.fitness import Misfit, unfit
from pytest_nnxcheck.transforms.layer import LENGTH

__tracebackhide__ = True  # pytest shows the frames of the user, not these


class Announced(Protocol):
    """Who is told of a nesting of a call right before it runs."""

    def begin(self, body: Any) -> None:
        """A test body is about to run, once more where values were needed."""

    def end(self, outcomes: Mapping[Nesting, Outcome]) -> None:
        """It has ended, and its nestings came to this."""

    def before(self, subject: Subject, profile: Profile | None, nesting: Nesting, chosen: Settings) -> None:
        """The nesting is about to run, or without a profile the call to be traced for it: that may take the process with it."""

    def settle(self, outcome: Outcome) -> Outcome:
        """The outcome of a nesting with its program, which now tells what broke."""


@dataclass(frozen=True, slots=True)
class UnNested:
    """What is known of the un-nested program of one call, by the name of its subject."""

    name: str
    evidence: Evidence
    advice: tuple[Advice, ...]


@dataclass(slots=True)
class Session:
    """What the nestings of one test have in common: profiles of its calls, and the places that a call may change.

    Between ``begin_example`` and ``end_example`` the user's objects change as he expects; then they are put back, so that every
    nesting meets a module of a wider fixture scope, and a cache in its code, in the same state.
    """

    adds_state: bool = False
    added: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    profiles: dict[Any, Profile] = field(default_factory=dict)
    restoring: set[Any] = field(default_factory=set)
    looked_up: set[str] = field(default_factory=set)
    gradients: dict[Any, str] = field(default_factory=dict)
    baselines: dict[Any, Memory | None] = field(default_factory=dict)
    un_nested: dict[Any, UnNested] = field(default_factory=dict)
    longer: dict[Any, Memory | None] = field(default_factory=dict)
    places: list[Places] = field(default_factory=list)
    references: References = field(default_factory=References)
    programs: Announced | None = None
    shared_programs: compat.SharedPrograms = field(default_factory=compat.SharedPrograms)
    values: Values = field(default_factory=Values)
    latest_key: tuple[Subject, Any] | None = None

    def announce(self, subject: Subject, profile: Profile | None, nesting: Nesting, settings: Settings) -> None:
        """Tell of a nesting that is about to run; without a profile, of a call that is about to be traced for the first time."""
        if self.programs is not None and (profile is not None or self.key(subject) not in self.profiles):
            self.programs.before(subject, profile, nesting, settings)

    def begin_example(self) -> None:
        self.places.clear()
        self.values.stand_ins.clear()
        self.references.begin_example()

    def end_example(self) -> None:
        self.latest_key = None  # which holds the state of the example
        while self.places:
            for place in self.places.pop().restore():
                self.note(f"{place} could not be put back: what a nesting left there is met by the next")

    def note(self, text: str) -> None:
        """Keep what the report of the test should say, once."""
        if text not in self.notes:
            self.notes.append(text)

    def key(self, subject: Subject) -> Any:
        """The signature of a subject, taken once: its own state is written when the call has been judged."""
        if self.latest_key is None or self.latest_key[0] is not subject:
            self.latest_key = subject, signature(subject)
        return self.latest_key[1]

    def profile_of(self, subject: Subject) -> Profile:
        """The profile of the call, from the memo where the same call was made before."""
        key = self.key(subject)
        if key not in self.profiles:
            with differentiable.restored(subject):
                self.profiles[key] = profile(subject)
        found = self.profiles[key]
        self.adds_state = self.adds_state or bool(found.added)
        self.added += [path for path in map(subject.path, found.added) if path not in self.added]
        return found

    def restores(self, subject: Subject) -> Profile:
        """The profile of the call, with the leaves that it writes and restores."""
        key = self.key(subject)
        if key not in self.restoring:
            known = self.profile_of(subject)
            with differentiable.restored(subject):
                paths = restored_leaves(subject, known.changed)
            size = sum(nbytes(leaf) for path, leaf in compat.raw_leaves(subject.state) if path in paths)
            self.restoring.add(key)
            self.profiles[key] = replace(known, restored=paths, restored_bytes=size)
        return self.profiles[key]

    def baseline_of(self, subject: Subject, donate: str, nesting: Nesting) -> Memory | None:
        """Memory of the un-nested jit, of the gradient where the nesting takes one; None where that does not run."""
        baseline = baseline_for(nesting)
        key = (self.key(subject), donate, baseline)
        if key not in self.baselines:
            facts = self.profile_of(subject)
            self.baselines[key] = observe(subject, facts, baseline, donate, self.shared_programs).memory
        return self.baselines[key]

    def learn_of_un_nested(self, subject: Subject, facts: Profile, memory: Memory) -> UnNested:
        """Where the bytes of the un-nested program are, and advice on them, found once for a call."""
        key = self.key(subject)
        if key not in self.un_nested:
            known = un_nested_evidence(memory)
            sizes = Sizes(facts.state_bytes, facts.input_bytes, facts.output_bytes)
            # Not the program's own names, which are in the order of its parameters.
            names = [*map(subject.path, facts.state_paths), *subject.input_names]
            pieces = advice(memory.peak, buffers(memory), facts.waste, names, sizes)
            self.un_nested[key] = UnNested(subject.name, known, pieces)
        return self.un_nested[key]

    def growth_of(self, subject: Subject, donate: str, nesting: Nesting, known: Split | None) -> Growth | None:
        """What each further step of the nesting's loop adds to the peak; `None` without one loop, or where it cannot be measured."""
        loops = [layer for layer in nesting.layers if layer.row.grows]
        if len(loops) != 1 or known is None:
            return None
        key = (self.key(subject), donate, nesting)
        if key not in self.longer:
            self.longer[key] = measure(subject, self.profile_of(subject), nesting, donate, 2 * LENGTH)
        return growth(str(loops[0]), LENGTH, known, split(self.longer[key]))

    def misfit(self, subject: Subject, facts: Profile, nesting: Nesting) -> Misfit | None:
        """Why a layer of the nesting cannot take the call."""
        reason = "" if (known := unfit(subject, facts, nesting)) else self.no_gradient(subject, nesting)
        return Misfit("", reason) if reason else known

    def no_gradient(self, subject: Subject, nesting: Nesting) -> str:
        """Why a ``grad`` of the nesting cannot differentiate the call; empty if it can, or there is none."""
        for layer in nesting.layers:
            if layer.row.pair == "gradients":
                key = (self.key(subject), layer.captures)
                if key not in self.gradients:
                    facts = self.profile_of(subject)
                    self.gradients[key] = differentiable.cannot(subject, facts, by_inputs=layer.captures)
                if self.gradients[key]:
                    return self.gradients[key]
        return ""


def signature(subject: Subject) -> Any:
    """What decides the profile of a call: code, graph, shapes, static arguments, and the mode of flax."""
    graphdef, leaves = compat.split(subject.state)
    shapes = tuple((path, describe(leaf)) for path, leaf in compat.flat_state(leaves))
    try:
        graph: Any = hash(graphdef)
    except TypeError:
        # An unhashable attribute: such a module cannot enter nnx.jit either, so that no profile is worth keeping.
        graph = object()
    kind = (subject.abstract, compat.mode_flags())
    return (subject.name, subject.code, graph, shapes, tuple(map(describe, subject.inputs)), *kind)
