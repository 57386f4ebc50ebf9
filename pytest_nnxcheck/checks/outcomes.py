"""Build the outcome of a call: one function for each way in which it ends."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax

from pytest_nnxcheck.compat import graph, refusals
from pytest_nnxcheck.compat.arrays import describe
from pytest_nnxcheck.core.catalogue import rows_of
from pytest_nnxcheck.core.errors import CheckError, Unfit
from pytest_nnxcheck.core.facts import Evidence, Lost, Observation
from pytest_nnxcheck.core.nesting import Misfit
from pytest_nnxcheck.core.notes import Fact, Mapped, Note, ValueAsked
from pytest_nnxcheck.core.outcome import NO_FACTS, CallFacts, Outcome
from pytest_nnxcheck.core.peak import SHOWN, SHOWN_LINES, Bound, by_line, marked_as_added
from pytest_nnxcheck.core.text import first_line
from pytest_nnxcheck.engine import causes, trials
from pytest_nnxcheck.engine.example import Call
from pytest_nnxcheck.engine.observe import How, observe
from pytest_nnxcheck.engine.ran import Ran
from pytest_nnxcheck.engine.reference import MOST_EQUATIONS, Evaluated, meaning_of
from pytest_nnxcheck.invariants.donation import lost_leaves
from pytest_nnxcheck.invariants.judge import Judgement
from pytest_nnxcheck.subject.profile import in_arrays_alone
from pytest_nnxcheck.transforms.compose import MAPPING, maps_written
from pytest_nnxcheck.values.effects import UNCHANGED, alike

__tracebackhide__ = True  # pytest shows the frames of the user, not these

LITTLE = 10 * 2**20
"""Bytes below which the figures of a target say little: those of its own workspace, 4 MiB for a product of matrices on a GPU."""

MUCH_MORE = 1.5
"""Times the peak of the CPU. Of 96 programs of flax models one in twelve needs more on a TPU, and one in ninety on a GPU."""


@dataclass(frozen=True, slots=True)
class Checked:
    """The result of a checked call."""

    output: Any
    """The un-nested output."""
    outcome: Outcome
    error: BaseException | None = None
    """The user's exception, if the call failed."""
    facts: CallFacts = NO_FACTS
    """The known facts of the call, whatever its nesting."""
    run: Observation | None = None
    """The run whose output the caller gets, until that has its structure again."""
    state: Any = None
    """The state whose values the user's objects get, until they have them."""


def checked(ran: Ran, judgement: Judgement) -> Checked:
    """The outcome of a nesting that ran and was judged."""
    if judgement.error is not None and not judgement.violations:
        return not_judged(ran.call, judgement.error)
    if ran.observation.error is not None and not judgement.violations:
        return raised(ran, ran.observation.error)
    return concluded(ran, judgement)


# --- a nesting that ended, or broke an invariant


def concluded(ran: Ran, judgement: Judgement) -> Checked:
    """The outcome with the output, and the state after the call.

    Tracers that nobody asserts keep nothing from the user but a state that holds them.
    """
    observation, outcome = ran.observation, outcome_of(ran, judgement)
    if observation.error is not None or (observation.leaks and outcome.violations):
        return Checked(None, outcome)
    spoiled = any(leak.place in ("variable", "module") for leak in observation.leaks)
    return Checked(None, outcome, run=observation, state=None if spoiled else observation.state)


def outcome_of(ran: Ran, judgement: Judgement) -> Outcome:
    """The verdict, the figures, and their explanation."""
    call, observation, bound = ran.call, ran.observation, ran.bound
    notes: tuple[Note, ...] = (*call.known.notes, *of_targets(observation), *unasserted(ran), *judgement.of_call)
    call.known.notes = tuple(dict.fromkeys(notes))
    return Outcome(
        nesting=call.nesting,
        verdict="violated" if judgement.violations else "held",
        violations=judgement.violations,
        peak=observation.memory.peak if observation.memory else None,
        budget=bound.budget if bound else None,
        facts=(*of_holding(ran), *notes_of(judgement)),
        evidence=evidence(ran, bound),
    )


def evidence(ran: Ran, bound: Bound | None) -> Evidence:
    """The figures and facts of a nesting that reports keep."""
    observation, un_nested = ran.observation, ran.un_nested_memory
    before = un_nested.made if un_nested else ()
    after = marked_as_added(observation.memory.made if observation.memory else (), before)
    lost = {leaf.path for leaf in lost_leaves(observation)}
    return Evidence(
        split=observation.memory and observation.memory.split,
        expected=bound.expected if bound else None,
        un_nested=un_nested and un_nested.split,
        buffers=after[:SHOWN],
        places=by_line(after, before)[:SHOWN_LINES],
        captured=ran.profile.program.captured[:SHOWN],
        leaks=observation.leaks,
        moves=tuple(
            Lost(move.before.path, str(move.before.type), str(move.after.type) if move.after else "")
            for move in observation.moves
            if move.before.path in lost
        ),
        reusable=reusable(ran) if observation.memory else (),
        targets=observation.targets,
    )


