"""One call under one nesting: prepared, observed, judged, and diagnosed where that is bad. The plugin and the public functions both come through here."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import Any, Literal

import jax

from pytest_nnxcheck.checks import outcomes
from pytest_nnxcheck.checks.outcomes import Checked, Seen
from pytest_nnxcheck.compat import frames, refusals, targets
from pytest_nnxcheck.core.catalogue import JIT, REF, TARGETED
from pytest_nnxcheck.core.chips import parse_target
from pytest_nnxcheck.core.errors import CheckError, Unfit
from pytest_nnxcheck.core.facts import Leak, Observation
from pytest_nnxcheck.core.nesting import Layer, Misfit, Nesting, impossible
from pytest_nnxcheck.core.notes import Fact
from pytest_nnxcheck.core.outcome import Listener, nobody
from pytest_nnxcheck.core.settings import Settings
from pytest_nnxcheck.engine import trials
from pytest_nnxcheck.engine.example import Call, Example, Known, evaluated_calls, with_earlier
from pytest_nnxcheck.engine.observe import RUN, TRACED, How, observe, traces
from pytest_nnxcheck.engine.on_targets import OnTargets, is_for_targets
from pytest_nnxcheck.engine.ran import Ran
from pytest_nnxcheck.engine.reference import MOST_EQUATIONS, Evaluated, Reference, meaning_of
from pytest_nnxcheck.invariants.judge import Judgement, judged
from pytest_nnxcheck.subject.contents import write_back
from pytest_nnxcheck.subject.originals import leak, look_at
from pytest_nnxcheck.subject.profile import UNKNOWN, Profile, profile
from pytest_nnxcheck.subject.subject import bind, signature
from pytest_nnxcheck.transforms.compose import maps_written

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
        return outcomes.outcome_of(not_restored(call))
    # The list of mapped files is long: it is read once for each call of the body.
    looked_for = ("mapped", bound.label, len(example.places) + 1) in example.memo.first
    originals = look_at(bound, example.stand_ins, donates=settings.asserts_donation, maps=not looked_for)
    if originals.held:
        return outcomes.outcome_of(not_run(call, originals.held))
    # Before the call is made: its own state is written when it has been judged.
    known = example.memo.known.setdefault(signature(bound, *originals.split), Known())
    call = with_earlier(replace(call, originals=originals, known=known))
    try:
        result = checked(call)
    except Unrestored as unrestored:
        call.memo.unrestored[bound.name, bound.code] = unrestored.leaks
        result = outcomes.outcome_of(not_restored(call))
    finally:
        if bound.name in call.memo.own_jits:
            # The user's own object must not meet what a jit that it keeps captured under ours.
            jax.clear_caches()
    return handed_back(call, replace(result, facts=outcomes.facts_of(call)))


def handed_back(call: Call, checked: Checked) -> Checked:
    """A call that was checked with its output; the user's objects get the values that it put into its copies. Nothing else changes them."""
    run = checked.run
    if run is None:
        return checked
    if checked.state is not None:
        write_back(call.subject, checked.state)
    # After that: a node of the user's own that is returned may have come with the call.
    return replace(checked, output=run.rebuild(run.output), run=None, state=None)


# --- looked at


def checked(call: Call) -> Checked:
    """The call under its nesting, or as the user made it: prepared, looked at until there is no reason to look again, and put into an outcome."""
    bare = Observation(call.nesting, call.subject.state)
    try:
        seen = Seen(prepared(call))
    except Unfit as error:
        return outcomes.outcome_of(Seen(Ran(call, replace(bare, error=error))))
    except Exception as error:  # noqa: BLE001 - the user's code may raise anything
        seen = look_for_tracers(Seen(Ran(call, bare)), error)
    else:
        seen.ran.call.announce()
        seen = look(seen, "first")
    while reason := again(seen):
        seen = look(seen, reason)
    ended = outcomes.outcome_of(seen)
    asserted = () if ended.outcome.verdict == "rejected" else seen.judgement.asserted
    return replace(ended, outcome=replace(ended.outcome, asserted=asserted))


def prepared(call: Call) -> Ran:
    """Collect what a nesting is compared with: facts of the call, results of the same calls without the nesting, the un-nested program.

    Raises what the user's code raises under a trace, and `Unfit` where a layer cannot take the call.
    """
    require_slices(call)
    bare = Observation(call.nesting, call.subject.state, proves=False)
    if not call.nesting.layers:
        call = replace(call, profile=profile_if_traceable(call))
        return Ran(call, bare, without_jit(call))
    call = replace(call, profile=profile_of(call))
    if misfit := trials.misfit_of(call):
        raise Unfit(misfit)
    # Before the run: the calls of the reference meet what the run meets, caches in the user's code among it.
    reference = reference_of(call) if call.settings.compares_values else None
    return Ran(call, bare, reference)


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


Reason = Literal["", "first", "unproven", "own jit", "restored", "arrays", "tracers", "own program", "on targets"]
"""The reason to look at a nesting: for the first time, or again; empty for none."""


