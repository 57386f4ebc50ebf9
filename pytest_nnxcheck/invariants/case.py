"""What the invariants are judged by, and what each says of it: plain data, in which nothing can run.

A need is a field of `Case`. A row of `core.catalogue.INVARIANT_ROWS` names those of an invariant, and `engine.gather` has one function for each.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from pytest_nnxcheck.core.errors import CheckError
from pytest_nnxcheck.core.facts import Advice, InnerDonation, Leak, Move, NestedCall
from pytest_nnxcheck.core.nesting import Layer, Nesting
from pytest_nnxcheck.core.notes import Fact, Note
from pytest_nnxcheck.core.outcome import Finding, JitTracedAgain, NotFinite, TypeMoved, ValueDiffers, Violation
from pytest_nnxcheck.core.peak import NO_COPIES, Bound, Captured, Copies, Memory, OnTarget

Pairs = tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Tracers:
    """The tracers of a run."""

    leaks: tuple[Leak, ...] = ()
    """Those that outlived their trace."""
    dropped: tuple[Leak, ...] = ()
    """Those that died with a module inside."""
    raised: bool = False
    """Whether the run ended with an exception that jax or flax raises for a tracer of another trace."""
    touched: tuple[tuple[Layer, str], ...] = ()
    """Leaves that a layer changed which asks for shapes alone."""
    pinned: Pairs = ()
    """Variables of the user's own that an ended trace made: path and type."""
    has_data: bool = False
    """Whether the installed flax has `nnx.data`."""


@dataclass(frozen=True, slots=True)
class Donation:
    """What became of donated arrays: of those that the generated jit donates, or of those of jits inside the un-nested call."""

    moves: tuple[Move, ...] = ()
    reused: frozenset[int] = frozenset()
    """The pointers of all that came back."""
    shared: Pairs = ()
    """Pairs of leaves of the user's own objects in one buffer."""
    views: Pairs = ()
    """Holders of views, each with the leaf that it views."""
    changed: frozenset[str] = frozenset()
    """The leaves of the state that the call changes."""
    dropped: tuple[str, ...] = ()
    """The leaves of an optimizer whose update went to a copy."""
    inputs: frozenset[str] = frozenset()
    """The call's own arrays."""
    promoted: dict[str, str] = field(default_factory=dict)
    """The lines at which a leaf got another dtype, by its path."""
    references: frozenset[str] = frozenset()
    """The leaves that are written in place: each is a `jax.Ref`."""
    inside: InnerDonation = field(default_factory=InnerDonation)
    """What the jits inside the un-nested call donated."""
    renewed: frozenset[str] = frozenset()
    """The leaves and inputs whose old arrays nobody needs after the un-nested call."""
    abstract: bool = False
    debug_nans: bool = False


@dataclass(frozen=True, slots=True)
class Program:
    """A compiled program beside the un-nested one."""

    memory: Memory
    bound: Bound
    copies: Copies = NO_COPIES
    state: int = 0
    """Bytes of one copy of the state."""
    devices: int = 1
    writes_back: bool = False
    """Whether a scan of the call hands out its stacked inputs as they were."""
    remat_in_scan: bool = False
    updates_can_be_off: bool = False
    """Whether the remat of the installed flax can leave the updates of the state out."""
    scans_references: bool = False
    """Whether a scan of the call takes references step by step."""
    branches: bool = False
    """Whether the call has a conditional."""
    captured: tuple[Captured, ...] = ()
    """The arrays that the call captures."""


@dataclass(frozen=True, slots=True)
class Differences:
    """What differs from the same calls without the nesting, or from the un-nested call without its jits."""

    left: tuple[ValueDiffers, ...] = ()
    """Values whose difference neither rounding nor the definition of a layer explains."""
    notes: tuple[Fact, ...] = ()
    """Facts about differences that are explained, and about calls that raise."""
    of_call: tuple[Fact, ...] = ()


@dataclass(frozen=True, slots=True)
class Case:
    """One nesting that was observed, with what one invariant needs of it. Names are text."""

    nesting: Nesting
    tracers: Tracers = Tracers()
    donation: Donation = field(default_factory=Donation)
    program: Program | None = None
    """The measured program, if it ran to its end."""
    advice: tuple[Advice, ...] = ()
    """On the un-nested call, where the settings make it a violation."""
    targets: tuple[OnTarget, ...] = ()
    second_call: tuple[TypeMoved, ...] = ()
    """What has another type after the call, so that jax traces a second call again."""
    inner_jits: tuple[JitTracedAgain, ...] = ()
    """The jits inside the call that jax traces in every call."""
    differences: Differences = Differences()
    not_finite: tuple[NotFinite, ...] | str = ()
    """What is not finite, but is finite without the nesting; or the exception that the same calls raise without it."""
    nested_call: NestedCall | Exception | None = None
    """The call for the user's own invariants; or the exception that the user's objects raised when the engine read them."""


@dataclass(frozen=True, slots=True)
class Judgement:
    """What one invariant says of a nesting, or all together."""

    violations: tuple[Violation, ...] = ()
    notes: tuple[Note, ...] = ()
    """What is worth telling all the same."""
    error: CheckError | None = None
    """Why an invariant of the user's own could not say anything; of several the first."""
    of_call: tuple[Fact, ...] = ()
    """Notes on the call, told once for all its nestings."""

    @classmethod
    def of(cls, invariant: str, findings: Iterable[Finding], notes: Iterable[Note] = ()) -> Judgement:
        """A violation, if there are findings."""
        every = tuple(findings)
        return cls((Violation(invariant, findings=every),) if every else (), tuple(notes))

    def __add__(self, other: Judgement) -> Judgement:
        of_call = tuple(dict.fromkeys(self.of_call + other.of_call))
        return Judgement(
            self.violations + other.violations, self.notes + other.notes, self.error or other.error, of_call
        )
