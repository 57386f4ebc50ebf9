"""One execution of a test body under one nesting: wrapped objects report their calls to it, and it raises what they come to."""

from __future__ import annotations

import importlib
from contextvars import ContextVar
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol

from pytest_nnxcheck import compat
from pytest_nnxcheck.core import expected_failures
from pytest_nnxcheck.core.errors import InvariantViolation, NestingExcused, NestingRejected, error_for
from pytest_nnxcheck.core.nesting import Nesting
from pytest_nnxcheck.core.outcome import Outcome
from pytest_nnxcheck.core.settings import Settings
from pytest_nnxcheck.core.text import one_line
from pytest_nnxcheck.reporting import memory_breakdown, report
from pytest_nnxcheck.subject.uncomputed import Watch

if TYPE_CHECKING:
    from pytest_nnxcheck.engine.check_call import Checked
    from pytest_nnxcheck.engine.session import Session

RUNNING: ContextVar[Active] = ContextVar("nnxcheck_active")


class Recorder(Protocol):
    """What an execution needs of the run that it belongs to."""

    settings: Settings
    session: Session
    watch: Watch

    def record(self, outcome: Outcome) -> None:
        """Keep the outcome."""

    def with_program(self, outcome: Outcome) -> Outcome:
        """The outcome with the program that shows it, if there is one."""


class Active:
    """One execution of a test body under one nesting; wrapped objects report to it."""

    def __init__(self, run: Recorder, nesting: Nesting) -> None:
        self.run = run
        self.nesting = nesting
        self.violation: InvariantViolation | None = None
        self.error: BaseException | None = None

    def call(self, subject: Any, args: tuple[Any, ...], kwargs: dict[str, Any], owner: str = "") -> Any:
        """Call the subject under the nesting; ``owner`` names the object that it is a method of.

        Raises a violation, a rejection, or the user's own exception.
        """
        __tracebackhide__ = True
        run = self.run
        with run.watch.paused():
            checked = engine().check_call(
                subject, args, kwargs, nesting=self.nesting, settings=run.settings, session=run.session, owner=owner
            )
        self._settle(replace(checked, outcome=memory_breakdown.located(checked.outcome)))
        return checked.output

    def _settle(self, checked: Checked) -> None:
        __tracebackhide__ = True
        outcome = checked.outcome
        strict = self.run.settings.on_rejection == "fail" and not outcome.unfit
        known = self.run.settings.expected_failures
        # A rejection fails nothing, but what names this very nesting has come true.
        named = strict or any(entry.nesting() == self.nesting for entry in known)
        if outcome.verdict == "violated" or (outcome.verdict == "rejected" and named):
            outcome = expected_failures.excuse(outcome, known)
        if outcome.verdict == "expected" and checked.error is not None and not self.nesting.layers:
            # A call that raises un-nested is the user's own error, whatever it leaves behind.
            outcome = replace(outcome, nesting=self.nesting, verdict="failed", reason=one_line(checked.error))
        outcome = self.run.with_program(outcome)
        self.run.record(outcome)
        if outcome.verdict == "expected" and _without_output(checked):
            raise NestingExcused
        if outcome.verdict == "failed" and checked.error is not None:
            self.error = checked.error
            raise checked.error.with_traceback(checked.error.__traceback__)
        if outcome.verdict == "violated":
            self.violation = error_for(outcome, report.headline(outcome))
            raise self.violation from checked.error
        if outcome.verdict == "rejected":
            raise self._rejection(outcome)

    def _rejection(self, outcome: Outcome) -> BaseException:
        if outcome.unfit or self.run.settings.on_rejection == "report":
            return NestingRejected(outcome)
        self.violation = InvariantViolation(report.headline(outcome), outcome)
        return self.violation

    def refuse(self, error: BaseException) -> BaseException | None:
        """Record what the body itself, not the checked, did that the mode cannot do: build a module with `nnx.StateAxes`, say."""
        outcome = Outcome(self.nesting, "rejected", reason=compat.mode_words(error), by_mode=True)
        if self.run.settings.on_rejection == "fail":
            outcome = expected_failures.excuse(outcome, self.run.settings.expected_failures)
        self.run.record(outcome)
        rejection = self._rejection(outcome) if outcome.verdict == "rejected" else None
        return None if isinstance(rejection, NestingRejected) else rejection


def _without_output(checked: Checked) -> bool:
    """Whether a call that did not hold gave nothing to go on with."""
    leaks = any(violation.invariant == "tracers" for violation in checked.outcome.violations)
    return checked.error is not None or leaks or checked.outcome.verdict == "rejected"


def active() -> Active | None:
    """The execution that is going on, if any."""
    return RUNNING.get(None)


def engine() -> Any:
    """The module that runs one checked. Late, since it imports jax."""
    return importlib.import_module("pytest_nnxcheck.engine.check_call")
