"""What a check says: violations, the outcome of one nesting, what is known of the calls whatever their nesting, and the events on the way.

Pure data: nothing here imports jax, flax, hypothesis or pytest.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from pytest_nnxcheck.core.nesting import Nesting

if TYPE_CHECKING:
    from pytest_nnxcheck.core.evidence import Evidence

Verdict = Literal["held", "violated", "rejected", "failed", "expected"]

Kind = Literal[
    "tracer left",
    "made in an ended trace",
    "state touched",
    "peak over budget",
    "state copied",
    "constants captured",
    "memory wasted",
    "shared buffer",
    "viewed buffer",
    "lost buffer",
    "update dropped",
    "value differs",
]
"""What a finding is about."""

Cause = Literal["", "dtype", "shape", "sharding", "not returned", "not reused"]
"""Why a buffer was lost."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is broken, as data: ``path`` is the leaf or the place in the model, where it is about one.

    ``size`` says of a value how far it is from what it should be, 1 for what is no float.
    """

    kind: Kind
    path: str = ""
    cause: Cause = ""
    size: float = field(default=1.0, compare=False)


@dataclass(frozen=True, slots=True)
class Violation:
    """One broken invariant.

    ``summary`` is one line, ``details`` are (label, text) rows of the message, ``hint`` says what to change
    and is empty where no advice is certain to be right. ``findings`` are the same as data, all of them; no code reads the text.
    """

    invariant: str
    summary: str
    details: tuple[tuple[str, str], ...] = ()
    hint: str = ""
    findings: tuple[Finding, ...] = field(default=(), metadata={"record": False})


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one nesting did: the verdict, its violations, and the peak against its budget (bytes a device).

    ``reason`` says why a nesting was rejected or failed, or was expected to, ``by_mode`` that flax rejected it for what its mode cannot
    do, ``unfit`` that it was rejected because a layer cannot take the call, not by flax; ``misfit`` is
    then the reason without the layer that it is about. ``notes`` are facts that are reported but not
    judged. ``expected`` are the keys of the expected failures that came true in it.

    ``error`` names the type of the exception of a nesting that failed. ``excluded``: it was not run, for what an earlier nesting has shown. ``evidence`` is what was measured, ``program`` the file that shows the same without the plugin, ``explained`` further rows of the
    message, which were found after hypothesis was done. ``seconds`` took the nesting, the test's own body included.
    """

    nesting: Nesting
    verdict: Verdict
    violations: tuple[Violation, ...] = ()
    reason: str = ""
    error: str = field(default="", metadata={"record": False})
    peak: int | None = None
    budget: int | None = None
    notes: tuple[str, ...] = ()
    expected: tuple[str, ...] = ()
    by_mode: bool = False
    unfit: bool = False
    excluded: bool = False
    misfit: str = ""
    evidence: Evidence | None = None
    program: str = ""
    explained: tuple[tuple[str, str], ...] = ()
    seconds: float = field(default=0.0, compare=False)


@dataclass(frozen=True, slots=True, eq=False)
class UnNested:
    """Where the bytes of the un-nested program of one call are, and advice on them. An equal one is of another call: both are kept."""

    name: str
    evidence: Evidence
    advice: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class CallFacts:
    """What the report of a test says of its calls, whatever their nesting: ``added`` is the state that they add."""

    notes: tuple[str, ...] = ()
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
