"""One call under one nesting: prepared, observed, judged, and diagnosed where that is bad. The plugin and the public functions both come through here."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import Any

import jax

from pytest_nnxcheck.checks import outcomes
from pytest_nnxcheck.checks.outcomes import Checked
from pytest_nnxcheck.compat import frames, refusals, targets
from pytest_nnxcheck.core.catalogue import JIT, REF, TARGETED
from pytest_nnxcheck.core.chips import parse_target
from pytest_nnxcheck.core.errors import CheckError, Unfit
from pytest_nnxcheck.core.facts import Evidence, Leak, Observation
from pytest_nnxcheck.core.nesting import Layer, Misfit, Nesting, impossible
from pytest_nnxcheck.core.notes import Fact, RaisedUnNested
from pytest_nnxcheck.core.outcome import Listener, Outcome, nobody
from pytest_nnxcheck.core.settings import Settings
from pytest_nnxcheck.core.text import first_line, some
from pytest_nnxcheck.engine import trials
from pytest_nnxcheck.engine.example import Call, Example, Known, evaluated_calls, with_earlier
from pytest_nnxcheck.engine.observe import TRACED, How, is_small, observe, tells
from pytest_nnxcheck.engine.on_targets import OnTargets
from pytest_nnxcheck.engine.ran import Ran
from pytest_nnxcheck.engine.reference import MOST_EQUATIONS, Evaluated, Reference, meaning_of
from pytest_nnxcheck.invariants.judge import Judgement, judged
from pytest_nnxcheck.subject.contents import write_back
from pytest_nnxcheck.subject.originals import leak, look_at
from pytest_nnxcheck.subject.profile import UNKNOWN, Profile, profile
from pytest_nnxcheck.subject.subject import bind, signature
from pytest_nnxcheck.transforms.compose import baseline_for, maps_written

__tracebackhide__ = True  # pytest shows the frames of the user, not these


class Unrestored(BaseException):
    """The first trace of a call left tracers in what cannot be put back, as the frame of a generator, and every later one meets them.

    Not an ``Exception``, as `NestingRejected`: it is none of the user's code.
    """

    def __init__(self, leaks: tuple[Leak, ...]) -> None:
        super().__init__()
        self.leaks = leaks


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
    """Run a call under a nesting and judge the run; ``publish`` hears before it runs. Raises `CheckError` where the call cannot be checked."""
    bound = replace(bind(subject, args, kwargs, owner), in_refs=nesting.mode == REF)
    bound.donated(settings.donate)  # a word that names no argument is an error of the test, whatever its nestings do
    call = Call(bound, nesting, settings, example, publish)
    if (bound.name, bound.code) in example.memo.unrestored:
        # Before its objects are looked at, which would find the same tracers, and blame what was there before the call.
        return not_restored(call)
    # The list of mapped files is long: it is read once for each call of the body.
    looked_for = ("mapped", bound.label, len(example.places) + 1) in example.memo.first
    originals = look_at(bound, example.stand_ins, donates=settings.asserts_donation, maps=not looked_for)
    if originals.held:
        return not_run(call, originals.held)
    # Before the call is made: its own state is written when it has been judged.
    known = example.memo.known.setdefault(signature(bound, *originals.split), Known())
    call = with_earlier(replace(call, originals=originals, known=known))
    try:
        checked = nested(call) if nesting.layers else un_nested(call)
    except Unrestored as unrestored:
        call.memo.unrestored[bound.name, bound.code] = unrestored.leaks
        checked = not_restored(call)
    finally:
        if bound.name in call.memo.own_jits:
            # The user's own object must not meet what a jit that it keeps captured under ours.
            jax.clear_caches()
    return handed_back(call, replace(checked, facts=outcomes.facts_of(call)))


def handed_back(call: Call, checked: Checked) -> Checked:
    """A call that was checked with its output; the user's objects get the values that it put into its copies. Nothing else changes them."""
    run = checked.run
    if run is None:
        return checked
    if checked.state is not None:
        write_back(call.subject, checked.state)
    # After that: a node of the user's own that is returned may have come with the call.
    return replace(checked, output=run.rebuild(run.output), run=None, state=None)


