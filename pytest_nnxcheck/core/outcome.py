"""The results of a check as plain data: findings, violations, outcomes of nestings; and the events of a run.

Pure data: nothing here imports jax, flax, hypothesis or pytest.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from pytest_nnxcheck.core.catalogue import severity
from pytest_nnxcheck.core.facts import Advice, ArrayType, Evidence, Leak, UnNested
from pytest_nnxcheck.core.nesting import Layer, Misfit, Nesting
from pytest_nnxcheck.core.notes import Explanation, Note
from pytest_nnxcheck.core.peak import UNRECORDED, Bound, Figures, OnTarget, PeakCause

Verdict = Literal["held", "violated", "rejected", "failed", "expected"]


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is broken, as data: ``path`` is the leaf or the place in the model, where it is about one."""

    path: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class TracerLeft(Finding):
    """A tracer that outlived its trace."""

    leak: Leak
    has_data: bool = False
    """True if the installed flax has `nnx.data`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MadeInEndedTrace(Finding):
    """A Variable that flax refuses to write."""

    type: str
    """The type of the Variable and of its value."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StateTouched(Finding):
    """A leaf that a layer changed, though it only asks for shapes."""

    layer: Layer


@dataclass(frozen=True, slots=True, kw_only=True)
class PeakOverBudget(Finding):
    """More than the budget."""

    figures: Figures


@dataclass(frozen=True, slots=True, kw_only=True)
class StateCopied(Finding):
    """Copies of the state at the peak."""

    figures: Figures
    bytes: int
    """The size of all copies together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FindingOnTarget(Finding):
    """A finding about a program on a target."""

    on: OnTarget


@dataclass(frozen=True, slots=True, kw_only=True)
class DoesNotFit(FindingOnTarget):
    """More than a program may use of the memory of a target."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OverBudgetOnTarget(FindingOnTarget):
    """More than a budget in bytes allows, on a target."""

    bound: Bound


