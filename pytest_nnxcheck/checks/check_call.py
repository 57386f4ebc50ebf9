"""One call under one nesting, from the order to the outcome: prepared, looked at until no reason is left to look again, and put into an outcome.

The plugin and the public functions both come through `check_call`. `again` has every reason to look once more, `outcome_of` every way in which a call ends.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import jax

from pytest_nnxcheck.compat import backend, graph, refusals, targets
from pytest_nnxcheck.compat.arrays import describe
from pytest_nnxcheck.core.catalogue import JIT, REF, TARGETED, rows_of
from pytest_nnxcheck.core.chips import parse_target
from pytest_nnxcheck.core.errors import CheckError, Unfit
from pytest_nnxcheck.core.facts import Evidence, Leak, Lost, Observation
from pytest_nnxcheck.core.ledger import ledger
from pytest_nnxcheck.core.memory_picture import Picture
from pytest_nnxcheck.core.nesting import Layer, Misfit, Nesting, impossible
from pytest_nnxcheck.core.notes import Fact, Mapped, Note, RaisedUnNested, ValueAsked
from pytest_nnxcheck.core.on_target import OnTarget
from pytest_nnxcheck.core.outcome import NO_FACTS, CallFacts, Listener, Outcome, nobody
from pytest_nnxcheck.core.peak import SHOWN, SHOWN_LINES, Bound, by_line, marked_as_added
from pytest_nnxcheck.core.settings import Settings
from pytest_nnxcheck.core.text import first_line, some
from pytest_nnxcheck.engine import causes, trials
from pytest_nnxcheck.engine.example import Call, Example, Known, evaluated_calls, with_earlier
from pytest_nnxcheck.engine.observe import TRACED, How, observe, takes_earlier, traces
from pytest_nnxcheck.engine.on_targets import OnTargets, is_for_targets
from pytest_nnxcheck.engine.ran import Ran
from pytest_nnxcheck.engine.reference import MOST_EQUATIONS, Evaluated, Reference, meaning_of
from pytest_nnxcheck.invariants.donation import lost_leaves
from pytest_nnxcheck.invariants.judge import Judgement, judged
from pytest_nnxcheck.subject.caches import emptied
from pytest_nnxcheck.subject.contents import write_back
from pytest_nnxcheck.subject.originals import leak, look_at
from pytest_nnxcheck.subject.profile import UNKNOWN, Profile, in_arrays_alone, profile
from pytest_nnxcheck.subject.subject import bind, signature
from pytest_nnxcheck.transforms.compose import MAPPING, maps_written
from pytest_nnxcheck.values.effects import UNCHANGED, alike

__tracebackhide__ = True  # pytest shows the frames of the user, not these


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


@dataclass(frozen=True, slots=True)
class Seen:
    """A call under its nesting, as far as it was looked at."""

    ran: Ran
    judgement: Judgement = field(default_factory=Judgement)
    looked: frozenset[str] = frozenset()
    """The reasons for which it was looked at; none where every run would meet the tracers that are there, or a layer takes no such call."""
    alone: Exception | None = None
    """The exception of the call without the nesting, where the nesting was looked at for the tracers that it leaves beside that."""
    in_arrays: bool = False
    """True if it raises with the state in references alone."""


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
    cold: bool = False,
) -> Checked:
    """Run a call under a nesting and judge the run; ``publish`` hears before it runs. Raises `CheckError` where the call cannot be checked.

    The caches that it reaches are made ``cold`` first, where they are not yet.
    """
    bound = replace(bind(subject, args, kwargs, owner), in_refs=nesting.mode == REF)
    bound.donated(settings.donate)  # a word that names no argument is an error of the test, whatever its nestings do
    call = Call(bound, nesting, settings, example, publish)
    if (bound.name, bound.code) in example.memo.unrestored:
        # Before its objects are looked at, which would find the same tracers, and blame what was there before the call.
        return outcome_of(not_restored(call))
    # The list of mapped files is long: it is read once for each call of the body.
    looked_for = ("mapped", bound.label, len(example.places) + 1) in example.memo.first
    originals = look_at(bound, example.stand_ins, donates=settings.asserts_donation, maps=not looked_for)
    if originals.held:
        return outcome_of(not_run(call, originals.held))
    if (
        not cold
        and originals.walk is not None
        and emptied(bound, originals.walk, example.memo.first, example.caches, from_cold=example.again)
    ):
        # Taken apart anew: what an object keeps of an earlier call may be an argument of this one.
        return check_call(
            subject,
            args,
            kwargs,
            nesting=nesting,
            settings=settings,
            example=example,
            publish=publish,
            owner=owner,
            cold=True,
        )
    # Before the call is made: its own state is written when it has been judged.
    known = example.memo.known.setdefault(signature(bound, *originals.split), Known())
    call = with_earlier(replace(call, originals=originals, known=known))
    try:
        result = checked(call)
    except Unrestored as unrestored:
        call.memo.unrestored[bound.name, bound.code] = unrestored.leaks
        result = outcome_of(not_restored(call))
    finally:
        if bound.name in call.memo.own_jits:
            # The user's own object must not meet what a jit that it keeps captured under ours.
            jax.clear_caches()
    return handed_back(call, replace(result, facts=facts_of(call)))


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
        return outcome_of(Seen(Ran(call, replace(bare, error=error))))
    except Exception as error:  # noqa: BLE001 - the user's code may raise anything
        seen = look_for_tracers(Seen(Ran(call, bare)), error)
    else:
        seen.ran.call.announce()
        seen = look(seen, "first")
    while reason := again(seen):
        seen = look(seen, reason)
    ended = outcome_of(seen)
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
    asked = backend.asked() if target else contextlib.nullcontext(())
    with subject.undone(subject.state, before) as left, asked as lines:
        facts = profile(subject, before)
    known.asked = tuple(lines)
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


Reason = Literal[
    "", "first", "unproven", "run", "own jit", "restored", "arrays", "tracers", "own program", "on targets"
]
"""The reason to look at a nesting: for the first time, or again; empty for none."""


def again(seen: Seen) -> Reason:
    """The reason to look at a nesting once more. Each holds at most once, and they are asked in this order: what a later one judges, an earlier one mends."""
    call, observation, looked = seen.ran.call, seen.ran.observation, seen.looked
    state, error = call.profile.state, observation.error
    if not observation.proves:
        return "unproven"  # a trace tells too little
    if observation.earlier and (seen.judgement.violations or observation.error):
        return "run"  # its message has the lines of a program that was compiled
    if seen.alone is None and meets_own_jit(call, observation) and "own jit" not in looked:
        return "own jit"  # jax keeps what it captured by way of the user's object, which held a trace of ours
    maps = seen.alone is None and error is not None and maps_written(call.nesting)
    if maps and not state.restored and "restored" not in looked:
        return "restored"  # a vmap that failed may have to map leaves that the call writes and restores
    if raises_in_refs(seen) and "arrays" not in looked:
        return "arrays"  # whether references are at fault
    un_nested = not (call.nesting.layers or seen.in_arrays) and JIT in call.settings.transforms
    if error is not None and un_nested and "tracers" not in looked:
        return "tracers"  # flax 0.12.5 refuses ``self.last = y`` on a field that was `None` eagerly, and lets the tracer in under a jit
    if seen.alone is not None or not seen.judgement.violations or looked & {"own program", "on targets"}:
        return ""
    broken = {violation.invariant for violation in seen.judgement.violations}
    if call.settings.target and not observation.targets and observation.memory and broken & TARGETED:
        return "on targets"  # the message says what their compilers make of it
    return "own program" if observation.shared else ""  # the message names lines, which must be its own


def look(seen: Seen, reason: Reason) -> Seen:
    """Observe and judge a nesting, in the way that the reason asks for."""
    call, looked = seen.ran.call, seen.looked | {reason}
    if reason == "arrays":
        return replace(seen, looked=looked, in_arrays=holds_in_arrays(seen.ran))
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
    observation = observe(call, call.nesting, how_to_look(call, reason))
    if isinstance(observation.error, CheckError) and call.nesting.layers:
        # The call cannot be checked, as a layer found out: that is no verdict on the nesting.
        raise observation.error
    if reason == "own jit" and meets_own_jit(call, observation):
        observation = replace(observation, error=Unfit(Misfit("own jit", call.subject.opened[0][0])))
    if unmade := frozenset(leak.path for leak in observation.leaks if not leak.line):
        at = call.once("kept at", lambda: causes.lines_that_keep(call.subject, unmade), *sorted(unmade))
        leaks = tuple(replace(leak, kept_at=at.get(leak.path, "")) for leak in observation.leaks)
        observation = replace(observation, leaks=leaks)
    ran = replace(seen.ran, call=call, observation=observation)
    # An un-nested call that raises is the user's own error, whatever else it breaks.
    judges = observation.proves and (call.nesting.layers or observation.error is None)
    judgement = judged(ran, call.settings.invariants) if judges else Judgement()
    if judges and observation.error is None and not judgement.violations:
        observation.keep()
    return Seen(ran, judgement, looked)


def how_to_look(call: Call, reason: Reason) -> How:
    """The way in which a nesting is observed, for a reason. Raises `uncomputed.ValuesNeeded` where it has to run, and is handed no values."""
    at_first = reason in ("first", "restored")
    if at_first and traces(call):
        return TRACED
    earlier = at_first and takes_earlier(call)
    if not earlier:
        call.example.require_values(call.subject)
    memory = "memory" in call.settings.invariants
    copied, asks = call.profile.copied_bytes if memory else 0, bool(call.known.asked)
    on_targets = OnTargets(call.settings.target, call.memo.on_targets, copied, asks)
    targets = on_targets.all if reason == "on targets" or is_for_targets(call) else None
    return How(copies=memory, alone=reason in ("own program", "on targets"), earlier=earlier, targets=targets)


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


# --- the outcome: one table of the ways in which a call ends, and what an outcome says

LITTLE = 10 * 2**20
"""Bytes below which the figures of a target say little: those of its own workspace, 4 MiB for a product of matrices on a GPU."""

MUCH_MORE = 1.5
"""Times the peak of the CPU. Of 96 programs of flax models one in twelve needs more on a TPU, and one in ninety on a GPU."""


def outcome_of(seen: Seen) -> Checked:  # noqa: C901, PLR0912 - a table, a row each ending
    """The end of a nesting, in the order of blame: what references cannot do, what broke, what a layer cannot take, what the user's code raises.

    Raises `CheckError` where the call holds tracers for good, and the settings do not assert that there are none.
    """
    call, observation, judgement = seen.ran.call, seen.ran.observation, seen.judgement
    nesting, error = call.nesting, observation.error
    inside = [layer.transform for layer in nesting.layers if not layer.row.compiles]
    match error:
        case None if not seen.looked and seen.alone is None:
            if not judgement.violations:
                raise CheckError(
                    f"{call.subject.name} holds tracers that the plugin cannot remove, in {some([leak.path for leak in observation.leaks])}: add "
                    "tracers to the invariants"
                )
            return Checked(None, violated(seen))
        case Exception() if refusals.is_of_platform(error) and not judgement.violations:
            return refused_here(call, error, observation.targets)
        case Exception() if seen.in_arrays and call.subject.in_refs and not inside:
            # In the mode that puts the state there, nothing is checked if a jit alone raises.
            return Checked(None, Outcome(nesting, "rejected", reason=first_line(error), by_mode=True))
        case Exception() if seen.in_arrays:
            return left_out(call, Misfit("in references", other=first_line(error)))
        case _ if seen.alone is not None and judgement.violations:
            # Beside the user's exception: tracers, which explain it or come of it.
            raised = first_line(seen.alone)
            own = RaisedUnNested(raised) if "tracers" in seen.looked else raised
            return Checked(None, violated(seen, (own,)), seen.alone)
        case _ if seen.alone is not None:
            return failed(seen, seen.alone)
        case None if judgement.error and not judgement.violations:
            # Where the invariant read a value that was not computed, the body runs again with values, as after any exception.
            words, name = str(judgement.error), type(judgement.error).__name__
            return Checked(None, Outcome(nesting, "failed", reason=words, error=name), judgement.error)
        case _ if error is None or judgement.violations:
            return concluded(seen)
        case _ if not nesting.layers:
            # Un-nested there is nothing of ours around it.
            return failed(seen, error)
        case Unfit():
            return left_out(call, error.misfit)
        case _ if refusals.branch_in_a_loop(error, inside):
            return left_out(call, Misfit("branch in a loop", jax.__version__))
        case _ if not observation.leaks and (misfit := trials.refusing(call, error)):
            return left_out(call, misfit)
        case _ if nesting.captures and refusals.is_refusal(error) and not observation.leaks:
            # Flax refused a closure layer, and left everything clean; without one the exception is the module's own.
            return Checked(None, Outcome(nesting, "rejected", reason=first_line(error)))
        case _:
            return failed(seen, error)


# --- a nesting that ended, or broke an invariant


def concluded(seen: Seen) -> Checked:
    """The outcome with the output, and the state after the call.

    Tracers that nobody asserts keep nothing from the user but a state that holds them.
    """
    call, observation, judgement = seen.ran.call, seen.ran.observation, seen.judgement
    broken, leaks = judgement.violations, observation.leaks
    call.known.notes = tuple(dict.fromkeys([*call.known.notes, *judgement.of_call]))
    if not call.nesting.layers:
        if not broken:
            outcome = Outcome(call.nesting, "held", facts=judgement.notes)
            return Checked(None, outcome, run=observation, state=observation.state)
        # A transform inside the call that captured a module or a Variable is at fault for what it leaves there. Handed them, it leaves the same tracer
        # in any other object.
        in_nodes = any(leak.place in ("variable", "module", "variable outside") for leak in leaks)
        outcome = violated(seen, captured(call, leaking=True) if in_nodes else ())
        return Checked(None, outcome, run=observation)
    outcome = judged_outcome(seen)
    if observation.error is not None or (leaks and broken):
        return Checked(None, outcome)
    # A jit of flax 0.10 that refuses what a Variable keeps hands out no new value, and has deleted the old one.
    spoiled = any(leak.place in ("variable", "module") for leak in leaks) or (leaks and has_deleted(observation.state))
    return Checked(None, outcome, run=observation, state=None if spoiled else observation.state)


def has_deleted(state: Any) -> bool:
    """True if a leaf of a state is an array without a buffer."""
    arrays = [value for _, value in graph.raw_leaves(state) if isinstance(value, jax.Array)]
    return any(not isinstance(array, jax.core.Tracer) and array.is_deleted() for array in arrays)


def violated(seen: Seen, explained: tuple[Note | str, ...] = ()) -> Outcome:
    """The outcome of a call that broke an invariant, without figures."""
    judgement, evidence = seen.judgement, Evidence(leaks=seen.ran.observation.leaks)
    broken = tuple(replace(violation, explained=explained) for violation in judgement.violations)
    return Outcome(seen.ran.call.nesting, "violated", broken, facts=notes_of(judgement), evidence=evidence)


def judged_outcome(seen: Seen) -> Outcome:
    """The verdict on a nesting, the figures, and their explanation."""
    ran, judgement = seen.ran, seen.judgement
    call, observation, bound = ran.call, ran.observation, ran.bound
    notes: tuple[Note, ...] = (
        *call.known.notes,
        *of_targets(observation),
        *of_lines(call, observation),
        *unasserted(ran),
    )
    call.known.notes = tuple(dict.fromkeys(notes))
    return Outcome(
        nesting=call.nesting,
        verdict="violated" if judgement.violations else "held",
        violations=judgement.violations,
        peak=observation.memory.peak if observation.memory else None,
        budget=bound.budget if bound else None,
        peaks=((observation.memory.peak, bound.expected),) if observation.memory and bound else (),
        facts=(*of_holding(ran), *notes_of(judgement)),
        evidence=evidence(ran, bound, drawn=any(each.invariant == "memory" for each in judgement.violations)),
    )


def evidence(ran: Ran, bound: Bound | None, *, drawn: bool) -> Evidence:
    """The figures and facts of a nesting that reports keep; ``drawn`` if its memory gets a picture, as that of a plain jit does."""
    observation, un_nested = ran.observation, ran.un_nested_memory
    drawn = drawn or len(ran.call.nesting.layers) == 1
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
        ledger=ledger(observation.memory, heads(ran))
        if drawn and observation.memory and observation.memory.named
        else (),
        picture=Picture.of(observation.memory) if drawn and observation.memory else None,
    )


def heads(ran: Ran) -> dict[str, str]:
    """The head in the ledger of each leaf of the state, by name."""
    subject = ran.call.subject
    return {
        subject.path(path): "optimizer state" if graph.is_optimizer_state(variable) else "state"
        for path, variable in graph.variables(subject.state)
    }


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
    kept: dict[str, Any] = {}
    if (written := state.references & state.changed) and not observation.abstract:
        before, came_out = (dict(graph.raw_leaves(node)) for node in (subject.state, observation.state))
        kept = {subject.path(path): path for path in written & came_out.keys() if alike(came_out[path], before[path])}
    if kept:
        calls = ran.reference.wanted if ran.reference else Evaluated().effect(subject, meaning_of(ran.call.nesting))
        after = {name: leaf.value for name, leaf in calls.after.leaves.items() if leaf.value is not UNCHANGED}
        kept = {name: path for name, path in kept.items() if name in after and not alike(after[name], before[path])}
    return (*map(subject.path, observation.still), *kept)


def of_targets(observation: Observation) -> Iterator[Fact]:
    """Targets that could not compile the program, and those on which the un-nested program needs far more than on the CPU."""
    held = observation.memory
    if observation.refused:
        yield Fact(
            "on targets alone", tuple(on.target for on in observation.targets if not on.left_out), observation.refused
        )
    for on in observation.targets:
        if on.left_out:
            yield Fact("left out on target", (on.target,), on.left_out)
        if held is None or on.peak is None or len(observation.nesting) > 1:
            continue
        if on.peak > max(MUCH_MORE * held.peak, LITTLE):
            yield Fact("peak on target", (on.target,), peaks=(on.peak, held.peak))


def of_lines(call: Call, observation: Observation) -> Iterator[Fact]:
    """The lines that asked jax what they run on, with the answers that they got for targets, or with the targets that they did not ask for."""
    judged = [on for on in observation.targets if not on.left_out]
    lines = dict.fromkeys([*call.known.asked, *(line for on in judged for line, _ in on.answered)]) if judged else ()
    for line in lines:
        answers = {on.target: dict(on.answered).get(line, "") for on in judged}
        if told := tuple(f"{answer} on {target}" for target, answer in answers.items() if answer):
            yield Fact("answered", told, line)
        if kept := tuple(target for target, answer in answers.items() if not answer):
            yield Fact("asks for devices", kept, line)


# --- other ends


def left_out(call: Call, misfit: Misfit) -> Checked:
    """The outcome of a nesting that cannot take the call."""
    return Checked(None, Outcome(call.nesting, "rejected", unfit=True, misfit=misfit))


def refused_here(call: Call, error: Exception, asked: tuple[OnTarget, ...]) -> Checked:
    """The outcome of a nesting whose program this platform cannot lower, nor any target that was ``asked``."""
    why = "; ".join(f"not checked on {on.target}: {on.left_out}" for on in asked)
    misfit = Misfit("platform", why or "name a target that can, --nnx-target", other=first_line(error))
    evidence = Evidence(targets=asked) if asked else None
    return Checked(None, Outcome(call.nesting, "rejected", unfit=True, misfit=misfit, evidence=evidence))


def raises_in_refs(seen: Seen) -> bool:
    """True if a nesting raises with the state in references, which may be at fault.

    What a state that the user put into references raises without a layer, or under one jit, is the user's own; but the `nnx.jit` of graph mode
    takes no abstract reference (flax 0.12.12).
    """
    call, observation, error = seen.ran.call, seen.ran.observation, seen.ran.observation.error
    bare = all(layer.row.compiles for layer in call.nesting.layers)
    ours = call.subject.in_refs or (call.profile.program.in_references and (call.subject.abstract or not bare))
    refused = call.nesting.captures and refusals.is_refusal(error)
    return ours and error is not None and not (refused or observation.leaks or isinstance(error, Unfit))


def holds_in_arrays(ran: Ran) -> bool:
    """True if the nesting ends with the same state in arrays, or flax refuses that."""
    call = ran.call
    with call.subject.undone(call.subject.state):
        in_arrays = replace(call, subject=in_arrays_alone(call.subject))
        raised = observe(in_arrays, call.nesting, How(donate="none")).error
    return raised is None or (call.nesting.captures and refusals.is_refusal(raised))


def failed(seen: Seen, error: Exception) -> Checked:
    """The outcome of the user's own exception, explained in notes; or of flax's, for a thing that its mode cannot do."""
    call, notes = seen.ran.call, tuple[Note, ...]()
    nesting, subject = call.nesting, call.subject
    if maps_written(nesting) and error is seen.ran.observation.error and not isinstance(error, CheckError):
        written = sorted(call.profile.state.written, key=str)
        notes = (Mapped(MAPPING, (*map(subject.path, written), *subject.input_names)),)
    if refusals.is_mode_refusal(error, nesting.mode):
        return Checked(None, Outcome(nesting, "rejected", reason=refusals.mode_words(error), by_mode=True, facts=notes))
    facts = (*explained(call, error, seen.ran.observation), *notes)
    outcome = Outcome(nesting, "failed", reason=first_line(error), error=type(error).__name__, facts=facts)
    return Checked(None, outcome, error)


def explained(call: Call, error: Exception, observation: Observation) -> tuple[Note, ...]:
    """The explanation of the user's exception: the leaked tracers, and the transform that captured a module."""
    if refusals.asks_for_value(error):
        return (ValueAsked(call.tried("numbers asked for", lambda: trials.numbers_asked_for(call))),)
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
    without_arrays = () if subject.names or subject.input_names else (subject.name,)
    running = tuple(row.name for row in rows_of(settings.invariants) if row.runs and subject.abstract)
    notes: list[Note] = [*call.originals.notes, *([Fact("abstract", running)] if running else [])]
    notes += call.known.notes
    if profile is None:
        return CallFacts((*notes,), (), () if un_nested is None else (un_nested,), without_arrays)
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
    return CallFacts((*notes,), added, () if un_nested is None else (un_nested,), without_arrays)
