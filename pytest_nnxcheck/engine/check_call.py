"""Check one call under one nesting: bind, observe, judge. The plugin and the public functions both come through here."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import jax

from pytest_nnxcheck import compat
from pytest_nnxcheck.core.catalogue import JIT
from pytest_nnxcheck.core.errors import CheckError, Unfit
from pytest_nnxcheck.core.evidence import Evidence
from pytest_nnxcheck.core.nesting import Layer, Nesting
from pytest_nnxcheck.core.observation import Memory, Observation
from pytest_nnxcheck.core.outcome import Finding, Outcome, Violation
from pytest_nnxcheck.core.settings import Settings
from pytest_nnxcheck.core.text import first_line
from pytest_nnxcheck.engine import causes, traced
from pytest_nnxcheck.engine.evidence import evidence, left
from pytest_nnxcheck.engine.observe import observe
from pytest_nnxcheck.engine.originals import Originals, look_at_originals, was_pinned
from pytest_nnxcheck.engine.parity import agrees, agrees_inside
from pytest_nnxcheck.engine.reference import meaning_of
from pytest_nnxcheck.engine.session import Session
from pytest_nnxcheck.invariants import donation, memory, tracers
from pytest_nnxcheck.invariants.donation import Returned
from pytest_nnxcheck.invariants.memory import Bound, bound, saved_state
from pytest_nnxcheck.invariants.notes import of_failure, of_holding
from pytest_nnxcheck.subject.bind import bind
from pytest_nnxcheck.subject.profile import UNKNOWN, Profile
from pytest_nnxcheck.subject.subject import Subject
from pytest_nnxcheck.subject.write_back import write_back
from pytest_nnxcheck.transforms.compose import BASELINE, baseline_for, maps_written

__tracebackhide__ = True  # pytest shows the frames of the user, not these


@dataclass(frozen=True, slots=True)
class Call:
    """What a checked call gives back: the un-nested output, the outcome, and the user's exception if the call failed."""

    output: Any
    outcome: Outcome
    error: BaseException | None = None


def check_call(
    subject: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    nesting: Nesting,
    settings: Settings,
    session: Session,
    owner: str = "",
) -> Call:
    """Run a call under a nesting and judge what it left. Raises `CheckError` where the call cannot be checked."""
    bound_subject = bind(subject, args, kwargs, owner)
    bound_subject.donated(settings.donate)
    originals = look_at_originals(bound_subject, settings, session)
    bound_subject.refuse_what_flax_cannot_split()
    if not nesting.layers:
        return un_nested(bound_subject, nesting, settings, session, originals)
    session.announce(bound_subject, None, nesting, settings)
    try:
        facts = session.profile_of(bound_subject)
    except Unfit as error:
        return Call(None, Outcome(nesting, "rejected", reason=str(error), unfit=True))
    except Exception as error:  # noqa: BLE001 - the user's code may raise anything
        return fails_when_traced(bound_subject, nesting, error, settings, session)
    if misfit := session.misfit(bound_subject, facts, nesting):
        return Call(None, Outcome(nesting, "rejected", reason=str(misfit), unfit=True, misfit=misfit.reason))
    parity = "parity" in settings.invariants
    # Before the run: the calls of the reference meet what the run meets, caches in the user's code among it.
    wanted = session.references.of(bound_subject, meaning_of(nesting)) if parity else None
    session.announce(bound_subject, facts, nesting, settings)
    found = observed(bound_subject, facts, nesting, settings, session)
    if found.error is not None and maps_written(nesting):
        facts, found = remapped(bound_subject, found, settings, session)
    if isinstance(found.error, CheckError):
        raise found.error
    violations, limit = judge(bound_subject, facts, found, settings, session, originals)
    if violations and found.shared:
        # Its message names lines, which must be its own.
        found = observe(bound_subject, facts, nesting, settings.donate, session.shared_programs, alone=True)
        violations, limit = judge(bound_subject, facts, found, settings, session, originals)
    told: tuple[str, ...] = ()
    if parity and found.error is None and not (violations or found.leaks):
        violations, told = agrees(bound_subject, facts, found, wanted)
    baseline = session.baseline_of(bound_subject, settings.donate, nesting) if limit else None
    known = evidence(bound_subject, facts, found, limit, baseline)
    if any(each.invariant == "memory" for each in violations):
        known = replace(known, growth=session.growth_of(bound_subject, settings.donate, nesting, known.split))
    return conclude(bound_subject, facts, found, violations, limit, told, known)


