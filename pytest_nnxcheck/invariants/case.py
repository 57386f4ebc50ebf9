"""The facts that invariants judge, and the judgement of each: plain data, in which nothing can run.

A need is a field of `Case`. A row of `core.catalogue.INVARIANT_ROWS` names those of an invariant, and `engine.gather` has one function for each.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from pytest_nnxcheck.core.errors import CheckError
from pytest_nnxcheck.core.facts import Advice, CallProgram, InnerDonation, Leaf, Leak, Move, NestedCall, Pairs
from pytest_nnxcheck.core.nesting import Layer, Nesting
from pytest_nnxcheck.core.notes import Fact, Note
from pytest_nnxcheck.core.outcome import Finding, JitTracedAgain, NotFinite, TypeMoved, ValueDiffers, Violation
from pytest_nnxcheck.core.peak import NO_COPIES, Bound, Copies, Memory, OnTarget


@dataclass(frozen=True, slots=True)
class Tracers:
    """The tracers of a run."""

    leaks: tuple[Leak, ...] = ()
    """Tracers that outlived their trace."""
    dropped: tuple[Leak, ...] = ()
    """Tracers that died with a module inside."""
    raised: bool = False
    """True if the run ended with an exception that jax or flax raises for a tracer of another trace."""
    touched: tuple[tuple[Layer, str], ...] = ()
    """Leaves that a layer changed which asks for shapes alone."""
    pinned: Pairs = ()
    """Variables of the user's own that an ended trace made: path and type."""
    has_data: bool = False
    """True if the installed flax has `nnx.data`."""


@dataclass(frozen=True, slots=True)
class Donation:
    """The donated arrays and their fate: those that the generated jit donates, or those of jits inside the un-nested call."""

    moves: tuple[Move, ...] = ()
    lost: tuple[Leaf, ...] = ()
    """The donated leaves to name for the buffers that were lost."""
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
    """The arrays that the jits inside the un-nested call donated."""
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
    of_call: CallProgram = field(default_factory=CallProgram)
    """Facts of the un-nested call's own program."""
    updates_can_be_off: bool = False
    """True if the remat of the installed flax can leave the updates of the state out."""


@dataclass(frozen=True, slots=True)
class Differences:
    """The differences from the same calls without the nesting, or from the un-nested call without its jits."""

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
    """Advice on the un-nested call, where the settings make it a violation."""
    targets: tuple[OnTarget, ...] = ()
    second_call: tuple[TypeMoved, ...] = ()
    """State with another type after the call, so that jax traces a second call again."""
    inner_jits: tuple[JitTracedAgain, ...] = ()
    """The jits inside the call that jax traces in every call."""
    differences: Differences = Differences()
    not_finite: tuple[NotFinite, ...] | str = ()
    """The values that are not finite, but are finite without the nesting; or the exception that the same calls raise without it."""
    nested_call: NestedCall | Exception | None = None
    """The call for the user's own invariants; or the exception that the user's objects raised when the engine read them."""


@dataclass(frozen=True, slots=True)
class Judgement:
    """The verdict of one invariant on a nesting, or of all together."""

    violations: tuple[Violation, ...] = ()
    notes: tuple[Note, ...] = ()
    """Notes that are no violations."""
    error: CheckError | None = None
    """The error of an invariant of the user's own that could not judge; the first of several."""
    of_call: tuple[Fact, ...] = ()
    """Notes on the call, reported once for all its nestings."""

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
