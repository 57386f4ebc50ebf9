"""What an invariant is handed, and what it gives back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from pytest_nnxcheck.core.errors import CheckError
from pytest_nnxcheck.core.facts import Advice, Leak, NestedCall, Observation
from pytest_nnxcheck.core.notes import Fact, Note
from pytest_nnxcheck.core.outcome import JitTracedAgain, TypeMoved, Violation
from pytest_nnxcheck.core.peak import Bound
from pytest_nnxcheck.core.settings import Settings
from pytest_nnxcheck.subject.profile import UNKNOWN, Profile
from pytest_nnxcheck.subject.state_facts import Effect

Pairs = tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Originals:
    """Facts of the user's own objects, found before they are copied: the copies share nothing, have no views, and may be written.

    ``shared`` are pairs of leaves in one buffer, ``views`` the holders of views with the leaf that they view. ``pinned`` are Variables, path
    and type, that were made in a trace that has ended. ``notes`` are facts that are reported, not judged. Where they ``held`` tracers, nothing else is
    known of them.
    """

    shared: Pairs = ()
    views: Pairs = ()
    pinned: Pairs = ()
    notes: tuple[Note, ...] = ()
    held: tuple[Leak, ...] = ()


@dataclass(frozen=True, slots=True)
class Written:
    """What the call does to what it is handed, by name.

    ``changed`` are the leaves of the state that it changes, ``dropped`` those of an optimizer whose update went to a copy; ``inputs`` are
    the call's own arrays, ``promoted`` the lines at which a leaf got another dtype, by its path. Of the un-nested call, where it donates
    something inside: ``renewed`` are the leaves and inputs whose old arrays nobody needs after it.
    """

    changed: frozenset[str] = frozenset()
    dropped: tuple[str, ...] = ()
    inputs: frozenset[str] = frozenset()
    promoted: dict[str, str] = field(default_factory=dict)
    renewed: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Judgement:
    """What one invariant says of a nesting: what is broken, and what is worth telling all the same.

    ``error``: an invariant of the user's own could not say anything; the first one is told. ``of_call`` are notes on the call, told once for all
    its nestings.
    """

    violations: tuple[Violation, ...] = ()
    notes: tuple[Note, ...] = ()
    error: CheckError | None = None
    of_call: tuple[Fact, ...] = ()

    def __add__(self, other: Judgement) -> Judgement:
        of_call = tuple(dict.fromkeys(self.of_call + other.of_call))
        return Judgement(
            self.violations + other.violations, self.notes + other.notes, self.error or other.error, of_call
        )


@dataclass(frozen=True, slots=True)
class Case:
    """One nesting as it was observed, with all that it is judged by. Names are text: no invariant sees the subject.

    ``bound`` is there where a program was measured beside the un-nested one; ``advice`` looks for advice on that, and gives what is to be a
    violation. ``compare`` holds the values against those of the same calls without the nesting, and may make them once more; there where the
    nesting ran to its end. ``effects`` gives what the same calls did and what the nesting did, where both are known. ``second_call`` makes the
    call again, where the jit outside would be the same one, and gives what has moved if it is traced again; ``jits_inside`` gives what the jits of the call itself trace in each. ``nested_call`` is for the
    invariants of the user's own.
    """

    observation: Observation
    settings: Settings
    profile: Profile = UNKNOWN
    originals: Originals = Originals()
    written: Written = Written()
    bound: Bound | None = None
    advice: Callable[[], tuple[Advice, ...]] = tuple
    debug_nans: bool = False
    compare: Callable[[], Judgement] | None = None
    effects: Callable[[], tuple[Effect, Effect]] | None = None
    second_call: Callable[[], tuple[TypeMoved, ...]] = tuple
    jits_inside: Callable[[], tuple[JitTracedAgain, ...]] = tuple
    nested_call: Callable[[], NestedCall] | None = None
