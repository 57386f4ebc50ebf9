"""The end of a run: the one exception that people see, or the reason why a run in which nothing failed proves nothing."""

from __future__ import annotations

import contextlib
import io

import hypothesis

from pytest_nnxcheck.compat.frames import raised_by_us
from pytest_nnxcheck.core.catalogue import rows_of
from pytest_nnxcheck.core.errors import InvariantViolation
from pytest_nnxcheck.core.text import counted, first_line, row, some
from pytest_nnxcheck.reporting import report, tally
from pytest_nnxcheck.runner import neighbours
from pytest_nnxcheck.runner.errors import add_notes, drop_notes, flatten, passes_through, plainest
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
        neighbours.run_around(run, nesting)
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
    if unasserted := _unasserted(run):
        return f"{report.NOTHING}: {unasserted}"
    if tally.nothing_checked(run.outcomes.values()) and not report.rejected_modes(run.report()):
        first = next(outcome for outcome in run.outcomes.values() if outcome.verdict == "rejected")
        if first.unfit:
            return f"{report.NOTHING}: no nesting can be run ({first.reason}): mend that, or name other transforms, or replay another nesting"
        styles = "add 'argument' or 'functional' to the styles, or replay another nesting"
        return f"{report.NOTHING}: every nesting was rejected ({first.reason}), {styles}"
    return ""


def _unasserted(run: Run) -> str:
    """Why no invariant could have been broken: only compiled programs break them, and there is none, or nothing is donated."""
    asserted, outcomes = rows_of(run.settings.invariants), run.outcomes.values()
    programs = [outcome.evidence.split for outcome in outcomes if outcome.evidence and outcome.evidence.split]
    nothing_reused = bool(programs) and not any(program.aliased for program in programs)
    if all(invariant.name == "donation" for invariant in asserted) and (
        run.settings.donate == "none" or nothing_reused
    ):
        return (
            "donation is checked for the arguments that the outermost jit donates, and no program reused a buffer"
            f" (donate is {run.settings.donate}): donate what the call changes, or add tracers to the invariants"
        )
    judged = (outcome.nesting.layers for outcome in outcomes if outcome.verdict != "rejected")
    if not all(invariant.compiled for invariant in asserted) or any(
        layers and layers[0].row.compiles for layers in judged
    ):
        return ""
    names = " and ".join(invariant.name for invariant in asserted)
    return (
        f"{names} can be checked in compiled programs alone, and no nesting has an outer jit: add jit to the"
        " transforms, or tracers to the invariants"
    )
