"""The end of a run: the one exception that people see, or the reason why a run in which nothing failed proves nothing.

`conclude` chooses the exception, and asks for the nestings near the one that broke: the nearest that hold, and the first that fails on the way from
the un-nested call. They are run after hypothesis is done, with the same test body, and count as tried nowhere else.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable, Iterator
from dataclasses import replace

import hypothesis

from pytest_nnxcheck.compat import refusals
from pytest_nnxcheck.compat.frames import raised_by_us
from pytest_nnxcheck.core.catalogue import CALL_FIRST, HANDED, rows_of, styles_of
from pytest_nnxcheck.core.errors import CheckError, InvariantViolation
from pytest_nnxcheck.core.nesting import Layer, Nesting, impossible
from pytest_nnxcheck.core.outcome import BodyFinished, FindingOnTarget, Outcome, Verdict, nobody
from pytest_nnxcheck.core.settings import Settings
from pytest_nnxcheck.core.text import counted, first_line, row, some
from pytest_nnxcheck.engine.example import Handed, Memo
from pytest_nnxcheck.invariants.memory import ConstantsCaptured
from pytest_nnxcheck.invariants.tracers import asks_to_hand_on
from pytest_nnxcheck.reporting import report
from pytest_nnxcheck.runner import cures, strategies
from pytest_nnxcheck.runner.execution import Body, add_notes, drop_notes, flatten, passes_through, plainest
from pytest_nnxcheck.runner.run import Run

# How the notes of hypothesis begin, by version.
_NOTES = ("Failing test case", "Failing explicit example", "Falsifying example", "Falsifying explicit example")
_FLAKY = (
    "nnxcheck: the test did not do the same thing twice, with the same arguments and the same nesting. Its body depends on"
    " randomness, on time, or on what an earlier run left behind: make it repeat itself, with a fixed seed inside the body"
    " for example, and no state outside of it."
)


def conclude(error: BaseException, run: Run) -> BaseException:
    """Turn the exception of hypothesis into the one to raise: the plainest one of a group, with its complete message."""
    if isinstance(error, hypothesis.errors.Flaky):
        add_notes(error, [_FLAKY])
        return error
    errors = list(flatten(error))
    if run.remember:
        # Without a user's ``@given`` the example is the nesting, which our message names better.
        for member in errors:
            drop_notes(member, lambda note: note.startswith(_NOTES))
    if any(passes_through(member) for member in errors):
        return error
    chosen = plainest(errors, run.nesting_of)
    if raised_by_us(chosen):
        return chosen
    nesting = chosen.outcome.nesting if isinstance(chosen, InvariantViolation) else run.nesting_of(chosen)
    # pytest no longer captures this test, and its body prints nothing new.
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        run_around(run, nesting)
    if isinstance(chosen, InvariantViolation):
        outcome = run.outcomes.get(chosen.outcome.nesting, chosen.outcome)
        chosen.args = (report.message(run.report(), outcome),)
    else:
        others = {type(error): error for error in errors if type(error) is not type(chosen)}
        also = [row("also failed", f"{run.nesting_of(other)}: {first_line(other)}") for other in others.values()]
        add_notes(chosen, [report.explained_note(run.outcomes.get(nesting)), report.modes_note(run.report()), *also])
    return chosen


def proves_nothing(run: Run) -> str:
    """Why a run in which nothing failed proves nothing, and what to write instead; empty if it does prove something."""
    if run.uncalled or not run.outcomes:
        return f"{report.NOTHING}: the test never called an object that nnx_wrap returned"
    if run.silent:
        every = counted(len({*run.silent, *run.outcomes}), "nesting")
        missed = "no call" if run.called < 2 else f"no call of some of the {run.called} objects that it wraps"
        return (
            f"nnx test made {missed} under {len(run.silent)} of {every}, {some(map(str, run.silent))}: call the object that"
            " nnx_wrap returned in every run of the body, and keep no result of it in a global, a cache or a fixture"
        )
    if report.nothing_checked(run.outcomes.values()) and not report.rejected_modes(run.report()):
        first = next(outcome for outcome in run.outcomes.values() if outcome.verdict == "rejected")
        if first.unfit:
            return f"{report.NOTHING}: no nesting can be run ({first.reason}): mend that, or name other transforms, or replay another nesting"
        styles = "add 'argument' or 'functional' to the styles, or replay another nesting"
        return f"{report.NOTHING}: every nesting was rejected ({first.reason}), {styles}"
    found = run.report()
    return report.nothing_asserted(found) or report.unjudged_target(found)


SHOWN = 4
"""Neighbours that hold and are named in the message: it stays one line."""
MOST = 12
"""Neighbours that are run at most: each may compile."""

STEPS: dict[Verdict, str] = {
    "held": "passes",
    "violated": "fails",
    "failed": "raises",
    "expected": "fails as expected",
    "rejected": "is not supported by flax",
}
"""The words for the verdict of a nesting in the row of the steps from the un-nested call."""

TryOut = Callable[[Nesting, Settings], Outcome | None]
"""Runs a nesting, or looks its outcome up; None where the test body raised before the call, or ran no call."""


def neighbours(nesting: Nesting, settings: Settings, exclusions: strategies.Exclusions) -> tuple[Nesting, ...]:
    """The nestings with one layer in another style, or without one layer, that can run; the plainest first."""
    every: dict[Nesting, None] = {}
    for number, layer in enumerate(nesting.layers):
        styles = dict.fromkeys([*HANDED, *settings.styles]) if layer.transform != CALL_FIRST else ()
        others = [style for style in styles if style != layer.style and style in styles_of(layer.transform)]
        for middle in ((), *((Layer(layer.transform, style),) for style in others)):
            every[replace(nesting, layers=(*nesting.layers[:number], *middle, *nesting.layers[number + 1 :]))] = None
    possible = (near for near in every if near.layers and not impossible(near))
    allowed = (near for near in possible if all(map(exclusions.allows, near.layers)))
    workable = (near for near in allowed if strategies.workable(near, settings, exclusions) == near)
    return tuple(sorted(workable, key=lambda near: near.plainness))


def run_around(run: Run, nesting: Nesting) -> None:
    """Add the neighbours that hold to the outcome of a nesting that did not hold, and try its cures; a replay runs no other nesting."""
    body, outcome = run.bodies.get(nesting), run.outcomes.get(nesting)
    if body is None or outcome is None:
        return
    if not nesting.layers:
        # A misuse of the plugin says nothing of the user's object.
        if outcome.verdict == "failed" and not isinstance(run.raised(nesting), CheckError):
            found = unlike_own(lambda handed: run.executor.unchecked(body, nesting.mode, handed))
            run.outcomes[nesting] = replace(outcome, explained=(*outcome.explained, *found))
        return
    on_targets = outcome.evidence is not None and outcome.evidence.targets
    # By default targets compile the plain jit alone: a way out must have been compiled for them too.
    settings = replace(run.settings, effort="thorough") if on_targets else run.settings
    outcome = cures.measured(outcome, settings, lambda settings: _cured(run, nesting, settings, body))
    run.outcomes[nesting] = outcome
    if run.settings.nesting is not None:
        return
    exclusions = run.exclusions[nesting.mode]
    run.outcomes[nesting] = explain(
        outcome, settings, exclusions, lambda near, settings: _try_out(run, near, settings, body)
    )


def _try_out(run: Run, nesting: Nesting, settings: Settings, body: Body) -> Outcome | None:
    """The outcome of a neighbour, run if it must be, and recorded nowhere; `None` where the body itself raised before the call."""
    if settings == run.settings and nesting in run.outcomes:
        return run.outcomes[nesting]
    executor = run.executor
    if settings != run.settings:
        # It is the nesting that broke: its program stays as it is.
        executor = replace(executor, programs=None, publish=nobody)
    try:
        execution = executor.execute(nesting, body, settings)
    finally:
        executor.publish(BodyFinished({}))
    run.facts += execution.facts
    if execution.raised is not None and not isinstance(execution.raised, Exception):
        raise execution.raised
    return execution.outcomes.get(nesting)


def _cured(run: Run, nesting: Nesting, settings: Settings, body: Body) -> Outcome | None:
    """The outcome of the nesting that broke with a cure applied. No known fact of the call is true of it."""
    memo = Memo(shared_programs=run.memo.shared_programs, same_arguments=run.memo.same_arguments)
    executor = replace(run.executor, memo=memo, programs=None, publish=nobody)
    execution = executor.execute(nesting, body, settings)
    if execution.raised is not None and not isinstance(execution.raised, Exception):
        raise execution.raised
    return execution.outcomes.get(nesting)


def explain(outcome: Outcome, settings: Settings, exclusions: strategies.Exclusions, try_out: TryOut) -> Outcome:
    """The outcome with the rows of what is near it, and without a hint that was tried and failed: to hand a captured module over.

    The rows are the neighbours that hold, and the way from the un-nested call to the first that fails.
    """
    nesting = outcome.nesting
    near = [(each, try_out(each, settings)) for each in neighbours(nesting, settings, exclusions)[:MOST]]
    tried = [(each, result) for each, result in near if result is None or measures_the_same(outcome, result)]
    handed = [mends(outcome, result) for each, result in tried if hands_on(nesting, each)]
    violations = outcome.violations
    if handed and not any(handed):
        violations = tuple(replace(v, hint="") if asks_to_hand_on(v) else v for v in violations)
    rows: list[tuple[str, str]] = []
    if holds := [str(each) for each, result in tried if result is not None and result.verdict == "held"]:
        more = f", and {len(holds) - SHOWN} more" if holds[SHOWN:] else ""
        rows.append(("passes", f"{', '.join(holds[:SHOWN])}{more}   (of {counted(len(tried), 'similar nesting')})"))
    steps = []
    for number in range(len(nesting), -1, -1):  # with one more layer each, the innermost first
        step = replace(nesting, layers=nesting.layers[number:])
        result = try_out(step, settings) if number else outcome
        steps.append(f"{step} {STEPS[result.verdict if result else 'failed']}")
        if result is None or result.verdict in ("violated", "failed", "expected"):
            break
    if len(steps) > 1:
        rows.append(("steps", ", ".join(steps)))
    return replace(outcome, violations=violations, explained=(*outcome.explained, *rows))


def hands_on(nesting: Nesting, near: Nesting) -> bool:
    """True if a neighbour differs in a closure layer, to which it hands the module over."""
    pairs = zip(nesting.layers, near.layers, strict=False) if len(near) == len(nesting) else ()
    return any(layer.captures and other.style in HANDED for layer, other in pairs if layer != other)


def mends(broken: Outcome, near: Outcome | None) -> bool:
    """True if the invariants that broke hold in a neighbour, whatever else breaks there."""
    if near is None or near.verdict not in ("held", "violated"):
        return False
    invariants = {violation.invariant for violation in broken.violations}
    return invariants.isdisjoint(violation.invariant for violation in near.violations)


def measures_the_same(broken: Outcome, near: Outcome) -> bool:
    """True if a neighbour that held is a way out: its run measured the figures that broke. One that did not hold needs no such test."""
    findings = [finding for violation in broken.violations for finding in violation.findings]
    compiled = any(row.compiled for row in rows_of(violation.invariant for violation in broken.violations))
    targets = {(finding.on.target, finding.on.state) for finding in findings if isinstance(finding, FindingOnTarget)}
    measured = {(on.target, on.state) for on in (near.evidence.targets if near.evidence else ())}
    # A closure captures the state by construction, so that no constants are judged in it.
    constants = near.nesting.captures and any(isinstance(finding, ConstantsCaptured) for finding in findings)
    same = (near.peak is not None or not compiled) and targets <= measured and not constants
    return same or near.verdict != "held"


def unlike_own(run: Callable[[Handed], BaseException | None]) -> Iterator[tuple[str, str]]:
    """A row for a body that raised un-nested, but passes with the user's own objects, unchecked: runs find what makes it raise."""
    error = run("own")
    if error is None:
        causes = (cause for handed, cause in UNLIKE_OWN.items() if run(handed) is not None)
        yield "note", f"passes with your object, {next(causes, 'unwrapped, and unchecked')}"
    elif refusals.is_tracer_error(error):
        yield "note", MET_A_TRACE


MET_A_TRACE = (
    "raises with your object too, unchecked: if the test passes without its marker, a trace of the model left a tracer that nothing"
    " can put back; nnx.jit makes such a trace too"
)
UNLIKE_OWN: dict[Handed, str] = {
    "inputs": "raises where its inputs are arrays of jax, as every transform hands them on",
    "copy": "raises with a copy of it: something goes by the object's identity, and nnx.jit and nnx.clone make copies too",
    "traced": "raises after the model was traced once: a trace leaves something behind, that of nnx.jit too",
}
