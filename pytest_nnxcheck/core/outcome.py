"""What a check says: findings, violations, the outcome of one nesting, what is known of the calls whatever their nesting, and the events on the way.

Pure data: nothing here imports jax, flax, hypothesis or pytest.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from pytest_nnxcheck.core.catalogue import severity
from pytest_nnxcheck.core.facts import Advice, ArrayType, Evidence, Leak
from pytest_nnxcheck.core.nesting import Layer, Misfit, Nesting
from pytest_nnxcheck.core.notes import Explanation, Note
from pytest_nnxcheck.core.peak import Bound, OnTarget, Split

Verdict = Literal["held", "violated", "rejected", "failed", "expected"]


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is broken, as data: ``path`` is the leaf or the place in the model, where it is about one."""

    path: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class TracerLeft(Finding):
    """A tracer that outlived its trace; ``has_data`` says that the installed flax has `nnx.data`."""

    leak: Leak
    has_data: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class MadeInEndedTrace(Finding):
    """A Variable, of the type of itself and of its value, that flax refuses to write."""

    type: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StateTouched(Finding):
    """A leaf that a layer changed, though it only asks for shapes."""

    layer: Layer


PeakCause = Literal[
    "",
    "scan writes back",
    "scan writes back, checkpoint",
    "scan writes back, remat",
    "captured constant",
    "constant of the call",
    "mapped branch",
    "returned",
]
"""Why a peak is what it is, where that is known. A constant of the call is one that nothing outside of it keeps."""


@dataclass(frozen=True, slots=True)
class Figures:
    """What a peak is judged by, bytes a device."""

    split: Split
    bound: Bound
    state: int
    devices: int
    cause: PeakCause


@dataclass(frozen=True, slots=True, kw_only=True)
class PeakOverBudget(Finding):
    """More than the budget."""

    figures: Figures