# --- under a nesting


def nested(call: Call) -> Checked:
    """The call under its nesting."""
    try:
        call, reference, baseline = prepared(call)
    except Unfit as error:
        return outcomes.left_out(call, error.misfit)
    except Exception as error:  # noqa: BLE001 - the user's code may raise anything
        return fails_when_traced(call, error)
    call.announce()
    ran = remapped(Ran(call, observed(call), reference, baseline))
    if isinstance(ran.observation.error, CheckError):
        # The call cannot be checked, as a layer found out: that is no verdict on the nesting.
        raise ran.observation.error
    if left_out := outcomes.not_in_refs(ran):
        return left_out
    judgement = judged(ran, call.settings.invariants)
    broken_for_targets = not ran.observation.targets and wants_targets(ran, judgement)
    if judgement.violations and (ran.observation.shared or broken_for_targets):
        # Its message names lines, which must be its own, and what the compilers of targets say of it.
        ran = replace(ran, observation=run_once(ran.call, alone=True, broken=broken_for_targets))
        judgement = judged(ran, call.settings.invariants)
    return outcomes.checked(ran, judgement)


def prepared(call: Call) -> tuple[Call, Reference | None, Nesting | None]:
    """Collect the yardsticks of a nesting: the call with its facts, the call, results of the same calls without the nesting, the un-nested program to compare memory with.

    Raises what the user's code raises under a trace, and `Unfit` where a layer cannot take the call.
    """
    require_slices(call)
    facts = profile_of(call)
    call = replace(call, profile=facts)
    if misfit := trials.misfit_of(call):
        raise Unfit(misfit)
    # Before the run: the calls of the reference meet what the run meets, caches in the user's code among it.
    reference = reference_of(call) if call.settings.compares_values else None
    return call, reference, baseline_for(call.nesting)


def profile_of(call: Call) -> Profile:
    """The profile of the call. Raises what the user's code raises under a trace, and `Unrestored`."""
    subject, known, target = call.subject, call.known, call.settings.target
    if known.profile is not None:
        return known.profile
    call.announce(known=False)
    before = call.originals.walk
    with subject.undone(subject.state, before) as left, frames.devices_asked(on=bool(target)) as lines:
        facts = profile(subject)
    known.notes = tuple(Fact("asks for devices", target, line) for line in lines)
    if left:
        raise Unrestored(tuple(leak(tracer, Layer(JIT)) for tracer in left))
    known.profile = facts
    return facts


def require_slices(call: Call) -> None:
    """Raise `CheckError` where a slice was named of another size than the mesh of the call, before anything of the call runs."""
    if not call.settings.target:
        return
    _, leaves = call.originals.split
    arrays = [*jax.tree.leaves(leaves), *call.subject.inputs]
    with contextlib.suppress(targets.LeftOut):
        for word in call.settings.target:
            targets.target_of(parse_target(word), targets.mesh_of(arrays))


def reference_of(call: Call) -> Reference | None:
    """Make the same calls without the nesting, in the same order; `None` where they cannot run.

    Calls that reach a reference are made anew: nestings of an earlier call that write one in a global differ in how often they do.
    """
    call.example.compared += 1
    if call.subject.abstract:
        return None
    known = {} if call.profile.program.in_references else call.memo.evaluated
    calls = evaluated_calls(known, call.subject, call.example.compared)
    return Reference.of(call.subject, meaning_of(call.nesting), calls)


def observed(call: Call) -> Observation:
    """The facts of a nesting: traced where a trace tells that it holds, else run."""
    if tells(call):
        observation = observe(call, call.nesting, TRACED)
        if observation.proves:
            return observation
    call.example.require_values(call.subject)
    return run(call)


