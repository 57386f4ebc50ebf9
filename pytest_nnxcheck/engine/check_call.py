"""One call under one nesting: prepared, observed, judged, and diagnosed where that is bad. The plugin and the public functions both come through here."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import jax

from pytest_nnxcheck import invariants
from pytest_nnxcheck.compat import refusals
from pytest_nnxcheck.core.catalogue import JIT, TARGETED
from pytest_nnxcheck.core.errors import CheckError, Unfit
from pytest_nnxcheck.core.facts import Observation
from pytest_nnxcheck.core.nesting import Layer, Misfit, Nesting
from pytest_nnxcheck.core.notes import Explanation, Fact, Note, RaisedUnNested, ValueAsked
from pytest_nnxcheck.core.outcome import NO_FACTS, CallFacts, Listener, Outcome, nobody
from pytest_nnxcheck.core.settings import Settings
from pytest_nnxcheck.core.text import first_line
from pytest_nnxcheck.engine import causes, stage
from pytest_nnxcheck.engine.cases import Call, Unrestored, case_of, case_of_un_nested, not_run, only_tracers
from pytest_nnxcheck.engine.evidence import evidence, left
from pytest_nnxcheck.engine.example import Example, look_at_originals
from pytest_nnxcheck.engine.memo import Memo, signature
from pytest_nnxcheck.engine.reference import Reference
from pytest_nnxcheck.engine.run import observe
from pytest_nnxcheck.invariants import Case, Judgement
from pytest_nnxcheck.invariants.notes import of_failure, of_holding, of_targets
from pytest_nnxcheck.subject.bind import bind
from pytest_nnxcheck.subject.profile import UNKNOWN, Profile
from pytest_nnxcheck.subject.subject import Subject
from pytest_nnxcheck.subject.write_back import write_back
from pytest_nnxcheck.transforms.compose import maps_written

__tracebackhide__ = True  # pytest shows the frames of the user, not these


@dataclass(frozen=True, slots=True)
class Checked:
    """What a checked call gives back: the un-nested output, the outcome, the user's exception if the call failed, and what is known of the call."""

    output: Any
    outcome: Outcome
    error: BaseException | None = None
    facts: CallFacts = NO_FACTS


@dataclass(frozen=True, slots=True)
class Prepared:
    """What is known of a call before it runs: its profile, why the nesting cannot take it, and what the same calls do without the nesting."""

    profile: Profile
    misfit: Misfit | None = None
    reference: Reference | None = None


def check_call(
    subject: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    nesting: Nesting,
    settings: Settings,
    example: Example,
    publish: Listener = nobody,
    owner: str = "",
) -> Checked:
    """Run a call under a nesting and judge what it left; ``publish`` hears before it runs. Raises `CheckError` where the call cannot be checked."""
    bound = bind(subject, args, kwargs, owner)
    bound.donated(settings.donate)
    if (bound.name, bound.code) in example.memo.unrestored:
        return not_restored(bound, nesting, settings, example.memo, publish)
    originals = look_at_originals(bound, settings, example)
    if originals.held:
        return Checked(None, not_run(bound, nesting, settings, originals.held, publish))
    call = Call(bound, signature(bound, *bound.split()), nesting, settings, example, originals, publish)
    try:
        checked = nested(call) if nesting.layers else un_nested(call)
    except Unrestored as unrestored:
        call.memo.unrestored[bound.name, bound.code] = unrestored.leaks
        checked = not_restored(bound, nesting, settings, call.memo, publish)
    finally:
        if bound.name in call.memo.own_jits:
            # The user's own object must not meet what a jit that it keeps captured under ours.
            jax.clear_caches()
    return replace(checked, facts=call.facts())