def observed(subject: Subject, facts: Profile, nesting: Nesting, settings: Settings, session: Session) -> Observation:
    """The facts of a nesting: traced where a trace tells that it holds, else run."""
    if traced.tells(subject, facts, nesting, settings):
        found = traced_in(subject, facts, nesting, session)
        if found is not None:
            return found
    session.values.require(subject)
    return observe(subject, facts, nesting, settings.donate, session.shared_programs)


def traced_in(subject: Subject, facts: Profile, nesting: Nesting, session: Session) -> Observation | None:
    """The facts of a nesting, traced; `None` where it must be run."""
    return traced.observe(subject, facts, nesting, session.values, session.shared_programs, session.places[-1])


def remapped(subject: Subject, found: Observation, settings: Settings, session: Session) -> tuple[Profile, Observation]:
    """A nesting whose ``vmap`` failed, once more where the call writes and restores leaves that have to be mapped."""
    facts = session.restores(subject)
    if not facts.restored:
        return facts, found
    session.announce(subject, facts, found.nesting, settings)
    return facts, observed(subject, facts, found.nesting, settings, session)


def un_nested(subject: Subject, nesting: Nesting, settings: Settings, session: Session, originals: Originals) -> Call:
    """The call as the user made it, on a copy of the state: traced where a trace tells that it holds, else run."""
    facts = profile_if_traceable(subject, nesting, settings, session)
    tells = facts is not UNKNOWN and not session.values.needed and traced.tells(subject, facts, nesting, settings)
    found = traced_in(subject, facts, nesting, session) if tells else None
    session.announce(subject, facts, nesting, settings)
    if found is None:
        session.values.require(subject)
        found = observe(subject, UNKNOWN, nesting, settings.donate)
    if found.error is not None:
        return fails_un_nested(subject, found.error, found, settings, session)
    violations: tuple[Violation, ...] = ()
    if "tracers" in settings.invariants:
        violations = leaves_tracers(subject, found) if found.leaks else was_pinned(originals)
    told: tuple[str, ...] = ()
    if "parity" in settings.invariants and not found.leaks:
        violations, told = agrees_inside(subject, facts, found)
    if not violations:
        write_back(subject, found.state)
    verdict = Outcome(
        nesting,
        "violated" if violations else "held",
        violations,
        notes=told,
        evidence=left(found) if violations else None,
    )
    return Call(found.rebuild(found.output), verdict)


def profile_if_traceable(subject: Subject, nesting: Nesting, settings: Settings, session: Session) -> Profile:
    """The profile of the call, `UNKNOWN` where no trace takes it: with Python control flow on values, say, it may hold as it is."""
    session.announce(subject, None, replace(nesting, layers=(Layer(JIT),)), settings)
    try:
        return session.profile_of(subject)
    except Exception:  # noqa: BLE001 - the user's code may raise anything, and the nestings will tell
        return UNKNOWN


def leaves_tracers(subject: Subject, found: Observation) -> tuple[Violation, ...]:
    """Violations of a call that leaks un-nested: a transform inside it is at fault."""
    rows = [("cause", text) for text in causes.captured(subject)]
    return tuple(replace(each, details=(*each.details, *rows)) for each in tracers(found))


def fails_when_traced(
    subject: Subject, nesting: Nesting, error: Exception, settings: Settings, session: Session
) -> Call:
    """A call that raises under any trace: the user's exception, unless it left tracers as well."""
    session.announce(subject, UNKNOWN, nesting, settings)
    session.values.require(subject)
    found = observe(subject, UNKNOWN, nesting, "none")
    violations = tracers(found) if "tracers" in settings.invariants and found.leaks else ()
    if not violations:
        return failed(subject, nesting, error, found)
    own = ("raises", first_line(error))
    violations = tuple(replace(each, details=(*each.details, own)) for each in violations)
    return Call(None, Outcome(nesting, "violated", violations, evidence=left(found)), error)


def fails_un_nested(
    subject: Subject, error: Exception, found: Observation, settings: Settings, session: Session
) -> Call:
    """A call that raises un-nested: the user's exception, unless a plain jit of it leaves tracers as well.

    Flax 0.12 refuses ``self.last = y`` on a field that was `None` when it is called eagerly, and lets the tracer in under a jit.
    """
    if JIT in settings.transforms:
        jit = replace(found.nesting, layers=(Layer(JIT),))
        under_jit = fails_when_traced(subject, jit, error, settings, session)
        if under_jit.outcome.verdict == "violated":
            return under_jit
    return failed(subject, found.nesting, error, found)