@dataclass(frozen=True, slots=True, kw_only=True)
class StateCopied(Finding):
    """Copies of the state at the peak, of so many bytes together."""

    figures: Figures
    bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FindingOnTarget(Finding):
    """What a program breaks on a target."""

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
    """Copies of the state at the peak, on a target; ``cause`` is that of the CPU's program."""

    cause: PeakCause = ""


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
    """What the un-nested call need not spend."""

    advice: tuple[Advice, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedBuffer(Finding):
    """Two leaves in one buffer; ``twice`` where both are donated, else the other is used beside that. ``inside``: by a jit of the call's own."""

    other: str
    twice: bool
    inside: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Orphaned(Finding):
    """A leaf that the call gave the array of an ``other`` one, which a jit inside the call donates."""

    other: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ViewedBuffer(Finding):
    """A donated leaf whose buffer a NumPy array, or another array, looks into."""

    holder: str


LossCause = Literal["dtype", "shape", "sharding", "not returned", "not reused"]
"""Why a buffer was lost."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LostBuffer(Finding):
    """A donated leaf whose buffer nothing came back in: its type, and that of its new value, as the call sees it, which is an ``output`` for an input.

    ``pointers`` are those before and after, the first alone where there is no buffer after; ``shardings`` the two as their user writes them;
    ``line`` is where the leaf got another dtype. ``abstract`` says that nothing was run, ``debug_nans`` that jax keeps old values.
    """

    cause: LossCause
    type: ArrayType
    new: ArrayType | None = None
    output: bool = False
    shardings: tuple[str, ...] = ()
    pointers: tuple[int, ...] = field(default=(), compare=False)
    line: str = ""
    abstract: bool = False
    debug_nans: bool = False


@dataclass(frozen=True, slots=True)
class UpdateDropped(Finding):
    """A leaf of an optimizer whose update went to a copy."""


DropCause = Literal["attribute", "broadcast", "copy"]
"""What dropped an update: it is of a plain attribute, the state was broadcast, or a transform of jax was handed a copy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueDiffers(Finding):
    """A leaf, an attribute or an output that is not as it should be; ``rounding`` says that only floats differ, by a finite amount.

    ``of`` is the type of the Variable, ``type`` that of the array, or of the Python value of an attribute. ``want`` and ``have`` are the
    two values, types or counts: of ``elements``, of which so many are ``wrong``, those that lie furthest apart. ``size`` is that distance,
    1 for what is no float, and ``allowed`` what it may be. ``cause`` is what dropped an update; ``variable`` is how one writes its type.
    """

    label: Literal["missing", "added", "dropped", "attribute", "deleted", "differs"]
    of: str = ""
    type: str = ""
    want: str | complex = ""
    have: str | complex = ""
    wrong: int = 0
    elements: int = 0
    size: float = 1.0
    allowed: float | None = None
    rounding: bool = False
    cause: DropCause | Literal[""] = ""
    variable: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class NotFinite(Finding):
    """A leaf or an output of which so many ``elements`` are ``wrong``: NaN or infinite, where those of the un-nested call are finite."""

    type: str
    wrong: int
    elements: int


MISSING = "missing"
"""What `TypeMoved` says of a leaf or an attribute that is not there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TypeMoved(Finding):
    """What a call compiles for, and leaves as another: an attribute of this Python ``type``, or the type of a leaf; nothing where it cannot be named.

    ``hardened`` says that a leaf was made of a Python number, and is not any more.
    """

    label: Literal["attribute", "leaf", ""] = ""
    type: str = ""
    before: str = ""
    after: str = ""
    hardened: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class JitTracedAgain(Finding):
    """A function, named by ``path``, that a jit inside the call traces so many ``times`` in each call, for arrays of the same types each time.

    ``line`` is where the function begins, empty for one of a library; ``called`` are the lines that call the jit.
    """

    line: str
    called: tuple[str, ...]
    times: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Breach(Finding):
    """One thing that breaks an invariant of your own: a sentence, further (label, text) rows of the message, and what to write instead."""

    summary: str
    details: tuple[tuple[str, str], ...] = ()
    hint: str = ""


@dataclass(frozen=True, slots=True)
class Violation:
    """One broken invariant.

    ``summary`` is one line, ``details`` are (label, text) rows of the message, ``hint`` says what to change
    and is empty where no advice is certain to be right. `reporting.wording` makes them of ``findings``, all that is broken as data, and of what
    is ``explained`` beside it; no code reads the text.
    """

    invariant: str
    summary: str = ""
    details: tuple[tuple[str, str], ...] = ()
    hint: str = ""
    findings: tuple[Finding, ...] = field(default=(), metadata={"record": False})
    explained: tuple[Explanation, ...] = field(default=(), metadata={"record": False})


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one nesting did: the verdict, its violations, and the peak against its budget (bytes a device).

    ``reason`` says why a nesting was rejected or failed, or was expected to, ``by_mode`` that flax rejected it for what its mode cannot
    do, ``unfit`` that it was rejected because a layer cannot take the call, not by flax; ``misfit`` is
    then the reason as data. ``notes`` are facts that are reported but not judged, and what explains a failure; ``facts`` are
    the same as data. ``expected`` are the keys of the expected failures that came true in it.

    ``error`` names the type of the exception of a nesting that failed. ``excluded``: it was not run, for what an earlier nesting has shown. ``evidence`` is what was measured, ``program`` the file that shows the same without the plugin, ``explained`` further rows of the
    message, which were found after hypothesis was done. ``seconds`` took the nesting, the test's own body included.
    """

    nesting: Nesting
    verdict: Verdict
    violations: tuple[Violation, ...] = ()
    reason: str = ""
    error: str = field(default="", metadata={"record": False})
    facts: tuple[Note, ...] = field(default=(), metadata={"record": False})
    peak: int | None = None
    budget: int | None = None
    notes: tuple[str, ...] = ()
    expected: tuple[str, ...] = ()
    by_mode: bool = False
    unfit: bool = False
    excluded: bool = False
    misfit: Misfit | None = field(default=None, metadata={"record": False})
    evidence: Evidence | None = None
    program: str = ""
    explained: tuple[tuple[str, str], ...] = ()
    seconds: float = field(default=0.0, compare=False)

    @property
    def rank(self) -> tuple[bool, int, object]:
        """Sort key of what broke: a violation first, of the most serious invariant, then the plainer nesting."""
        broken = [severity(violation.invariant) for violation in self.violations]
        return (self.verdict != "violated", min(broken, default=0), self.nesting.plainness)


@dataclass(frozen=True, slots=True, eq=False)
class UnNested:
    """Where the bytes of the un-nested program of one call are, and advice on them. An equal one is of another call: both are kept."""

    name: str
    evidence: Evidence
    advice: tuple[Advice, ...]


@dataclass(frozen=True, slots=True)
class CallFacts:
    """What the report of a test says of its calls, whatever their nesting: ``added`` is the state that they add."""

    notes: tuple[Note, ...] = ()
    added: tuple[str, ...] = ()
    un_nested: tuple[UnNested, ...] = ()

    def __add__(self, later: CallFacts) -> CallFacts:
        """The facts of both, each once."""
        notes, added = dict.fromkeys(self.notes + later.notes), dict.fromkeys(self.added + later.added)
        return CallFacts((*notes,), (*added,), (*dict.fromkeys(self.un_nested + later.un_nested),))


NO_FACTS = CallFacts()


@dataclass(frozen=True, slots=True)
class NestingStarted:
    """A nesting of a test is about to run; ``drawn`` by hypothesis, or one of the sweep."""

    nesting: Nesting
    drawn: bool


@dataclass(frozen=True, slots=True)
class NestingFinished:
    """A nesting of a test has run: its outcome, if it has one, and the seconds that it took.

    ``whole`` says that hypothesis drew nothing beside it, ``repeats`` that the next run of the test has it again.
    """

    nesting: Nesting
    outcome: Outcome | None
    seconds: float
    drawn: bool
    whole: bool
    repeats: bool


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
    """The body has ended; ``outcomes`` are those of the run by now, none where a nesting is only tried out."""

    outcomes: Mapping[Nesting, Outcome]


Listener = Callable[[object], None]
"""Who is told of the events of a test: these, and `CallStarted` of the engine. Nothing comes back."""


def nobody(event: object) -> None:
    """Listen to nothing."""
