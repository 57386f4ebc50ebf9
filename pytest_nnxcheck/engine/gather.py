"""Collect what the invariants need of a run, each need only if an invariant asks for it; then let them judge.

This is the last place that sees the subject: what an invariant is handed is plain data, with names as text.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax

from pytest_nnxcheck.compat import graph, refusals
from pytest_nnxcheck.compat.arrays import array_type
from pytest_nnxcheck.compat.variables import kind_of, variable_value
from pytest_nnxcheck.core.catalogue import JIT, InvariantRow, rows_of, severity
from pytest_nnxcheck.core.facts import Advice, Evidence, NestedCall, Observation, UnNested
from pytest_nnxcheck.core.nesting import Layer
from pytest_nnxcheck.core.outcome import JitTracedAgain, NotFinite, TypeMoved
from pytest_nnxcheck.core.peak import SHOWN, SHOWN_LINES, Bound, Growth, Memory, by_line
from pytest_nnxcheck.core.text import first_line
from pytest_nnxcheck.engine.example import Call
from pytest_nnxcheck.engine.memo import recall
from pytest_nnxcheck.engine.parity import compared, effect_against
from pytest_nnxcheck.engine.reference import Reference
from pytest_nnxcheck.engine.run import measure, observe, traced_again
from pytest_nnxcheck.invariants import own
from pytest_nnxcheck.invariants.advice import Sizes, advice
from pytest_nnxcheck.invariants.case import Case, Differences, Donation, Judgement, Pairs, Program, Tracers
from pytest_nnxcheck.subject.compared_by_jit import moved, types_moved
from pytest_nnxcheck.subject.inner_jits import jits_traced_again
from pytest_nnxcheck.subject.profile import UNKNOWN, Profile
from pytest_nnxcheck.subject.use_of_state import of_state, successors
from pytest_nnxcheck.transforms.bound import bound
from pytest_nnxcheck.transforms.compose import BASELINE, baseline_for
from pytest_nnxcheck.transforms.layer import LENGTH
from pytest_nnxcheck.values.differences import not_finite
from pytest_nnxcheck.values.effects import read

__tracebackhide__ = True  # pytest shows the frames of the user, not these


@dataclass(frozen=True, slots=True)
class Ran:
    """A call that ran under its nesting."""

    call: Call
    profile: Profile
    observation: Observation
    reference: Reference | None = None
    """What the same calls do without the nesting, or an un-nested call without its jits. `None` where no invariant compares values."""

    @property
    def measured(self) -> bool:
        """Whether a program was compiled and ran to its end."""
        return self.observation.memory is not None and self.observation.error is None


def judged(ran: Ran, invariants: tuple[str, ...]) -> Judgement:
    """What the invariants say of a run; the violations begin with the most serious one."""
    judgement = Judgement()
    for row in rows_of(invariants):
        if can_judge(row, ran.observation, judgement):
            case = Case(ran.observation.nesting, **{need: GATHER[need](ran) for need in row.needs})
            module = own if row.function else importlib.import_module(f"pytest_nnxcheck.invariants.{row.name}")
            judgement += module.judge(case, row) if row.function else module.judge(case)
    broken = sorted(judgement.violations, key=lambda violation: severity(violation.invariant))
    return replace(judgement, violations=tuple(broken))


def can_judge(row: InvariantRow, observation: Observation, judgement: Judgement) -> bool:
    """Whether a run shows what an invariant is about.

    Values are compared where the call ended, left no tracers, and broke nothing else; an invariant of the user's own is asked where it ended
    and left none, whatever else broke.
    """
    if row.function is not None:
        measured = observation.memory is not None or not row.compiled
        return observation.settled and measured and not (row.runs and observation.abstract)
    return observation.settled and not judgement.violations if row.values else True


# --- tracers


def tracers(ran: Ran) -> Tracers:
    """The tracers of the run, and the Variables of the user's own that an ended trace made."""
    observation = ran.observation
    return Tracers(
        leaks=observation.leaks,
        dropped=observation.dropped,
        raised=refusals.is_tracer_error(observation.error),
        touched=observation.mutated,
        pinned=ran.call.originals.pinned,
        has_data=graph.has_data(),
    )


# --- memory