def nested(call: Call) -> Checked:
    """The call under its nesting."""
    call.announce(None)
    try:
        prepared = prepare(call)
    except Unfit as error:
        return left_out(call, error.misfit)
    except Exception as error:  # noqa: BLE001 - the user's code may raise anything
        return fails_when_traced(call, error)
    if prepared.misfit:
        return left_out(call, prepared.misfit)
    call.announce(prepared.profile)
    observation = observed(call, prepared.profile)
    if observation.error is not None and maps_written(call.nesting):
        prepared, observation = remapped(call, prepared, observation)
    if isinstance(observation.error, CheckError):
        raise observation.error
    case = case_of(call, prepared.profile, observation, prepared.reference)
    judgement = invariants.judge(case)
    broken_for_targets = not observation.targets and wants_targets(call, observation, judgement)
    if judgement.violations and (observation.shared or broken_for_targets):
        # Its message names lines, which must be its own, and what the compilers of targets say of it.
        observation = run_once(call, prepared.profile, alone=True, broken=broken_for_targets)
        case = case_of(call, prepared.profile, observation, prepared.reference)
        judgement = invariants.judge(case)
    if judgement.error is not None and not judgement.violations:
        return not_judged(call, judgement.error)
    if observation.error is not None and not judgement.violations:
        return raised(call, prepared.profile, observation, observation.error)
    return concluded(call, observation, outcome_of(call, case, judgement))


def prepare(call: Call) -> Prepared:
    """What a nesting is judged by. Raises what the user's code raises under a trace, and `Unfit`."""
    call.require_slices()
    profile = call.profile()
    misfit = call.misfit(profile)
    if misfit or not call.compares_values:
        return Prepared(profile, misfit)
    # Before the run: the calls of the reference meet what the run meets, caches in the user's code among it.
    return Prepared(profile, reference=call.reference())


def observed(call: Call, profile: Profile) -> Observation:
    """The facts of a nesting: traced where a trace tells that it holds, else run."""
    subject = call.subject
    if stage.tells(subject, profile, call.nesting, call.settings):
        observation = traced_in(call, profile)
        if observation is not None:
            return observation
    call.example.values.require(subject)
    return run(call, profile)


def run(call: Call, profile: Profile) -> Observation:
    """The facts of a nesting that is run; a second time, with jax' caches empty, where a plain object's own jit met a trace of ours.

    The user's object holds the values of the program while that runs, and jax keeps what a jitted function captured by way of it.
    """
    observation = run_once(call, profile)
    if not meets_own_jit(call, observation):
        return observation
    call.memo.own_jits.add(call.subject.name)
    jax.clear_caches()
    observation = run_once(call, profile)
    if not meets_own_jit(call, observation):
        return observation
    label, _ = call.subject.opened[0]
    return replace(observation, error=Unfit(Misfit("own jit", label)))


def run_once(call: Call, profile: Profile, *, alone: bool = False, broken: bool = False) -> Observation:
    """The facts of a nesting that is run, ``alone`` where its program must be its own, ``broken`` where targets have to say what they make of it."""
    programs, originals, nesting = call.memo.shared_programs, call.example.originals, call.nesting
    donate, memory = call.settings.donate, "memory" in call.settings.invariants
    targets = call.on_targets(profile) if broken or call.is_for_targets else None
    return observe(
        call.subject, profile, nesting, donate, programs, targets, alone=alone, originals=originals, copies=memory
    )


def wants_targets(call: Call, observation: Observation, judgement: Judgement) -> bool:
    """Whether a program broke what targets judge as well."""
    broken = {violation.invariant for violation in judgement.violations}
    return bool(call.settings.target and observation.memory and broken & TARGETED)


def meets_own_jit(call: Call, observation: Observation) -> bool:
    """Whether a call of a plain object met a tracer that nothing which is reachable holds: jax keeps it, for a jitted function."""
    return bool(call.subject.opened) and not observation.leaks and refusals.is_tracer_error(observation.error)


def traced_in(call: Call, profile: Profile) -> Observation | None:
    """The facts of a nesting, traced; `None` where it must be run."""
    example = call.example
    if example.originals is None:
        return None
    return stage.observe(
        call.subject, profile, call.nesting, example.values, call.memo.shared_programs, example.originals
    )


def remapped(call: Call, prepared: Prepared, observation: Observation) -> tuple[Prepared, Observation]:
    """A nesting whose ``vmap`` failed, once more where the call writes and restores leaves that have to be mapped."""
    prepared = replace(prepared, profile=call.remapped())
    if not prepared.profile.restored:
        return prepared, observation
    call.announce(prepared.profile)
    return prepared, observed(call, prepared.profile)


