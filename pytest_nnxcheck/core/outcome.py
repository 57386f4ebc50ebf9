"""The results of a check as plain data: findings, violations, outcomes of nestings; and the events of a run.

Pure data: nothing here imports jax, flax, hypothesis or pytest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Literal, NamedTuple, Protocol

from pytest_nnxcheck.core.catalogue import severity
from pytest_nnxcheck.core.facts import Evidence
from pytest_nnxcheck.core.nesting import Misfit, Nesting
from pytest_nnxcheck.core.notes import Note
from pytest_nnxcheck.core.on_target import OnTarget
from pytest_nnxcheck.core.peak import UNRECORDED
from pytest_nnxcheck.core.text import Row

Verdict = Literal["held", "violated", "rejected", "failed", "expected"]


class Words(NamedTuple):
    """The message of one broken invariant, without what the figures add."""

    summary: str
    rows: list[Row]
    hint: str


Moment = Literal["first", "before", "after", "search", "in place"]
"""The moment of a look: when the call is taken apart, on the values that the run gets, and when it has run, each an expression that is true
where something is broken, or a line that one of these needs. A ``search`` has the type of a tracer that is alive after the run. ``in place`` lets the run
have the user's own arrays.
"""


class InProgram(Protocol):
    """One call under a nesting as a program to paste has it: the names of its parts."""

    @property
    def nesting(self) -> Nesting:
        """The layers around it."""
        ...

    def keys(self, path: str) -> str:
        """The keys that lead to a leaf of ``state``, as arguments; empty where it is not in the state."""
        ...

    def value(self, path: str, state: str = "state") -> str:
        """The expression for a leaf or an input; empty for what is neither."""
        ...

    @property
    def references(self) -> frozenset[str]:
        """The leaves that are references."""
        ...


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is broken, as data, which words itself: ``path`` is the leaf or the place in the model, where it is about one.

    The first finding of an invariant gives its message the summary, the last rows and the hint; the others give rows.
    """

    path: str = ""

    SHOWN: ClassVar[int] = 6
    """Findings that a message has rows of: as many as people read. The others are counted."""
    OF_PEAK: ClassVar[bool] = False
    """True if it is about the peak of a program, whose lines and buffers the message shows then."""

    def sentence(self) -> str:
        """Say what is wrong, in one line."""
        return self.path

    def rows(self) -> Iterable[Row]:
        """Its rows of the message."""
        return ()

    def first_rows(self) -> Iterable[Row]:
        """Its rows where it is the first, whose sentence is the summary."""
        return self.rows()

    def last_rows(self) -> Iterable[Row]:
        """Rows below those of all findings."""
        return ()

    def cure(self) -> str:
        """The change to make; empty if no advice is certain to be right. A test makes the change, and sees the nesting hold."""
        return ""

    def look(self, call: InProgram) -> Iterable[tuple[Moment, str]]:  # noqa: ARG002 - for those that a program can look for
        """Write how a program to paste looks for it; empty if the plugin alone can see it."""
        return ()

    def words(self, others: Sequence[Finding] = ()) -> Words:
        """Word the message of an invariant whose first finding this is; the ``others`` follow it."""
        shown = others[: self.SHOWN - 1]
        rows = [*self.first_rows(), *(row for each in shown for row in each.rows()), *uncounted(others[len(shown) :])]
        return Words(self.sentence(), [*rows, *self.last_rows()], self.cure())

    def brief(self, summary: str, evidence: Evidence | None) -> str:  # noqa: ARG002 - for those that say it with figures
        """Say what breaks in a part of a summary line, where it is about no leaf."""
        return summary


@dataclass(frozen=True, slots=True, kw_only=True)
class FindingOnTarget(Finding):
    """A finding about a program on a target."""

    on: OnTarget


def uncounted(left_out: Sequence[Finding]) -> list[Row]:
    """The row that counts the findings without one."""
    return [("", f"and {len(left_out)} more")] if left_out else []


@dataclass(frozen=True, slots=True, kw_only=True)
class Breach(Finding):
    """One thing that breaks an invariant of your own. ``path`` names the leaf or the place in the model, if there is one."""

    summary: str
    """One sentence that says what is wrong."""
    details: tuple[tuple[str, str], ...] = ()
    """Further rows of the message: pairs of a label and a text."""
    hint: str = ""
    """The change to make, as advice."""

    def sentence(self) -> str:
        return self.summary

    def rows(self) -> Iterable[Row]:
        return (("also", self.summary), *self._details())

    def first_rows(self) -> Iterable[Row]:
        return (*([("where", self.path)] if self.path else []), *self._details())

    def _details(self) -> list[Row]:
        return [(label, text) for label, text in self.details]  # the user may have written lists

    def cure(self) -> str:
        return self.hint