def program(ran: Ran) -> Program | None:
    """The compiled program with its bound; nothing where the un-nested one beside it was not measured."""
    observation, profile, limit = ran.observation, ran.profile, bound_of(ran)
    if observation.memory is None or limit is None:
        return None
    return Program(
        memory=observation.memory,
        bound=limit,
        copies=observation.copies,
        state=profile.copied_bytes,
        devices=profile.devices,
        writes_back=profile.writes_back,
        remat_in_scan=profile.remat_in_scan,
        updates_can_be_off=graph.remat_updates_can_be_off(),
        scans_references=profile.scans_references,
        branches=profile.branches,
        captured=profile.captured,
    )


def bound_of(ran: Ran) -> Bound | None:
    """What the program of the nesting may cost; nothing where none was measured."""
    baseline = un_nested_memory(ran)
    return bound(ran.observation, ran.profile, baseline, ran.call.settings.memory_budget) if baseline else None


def un_nested_memory(ran: Ran) -> Memory | None:
    """Measure the un-nested call under a jit, or its gradient where the nesting takes one.

    Gives nothing where the program of the nesting was not measured, or where the un-nested one does not run.
    """
    call, baseline = ran.call, baseline_for(ran.observation.nesting)

    def measured() -> Memory | None:
        with call.subject.undone(call.subject.state):
            return observe(call.subject, ran.profile, baseline, call.settings.donate, call.memo.shared_programs).memory

    return call.once("un-nested memory", measured, call.settings.donate, baseline) if ran.measured else None


def judged_advice(ran: Ran) -> tuple[Advice, ...]:
    """The advice on the un-nested call, where the settings make it a violation of the nestings that are measured by it.

    The un-nested call is measured whatever breaks, because reports show its figures.
    """
    memory = un_nested_memory(ran)
    if memory is None or baseline_for(ran.observation.nesting) != BASELINE:
        return ()
    call = ran.call
    found = recall(call.memo.un_nested, call.key, lambda: un_nested(ran, memory)).advice
    return () if call.settings.memory_advice == "note" else found


def un_nested(ran: Ran, memory: Memory) -> UnNested:
    """Where the bytes of the un-nested program are, and advice on them."""
    subject, profile = ran.call.subject, ran.profile
    sizes = Sizes(profile.state_bytes, profile.input_bytes, profile.output_bytes)
    # Not the program's own names, which are in the order of its parameters.
    leaves, handed = [*map(subject.path, profile.state_paths)], tuple(of_state(subject, profile))
    advised = advice(memory.peak, memory.made, profile.waste, leaves, subject.input_names, sizes, handed)
    lines = by_line(memory.made, memory.made)[:SHOWN_LINES]
    evidence = Evidence(memory.split, un_nested=memory.split, buffers=memory.made[:SHOWN], places=lines)
    return UnNested(subject.name, evidence, advised)


def growth(ran: Ran) -> Growth | None:
    """What each further step of the nesting's loop adds to the peak; `None` without one loop, or where it cannot be measured."""
    call, short, nesting = ran.call, ran.observation.memory, ran.observation.nesting
    loops = [layer for layer in nesting.layers if layer.row.grows]
    if len(loops) != 1 or short is None:
        return None

    def measured() -> Memory | None:
        return measure(call.subject, ran.profile, nesting, call.settings.donate, 2 * LENGTH)

    long = call.once("longer", measured, call.settings.donate, nesting)
    return Growth.between(str(loops[0]), LENGTH, short, long) if long else None


# --- donation


def donation(ran: Ran) -> Donation:
    """What became of donated arrays: of those that the generated jit donates, or of those of jits inside the un-nested call."""
    call, profile, observation = ran.call, ran.profile, ran.observation
    name, originals = call.subject.path, call.originals
    if not observation.nesting.layers:
        outside = held_outside(call) if observation.inside.consumed else ()
        renewed_ones = renewed(ran) if observation.inside.consumed else frozenset[str]()
        return Donation(inside=observation.inside, shared=originals.shared + outside, renewed=renewed_ones)
    return Donation(
        moves=observation.moves,
        references=observation.references,
        reused=observation.reused,
        shared=originals.shared,
        views=originals.views,
        changed=frozenset(map(name, profile.changed)),
        dropped=tuple(map(name, profile.dropped)) if donates(ran) else (),
        inputs=frozenset(call.subject.input_names),
        promoted={name(path): line for path, line in profile.promoted},
        abstract=observation.abstract,
        debug_nans=bool(jax.config.jax_debug_nans),
    )