def outcome_of(call: Call, case: Case, judgement: Judgement) -> Outcome:
    """What a nesting came to that ended, or broke an invariant: its verdict, the figures, and what explains them."""
    observation, bound = case.observation, case.bound
    known = call.memo.notes.get(call.key, ())
    notes = (*known, *of_targets(observation), *unasserted(call, observation), *judgement.of_call)
    call.memo.notes[call.key] = tuple(dict.fromkeys(notes))
    baseline = call.un_nested_memory() if bound else None
    measured = evidence(call.subject, case.profile, observation, bound, baseline)
    if any(violation.invariant == "memory" for violation in judgement.violations):
        measured = replace(measured, growth=call.growth(measured.split))
    return Outcome(
        nesting=call.nesting,
        verdict="violated" if judgement.violations else "held",
        violations=judgement.violations,
        peak=observation.memory.peak if observation.memory else None,
        budget=bound.budget if bound else None,
        facts=(
            *of_holding(call.subject, case.profile, observation),
            *notes_of(judgement),
        ),
        evidence=measured,
    )


def unasserted(call: Call, observation: Observation) -> tuple[Fact, ...]:
    """A note on tracers that remain, where the test does not assert that none does."""
    if not observation.leaks or "tracers" in call.settings.invariants:
        return ()
    return (Fact("leaked", tuple(leak.path for leak in observation.leaks)),)


def concluded(call: Call, observation: Observation, outcome: Outcome) -> Checked:
    """The outcome with the output; the user's objects get what the call left in its copies, the one effect on them.

    Tracers that nobody asserts keep nothing from the user but a state that holds them.
    """
    if observation.error is not None or (observation.leaks and outcome.violations):
        return Checked(None, outcome)
    if not any(leak.place in ("variable", "module") for leak in observation.leaks):
        write_back(call.subject, observation.state)
    return Checked(observation.rebuild(observation.output), outcome)


# --- what ends otherwise


def left_out(call: Call, misfit: Misfit) -> Checked:
    """The outcome of a nesting that cannot take the call."""
    return Checked(None, Outcome(call.nesting, "rejected", unfit=True, misfit=misfit))


def raised(call: Call, profile: Profile, observation: Observation, error: Exception) -> Checked:
    """A nesting that raised and broke no invariant: what it is not made for, what flax refuses, or the user's own exception."""
    if isinstance(error, Unfit):
        return left_out(call, error.misfit)
    inside = [layer.transform for layer in call.nesting.layers if not layer.row.compiles]
    if misfit := refusals.fault_of_jax(error, inside):
        return left_out(call, misfit)
    if refused(observation):
        return Checked(None, Outcome(call.nesting, "rejected", reason=first_line(error)))
    checked = failed(call, error, observation)
    explanations = (*checked.outcome.facts, *of_failure(call.subject, profile, observation))
    return replace(checked, outcome=replace(checked.outcome, facts=explanations))


def not_judged(call: Call, error: CheckError) -> Checked:
    """A nesting of which an invariant of the user's own could not say anything: all else that was asked of it held.

    Where that read a value which was not computed, the body runs again with values, as after any exception.
    """
    outcome = Outcome(call.nesting, "failed", reason=str(error), error=type(error).__name__)
    return Checked(None, outcome, error)


def notes_of(judgement: Judgement) -> tuple[Note, ...]:
    """The notes, and what an invariant of the user's own raised beside a violation of another."""
    return (*judgement.notes, *([str(judgement.error)] if judgement.error else []))


def refused(observation: Observation) -> bool:
    """Whether flax refused a closure layer and left everything clean; without one the exception is the module's own."""
    captures = observation.nesting.captures
    return captures and refusals.is_refusal(observation.error) and not observation.leaks


def failed(call: Call, error: Exception, observation: Observation | None) -> Checked:
    """The user's own exception, with what we know of it as notes; or flax's, for what its mode cannot do."""
    nesting = call.nesting
    if refusals.is_mode_refusal(error, nesting.mode):
        return Checked(None, Outcome(nesting, "rejected", reason=refusals.mode_words(error), by_mode=True))
    explanations = explained(call, error, observation)
    return Checked(
        None,
        Outcome(nesting, "failed", reason=first_line(error), error=type(error).__name__, facts=explanations),
        error,
    )


def explained(call: Call, error: Exception, observation: Observation | None) -> tuple[Explanation, ...]:
    """What explains the user's exception: the tracers that are left, and the transform that captured a module."""
    if refusals.asks_for_value(error):
        return (ValueAsked(),)
    is_refusal = refusals.is_refusal(error)
    if not (is_refusal or refusals.is_tracer_error(error)):
        return ()
    leaks = (observation.leaks or observation.dropped) if observation else ()
    captures = call.captured() or (causes.captured_by_call(call.subject) if is_refusal else ())
    return (*(leaks or call.merged())[: causes.SHOWN], *captures)


