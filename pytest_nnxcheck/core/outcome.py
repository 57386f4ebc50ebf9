"""What a check says: violations, the outcome of one nesting, and the exceptions that carry them.

Pure data: nothing here imports jax, flax, hypothesis or pytest.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from pytest_nnxcheck.core.nesting import Nesting

if TYPE_CHECKING:
    # Late: its dataclasses take a quarter of the time that loading the plugin does.
    from pytest_nnxcheck.core.evidence import Evidence

Verdict = Literal["held", "violated", "rejected", "failed", "expected"]
INVARIANTS = ("tracers", "memory", "donation")
"""What is asserted by default."""
OPTIONAL_INVARIANTS = ("parity",)
"""What is asserted where it is named."""


@dataclass(frozen=True, slots=True)
class Violation:
    """One broken invariant.

    ``summary`` is one line, ``details`` are (label, text) rows of the message, ``hint`` says what to change
    and is empty where no advice is certain to be right.
    """

    invariant: str
    summary: str
    details: tuple[tuple[str, str], ...] = ()
    hint: str = ""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one nesting did: the verdict, its violations, and the peak against its budget (bytes a device).

    ``reason`` says why a nesting was rejected or failed, or was expected to, ``by_mode`` that flax rejected it for what its mode cannot
    do, ``unfit`` that it was rejected because a layer cannot take the call, not by flax; ``misfit`` is
    then the reason without the layer that it is about. ``notes`` are facts that are reported but not
    judged. ``expected`` are the keys of the expected failures that came true in it.

    ``evidence`` is what was measured, ``program`` the file that shows the same without the plugin, ``explained`` further rows of the
    message, which were found after hypothesis was done. ``seconds`` took the nesting, the test's own body included.
    """

    nesting: Nesting
    verdict: Verdict
    violations: tuple[Violation, ...] = ()
    reason: str = ""
    peak: int | None = None
    budget: int | None = None
    notes: tuple[str, ...] = ()
    expected: tuple[str, ...] = ()
    by_mode: bool = False
    unfit: bool = False
    misfit: str = ""
    evidence: Evidence | None = None
    program: str = ""
    explained: tuple[tuple[str, str], ...] = ()
    seconds: float = field(default=0.0, compare=False)


PUBLIC = __name__.partition(".")[0]
"""The module that public exceptions show: where people import them from."""


class InvariantViolation(AssertionError):
    """A nesting broke an invariant; ``outcome`` holds the violations as data."""

    __module__ = PUBLIC

    def __init__(self, message: str, outcome: Outcome) -> None:
        super().__init__(message)
        self.outcome = outcome


class TracerResidue(InvariantViolation):
    """A tracer remained in the state, or anywhere reachable from the module, after the nesting."""

    __module__ = PUBLIC


class MemoryBudgetExceeded(InvariantViolation):
    """The peak memory of the compiled program passed its bound, or the program copies its state."""

    __module__ = PUBLIC


class DonationLost(InvariantViolation):
    """A donated buffer was not reused for the new value of its leaf."""

    __module__ = PUBLIC


class ParityLost(InvariantViolation):
    """The outputs or the state after the nesting are not those of the same calls without it."""

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
    """A layer cannot take this subject, whatever the subject's own code does; the text is the reason of the rejection."""


class CheckError(Exception):
    """The check cannot be made as it was asked for; the text says what to write instead."""

    __module__ = PUBLIC


ERRORS: dict[str, type[InvariantViolation]] = {
    "tracers": TracerResidue,
    "memory": MemoryBudgetExceeded,
    "donation": DonationLost,
    "parity": ParityLost,
}