def donates(ran: Ran) -> bool:
    """Whether the program donates its state: the jit at its root was handed it, compiled it, and left nothing behind."""
    root = ran.observation.nesting.layers[0]
    return root.row.compiles and not root.captures and ran.call.settings.donate != "none" and ran.observation.settled


def renewed(ran: Ran) -> frozenset[str]:
    """The leaves and inputs whose old arrays are of no use when the call has ended: it put others there, or returned what takes their place."""
    subject, profile, kept = ran.call.subject, ran.profile, ran.observation.inside.kept
    leaves = {subject.path(path) for path, _ in graph.raw_leaves(subject.state)}
    if profile is UNKNOWN:
        return frozenset(leaves.union(subject.input_names)) - kept
    inputs = {
        subject.input_names[number]
        for number, output in successors(subject, profile, "all").items()
        if array_type(profile.out[output]) == array_type(subject.inputs[number])
    }
    return frozenset(leaves | inputs) - kept


def held_outside(call: Call) -> Pairs:
    """Pair each leaf with a Variable outside of the state that holds the same array.

    The code may have captured such a Variable, of a target network say. A jit inside the call that donates the leaf deletes the array for the Variable too.
    """
    subject, originals = call.subject, call.example.originals
    own_variables = {id(variable) for _, variable in graph.variables(subject.state)}
    leaf = {id(array): subject.path(path) for path, array in graph.raw_leaves(subject.state)}
    outside = (
        (leaf.get(id(variable_value(node))), path)
        for path, node in (originals.nodes if originals else ())
        if kind_of(type(node)) == "variable" and id(node) not in own_variables
    )
    return tuple((name, path) for name, path in outside if name is not None)


# --- a second call


def second_call(ran: Ran) -> tuple[TypeMoved, ...]:
    """Find what has another type after the call, so that a jit outside traces a second call again.

    Gives nothing where the jit does not trace it again, or where no jit outside takes the state. A functional jit takes leaves alone, and
    each call here builds it anew: a functional jit that the user keeps traces again where the types of the leaves differ.
    """
    call, observation = ran.call, ran.observation
    subject, nesting = call.subject, observation.nesting
    if not observation.settled or observation.abstract:
        return ()
    if nesting.layers[:1] == (Layer(JIT, "functional"),):
        return tuple(types_moved(subject, subject.state, observation.state))
    if nesting.layers[:1] != (Layer(JIT),):
        return ()
    if not traced_again(subject, ran.profile, nesting, call.settings.donate, observation.state):
        return ()
    return moved(subject, subject.state, observation.state)


def inner_jits(ran: Ran) -> tuple[JitTracedAgain, ...]:
    """The jits inside the call that trace the same in each; the same under every nesting."""
    subject, observation = ran.call.subject, ran.observation

    def found_out() -> tuple[JitTracedAgain, ...]:
        with subject.undone(subject.state):
            return jits_traced_again(subject)

    if not ran.measured or not observation.settled or observation.abstract:
        return ()
    return ran.call.once("inner jits", found_out)


# --- values


def differences(ran: Ran) -> Differences:
    """Compare the run with the same calls without the nesting, or the un-nested call with itself without its jits."""
    if ran.reference is None:
        return Differences()
    return compared(ran.call.subject, ran.profile, ran.observation, ran.reference)


def what_is_not_finite(ran: Ran) -> tuple[NotFinite, ...] | str:
    """What is not finite, but is finite without the nesting; or the exception that the same calls raise without it."""
    if ran.reference is None or not ran.observation.nesting.layers:
        return ()
    wanted = ran.reference.wanted
    if wanted.error is not None:
        return first_line(wanted.error)
    return not_finite(wanted, effect_against(ran.call.subject, ran.observation, wanted))


def nested_call(ran: Ran) -> NestedCall | Exception:
    """The call as an invariant of the user's own sees it; or the exception of the user's objects, which raise where they are read."""
    subject, observation = ran.call.subject, ran.observation
    try:
        before, after = read(subject, subject.state), read(subject, observation.state)
    except Exception as error:  # noqa: BLE001 - the user's code may raise anything
        return error
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


GATHER: dict[str, Callable[[Ran], Any]] = {
    "tracers": tracers,
    "program": program,
    "advice": judged_advice,
    "targets": lambda ran: ran.observation.targets,
    "donation": donation,
    "second_call": second_call,
    "inner_jits": inner_jits,
    "differences": differences,
    "not_finite": what_is_not_finite,
    "nested_call": nested_call,
}
"""How each need of `invariants.case.Case` is gathered."""
