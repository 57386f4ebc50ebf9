"""Collect the needs of the invariants from a run, each only if an invariant asks for it; then let them judge.

This is the last place that sees the subject: an invariant gets plain data, with names as text.
"""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax

from pytest_nnxcheck.compat import graph, refusals
from pytest_nnxcheck.compat.arrays import array_type
from pytest_nnxcheck.compat.graph import is_variable, variable_value
from pytest_nnxcheck.core.catalogue import JIT, InvariantRow, rows_of, severity
from pytest_nnxcheck.core.facts import Advice, Evidence, NestedCall, Observation, Pairs, UnNested
from pytest_nnxcheck.core.nesting import Layer, Nesting
from pytest_nnxcheck.core.outcome import JitTracedAgain, NotFinite, TypeMoved
from pytest_nnxcheck.core.peak import SHOWN, SHOWN_LINES, Bound, Growth, Memory, by_line
from pytest_nnxcheck.core.text import first_line
from pytest_nnxcheck.engine.comparison import compared, effect_against
from pytest_nnxcheck.engine.example import Call
from pytest_nnxcheck.engine.observe import How, observe, traced_again
from pytest_nnxcheck.engine.reference import Reference
from pytest_nnxcheck.invariants import own
from pytest_nnxcheck.invariants.advice import Sizes, advice
from pytest_nnxcheck.invariants.case import Case, Differences, Donation, Judgement, Program, Tracers
from pytest_nnxcheck.invariants.donation import notes
from pytest_nnxcheck.subject.profile import UNKNOWN, Profile
from pytest_nnxcheck.subject.traced_again import jits_traced_again, moved, types_moved
from pytest_nnxcheck.subject.use_of_state import of_state, successors
from pytest_nnxcheck.transforms.bound import bound
from pytest_nnxcheck.transforms.compose import BASELINE
from pytest_nnxcheck.transforms.layers import LENGTH
from pytest_nnxcheck.values.differences import not_finite
from pytest_nnxcheck.values.effects import read

__tracebackhide__ = True  # pytest shows the frames of the user, not these


@dataclass(frozen=True, slots=True)
class Ran:
    """A call that ran under its nesting."""

    call: Call
    observation: Observation
    reference: Reference | None = None
    """The results of the same calls without the nesting, or of an un-nested call without its jits. `None` where no invariant compares values."""
    baseline: Nesting | None = None
    """The un-nested program that it is measured by. `None` where that cannot take the call."""

    @property
    def profile(self) -> Profile:
        """The facts of the un-nested call."""
        return self.call.profile

    @property
    def measured(self) -> bool:
        """True if a program was compiled and ran to its end."""
        return self.observation.memory is not None and self.observation.error is None


def judged(ran: Ran, invariants: tuple[str, ...]) -> Judgement:
    """Judge a run by the invariants; the violations begin with the most serious one, the notes with those on donation, asserted or not.

    A need of several invariants is gathered before the first of them judges. One that compares values comes alone: whether it is asked
    depends on what those before it say.
    """
    judgement, observation = Judgement(), ran.observation
    for _, together in itertools.groupby(rows_of(invariants), lambda row: row.values and row.name):
        rows = [row for row in together if can_judge(row, observation, judgement)]
        needs = {need for row in rows for need in row.needs}
        case = Case(observation.nesting, **{need: gather(ran) for need, gather in GATHER.items() if need in needs})
        for row in rows:
            module = own if row.function else importlib.import_module(f"pytest_nnxcheck.invariants.{row.name}")
            judgement += module.judge(case, row) if row.function else module.judge(case)
    broken = sorted(judgement.violations, key=lambda violation: severity(violation.invariant))
    known = notes(observation.nesting, observation.moves, observation.lost)
    return replace(judgement, violations=tuple(broken), notes=(*known, *judgement.notes))


def can_judge(row: InvariantRow, observation: Observation, judgement: Judgement) -> bool:
    """True if an invariant can judge the run.

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
        of_call=profile.program,
        updates_can_be_off=graph.remat_updates_can_be_off(),
    )


def bound_of(ran: Ran) -> Bound | None:
    """The most bytes that the program of the nesting may take; `None` where none was measured."""
    baseline = un_nested_memory(ran)
    return bound(ran.observation, ran.profile, baseline, ran.call.settings.memory_budget) if baseline else None


def un_nested_memory(ran: Ran) -> Memory | None:
    """Measure the un-nested call under a jit, or its gradient where the nesting takes one.

    Gives nothing where the program of the nesting was not measured, or where the un-nested one does not run.
    """
    call, baseline, donate = ran.call, ran.baseline, ran.call.settings.donate
    if baseline is None or not ran.measured:
        return None
    if baseline.layers == ran.observation.nesting.layers:
        return ran.observation.memory
    return call.tried("un-nested memory", lambda: observe(call, baseline).memory, donate, baseline)


def judged_advice(ran: Ran) -> tuple[Advice, ...]:
    """The advice on the un-nested call, where the settings make it a violation of the nestings that are measured by it.

    The un-nested call is measured whatever breaks, because reports show its figures.
    """
    memory = un_nested_memory(ran)
    if memory is None or ran.baseline != BASELINE:
        return ()
    known = ran.call.known
    known.un_nested = known.un_nested or un_nested(ran, memory)
    return () if ran.call.settings.memory_advice == "note" else known.un_nested.advice


def un_nested(ran: Ran, memory: Memory) -> UnNested:
    """The memory figures of the un-nested program, and advice on them."""
    subject, profile = ran.call.subject, ran.profile
    sizes = Sizes(profile.state.bytes, profile.input_bytes, profile.output.bytes)
    # Not the program's own names, which are in the order of its parameters.
    leaves, handed = [*map(subject.path, profile.state.paths)], tuple(of_state(subject, profile))
    advised = advice(memory.peak, memory.made, profile.program.waste, leaves, subject.input_names, sizes, handed)
    lines = by_line(memory.made, memory.made)[:SHOWN_LINES]
    evidence = Evidence(memory.split, un_nested=memory.split, buffers=memory.made[:SHOWN], places=lines)
    return UnNested(subject.name, evidence, advised)


def growth(ran: Ran) -> Growth | None:
    """The bytes that each further step of the nesting's loop adds to the peak; `None` without one loop, or where it cannot be measured."""
    call, short, nesting = ran.call, ran.observation.memory, ran.observation.nesting
    loops = [layer for layer in nesting.layers if layer.row.grows]
    if len(loops) != 1 or short is None:
        return None
    how = How(compiled=True, length=2 * LENGTH)
    long = call.tried("longer", lambda: observe(call, nesting, how).memory, call.settings.donate, nesting)
    return Growth.between(str(loops[0]), LENGTH, short, long) if long else None


