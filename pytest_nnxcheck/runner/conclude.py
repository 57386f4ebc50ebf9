"""The exception that people see: one out of all that hypothesis raised, with its final text."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterable
from typing import TYPE_CHECKING

import hypothesis

from pytest_nnxcheck.core.errors import InvariantViolation
from pytest_nnxcheck.core.text import first_line, row
from pytest_nnxcheck.reporting import report
from pytest_nnxcheck.runner.errors import add_notes, flatten, passes_through, plainest

if TYPE_CHECKING:
    from pytest_nnxcheck.runner.run import Run

_NOTES = ("Failing test case", "Failing explicit example", "Falsifying example", "Falsifying explicit example")
_FLAKY = (
    "nnxcheck: the test did not do the same thing twice, with the same arguments and the same nesting. Its body depends on"
    " randomness, on time, or on what an earlier run left behind: make it repeat itself, with a fixed seed inside the body"
    " for example, and no state outside of it."
)


def conclude(error: BaseException, run: Run, *, own_given: bool) -> BaseException:
    """Turn what came out of hypothesis into the exception to raise: the plainest one, its message complete."""
    if isinstance(error, hypothesis.errors.Flaky):
        add_notes(error, [_FLAKY])
        return error
    errors = list(flatten(error))
    if not own_given:
        for member in errors:
            _drop_notes(member)
    if any(passes_through(member) for member in errors):
        return error
    chosen = plainest(errors, run.nesting_of)
    nesting = chosen.outcome.nesting if isinstance(chosen, InvariantViolation) else run.nesting_of(chosen)
    # pytest captures no more of this test, and what its body prints once more tells nothing new.
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        run.explain(nesting)
    if isinstance(chosen, InvariantViolation):
        outcome = run.outcomes.get(chosen.outcome.nesting, chosen.outcome)
        chosen.args = (report.message(run.report(), outcome),)
    else:
        others = _one_of_each_type(errors, chosen)
        also = [row("also failed", f"{run.nesting_of(other)}: {first_line(other)}") for other in others]
        add_notes(chosen, [report.explained_note(run.outcomes.get(nesting)), report.modes_note(run.report()), *also])
    return chosen


def _one_of_each_type(errors: Iterable[BaseException], chosen: BaseException) -> list[BaseException]:
    """One exception of each type that the chosen one is not of."""
    return list({type(error): error for error in errors if type(error) is not type(chosen)}.values())


def _drop_notes(error: BaseException) -> None:
    """Drop the example that hypothesis notes: without a ``@given`` of the user it is the nesting, which the message names better."""
    notes = getattr(error, "__notes__", None)
    if notes is not None:
        notes[:] = [note for note in notes if not note.startswith(_NOTES)]
