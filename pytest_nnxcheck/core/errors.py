"""The exceptions of a check: an invariant broke, something cannot be checked, or a run is steered.

At load this imports next to nothing: `outcome` is for types alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pytest_nnxcheck.core.catalogue import invariant_rows
from pytest_nnxcheck.core.text import Unreadable

if TYPE_CHECKING:
    from pytest_nnxcheck.core.nesting import Misfit
    from pytest_nnxcheck.core.outcome import Outcome

PUBLIC = __name__.partition(".")[0]
"""The module that tracebacks show for public exceptions: people import them from there."""


class InvariantViolation(AssertionError):
    """A nesting broke an invariant. ``outcome`` has the violations as data."""

    __module__ = PUBLIC

    def __init__(self, message: str, outcome: Outcome) -> None:
        super().__init__(message)
        self.outcome = outcome


class TracerResidue(InvariantViolation):
    """A tracer remained in the state, or anywhere reachable from the module, after the nesting."""

    __module__ = PUBLIC


class MemoryBudgetExceeded(InvariantViolation):
    """The peak of the compiled program is over its budget, or the program holds a second copy of its state or large constants."""

    __module__ = PUBLIC


class DonationLost(InvariantViolation):
    """A donated buffer was not reused by any value that came back."""

    __module__ = PUBLIC


class ParityLost(InvariantViolation):
    """The outputs or the state after the nesting differ from those of the same calls without it."""

    __module__ = PUBLIC


class NestingRejected(BaseException):
    """Flax refused the nesting and left the state clean.

    Not an ``Exception``: a test body's own ``except Exception`` must not swallow it.
    """

    def __init__(self, outcome: Outcome) -> None:
        super().__init__(outcome.reason)
        self.outcome = outcome


class NestingExcused(BaseException):
    """A nesting failed as it was expected to, and left no output to go on with; not an ``Exception`` for the same reason."""


class UnexpectedPass(AssertionError):
    """An expected failure did not happen."""

    __module__ = PUBLIC


class Unfit(Exception):
    """A layer cannot take this subject, whatever the subject's own code does; ``misfit`` is the reason of the rejection."""

    def __init__(self, misfit: Misfit) -> None:
        super().__init__(misfit)
        self.misfit = misfit


class CheckError(Exception):
    """The check cannot be made with these arguments or settings. The text says what to write instead."""

    __module__ = PUBLIC


class SettingError(CheckError, Unreadable):
    """A setting cannot be read; the text names the source, the value and what to write instead."""


def error_for(outcome: Outcome, message: str) -> InvariantViolation:
    """The exception for an outcome that broke invariants: that of the first."""
    names = {row.name: row.error for row in invariant_rows()}
    error: type[InvariantViolation] = globals()[names.get(outcome.violations[0].invariant, InvariantViolation.__name__)]
    return error(message, outcome)
