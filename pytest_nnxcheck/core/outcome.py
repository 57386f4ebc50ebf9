"""What a check says: violations, and the outcome of one nesting.

Pure data: nothing here imports jax, flax, hypothesis or pytest.
"""

from __future__ import annotations

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