@dataclass(frozen=True, slots=True)
class Violation:
    """One broken invariant."""

    # `reporting.violations` puts the words of the findings together, and those of their causes; no code reads the text.
    invariant: str
    """The name of the invariant."""
    summary: str = ""
    """One line that says what is wrong."""
    details: tuple[tuple[str, str], ...] = ()
    """Rows of the message: pairs of a label and a text."""
    hint: str = ""
    """The change to make; empty if no advice is certain to be right."""
    findings: tuple[Finding, ...] = field(default=(), metadata=UNRECORDED)
    """Everything that is broken, as data."""
    explained: tuple[Note, ...] = field(default=(), metadata=UNRECORDED)
    """Possible causes, as data."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of one nesting."""

    nesting: Nesting = field(metadata=UNRECORDED)
    verdict: Verdict
    """``held``, ``violated`` (an invariant broke), ``failed`` (the nesting raised), ``rejected`` (flax or a layer cannot take the call), or
    ``expected`` (it failed, and a setting says so)."""
    violations: tuple[Violation, ...] = ()
    """The broken invariants, the most serious first."""
    reason: str = ""
    """The reason why the nesting was rejected, raised, or was expected to fail."""
    error: str = field(default="", metadata=UNRECORDED)
    """The type of the exception, if the nesting raised."""
    facts: tuple[Note, ...] = field(default=(), metadata=UNRECORDED)
    """Facts that no invariant judges, and causes of a failure, as data."""
    asserted: tuple[str, ...] = ()
    """The invariants that it could have broken."""
    peak: int | None = None
    """The peak memory of the program, in bytes a device."""
    budget: int | None = None
    """The bound on the peak, in bytes a device."""
    peaks: tuple[tuple[int, int], ...] = field(default=(), metadata=UNRECORDED)
    """The peak and the expected peak of each call that was measured."""
    notes: tuple[str, ...] = ()
    """The ``facts`` as text."""
    expected: tuple[str, ...] = ()
    """The keys of the expected failures that happened in it."""
    by_mode: bool = field(default=False, metadata=UNRECORDED)
    """True if flax rejected the nesting because its mode cannot do it."""
    unfit: bool = False
    """True if the nesting was rejected because a layer cannot take the call, and not by flax."""
    misfit: Misfit | None = field(default=None, metadata=UNRECORDED)
    """The reason why a layer cannot take the call, as data."""
    evidence: Evidence | None = field(default=None, metadata=UNRECORDED)
    """The measurements."""
    program: str = ""
    """The file of the program that shows the failure without the plugin; empty if there is none."""
    explained: tuple[tuple[str, str], ...] = ()
    """Further rows of the message, which the plugin found after the nestings had run."""
    seconds: float = field(default=0.0, compare=False)
    """The seconds that the nesting took, with the test's own body."""

    def picture(self) -> str:
        """Draw the memory of its program as SVG; empty where it has no picture: see `Evidence.picture`."""
        found = self.evidence.picture if self.evidence else None
        return found.svg(self.budget) if found else ""

    @property
    def rank(self) -> tuple[bool, int, object]:
        """Sort key of a failure: violations first, then the most serious invariant, then the plainer nesting."""
        broken = [severity(violation.invariant) for violation in self.violations]
        return (self.verdict != "violated", min(broken, default=0), self.nesting.plainness)


@dataclass(frozen=True, slots=True, eq=False)
class UnNested:
    """The bytes of the un-nested program of one call, and advice on them. An equal one is of another call: both are kept."""

    name: str
    evidence: Evidence
    advice: tuple[Note, ...]


@dataclass(frozen=True, slots=True)
class CallFacts:
    """The facts that the report of a test states about its calls, whatever their nesting."""

    notes: tuple[Note, ...] = ()
    added: tuple[str, ...] = ()
    """The state that they add."""
    un_nested: tuple[UnNested, ...] = ()
    without_arrays: tuple[str, ...] = ()
    """The subjects that get no module and no array."""

    def __add__(self, later: CallFacts) -> CallFacts:
        """The facts of both, each once."""
        notes, added = dict.fromkeys(self.notes + later.notes), dict.fromkeys(self.added + later.added)
        un_nested = dict.fromkeys(self.un_nested + later.un_nested)
        without_arrays = dict.fromkeys(self.without_arrays + later.without_arrays)
        return CallFacts((*notes,), (*added,), (*un_nested,), (*without_arrays,))


NO_FACTS = CallFacts()


@dataclass(frozen=True, slots=True)
class NestingStarted:
    """A nesting of a test is about to run."""

    nesting: Nesting
    drawn: bool
    """True if hypothesis drew it; else it is one of the sweep."""


@dataclass(frozen=True, slots=True)
class NestingFinished:
    """A nesting of a test has run."""

    nesting: Nesting
    outcome: Outcome | None
    seconds: float
    drawn: bool
    """True if hypothesis drew it; else it is one of the sweep."""


@dataclass(frozen=True, slots=True)
class NestingRuledOut:
    """A nesting of a test is not run, for what an earlier one has shown: its outcome."""

    outcome: Outcome


@dataclass(frozen=True, slots=True)
class BodyStarted:
    """The body of a test is about to run, under a nesting of its own or one that is tried out, or once more for values."""

    body: Callable[[], object]


@dataclass(frozen=True, slots=True)
class BodyFinished:
    """The body has ended."""

    outcomes: Mapping[Nesting, Outcome]
    """The outcomes of the run by now; none where a nesting is only tried out."""


Listener = Callable[[object], None]
"""Hears the events of a test: these, and `CallStarted` of the engine. Nothing comes back."""


def nobody(event: object) -> None:
    """Listen to nothing."""