def reusable(ran: Ran) -> tuple[str, ...]:
    """Inputs of a jit that were not donated, and whose type an output of the call has."""
    subject, donated = ran.call.subject, {move.before.path for move in ran.observation.moves}
    types = {describe(leaf) for leaf in ran.profile.output.types}
    inputs = zip(subject.input_names, subject.inputs, strict=False)
    return tuple(name for name, leaf in inputs if name not in donated and describe(leaf) in types)


def notes_of(judgement: Judgement) -> tuple[Note, ...]:
    """The notes, and the error of an invariant of the user's own beside a violation of another."""
    return (*judgement.notes, *([str(judgement.error)] if judgement.error else []))


def unasserted(ran: Ran) -> tuple[Fact, ...]:
    """A note on tracers that remain, where the test does not assert that none does."""
    if not ran.observation.leaks or "tracers" in ran.call.settings.invariants:
        return ()
    return (Fact("leaked", tuple(leak.path for leak in ran.observation.leaks)),)


def of_holding(ran: Ran) -> tuple[Note, ...]:
    """Notes on a nesting that was judged."""
    observation, nesting, notes = ran.observation, ran.call.nesting, list[Note]()
    if observation.dropped and observation.error is None:
        leak = observation.dropped[0]
        notes.append(Fact("left in merged", (leak.path,), leak.layer))
    count = ran.profile.program.inner_donations
    if count and any(layer.row.compiles for layer in nesting.layers):
        notes.append(Fact("inner donations", count=count))
    if still := not_moved(ran):
        notes.append(Fact("not moved", still, str(nesting)))
    return tuple(notes)


def not_moved(ran: Ran) -> tuple[str, ...]:
    """The leaves that a nesting left as they are, and the un-nested call changes. A reference counts if the same calls without the nesting give it another value."""
    subject, state, observation = ran.call.subject, ran.profile.state, ran.observation
    before, came_out = (dict(graph.raw_leaves(node)) for node in (subject.state, observation.state))
    written = () if observation.abstract else state.references & state.changed & came_out.keys()
    kept = {subject.path(path): path for path in written if alike(came_out[path], before[path])}
    if kept:
        calls = ran.reference.wanted if ran.reference else Evaluated().effect(subject, meaning_of(ran.call.nesting))
        after = {name: leaf.value for name, leaf in calls.after.leaves.items() if leaf.value is not UNCHANGED}
        kept = {name: path for name, path in kept.items() if name in after and not alike(after[name], before[path])}
    return (*map(subject.path, observation.still), *kept)


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


# --- other ends


def left_out(call: Call, misfit: Misfit) -> Checked:
    """The outcome of a nesting that cannot take the call."""
    return Checked(None, Outcome(call.nesting, "rejected", unfit=True, misfit=misfit))


def not_in_refs(ran: Ran) -> Checked | None:
    """The outcome of a nesting that raises with the state in references, where it takes the same state without them, or flax refuses that; `None` for any other.

    In the mode that puts them there nothing is checked if a jit alone raises. What a state that the user put into references raises without a
    layer, or under one jit, is the user's own; but the `nnx.jit` of graph mode takes no abstract reference (flax 0.12.12).
    """
    call, observation, error = ran.call, ran.observation, ran.observation.error
    subject, nesting = call.subject, call.nesting
    bare = all(layer.row.compiles for layer in nesting.layers)
    refused = nesting.captures and refusals.is_refusal(error)
    ours = subject.in_refs or (ran.profile.program.in_references and (subject.abstract or not bare))
    if not ours or error is None or refused or observation.leaks or isinstance(error, Unfit):
        return None
    with subject.undone(subject.state):
        raised = observe(replace(call, subject=in_arrays_alone(subject)), nesting, How(donate="none")).error
    if raised is not None and not (nesting.captures and refusals.is_refusal(raised)):
        return None
    if subject.in_refs and bare:
        return Checked(None, Outcome(nesting, "rejected", reason=first_line(error), by_mode=True))
    return left_out(call, Misfit("in references", other=first_line(error)))


def not_judged(call: Call, error: CheckError) -> Checked:
    """A nesting that holds, but that an invariant of the user's own could not judge.

    Where the invariant read a value that was not computed, the body runs again with values, as after any exception.
    """
    outcome = Outcome(call.nesting, "failed", reason=str(error), error=type(error).__name__)
    return Checked(None, outcome, error)