def judge(
    subject: Subject, facts: Profile, found: Observation, settings: Settings, session: Session, originals: Originals
) -> tuple[tuple[Violation, ...], Bound | None]:
    """The violations of the invariants that are asked for, and the bound on the memory."""
    violations: tuple[Violation, ...] = ()
    limit = None
    if "tracers" in settings.invariants:
        violations += tracers(found) or was_pinned(originals)
    if found.memory is not None and found.error is None:
        baseline = session.baseline_of(subject, settings.donate, found.nesting)
        if baseline is not None:
            limit = bound(found, facts, baseline, settings.memory_budget)
            if "memory" in settings.invariants:
                violations += memory(found, facts, limit) or advised(subject, facts, found, baseline, settings, session)
    if "donation" in settings.invariants:
        nans = bool(jax.config.jax_debug_nans)
        call = Returned(
            changed=frozenset(map(subject.path, facts.changed)),
            dropped=tuple(map(subject.path, facts.dropped)) if donates(found, settings) else (),
            inputs=frozenset(subject.input_names),
            promoted={subject.path(path): line for path, line in facts.promoted},
        )
        violations += donation(found, originals.shared, originals.views, call, nans)
    return violations, limit


def advised(
    subject: Subject, facts: Profile, found: Observation, baseline: Memory, settings: Settings, session: Session
) -> tuple[Violation, ...]:
    """The advice on the un-nested call, which a nesting that is measured by it breaks where the settings say so."""
    if baseline_for(found.nesting) != BASELINE:
        return ()
    pieces = session.learn_of_un_nested(subject, facts, baseline).advice
    if settings.memory_advice == "note" or not pieces:
        return ()
    rows = [("advice", piece.text) for piece in pieces]
    summary = "the un-nested call spends memory that it need not"
    return (Violation("memory", summary, tuple(rows), findings=(Finding("memory wasted"),)),)


def donates(found: Observation, settings: Settings) -> bool:
    """Whether the program donates its state: the jit at its root was handed it, compiled it, and left nothing behind."""
    layers = found.nesting.layers
    handed = bool(layers) and layers[0].row.compiles and not layers[0].captures
    return handed and settings.donate != "none" and found.error is None and not found.leaks


def conclude(
    subject: Subject,
    facts: Profile,
    found: Observation,
    violations: tuple[Violation, ...],
    limit: Bound | None,
    told: tuple[str, ...] = (),
    known: Evidence | None = None,
) -> Call:
    """The verdict of a nesting."""
    if found.error is not None and not violations:
        if isinstance(found.error, Unfit):
            return Call(None, Outcome(found.nesting, "rejected", reason=str(found.error), unfit=True))
        if reason := compat.fault_of_jax(found.error, [layer.transform for layer in found.nesting.layers]):
            return Call(None, Outcome(found.nesting, "rejected", reason=reason, unfit=True))
        if refused(found):
            return Call(None, Outcome(found.nesting, "rejected", reason=first_line(found.error)))
        call = failed(subject, found.nesting, found.error, found)
        return replace(
            call, outcome=replace(call.outcome, notes=(*call.outcome.notes, *of_failure(subject, facts, found)))
        )
    outcome = Outcome(
        nesting=found.nesting,
        verdict="violated" if violations else "held",
        violations=violations,
        peak=found.memory.peak if found.memory else None,
        budget=limit.budget if limit else None,
        notes=(*of_holding(subject, facts, found), *saved_state(found, facts), *told),
        evidence=known,
    )
    if found.error is not None or found.leaks:
        return Call(None, outcome)
    write_back(subject, found.state)
    return Call(found.rebuild(found.output), outcome)


def refused(found: Observation) -> bool:
    """Whether flax refused a closure layer and left everything clean; without one the exception is the module's own."""
    captures = any(layer.captures for layer in found.nesting.layers)
    return captures and compat.is_refusal(found.error) and not found.leaks


def failed(subject: Subject, nesting: Nesting, error: Exception, found: Observation | None) -> Call:
    """The user's own exception, with what we know of it as notes; or flax's, for what its mode cannot do."""
    if compat.is_mode_refusal(error, nesting.mode):
        return Call(None, Outcome(nesting, "rejected", reason=compat.mode_words(error), by_mode=True))
    outcome = Outcome(nesting, "failed", reason=first_line(error), notes=causes.causes(subject, error, found))
    return Call(None, outcome, error)
