"""The bounded walk that finds every tracer reachable from a module, the subject's code, its inputs, or an exception.

The walk only reads: it runs no user code, no jax operation, and binds no primitive, so that it can run inside a trace.
Bounded means that nothing starts at the level of the process: library code is never entered, of a function only the globals
that it names are opened, and of a user's module only the attributes that the function names.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Container, Iterable
from dataclasses import replace
from types import CodeType, ModuleType
from typing import TypeVar

from pytest_nnxcheck.walk.openers import openers_for, records_of
from pytest_nnxcheck.walk.raw_access import MISSING
from pytest_nnxcheck.walk.visit import UNREADABLE, Classes, FoundTracer, Name, Visit

T = TypeVar("T")
CHANGED = Name("what changed")
YOUNG, OLD = 1, 2
"""Generations of the garbage collector. It does not run inside a nesting, so that garbage of a nesting is young."""


class Walk(Visit):
    """A visit that has ended: the objects that it met."""

    modules: tuple[object, ...]
    """The modules that were imported at the time."""
    left_out: tuple[object, ...] = ()
    """Objects that are not opened, whatever leads to them."""

    def since(self, roots: Iterable[tuple[str, object]]) -> Walk | None:
        """Walk only new or changed objects. Finds the tracers of a full walk, most under another path. `None` if that is not certain."""
        if self.tracers or not self.complete:
            return None
        later = Walk(self.classes)
        later.modules, later.keeps_references = self.modules, False
        later.seen.update(self.seen)
        later.left_out = self.left_out
        try:
            changed = list(self.places.changes())
            # A module, other code or a name that is gone may lead a function to other global names.
            if any(item is MISSING or issubclass(type(item), ModuleType | CodeType) for item in changed):
                return None
            if tuple(sys.modules.values()) != self.modules:
                return None
            for item in changed:
                later.put(item, "", CHANGED)
            for opener, value, name in self.fleeting:
                opener(value, name, later)
        except UNREADABLE:
            return None
        later.run([(Name(name), value) for name, value in roots])
        return later if later.complete else None

    def extended(self, roots: Iterable[tuple[str, object]]) -> Walk | None:
        """Add what other roots lead to, and its places. `None` if there is a tracer, or if it is not certain that there is none."""
        later = self.since(roots)
        if later is None or later.tracers:
            return None
        later.places = self.places.and_those(later.places)
        later.mocks = self.mocks + later.mocks
        return later

    def open_mocks(self) -> None:
        """Open what the mocks recorded. What is reached without them is open by now, so that a tracer in there is in a record alone."""
        visit = Visit(self.classes)
        visit.seen, visit.places, visit.mocks = self.seen, self.places, self.mocks
        for name, mock in self.mocks:  # those that a mock holds are added meanwhile
            for called, record in records_of(mock, name, visit):
                visit.put(record, "mock", called)
                visit.run([])
                self.recorded += [replace(found, path=str(called)) for found in visit.tracers]
                visit.tracers.clear()


def walk(roots: Iterable[tuple[str, object]], most: int | None = None, left_out: Iterable[object] = ()) -> Walk:
    """Walk breadth first from (name, object): modules, the subject's function, inputs, a caught exception; ``most`` replaces the fuse, and
    what is ``left_out`` is not opened.

    Exceptions among the roots come last, so that what only they hold is marked as ``passing``. Raises nothing of its own.
    """
    found = Walk(Classes(openers_for), most)
    found.left_out = tuple(left_out)
    found.seen.update((id(value), value) for value in found.left_out)
    named = [(Name(name), value) for name, value in roots]
    errors = [issubclass(type(value), BaseException) for _, value in named]
    found.run([root for root, error in zip(named, errors, strict=True) if not error])
    found.passing = True
    found.run([root for root, error in zip(named, errors, strict=True) if error])
    found.open_mocks()
    found.modules = tuple(sys.modules.values())
    return found


def walk_anew(roots: list[tuple[str, object]], left_out: Iterable[object] = ()) -> Walk:
    """A walk, and a second one without garbage where that finds tracers."""
    return without_garbage(lambda: walk(roots, left_out=left_out), lambda seen: seen.tracers)


def tracers_left(
    roots: list[tuple[str, object]], earlier: Walk | None, alive: Container[tuple[int, int]]
) -> tuple[FoundTracer, ...]:
    """The tracers that are of no trace ``alive``, and held by more than garbage; ``earlier`` is a walk that found none."""
    return without_garbage(lambda: tracers_since(earlier, roots, lambda leaked: leaked.trace not in alive))


def tracers_since(
    earlier: Walk | None, roots: list[tuple[str, object]], matters: Callable[[FoundTracer], bool]
) -> tuple[FoundTracer, ...]:
    """Find the tracers that matter. A full walk is made only if there are some, or if an earlier walk cannot be continued."""
    later = None if earlier is None else earlier.since(roots)
    if later is not None and not any(map(matters, later.tracers)):
        return ()
    left_out = () if earlier is None else earlier.left_out
    return tuple(filter(matters, walk(roots, left_out=left_out).tracers))


def recorded_since(earlier: Walk, roots: Iterable[tuple[str, object]]) -> list[FoundTracer]:
    """The tracers that mocks were handed since an earlier walk, which are not walked if there is no mock."""
    found = walk(roots).recorded if earlier.mocks else []
    return [left for left in found if id(left.tracer) not in earlier.seen]


def without_garbage(look: Callable[[], T], finds: Callable[[T], object] = bool, generation: int = YOUNG) -> T:
    """Return what ``look`` returns. If it finds something, collect garbage and look again.

    A cache with weak keys keeps an entry until the cycle that holds its key is collected. Nobody can use such an entry.
    """
    seen = look()
    if not finds(seen):
        return seen
    del seen
    gc.collect(generation)
    return look()


def holds_beside(node: object, leaves: Iterable[object], earlier: Walk | None = None) -> bool:
    """True if a graph node holds tracers outside of its leaves. jax compares the structure of a node later, and fails on a tracer."""
    own = {id(leaf) for leaf in leaves}
    return bool(tracers_since(earlier, [("", node)], lambda leaked: id(leaked.tracer) not in own))
