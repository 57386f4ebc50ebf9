"""A call under its nesting, and the case that an observation of it makes for the invariants: the last place that knows the subject."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, replace
from typing import Any

import jax

from pytest_nnxcheck import invariants
from pytest_nnxcheck.compat import flax_modes, frames, graph, targets
from pytest_nnxcheck.compat.arrays import nbytes
from pytest_nnxcheck.core.catalogue import JIT, TARGETED, rows_of
from pytest_nnxcheck.core.chips import parse_target
from pytest_nnxcheck.core.errors import CheckError
from pytest_nnxcheck.core.facts import Advice, Leak, NestedCall, Observation, UnNested
from pytest_nnxcheck.core.nesting import Layer, Misfit, Nesting
from pytest_nnxcheck.core.notes import CapturedBy, Fact, MergedVariables
from pytest_nnxcheck.core.outcome import CallFacts, JitTracedAgain, Listener, Outcome, TypeMoved
from pytest_nnxcheck.core.peak import Growth, Memory, Split
from pytest_nnxcheck.core.settings import Settings
from pytest_nnxcheck.core.text import some
from pytest_nnxcheck.engine import causes
from pytest_nnxcheck.engine.evidence import buffers, growth, left, split, un_nested_evidence
from pytest_nnxcheck.engine.example import Example, held_outside, renewed
from pytest_nnxcheck.engine.memo import Memo, evaluated_calls, recall
from pytest_nnxcheck.engine.on_targets import OnTargets
from pytest_nnxcheck.engine.parity import MOST_EQUATIONS, agrees, effect_against, keeps_updates
from pytest_nnxcheck.engine.reference import Reference, ReferenceWithoutJit, meaning_of
from pytest_nnxcheck.engine.run import measure, observe, traced_again
from pytest_nnxcheck.invariants import Case
from pytest_nnxcheck.invariants.advice import Sizes, advice, of_state
from pytest_nnxcheck.invariants.bound import bound
from pytest_nnxcheck.invariants.case import Originals, Written
from pytest_nnxcheck.invariants.recompilation import moved, types_moved
from pytest_nnxcheck.subject.inner_jits import jits_traced_again
from pytest_nnxcheck.subject.leaks import leak
from pytest_nnxcheck.subject.profile import UNKNOWN, Profile, profile
from pytest_nnxcheck.subject.state_facts import read
from pytest_nnxcheck.subject.subject import Subject
from pytest_nnxcheck.transforms import trials
from pytest_nnxcheck.transforms.compose import BASELINE, baseline_for
from pytest_nnxcheck.transforms.fitness import unfit
from pytest_nnxcheck.transforms.layer import LENGTH

__tracebackhide__ = True  # pytest shows the frames of the user, not these


@dataclass(frozen=True, slots=True)
class CallStarted:
    """A call is about to run under a nesting, or without a profile to be traced for the first time: that may take the process with it."""

    subject: Subject
    profile: Profile | None
    nesting: Nesting
    settings: Settings


class Unrestored(BaseException):
    """The first trace of a call left tracers in what cannot be put back, as the frame of a generator, and every later one meets them.

    Not an ``Exception``, as `NestingRejected`: it is none of the user's code.
    """

    def __init__(self, leaks: tuple[Leak, ...]) -> None:
        super().__init__()
        self.leaks = leaks


@dataclass(frozen=True, slots=True)
class Call:
    """One call of the user's under one nesting, taken apart, with the settings of its check and the example that makes it.

    ``key`` is its signature, taken before the call: its own state is written when it has been judged.
    """

    subject: Subject
    key: Any
    nesting: Nesting
    settings: Settings
    example: Example
    originals: Originals
    publish: Listener

    @property
    def memo(self) -> Memo:
        """What is known of the calls of the test."""
        return self.example.memo

    @property
    def compares_values(self) -> bool:
        """Whether an invariant is asked for that compares the values with those of the same calls without the nesting."""
        return any(row.values and row.function is None for row in rows_of(self.settings.invariants))

    @property
    def is_for_targets(self) -> bool:
        """Whether targets compile the program of the nesting, whatever the CPU makes of it: the un-nested jit, one that is replayed, with ``thorough`` all."""
        settings, layers = self.settings, self.nesting.layers
        judged = settings.target and TARGETED & {*settings.invariants}
        if not judged or not layers or not layers[0].row.compiles:
            return False
        return (
            layers == (Layer(JIT, settings.styles[0]),) or settings.effort == "thorough" or settings.nesting is not None
        )

    def require_slices(self) -> None:
        """Raise `CheckError` where a slice was named of another size than the mesh of the call, before anything of the call runs."""
        if not self.settings.target:
            return
        leaves = [*jax.tree.leaves(flax_modes.split(self.subject.state)[1]), *self.subject.inputs]
        with contextlib.suppress(targets.LeftOut):
            for word in self.settings.target:
                targets.target_of(parse_target(word), targets.mesh_of(leaves))

    def on_targets(self, profile: Profile) -> OnTargets:
        """What compiles the call's programs for the targets of the settings."""
        state = profile.copied_bytes if "memory" in self.settings.invariants else 0
        return OnTargets(self.settings.target, self.memo.on_targets, state)

    def announce(self, profile: Profile | None) -> None:
        """Say that the nesting is about to run; without a profile, that the call is about to be traced, where it never was."""
        if profile is not None or self.key not in self.memo.profiles:
            self.publish(CallStarted(self.subject, profile, self.nesting, self.settings))

    def facts(self) -> CallFacts:
        """What is known of the call by now, whatever its nesting."""
        profile, un_nested = self.memo.profiles.get(self.key), self.memo.un_nested.get(self.key)
        added = () if profile is None else tuple(map(self.subject.path, profile.added))
        running = tuple(row.name for row in rows_of(self.settings.invariants) if row.runs and self.subject.abstract)
        notes = [Fact("abstract", running)] if running else []
        notes += self.memo.notes.get(self.key, ())
        if profile is not None and profile.untrained:
            notes.append(Fact("untrained", tuple(map(self.subject.path, profile.untrained)), self.subject.name))
        if self.compares_values and profile is not None and profile.equations > MOST_EQUATIONS:
            notes.append(Fact("many equations", of=self.subject.name, count=profile.equations))
        donates = "donation" in self.settings.invariants and self.settings.donate != "none"
        if profile is not None and profile.in_one_array and donates:
            first = tuple(map(self.subject.path, profile.in_one_array[0]))
            notes.append(Fact("in one array", first, self.subject.name, len(profile.in_one_array)))
        return CallFacts((*self.originals.notes, *notes), added, () if un_nested is None else (un_nested,))

    # --- from the memo, where the same call was made before

    def profile(self) -> Profile:
        """The profile of the call. Raises what the user's code raises under a trace, and `Unrestored`."""
        if self.key in self.memo.remapped:
            return self.memo.remapped[self.key]

        def evaluated() -> Profile:
            with (
                self.subject.undone(self.subject.state, self.example.originals) as left,
                frames.devices_asked(on=bool(self.settings.target)) as lines,
            ):
                evaluated = profile(self.subject)
            self.memo.notes[self.key] = tuple(Fact("asks for devices", self.settings.target, line) for line in lines)
            if left:
                raise Unrestored(tuple(leak(tracer, Layer(JIT)) for tracer in left))
            return evaluated

        return recall(self.memo.profiles, self.key, evaluated)

    def remapped(self) -> Profile:
        """The profile of the call, with the leaves that it writes and restores."""

        def evaluated() -> Profile:
            before, state = self.profile(), self.subject.state
            with self.subject.undone(state):
                paths = trials.restored_leaves(self.subject, before.changed)
            size = sum(nbytes(leaf) for path, leaf in graph.raw_leaves(state) if path in paths)
            return replace(before, restored=paths, restored_bytes=size)

        return recall(self.memo.remapped, self.key, evaluated)

    def misfit(self, profile: Profile) -> Misfit | None:
        """Why a layer of the nesting cannot take the call."""
        misfit = unfit(self.subject, profile, self.nesting)
        layers = () if misfit else (layer for layer in self.nesting.layers if layer.row.pair == "gradients")
        return misfit or next(
            filter(None, (self.no_gradient(profile, by_inputs=layer.captures) for layer in layers)), None
        )

    def no_gradient(self, profile: Profile, *, by_inputs: bool) -> Misfit | None:
        """Why the call has no gradient by its parameters, or by its inputs; `None` where it has one."""
        table, key = self.memo.gradients, (self.key, by_inputs)
        return recall(table, key, lambda: trials.no_gradient(self.subject, profile, by_inputs=by_inputs))

    def un_nested_memory(self) -> Memory | None:
        """Memory of the un-nested jit, of the gradient where the nesting takes one; None where that does not run."""
        baseline, donate = baseline_for(self.nesting), self.settings.donate

        def measured() -> Memory | None:
            profile = self.profile()
            with self.subject.undone(self.subject.state):
                return observe(self.subject, profile, baseline, donate, self.memo.shared_programs).memory

        return recall(self.memo.baselines, (self.key, donate, baseline), measured)

    def un_nested_facts(self, profile: Profile, memory: Memory) -> UnNested:
        """Where the bytes of the un-nested program are, and advice on them."""

        def found_out() -> UnNested:
            sizes = Sizes(profile.state_bytes, profile.input_bytes, profile.output_bytes)
            # Not the program's own names, which are in the order of its parameters.
            leaves, inputs = [*map(self.subject.path, profile.state_paths)], self.subject.input_names
            handed = tuple(of_state(self.subject, profile))
            advised = advice(memory.peak, buffers(memory), profile.waste, leaves, inputs, sizes, handed)
            return UnNested(self.subject.name, un_nested_evidence(memory), advised)

        return recall(self.memo.un_nested, self.key, found_out)

    def growth(self, short: Split | None) -> Growth | None:
        """What each further step of the nesting's loop adds to the peak; `None` without one loop, or where it cannot be measured."""
        loops = [layer for layer in self.nesting.layers if layer.row.grows]
        if len(loops) != 1 or short is None:
            return None
        nesting, donate = self.nesting, self.settings.donate

        def measured() -> Memory | None:
            return measure(self.subject, self.profile(), nesting, donate, 2 * LENGTH)

        long = recall(self.memo.longer, (self.key, donate, nesting), measured)
        return growth(str(loops[0]), LENGTH, short, split(long))

    def captured(self, *, leaking: bool = False) -> tuple[CapturedBy, ...]:
        """The transforms that the call applies to a function which captured a graph node, one that holds tracers then; the same under every nesting."""
        captures = recall(self.memo.captured, self.key, lambda: causes.captured(self.subject))
        return tuple(capture for capture in captures if capture.leaks or not leaking)

    def merged(self) -> tuple[Leak | MergedVariables, ...]:
        """What is wrong with the modules that the call itself merged; the same under every nesting."""
        return recall(self.memo.merged, self.key, lambda: causes.merged_inside(self.subject))

    def jits_traced_again(self) -> tuple[JitTracedAgain, ...]:
        """The jits inside the call that trace the same in each; the same under every nesting."""

        def found_out() -> tuple[JitTracedAgain, ...]:
            with self.subject.undone(self.subject.state):
                return jits_traced_again(self.subject)

        return recall(self.memo.jits_traced_again, self.key, found_out)

    def without_jit(self, profile: Profile) -> Reference | None:
        """The call with its jits off; none where nothing is compared, it cannot run, or would take minutes."""
        compares = self.compares_values and not self.subject.abstract and profile.equations <= MOST_EQUATIONS
        return ReferenceWithoutJit.of(self.subject) if compares else None

    def reference(self) -> Reference | None:
        """What the same calls do without the nesting, made in the same order; none where they cannot run."""
        self.example.compared += 1
        if self.subject.abstract:
            return None
        meaning = meaning_of(self.nesting)
        calls = evaluated_calls(self.memo.evaluated, self.subject, self.example.compared)
        return Reference(meaning, calls.effect(self.subject, meaning), calls)