def raised(ran: Ran, error: Exception) -> Checked:
    """The outcome of a nesting that raised and broke no invariant: it cannot take the call, flax refuses it, or the user's code raises."""
    call, observation = ran.call, ran.observation
    if isinstance(error, Unfit):
        return left_out(call, error.misfit)
    inside = [layer.transform for layer in call.nesting.layers if not layer.row.compiles]
    if refusals.branch_in_a_loop(error, inside):
        return left_out(call, Misfit("branch in a loop", jax.__version__))
    if misfit := None if observation.leaks else trials.refusing(call, error):
        return left_out(call, misfit)
    if call.nesting.captures and refusals.is_refusal(error) and not observation.leaks:
        # Flax refused a closure layer, and left everything clean; without one the exception is the module's own.
        return Checked(None, Outcome(call.nesting, "rejected", reason=first_line(error)))
    return failed(call, error, observation, mapped(ran, error))


def mapped(ran: Ran, error: Exception) -> tuple[Mapped, ...]:
    """The leaves and inputs with an axis that a ``vmap`` that raised was handed."""
    if not maps_written(ran.call.nesting) or isinstance(error, CheckError):
        return ()
    subject, written = ran.call.subject, sorted(ran.profile.state.written, key=str)
    return (Mapped(MAPPING, (*map(subject.path, written), *subject.input_names)),)


def failed(call: Call, error: Exception, observation: Observation, more: tuple[Note, ...] = ()) -> Checked:
    """The outcome of the user's own exception, explained in notes; or of flax's, for a thing that its mode cannot do."""
    nesting = call.nesting
    if refusals.is_mode_refusal(error, nesting.mode):
        return Checked(None, Outcome(nesting, "rejected", reason=refusals.mode_words(error), by_mode=True, facts=more))
    facts = (*explained(call, error, observation), *more)
    outcome = Outcome(nesting, "failed", reason=first_line(error), error=type(error).__name__, facts=facts)
    return Checked(None, outcome, error)


def explained(call: Call, error: Exception, observation: Observation) -> tuple[Note, ...]:
    """The explanation of the user's exception: the leaked tracers, and the transform that captured a module."""
    if refusals.asks_for_value(error):
        return (ValueAsked(),)
    is_refusal = refusals.is_refusal(error)
    if not (is_refusal or refusals.is_tracer_error(error)):
        return ()
    left: Sequence[Note] = observation.leaks or observation.dropped
    left = left or call.once("merged", lambda: causes.merged_inside(call.subject))
    captures = captured(call) or (causes.captured_by_call(call.subject) if is_refusal else ())
    return (*left[: causes.SHOWN], *captures)


def captured(call: Call, *, leaking: bool = False) -> tuple[Note, ...]:
    """The transforms that the call applies to a function which captured a graph node, one that holds tracers then; the same under every nesting."""
    captures = call.once("captured", lambda: causes.captured(call.subject))
    return tuple(capture for capture in captures if capture.leaks or not leaking)


# --- whatever the nesting


def facts_of(call: Call) -> CallFacts:
    """The facts of the call that are known by now, whatever its nesting."""
    subject, settings = call.subject, call.settings
    profile, un_nested = call.known.profile, call.known.un_nested
    running = tuple(row.name for row in rows_of(settings.invariants) if row.runs and subject.abstract)
    notes: list[Note] = [*call.originals.notes, *([Fact("abstract", running)] if running else [])]
    notes += call.known.notes
    if profile is None:
        return CallFacts((*notes,), (), () if un_nested is None else (un_nested,))
    if profile.training.untrained:
        notes.append(Fact("untrained", tuple(map(subject.path, profile.training.untrained)), subject.name))
    if settings.compares_values and profile.program.equations > MOST_EQUATIONS:
        notes.append(Fact("many equations", of=subject.name, count=profile.program.equations))
    if (pairs := profile.state.in_one_array) and settings.asserts_donation:
        notes.append(Fact("in one array", tuple(map(subject.path, pairs[0])), subject.name, len(pairs)))
    state = profile.state
    beside = state.changed - state.references if state.references and settings.asserts_donation else ()
    if state.lost:
        notes.append(Fact("lost in copies", tuple(sorted(map(subject.path, state.lost)))))
    if beside:
        notes.append(Fact("beside references", tuple(sorted(map(subject.path, beside)))))
    if subject.in_refs and not state.references:
        notes.append(Fact("nothing in references", of=subject.name))
    if profile.program.written_twice:
        notes.append(Fact("written twice", (profile.program.written_twice,)))
    added = tuple(map(subject.path, profile.state.added))
    return CallFacts((*notes,), added, () if un_nested is None else (un_nested,))
