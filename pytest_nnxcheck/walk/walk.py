"""The bounded walk that finds every tracer reachable from a module, the subject's code, its inputs, or an exception.

The walk only reads: it runs no user code, no jax operation, and binds no primitive, so that it can run inside a trace.
Bounded means that nothing starts at the level of the process: library code is never entered, of a function only the globals
that it names are opened, and of a user's module only the attributes that the function names.
"""

from __future__ import annotations

import functools
import gc
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from types import CodeType, ModuleType
from typing import Any, TypeVar

from pytest_nnxcheck.walk.open_code import CODE
from pytest_nnxcheck.walk.open_data import openers_for
from pytest_nnxcheck.walk.raw_access import MISSING, mro
from pytest_nnxcheck.walk.snapshot import Places
from pytest_nnxcheck.walk.visit import UNREADABLE, Classes, Found, Name, Opener, Visit

T = TypeVar("T")
CHANGED = Name("what changed")
YOUNG, OLD = 1, 2
"""Generations of the garbage collector. It does not run inside a nesting, so that garbage of a nesting is young."""


@dataclass(frozen=True, slots=True, eq=False)
class Walk:
    """The objects that a walk met."""

    tracers: tuple[Found, ...]
    """Nearest first, each once."""
    arrays: tuple[tuple[str, Any], ...]
    """Arrays of jax and NumPy, with their paths."""
    nodes: tuple[tuple[str, Any], ...]
    """Graph nodes and the user's classes of graph nodes, with their paths."""
    places: Places
    seen: Mapping[int, object]
    """All objects, by id."""
    fleeting: tuple[tuple[Opener, Any, Name], ...]
    """Objects that may change and have no place to compare. `since` opens them again."""
    modules: tuple[object, ...]
    """The modules that were imported at the time."""
    classes: Classes
    complete: bool = True
    """False if there were too many objects, or one could not be read: the walk did not look behind it."""

    def since(self, roots: Iterable[tuple[str, object]]) -> Walk | None:
        """Walk only what is new or changed. Finds the tracers of a full walk, most under another path. `None` if that is not certain."""
        if self.tracers or not self.complete:
            return None
        visit = Visit(self.classes)
        visit.seen.update(self.seen)
        try:
            changed = list(self.places.changes())
            if any(map(opens_names, changed)) or tuple(sys.modules.values()) != self.modules:
                return None
            for item in changed:
                visit.put(item, "", CHANGED)
            for opener, value, name in self.fleeting:
                opener(value, name, visit)
        except UNREADABLE:
            return None
        visit.run([(Name(name), value) for name, value in roots])
        return walked(visit, self.modules) if visit.complete else None

    def extended(self, roots: Iterable[tuple[str, object]]) -> Walk | None:
        """Add what other roots lead to, and its places. `None` if there is a tracer, or if it is not certain that there is none."""
        later = self.since(roots)
        if later is None or later.tracers:
            return None
        return replace(later, places=self.places.and_those(later.places))


def walk(roots: Iterable[tuple[str, object]], most: int | None = None, left_out: Iterable[object] = ()) -> Walk:
    """Walk breadth first from (name, object): modules, the subject's function, inputs, a caught exception; ``most`` replaces the fuse, and
    what is ``left_out`` is not opened.

    Exceptions among the roots come last, so that what only they hold is marked as ``passing``. Raises nothing of its own.
    """
    visit = Visit(Classes(functools.partial(openers_for, code=CODE)), most)
    visit.seen.update((id(value), value) for value in left_out)
    named = [(Name(name), value) for name, value in roots]
    errors = [is_exception(value) for _, value in named]
    visit.run([root for root, error in zip(named, errors, strict=True) if not error])
    visit.passing = True
    visit.run([root for root, error in zip(named, errors, strict=True) if error])
    return walked(visit, tuple(sys.modules.values()))


def walked(visit: Visit, modules: tuple[object, ...]) -> Walk:
    """Freeze a visit that has ended."""
    return Walk(
        tracers=tuple(visit.tracers),
        arrays=tuple(visit.arrays),
        nodes=tuple(visit.nodes),
        places=visit.places,
        seen=visit.seen,
        fleeting=tuple(visit.fleeting),
        modules=modules,
        classes=visit.classes,
        complete=visit.complete,
    )


def tracers_since(
    earlier: Walk | None, roots: list[tuple[str, object]], matters: Callable[[Found], bool]
) -> tuple[Found, ...]:
    """Find the tracers that matter. A full walk is made only if there are some, or if an earlier walk cannot be continued."""
    later = None if earlier is None else earlier.since(roots)
    if later is not None and not any(map(matters, later.tracers)):
        return ()
    return tuple(filter(matters, walk(roots).tracers))


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
    """Whether a graph node holds tracers outside of its leaves. jax compares the structure of a node later, and fails on a tracer."""
    own = {id(leaf) for leaf in leaves}
    return bool(tracers_since(earlier, [("", node)], lambda leaked: id(leaked.tracer) not in own))


def opens_names(changed: object) -> bool:
    """Whether a change may lead a function to other global names: a module, other code, a name that is gone."""
    return changed is MISSING or any(base in (ModuleType, CodeType) for base in mro(type(changed)))


def is_exception(value: object) -> bool:
    return any(base is BaseException for base in mro(type(value)))
