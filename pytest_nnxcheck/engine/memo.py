"""What is known of the calls of one test, by their signature: what decides it is the same for every nesting, and found out once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from pytest_nnxcheck.compat.compile_cache import SharedPrograms
from pytest_nnxcheck.core.evidence import OnTarget
from pytest_nnxcheck.core.nesting import Misfit
from pytest_nnxcheck.core.notes import CapturedBy, Fact, InMappedFile, MergedVariables
from pytest_nnxcheck.core.observation import Leak, Memory
from pytest_nnxcheck.core.outcome import JitTracedAgain, UnNested
from pytest_nnxcheck.engine.reference import Evaluated
from pytest_nnxcheck.subject.identity import identity
from pytest_nnxcheck.subject.profile import Profile
from pytest_nnxcheck.subject.subject import Subject

__tracebackhide__ = True  # pytest shows the frames of the user, not these

V = TypeVar("V")


@dataclass(frozen=True, slots=True)
class Entry:
    """What was found out of a call, and what its key names by identity: held, so that no id is used again."""

    evaluated: Evaluated
    held: Any


@dataclass(slots=True)
class Memo:
    """One table for each kind of fact; a key starts with the `identity.signature` of a call, or with what else decides the fact.

    ``remapped`` are profiles with the leaves that the call restores, ``gradients`` say why it has none, ``longer`` is the memory of
    programs of twice the length, ``captured`` the transforms inside the call that captured a module, ``merged`` what is wrong with the modules
    that it merged, ``mapped`` what lies in a mapped file, ``compared_by_value`` the first
    of the plain objects with arrays that were met under a path by a call of that number, ``own_jits`` the names of subjects whose plain object
    keeps a jitted function that captured what it holds, ``unrestored`` the tracers that a trace of a subject left for good.
    """

    profiles: dict[Any, Profile] = field(default_factory=dict)
    remapped: dict[Any, Profile] = field(default_factory=dict)
    gradients: dict[Any, Misfit | None] = field(default_factory=dict)
    baselines: dict[Any, Memory | None] = field(default_factory=dict)
    un_nested: dict[Any, UnNested] = field(default_factory=dict)
    longer: dict[Any, Memory | None] = field(default_factory=dict)
    notes: dict[Any, tuple[Fact, ...]] = field(default_factory=dict)
    """Notes on a call that its nestings bring up: lines that ask jax for its devices, programs on targets, tracers that nobody asserts."""
    captured: dict[Any, tuple[CapturedBy, ...]] = field(default_factory=dict)
    merged: dict[Any, tuple[Leak | MergedVariables, ...]] = field(default_factory=dict)
    jits_traced_again: dict[Any, tuple[JitTracedAgain, ...]] = field(default_factory=dict)
    evaluated: dict[Any, Entry] = field(default_factory=dict)
    mapped: dict[Any, InMappedFile | None] = field(default_factory=dict)
    compared_by_value: dict[Any, Any] = field(default_factory=dict)
    static_parts: dict[Any, dict[str, Any]] = field(default_factory=dict)
    """What jax compares of the objects that a call of that name and number was handed first."""
    made_anew: dict[Any, Fact] = field(default_factory=dict)
    same_arguments: bool = True
    """Whether the body is the same each time: no arguments of its own are drawn."""
    own_jits: set[str] = field(default_factory=set)
    unrestored: dict[Any, tuple[Leak, ...]] = field(default_factory=dict)
    shared_programs: SharedPrograms = field(default_factory=SharedPrograms)
    on_targets: dict[str, OnTarget] = field(default_factory=dict)
    body: object = None
    """The body with its arguments that ran last, where each has its own."""

    def run_of(self, body: object) -> None:
        """A body runs: forget what the calls of another one do, which has other arguments.

        No key tells all the ways by which a call may get at an argument, such as a global that the body sets.
        """
        if self.same_arguments or body is self.body:
            return
        self.body = body
        of_calls = (
            self.profiles,
            self.remapped,
            self.gradients,
            self.baselines,
            self.un_nested,
            self.longer,
            self.notes,
        )
        inside = (self.captured, self.merged, self.jits_traced_again, self.evaluated)
        for table in (*of_calls, *inside):
            table.clear()


def recall(table: dict[Any, V], key: Any, find_out: Callable[[], V]) -> V:
    """The entry of a key, found out where it is not there yet."""
    if key not in table:
        table[key] = find_out()
    return table[key]


def evaluated_calls(table: dict[Any, Entry], subject: Subject, number: int) -> Evaluated:
    """Cached results of the ``number``-th call of an example; an empty cache if the call cannot be identified for certain."""
    content = identity(subject)
    if content is None:
        return Evaluated()
    entry = recall(table, (number, content), lambda: Entry(Evaluated(), (subject.function, subject.program_of)))
    return entry.evaluated