def run(call: Call) -> Observation:
    """The facts of a nesting that is run; a second time, with jax' caches empty, where a plain object's own jit met a trace of ours.

    The user's object holds the values of the program while that runs, and jax keeps what a jitted function captured by way of it.
    """
    observation = run_once(call)
    if not meets_own_jit(call, observation):
        return observation
    call.memo.own_jits.add(call.subject.name)
    jax.clear_caches()
    observation = run_once(call)
    if not meets_own_jit(call, observation):
        return observation
    label, _ = call.subject.opened[0]
    return replace(observation, error=Unfit(Misfit("own jit", label)))


def run_once(call: Call, *, alone: bool = False, broken: bool = False) -> Observation:
    """The facts of a nesting that is run, ``alone`` where its program must be its own, ``broken`` where targets have to say what they make of it."""
    settings, memory = call.settings, "memory" in call.settings.invariants
    on_targets = OnTargets(settings.target, call.memo.on_targets, call.profile.copied_bytes if memory else 0)
    targets = on_targets.all if broken or is_for_targets(call) else None
    return observe(call, call.nesting, How(copies=memory, alone=alone, targets=targets))


def is_for_targets(call: Call) -> bool:
    """True if targets compile the nesting even if it passes on the CPU: the un-nested jit, one that is replayed, with ``thorough`` all."""
    settings, layers = call.settings, call.nesting.layers
    judged = settings.target and TARGETED & {*settings.invariants}
    if not judged or not layers or not layers[0].row.compiles:
        return False
    return layers == (Layer(JIT, settings.styles[0]),) or settings.effort == "thorough" or settings.nesting is not None


def wants_targets(ran: Ran, judgement: Judgement) -> bool:
    """True if a program broke an invariant that targets judge as well."""
    broken = {violation.invariant for violation in judgement.violations}
    return bool(ran.call.settings.target and ran.observation.memory and broken & TARGETED)


def meets_own_jit(call: Call, observation: Observation) -> bool:
    """True if a call of a plain object met a tracer that no reachable object holds: jax keeps it, for a jitted function."""
    return bool(call.subject.opened) and not observation.leaks and refusals.is_tracer_error(observation.error)


def remapped(ran: Ran) -> Ran:
    """A nesting whose ``vmap`` failed, once more where the call writes and restores leaves that have to be mapped; any other as it is."""
    call, state = ran.call, ran.profile.state
    if ran.observation.error is None or state.restored or not maps_written(call.nesting):
        return ran

    restored = call.tried("restored", lambda: trials.restored_leaves(call.subject, state.changed))
    if not restored:
        return ran
    call.known.profile = replace(ran.profile, state=replace(state, restored=restored))
    call = replace(call, profile=call.known.profile)
    call.announce()
    return replace(ran, call=call, observation=observed(call))


# --- calls that no nesting can take


def fails_when_traced(call: Call, error: Exception, *, un_nested: bool = False) -> Checked:
    """A call that raises under any trace, or ``un_nested`` already: the user's exception, unless it left tracers as well."""
    call = replace(call, profile=UNKNOWN)
    call.announce()
    call.example.require_values(call.subject)
    fits = impossible(call.nesting) is None
    bare = Observation(call.nesting, call.subject.state)
    ran = Ran(call, observe(call, call.nesting, How(donate="none")) if fits else bare)
    violations = judged(ran, only_tracers(call.settings)).violations if ran.observation.leaks else ()
    if not violations:
        return outcomes.not_in_refs(ran) or outcomes.failed(call, error, ran.observation)
    own = RaisedUnNested(first_line(error)) if un_nested else first_line(error)
    violations = tuple(replace(violation, explained=(own,)) for violation in violations)
    evidence = Evidence(leaks=ran.observation.leaks)
    return Checked(None, Outcome(call.nesting, "violated", violations, evidence=evidence), error)


def not_restored(call: Call) -> Checked:
    """A call whose trace, as a plain jit makes it, leaves tracers for good: no nesting can run, and each says so."""
    layers = call.nesting.layers or (Layer(JIT),)
    leaks = call.memo.unrestored[call.subject.name, call.subject.code]
    call = replace(call, nesting=replace(call.nesting, layers=layers))
    return not_run(call, tuple(replace(leak, layer=str(layers[0])) for leak in leaks))