def fails_when_traced(call: Call, error: Exception, *, un_nested: bool = False) -> Checked:
    """A call that raises under any trace, or ``un_nested`` already: the user's exception, unless it left tracers as well."""
    call.announce(UNKNOWN)
    call.example.values.require(call.subject)
    observation = observe(call.subject, UNKNOWN, call.nesting, "none")
    judgement = invariants.judge(Case(observation, only_tracers(call.settings))) if observation.leaks else Judgement()
    if not judgement.violations:
        return failed(call, error, observation)
    line = first_line(error)
    own = RaisedUnNested(line) if un_nested else line
    violations = tuple(replace(violation, explained=(own,)) for violation in judgement.violations)
    return Checked(None, Outcome(call.nesting, "violated", violations, evidence=left(observation)), error)


def not_restored(subject: Subject, nesting: Nesting, settings: Settings, memo: Memo, publish: Listener) -> Checked:
    """A call of which a trace, as a plain jit makes it, left tracers for good: no nesting can run, and each is told so."""
    nesting = replace(nesting, layers=nesting.layers or (Layer(JIT),))
    leaks = tuple(replace(leak, layer=nesting.layers[0]) for leak in memo.unrestored[subject.name, subject.code])
    return Checked(None, not_run(subject, nesting, settings, leaks, publish))


# --- without a nesting


def un_nested(call: Call) -> Checked:
    """The call as the user made it, on a copy of the state: traced where a trace tells that it holds, else run."""
    profile = profile_if_traceable(call)
    values = call.example.values
    tells = profile is not UNKNOWN and not values.needed
    tells = tells and stage.tells(call.subject, profile, call.nesting, call.settings)
    tells = tells and not stage.is_small(call.subject, profile, values)
    observation = traced_in(call, profile) if tells else None
    call.announce(profile)
    without_jit = None
    if observation is None:
        values.require(call.subject)
        # Before the run, as in `prepare`: both meet the same number that a plain object counts.
        without_jit = call.without_jit(profile)
        observation = run(call, UNKNOWN)
    if observation.error is not None:
        return fails_un_nested(call, observation, observation.error)
    judgement = invariants.judge(case_of_un_nested(call, profile, observation, without_jit))
    if judgement.error is not None and not judgement.violations:
        return not_judged(call, judgement.error)
    if not judgement.violations:
        write_back(call.subject, observation.state)
        outcome = Outcome(call.nesting, "held", facts=judgement.notes)
        return Checked(observation.rebuild(observation.output), outcome)
    violations = judgement.violations
    if observation.leaks:  # a transform inside the call is at fault
        violations = tuple(replace(violation, explained=call.captured(leaking=True)) for violation in violations)
    outcome = Outcome(call.nesting, "violated", violations, facts=notes_of(judgement), evidence=left(observation))
    return Checked(observation.rebuild(observation.output), outcome)


def profile_if_traceable(call: Call) -> Profile:
    """The profile of the call, `UNKNOWN` where no trace takes it: with Python control flow on values, say, it may hold as it is."""
    replace(call, nesting=replace(call.nesting, layers=(Layer(JIT),))).announce(None)
    try:
        return call.profile()
    except Exception as error:  # noqa: BLE001 - the user's code may raise anything, and the nestings will tell
        # An exception that the user's code keeps has the frames of this trace, which the test did not ask for.
        error.__traceback__ = None
        return UNKNOWN


def fails_un_nested(call: Call, observation: Observation, error: Exception) -> Checked:
    """A call that raises un-nested: the user's exception, unless a plain jit of it leaves tracers as well.

    Flax 0.12 refuses ``self.last = y`` on a field that was `None` when it is called eagerly, and lets the tracer in under a jit.
    """
    if JIT in call.settings.transforms:
        nesting = replace(call.nesting, layers=(Layer(JIT),))
        under_jit = fails_when_traced(replace(call, nesting=nesting), error, un_nested=True)
        if under_jit.outcome.verdict == "violated":
            return under_jit
    return failed(call, error, observation)