@dataclass(frozen=True, slots=True, kw_only=True)
class CopiedOnTarget(FindingOnTarget):
    """Copies of the state at the peak, on a target."""

    cause: PeakCause = ""
    """The `PeakCause` of the program on the CPU."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LostOnTarget(FindingOnTarget):
    """Donated leaves, ``on.lost``, whose buffers are lost on a target, and kept on the CPU."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConstantsCaptured(Finding):
    """Arrays of the user's that became constants of the program."""

    figures: Figures
    bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryWasted(Finding):
    """Memory that the un-nested call need not spend."""

    advice: tuple[Advice, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedBuffer(Finding):
    """Two leaves in one buffer, and a program donates one of them."""

    other: str
    twice: bool
    """True if both are donated; else the other is used beside that."""
    inside: bool = False
    """True if a jit of the call's own donates them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Orphaned(Finding):
    """A leaf that the call gave the array of an ``other`` one, which a jit inside the call donates."""

    other: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ViewedBuffer(Finding):
    """A donated leaf whose buffer a NumPy array, or another array, looks into."""

    holder: str


LossCause = Literal["dtype", "shape", "sharding", "not returned", "not reused", "reference"]
"""The reason why a buffer was lost."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LostBuffer(Finding):
    """A donated leaf whose buffer nothing came back in."""

    cause: LossCause
    type: ArrayType
    new: ArrayType | None = None
    """The type of its new value, as the call sees it."""
    output: bool = False
    """True if the new value is an output, for an input."""
    shardings: tuple[str, ...] = ()
    """The shardings before and after, as their user writes them."""
    pointers: tuple[int, ...] = field(default=(), compare=False)
    """The pointers before and after; the first alone where there is no buffer after."""
    line: str = ""
    """The line where the leaf got another dtype."""
    abstract: bool = False
    """True if nothing was run."""
    debug_nans: bool = False
    """True if jax keeps old values for `jax_debug_nans`."""


@dataclass(frozen=True, slots=True)
class UpdateDropped(Finding):
    """A leaf of an optimizer whose update went to a copy."""


DropCause = Literal["attribute", "broadcast", "copy", "reference", "replaced"]
"""The cause of a dropped update: it is of a plain attribute, the state was broadcast, a transform of jax was handed a copy, a transform copied a
reference or wrote to it twice, or the call put another Variable in the place of one in a reference.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueDiffers(Finding):
    """A leaf, an attribute or an output that is not as it should be."""

    label: Literal["missing", "added", "dropped", "attribute", "deleted", "differs"]
    of: str = ""
    """The type of the Variable."""
    type: str = ""
    """The type of the array, or of the Python value of an attribute."""
    want: str | complex = ""
    """The value, type or count that should be there: of an array, that of the element whose values differ most."""
    have: str | complex = ""
    """The value, type or count that is there."""
    wrong: int = 0
    """The number of elements that differ."""
    elements: int = 0
    size: float = 1.0
    """The distance between the two values of that element; 1 where it is no float."""
    allowed: float | None = None
    """The distance that is allowed."""
    rounding: bool = False
    """True if only floats differ, by a finite amount."""
    cause: DropCause | Literal[""] = ""
    """The cause of a dropped update."""
    variable: str = ""
    """The type of the Variable, as its user writes it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NotFinite(Finding):
    """A leaf or an output with elements that are NaN or infinite, where those of the un-nested call are finite."""

    type: str
    wrong: int
    """The number of such elements."""
    elements: int


MISSING = "missing"
"""The word of `TypeMoved` for a leaf or an attribute that is not there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TypeMoved(Finding):
    """An attribute, or the type of a leaf, that a call compiles for and then changes; empty where it cannot be named."""

    label: Literal["attribute", "leaf", ""] = ""
    type: str = ""
    """The Python type of an attribute."""
    before: str = ""
    after: str = ""
    hardened: bool = False
    """True if a leaf was made of a Python number, and is not any more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JitTracedAgain(Finding):
    """A function, named by ``path``, that a jit inside the call traces in each call, for arrays of the same types each time."""

    line: str
    """The line where the function begins; empty for one of a library."""
    called: tuple[str, ...]
    """The lines that call the jit."""
    times: int
    """The number of times that the jit traces it in one call."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Breach(Finding):
    """One thing that breaks an invariant of your own. ``path`` names the leaf or the place in the model, if there is one."""

    summary: str
    """One sentence that says what is wrong."""
    details: tuple[tuple[str, str], ...] = ()
    """Further rows of the message: pairs of a label and a text."""
    hint: str = ""
    """The change to make, as advice."""


@dataclass(frozen=True, slots=True)
class Violation:
    """One broken invariant."""

    # `reporting.violations` makes the text of the findings and their causes; no code reads the text.
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
    explained: tuple[Explanation, ...] = field(default=(), metadata=UNRECORDED)
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
    peak: int | None = None
    """The peak memory of the program, in bytes a device."""
    budget: int | None = None
    """The bound on the peak, in bytes a device."""
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

    @property
    def rank(self) -> tuple[bool, int, object]:
        """Sort key of a failure: violations first, then the most serious invariant, then the plainer nesting."""
        broken = [severity(violation.invariant) for violation in self.violations]
        return (self.verdict != "violated", min(broken, default=0), self.nesting.plainness)


@dataclass(frozen=True, slots=True)
class CallFacts:
    """The facts that the report of a test states about its calls, whatever their nesting."""

    notes: tuple[Note, ...] = ()
    added: tuple[str, ...] = ()
    """The state that they add."""
    un_nested: tuple[UnNested, ...] = ()

    def __add__(self, later: CallFacts) -> CallFacts:
        """The facts of both, each once."""
        notes, added = dict.fromkeys(self.notes + later.notes), dict.fromkeys(self.added + later.added)
        return CallFacts((*notes,), (*added,), (*dict.fromkeys(self.un_nested + later.un_nested),))


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