def not_run(call: Call, leaks: tuple[Leak, ...]) -> Checked:
    """Judge a call by tracers that every run of it would meet, without a run.

    Raises `CheckError` where the settings do not assert the invariant tracers.
    """
    call.announce()
    ran = Ran(call, Observation(call.nesting, call.subject.state, leaks=leaks))
    judgement = judged(ran, only_tracers(call.settings))
    if not judgement.violations:
        paths = some([leak.path for leak in leaks])
        raise CheckError(
            f"{call.subject.name} holds tracers that the plugin cannot remove, in {paths}: add tracers to the invariants"
        )
    return Checked(None, Outcome(call.nesting, "violated", judgement.violations, evidence=Evidence(leaks=leaks)))


def only_tracers(settings: Settings) -> tuple[str, ...]:
    """The invariants that can be asserted of a nesting that did not run to its end."""
    return tuple({"tracers"} & {*settings.invariants})


# --- without a nesting


def un_nested(call: Call) -> Checked:
    """The call as the user made it, on a copy of the state: traced where a trace tells that it holds, else run."""
    call = replace(call, profile=profile_if_traceable(call))
    traced = call.profile is not UNKNOWN and not call.example.values_needed and tells(call) and not is_small(call)
    observation = observe(call, call.nesting, TRACED) if traced else None
    call.announce()
    reference = None
    if observation is None or not observation.proves:
        call.example.require_values(call.subject)
        # Before the run, as in `nested`: both meet the same number that a plain object counts.
        reference = without_jit(call)
        observation = run(call)
    if observation.error is not None:
        return outcomes.not_in_refs(Ran(call, observation)) or fails_un_nested(call, observation, observation.error)
    judgement = judged(Ran(call, observation, reference), call.settings.invariants)
    if judgement.error is not None and not judgement.violations:
        return outcomes.not_judged(call, judgement.error)
    violations = judgement.violations
    if not violations:
        outcome = Outcome(call.nesting, "held", facts=judgement.notes)
        return Checked(None, outcome, run=observation, state=observation.state)
    if observation.leaks:  # a transform inside the call is at fault
        captures = outcomes.captured(call, leaking=True)
        violations = tuple(replace(violation, explained=captures) for violation in violations)
    notes, evidence = outcomes.notes_of(judgement), Evidence(leaks=observation.leaks)
    outcome = Outcome(call.nesting, "violated", violations, facts=notes, evidence=evidence)
    return Checked(None, outcome, run=observation)


def profile_if_traceable(call: Call) -> Profile:
    """The profile of the call, `UNKNOWN` where no trace takes it: with Python control flow on values, say, it may hold as it is."""
    try:
        return profile_of(replace(call, nesting=replace(call.nesting, layers=(Layer(JIT),))))
    except Exception as error:  # noqa: BLE001 - the user's code may raise anything, and the nestings will tell
        # An exception that the user's code keeps has the frames of this trace, which the test did not ask for.
        error.__traceback__ = None
        return UNKNOWN


def without_jit(call: Call) -> Reference | None:
    """The call with its jits off; none where nothing is compared, it cannot run, or would take minutes."""
    compares = (
        call.settings.compares_values and not call.subject.abstract and call.profile.program.equations <= MOST_EQUATIONS
    )
    return Reference.of(call.subject, (), Evaluated(jits=False)) if compares else None


def fails_un_nested(call: Call, observation: Observation, error: Exception) -> Checked:
    """A call that raises un-nested: the user's exception, unless a plain jit of it leaves tracers as well.

    Flax 0.12 refuses ``self.last = y`` on a field that was `None` when it is called eagerly, and lets the tracer in under a jit.
    """
    if JIT in call.settings.transforms:
        nesting = replace(call.nesting, layers=(Layer(JIT),))
        under_jit = fails_when_traced(replace(call, nesting=nesting), error, un_nested=True)
        if under_jit.outcome.verdict == "violated":
            return under_jit
    return outcomes.failed(call, error, observation)