def again(seen: Seen) -> Reason:
    """The reason to look at a nesting once more. Each holds at most once, and they are asked in this order: what a later one judges, an earlier one mends."""
    call, observation, looked = seen.ran.call, seen.ran.observation, seen.looked
    state, error = call.profile.state, observation.error
    if not observation.proves:
        return "unproven"  # a trace tells too little
    if seen.alone is None and meets_own_jit(call, observation) and "own jit" not in looked:
        return "own jit"  # jax keeps what it captured by way of the user's object, which held a trace of ours
    maps = seen.alone is None and error is not None and maps_written(call.nesting)
    if maps and not state.restored and "restored" not in looked:
        return "restored"  # a vmap that failed may have to map leaves that the call writes and restores
    if outcomes.raises_in_refs(seen) and "arrays" not in looked:
        return "arrays"  # whether references are at fault
    un_nested = not (call.nesting.layers or seen.in_arrays) and JIT in call.settings.transforms
    if error is not None and un_nested and "tracers" not in looked:
        return "tracers"  # flax 0.12 refuses ``self.last = y`` on a field that was `None` eagerly, and lets the tracer in under a jit
    if seen.alone is not None or not seen.judgement.violations or looked & {"own program", "on targets"}:
        return ""
    broken = {violation.invariant for violation in seen.judgement.violations}
    if call.settings.target and not observation.targets and observation.memory and broken & TARGETED:
        return "on targets"  # the message says what their compilers make of it
    return "own program" if observation.shared else ""  # the message names lines, which must be its own


def look(seen: Seen, reason: Reason) -> Seen:
    """Observe and judge a nesting, in the way that the reason asks for."""
    call, how = seen.ran.call, RUN
    looked = seen.looked | {reason}
    if reason == "arrays":
        return replace(seen, looked=looked, in_arrays=outcomes.holds_in_arrays(seen.ran))
    raised = seen.ran.observation.error
    if reason == "tracers" and raised is not None:
        seen = replace(seen, looked=looked)
        under_jit = replace(call, nesting=replace(call.nesting, layers=(Layer(JIT),)))
        left = look_for_tracers(replace(seen, ran=replace(seen.ran, call=under_jit)), raised)
        return left if left.judgement.violations else seen
    if reason == "restored":
        state = call.profile.state
        restored = call.tried("restored", lambda: trials.restored_leaves(call.subject, state.changed))
        if not restored:
            return replace(seen, looked=looked)
        call.known.profile = replace(call.profile, state=replace(state, restored=restored))
        call = replace(call, profile=call.known.profile)
        call.announce()
    if reason == "own jit":
        call.memo.own_jits.add(call.subject.name)
        jax.clear_caches()
    if reason in ("first", "restored") and traces(call):
        how = TRACED
    else:
        call.example.require_values(call.subject)
        memory = "memory" in call.settings.invariants
        on_targets = OnTargets(call.settings.target, call.memo.on_targets, call.profile.copied_bytes if memory else 0)
        targets = on_targets.all if reason == "on targets" or is_for_targets(call) else None
        how = How(copies=memory, alone=reason in ("own program", "on targets"), targets=targets)
    observation = observe(call, call.nesting, how)
    if isinstance(observation.error, CheckError) and call.nesting.layers:
        # The call cannot be checked, as a layer found out: that is no verdict on the nesting.
        raise observation.error
    if reason == "own jit" and meets_own_jit(call, observation):
        observation = replace(observation, error=Unfit(Misfit("own jit", call.subject.opened[0][0])))
    ran = replace(seen.ran, call=call, observation=observation)
    # An un-nested call that raises is the user's own error, whatever else it breaks.
    judges = observation.proves and (call.nesting.layers or observation.error is None)
    return Seen(ran, judged(ran, call.settings.invariants) if judges else Judgement(), looked)


def meets_own_jit(call: Call, observation: Observation) -> bool:
    """True if a call of a plain object met a tracer that no reachable object holds: jax keeps it, for a jitted function."""
    return bool(call.subject.opened) and not observation.leaks and refusals.is_tracer_error(observation.error)


# --- calls that raise, or hold tracers, whatever the nesting


def look_for_tracers(seen: Seen, error: Exception) -> Seen:
    """Look for the tracers that a call leaves which raises under any trace, or un-nested already: beside its exception they are what is wrong with it."""
    call = replace(seen.ran.call, profile=UNKNOWN)
    call.announce()
    call.example.require_values(call.subject)
    ran = Ran(call, Observation(call.nesting, call.subject.state))
    if impossible(call.nesting) is None:
        ran = replace(ran, observation=observe(call, call.nesting, How(donate="none")))
    tracers = only_tracers(call.settings)
    judgement = judged(ran, tracers) if ran.observation.leaks else Judgement(asserted=tracers)
    return replace(seen, ran=ran, judgement=judgement, alone=error)


def not_restored(call: Call) -> Seen:
    """A call whose trace, as a plain jit makes it, leaves tracers for good: no nesting can run, and each says so."""
    layers = call.nesting.layers or (Layer(JIT),)
    leaks = call.memo.unrestored[call.subject.name, call.subject.code]
    call = replace(call, nesting=replace(call.nesting, layers=layers))
    return not_run(call, tuple(replace(leak, layer=str(layers[0])) for leak in leaks))


def not_run(call: Call, leaks: tuple[Leak, ...]) -> Seen:
    """A call that is judged by tracers which every run of it would meet, without a run."""
    call.announce()
    ran = Ran(call, Observation(call.nesting, call.subject.state, leaks=leaks))
    return Seen(ran, judged(ran, only_tracers(call.settings)))


def only_tracers(settings: Settings) -> tuple[str, ...]:
    """The invariants that can be asserted of a nesting that did not run to its end."""
    return tuple({"tracers"} & {*settings.invariants})


# --- the call without a nesting


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