def settled(observation: Observation) -> bool:
    """Whether a run ended, and left no tracers: its state and its output can be handed on."""
    return observation.error is None and not observation.leaks


def case_of(call: Call, profile: Profile, observation: Observation, reference: Reference | None) -> Case:
    """The case of a nesting; ``reference`` is what the same calls do without it."""
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
        advice=(lambda: judged_advice(call, profile, baseline)) if baseline is not None else tuple,
        debug_nans=bool(jax.config.jax_debug_nans),
        compare=(lambda: agrees(subject, profile, observation, reference)) if compares and reference else None,
        effects=(lambda: (reference.wanted, effect_against(subject, observation, reference.wanted)))
        if compares and reference
        else None,
        second_call=(lambda: second_call(call, profile, observation)) if builds_one_jit(call, observation) else tuple,
        jits_inside=call.jits_traced_again if measured and settled(observation) and not observation.abstract else tuple,
        nested_call=lambda: nested_call(subject, observation),
    )


def case_of_un_nested(call: Call, profile: Profile, observation: Observation, without_jit: Reference | None) -> Case:
    """The case of the call as the user made it: nothing of it is compiled or donated. Its updates are compared with those ``without_jit``."""
    donates = bool(observation.inside.consumed)
    outside = held_outside(call.subject, call.example.originals) if donates and call.example.originals else ()
    return Case(
        observation=observation,
        settings=call.settings,
        originals=replace(call.originals, shared=call.originals.shared + outside),
        written=Written(renewed=renewed(call.subject, profile, observation)) if donates else Written(),
        compare=(lambda: keeps_updates(call.subject, profile, observation, without_jit)) if without_jit else None,
        nested_call=lambda: nested_call(call.subject, observation),
    )


