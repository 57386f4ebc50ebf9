"""Remember facts of the calls of one test by their signature: they are the same under every nesting, so that each is found once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from pytest_nnxcheck.compat.compile_cache import SharedPrograms
from pytest_nnxcheck.core.facts import Leak
from pytest_nnxcheck.core.notes import Fact, InMappedFile, Note
from pytest_nnxcheck.core.outcome import UnNested
from pytest_nnxcheck.core.peak import OnTarget
from pytest_nnxcheck.engine.reference import Evaluated
from pytest_nnxcheck.kept import Kept
from pytest_nnxcheck.subject.profile import Profile
from pytest_nnxcheck.subject.subject import Subject, identity

__tracebackhide__ = True  # pytest shows the frames of the user, not these

V = TypeVar("V")


@dataclass(slots=True)
class Known:
    """The facts that are found out once for all calls with one signature, see `identity.signature`."""

    profile: Profile | None = None
    un_nested: UnNested | None = None
    notes: tuple[Note, ...] = ()
    """Notes that its nestings bring up: lines that ask jax for its devices, programs on targets, tracers that nobody asserts."""
    found: dict[Any, Any] = field(default_factory=dict)
    """Further facts that are found out once, by their kind: see `engine.example.Call.once`."""


@dataclass(slots=True)
class Memo:
    """The facts that the calls of one test have shown: a table for each kind of fact."""

    known: dict[Any, Known] = field(default_factory=dict)
    """Facts by the signatures of calls."""
    evaluated: dict[Any, Evaluated] = field(default_factory=dict)
    """References by the number of a call in the body and all that its result depends on, see `identity.identity`."""
    mapped: dict[Any, InMappedFile | None] = field(default_factory=dict)
    """Leaves that lie in a mapped file."""
    compared_by_value: dict[Any, Any] = field(default_factory=dict)
    """The first of the plain objects with arrays that were met under a path by a call of that number."""
    static_parts: dict[Any, dict[str, Any]] = field(default_factory=dict)
    """The static parts, which jax compares, of the objects that a call of that name and number was handed first."""
    made_anew: dict[Any, Fact] = field(default_factory=dict)
    same_arguments: bool = True
    """True if the body is the same each time: no arguments of its own are drawn."""
    own_jits: set[str] = field(default_factory=set)
    """The names of subjects whose plain object keeps a jitted function that captured what it holds."""
    unrestored: dict[Any, tuple[Leak, ...]] = field(default_factory=dict)
    """The tracers that a trace of a subject left for good."""
    shared_programs: SharedPrograms = field(default_factory=SharedPrograms)
    on_targets: Kept[OnTarget] = field(default_factory=Kept)
    body: object = None
    """The body with its arguments that ran last, where each has its own."""

    def run_of(self, body: object) -> None:
        """Forget the calls of a body with other arguments, before this one runs.

        No key tells all the ways by which a call may get at an argument, such as a global that the body sets.
        """
        if self.same_arguments or body is self.body:
            return
        self.body = body
        self.known.clear()
        self.evaluated.clear()


def recall(table: dict[Any, V], key: Any, find_out: Callable[[], V]) -> V:
    """The entry of a key, found out where it is not there yet."""
    if key not in table:
        table[key] = find_out()
    return table[key]


def evaluated_calls(table: dict[Any, Evaluated], subject: Subject, number: int) -> Evaluated:
    """Cached results of the ``number``-th call of an example; an empty cache if the call cannot be identified for certain."""
    content = identity(subject)
    if content is None:
        return Evaluated()
    return recall(table, (number, content), lambda: Evaluated(held=(subject.function, subject.program_of)))