# --- donation


def donation(ran: Ran) -> Donation:
    """The donated arrays and their fate: those that the generated jit donates, or those of jits inside the un-nested call."""
    call, profile, observation = ran.call, ran.profile, ran.observation
    name, originals = call.subject.path, call.originals
    if not observation.nesting.layers:
        outside = held_outside(call) if observation.inside.consumed else ()
        renewed_ones = renewed(ran) if observation.inside.consumed else frozenset[str]()
        return Donation(inside=observation.inside, shared=originals.shared + outside, renewed=renewed_ones)
    return Donation(
        moves=observation.moves,
        lost=observation.lost,
        references=frozenset(map(name, profile.state.references)),
        shared=originals.shared,
        views=originals.views,
        changed=frozenset(map(name, profile.state.changed)),
        dropped=tuple(map(name, profile.training.dropped)) if donates(ran) else (),
        inputs=frozenset(call.subject.input_names),
        promoted={name(leaf.path): leaf.line for leaf in profile.state.retyped if leaf.line},
        abstract=observation.abstract,
        debug_nans=bool(jax.config.jax_debug_nans),
    )


def donates(ran: Ran) -> bool:
    """True if the program donates its state: the jit at its root takes the state, compiled the program, and leaked no tracer."""
    root = ran.observation.nesting.layers[0]
    return root.row.compiles and not root.captures and ran.call.settings.donate != "none" and ran.observation.settled


def renewed(ran: Ran) -> frozenset[str]:
    """The leaves and inputs whose old arrays have no use after the call: it put others there, or returned their new values."""
    subject, profile, kept = ran.call.subject, ran.profile, ran.observation.inside.kept
    leaves = {subject.path(path) for path, _ in graph.raw_leaves(subject.state)}
    if profile is UNKNOWN:
        return frozenset(leaves.union(subject.input_names)) - kept
    inputs = {
        subject.input_names[number]
        for number, output in successors(subject, profile, "all").items()
        if array_type(profile.output.types[output]) == array_type(subject.inputs[number])
    }
    return frozenset(leaves | inputs) - kept


def held_outside(call: Call) -> Pairs:
    """Pair each leaf with a Variable outside of the state that holds the same array.

    The code may have captured such a Variable, of a target network say. A jit inside the call that donates the leaf deletes the array for the Variable too.
    """
    subject, walked = call.subject, call.originals.walk
    own_variables = {id(variable) for _, variable in graph.variables(subject.state)}
    leaf = {id(array): subject.path(path) for path, array in graph.raw_leaves(subject.state)}
    outside = (
        (leaf.get(id(variable_value(node))), path)
        for path, node in (walked.nodes if walked else ())
        if is_variable(node) and id(node) not in own_variables
    )
    return tuple((name, path) for name, path in outside if name is not None)


# --- a second call


def second_call(ran: Ran) -> tuple[TypeMoved, ...]:
    """Find values that have another type after the call, so that a jit outside traces a second call again.

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
    if not traced_again(call, nesting, observation.state):
        return ()
    return moved(subject, subject.state, observation.state)


def inner_jits(ran: Ran) -> tuple[JitTracedAgain, ...]:
    """The jits inside the call that trace the same in each; the same under every nesting."""
    call, observation = ran.call, ran.observation
    if not ran.measured or not observation.settled or observation.abstract:
        return ()
    return call.tried("inner jits", lambda: jits_traced_again(call.subject))


# --- values


def differences(ran: Ran) -> Differences:
    """Compare the run with the same calls without the nesting, or the un-nested call with itself without its jits."""
    if ran.reference is None:
        return Differences()
    return compared(ran.call.subject, ran.profile, ran.observation, ran.reference)


def what_is_not_finite(ran: Ran) -> tuple[NotFinite, ...] | str:
    """The values that are not finite, but are finite without the nesting; or the exception that the same calls raise without it."""
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
    "targets": lambda ran: ran.observation.targets,
    "donation": donation,
    "second_call": second_call,
    "inner_jits": inner_jits,
    "advice": judged_advice,
    "differences": differences,
    "not_finite": what_is_not_finite,
    "nested_call": nested_call,
}
"""The function that gathers each need of `invariants.case.Case`, in this order: those that run or trace the call come first."""