def builds_one_jit(call: Call, observation: Observation) -> bool:
    """Whether the nesting ran under a jit that is handed the state, so that a second call may find it again."""
    root = call.nesting.layers[:1]
    return root in ((Layer(JIT),), (Layer(JIT, "functional"),)) and settled(observation) and not observation.abstract


def second_call(call: Call, profile: Profile, observation: Observation) -> tuple[TypeMoved, ...]:
    """What the call left in another type, where a second one is traced again; nothing where it is not.

    A functional jit, which is handed leaves alone, is built anew in each call here: one that is kept is traced again where their types are others.
    """
    subject = call.subject
    if call.nesting.layers[0].style == "functional":
        return tuple(types_moved(subject, subject.state, observation.state))
    if not traced_again(subject, profile, call.nesting, call.settings.donate, observation.state):
        return ()
    return moved(subject, subject.state, observation.state)


def nested_call(subject: Subject, observation: Observation) -> NestedCall:
    """The call as an invariant of the user's own sees it."""
    before, after = read(subject, subject.state), read(subject, observation.state)
    outputs: dict[str, Any] = {}
    for name, array in zip(observation.output_names, observation.output, strict=False):
        label = f"output{name}"  # all arrays of a module that is returned have one name
        outputs[label if label not in outputs else f"{label} #{len(outputs)}"] = array
    return NestedCall(
        nesting=observation.nesting,
        before={path: leaf.value for path, leaf in before.leaves.items()},
        after={path: leaf.value for path, leaf in after.leaves.items()},
        kinds={path: leaf.kind for path, leaf in after.leaves.items()},
        outputs=outputs,
        memory=observation.memory,
        compiled=observation.compiled,
        abstract=observation.abstract,
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


def not_run(
    subject: Subject, nesting: Nesting, settings: Settings, leaks: tuple[Leak, ...], publish: Listener
) -> Outcome:
    """The outcome of a call that every run would make with these tracers: none is made. Raises `CheckError` where nobody asserts that there are none."""
    publish(CallStarted(subject, UNKNOWN, nesting, settings))
    observation = Observation(nesting, subject.state, leaks=leaks)
    judgement = invariants.judge(Case(observation, only_tracers(settings)))
    if not judgement.violations:
        paths = some([leak.path for leak in leaks])
        raise CheckError(
            f"{subject.name} runs with tracers that cannot be put back, in {paths}: assert the invariant tracers"
        )
    return Outcome(nesting, "violated", judgement.violations, evidence=left(observation))


def only_tracers(settings: Settings) -> Settings:
    """The settings of a nesting of which nothing else can be asserted."""
    return replace(settings, invariants=tuple({"tracers"} & {*settings.invariants}))


def judged_advice(call: Call, profile: Profile, baseline: Memory) -> tuple[Advice, ...]:
    """The advice on the un-nested call, where the settings make it a violation of the nestings that are measured by it."""
    if baseline_for(call.nesting) != BASELINE:
        return ()
    advised = call.un_nested_facts(profile, baseline).advice
    return () if call.settings.memory_advice == "note" else advised
