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
"""The generations that are collected: inside a nesting, where the collector is held back, what it made is young."""


@dataclass(frozen=True, slots=True, eq=False)
class Walk:
    """What a walk met: tracers, nearest first and each once; jax and NumPy arrays, graph nodes and the user's classes of such, with
    their paths; the mutable places; all that was ``seen``, by id.

    ``complete`` is false where a fuse ended the walk or an object could not be read: what lies behind was not looked at. ``fleeting`` is
    what changes without a place that tells, ``modules`` are those that were imported, ``classes`` those that were looked at.
    """

    tracers: tuple[Found, ...]
    arrays: tuple[tuple[str, Any], ...]
    nodes: tuple[tuple[str, Any], ...]
    places: Places
    seen: Mapping[int, object]
    fleeting: tuple[tuple[Opener, Any, Name], ...]
    modules: tuple[object, ...]
    classes: Classes
    complete: bool = True

    @property
    def objects(self) -> int:
        """How many objects were met."""
        return len(self.seen) - 1

    def since(self, roots: Iterable[tuple[str, object]]) -> Walk | None:
        """A walk through what this one has not seen and through what changed since: it meets every tracer that a whole walk would, most
        under another name. `None` where that cannot be told.
        """
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
        """A walk from other roots that has the places of this one too, and goes on from both; `None` where it met a tracer, or cannot be told."""
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
    """What a visit met that is over, while these modules were imported."""
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
    """The tracers that a walk from the roots finds and that matter; a whole walk is made only where there are some, or where an earlier one tells nothing."""
    later = None if earlier is None else earlier.since(roots)
    if later is not None and not any(map(matters, later.tracers)):
        return ()
    return tuple(filter(matters, walk(roots).tracers))


def without_garbage(look: Callable[[], T], finds: Callable[[T], object] = bool, generation: int = YOUNG) -> T:
    """What ``look`` gives; where it finds something, once more when garbage is collected.

    A cache with weak keys has an entry until the cycle that its key is part of is collected: what only that keeps, nobody is left to use.
    """
    seen = look()
    if not finds(seen):
        return seen
    del seen
    gc.collect(generation)
    return look()


def holds_beside(node: object, leaves: Iterable[object], earlier: Walk | None = None) -> bool:
    """Whether tracers are reachable from a graph node that are none of its leaves: its structure holds them, which jax compares later on."""
    own = {id(leaf) for leaf in leaves}
    return bool(tracers_since(earlier, [("", node)], lambda leaked: id(leaked.tracer) not in own))


def opens_names(changed: object) -> bool:
    """Whether what a place holds now decides which names of a module a function opens: a module, other code, a name that is gone."""
    return changed is MISSING or any(base in (ModuleType, CodeType) for base in mro(type(changed)))


def is_exception(value: object) -> bool:
    return any(base is BaseException for base in mro(type(value)))
