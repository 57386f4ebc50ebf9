"""The bounded walk that finds every tracer reachable from a module, the subject's code, its inputs, or an exception.

The walk only reads: it runs no user code, no jax operation, and binds no primitive, so that it can run inside a trace.
Bounded means that nothing starts at the level of the process: library code is never entered, of a function only the globals
that it names are opened, and of a user's module only the attributes that the function names.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from pytest_nnxcheck import compat
from pytest_nnxcheck.code_openers import CODE
from pytest_nnxcheck.openers import ATOMS, Name, Opener, openers_for
from pytest_nnxcheck.places import Places
from pytest_nnxcheck.reading import MISSING, Layout, layout, mro

MOST_OBJECTS = 200_000
"""The fuse: the largest of 48 real models has 874 objects."""
MOST_ITEMS = 2_000_000
"""Longer containers are looked at up to here; numbers and strings in them are not objects."""


@dataclass(frozen=True, slots=True)
class Found:
    """One tracer: where it is, and what kind of thing holds it.

    ``holder`` is the Variable type's name for the value of a Variable, else one of attribute, list, tuple, dict, set, deque,
    closure, default argument, class attribute, global, cache, metadata, frame, exception, input, or the name of a type.
    ``passing``: reached only through an exception among the roots, and gone when that is dropped.
    """

    path: str
    # Comparing tracers is an operation of jax.
    tracer: Any = field(compare=False)
    holder: str
    passing: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class Walk:
    """What a walk met: tracers, nearest first and each once; jax and NumPy arrays with their paths; the mutable places.

    ``complete`` is false where a fuse ended the walk or an object could not be read: what lies behind was not looked at.
    """

    tracers: tuple[Found, ...]
    arrays: tuple[tuple[str, Any], ...]
    places: Places
    objects: int
    complete: bool = True


def walk(roots: Iterable[tuple[str, object]]) -> Walk:
    """Walk breadth first from (name, object): modules, the subject's function, inputs, a caught exception.

    Exceptions among the roots come last, so that what only they hold is marked as ``passing``. Raises nothing of its own.
    """
    visit = Visit()
    named = [(Name(name), value) for name, value in roots]
    errors = [is_exception(value) for _, value in named]
    visit.run([root for root, error in zip(named, errors, strict=True) if not error])
    visit.passing = True
    visit.run([root for root, error in zip(named, errors, strict=True) if error])
    return Walk(tuple(visit.tracers), tuple(visit.arrays), visit.places, len(visit.seen) - 1, visit.complete)


def holds_beside(node: object, leaves: Iterable[object]) -> bool:
    """Whether tracers are reachable from a graph node that are none of its leaves: its structure holds them, which jax compares later on."""
    known = {id(leaf) for leaf in leaves}
    return any(id(found.tracer) not in known for found in walk([("", node)]).tracers)


def is_exception(value: object) -> bool:
    return any(base is BaseException for base in mro(type(value)))


class Visit:
    """One walk under way: what was seen, what is still to be opened, what was found."""

    def __init__(self) -> None:
        self.places = Places()
        self.tracers: list[Found] = []
        self.arrays: list[tuple[str, Any]] = []
        # Objects are kept, not only their ids, so that no id is used again while the walk runs.
        self.seen: dict[int, Any] = {id(MISSING): MISSING}
        self.complete = True
        self.passing = False
        self._queue: deque[tuple[Any, str, Name]] = deque()
        self._last: deque[tuple[Any, str, Name]] = deque()
        # By the id of a class; `None` for tracers, which are never opened.
        self._openers: dict[int, tuple[Opener, ...] | None] = {}
        self._layouts: dict[int, Layout] = {}

    def run(self, roots: list[tuple[Name, Any]]) -> None:
        """Open everything reachable from the roots, and the frames that exceptions keep after all else."""
        for name, value in roots:
            self.put(value, "input", name)
        while self._queue or self._last:
            value, holder, name = self._queue.popleft() if self._queue else self._last.popleft()
            self._open(value, holder, name)

    def put(self, value: Any, holder: str, name: Name) -> None:
        """Take note of an object, once, under the first name that reaches it."""
        if id(type(value)) in ATOMS or id(value) in self.seen:
            return
        if len(self.seen) > MOST_OBJECTS:
            self.complete = False
            return
        self.seen[id(value)] = value
        self._queue.append((value, holder, name))

    def put_last(self, value: Any, holder: str, name: Name) -> None:
        """Take note of an object that is opened after everything that can be reached without it."""
        if value is not None and id(value) not in self.seen:
            self.seen[id(value)] = value
            self._last.append((value, holder, name))

    def take(self, items: Iterable[Any]) -> list[Any] | None:
        """The items of a container, or `None` where they are too many or change under our hands."""
        try:
            taken = list(itertools.islice(items, MOST_ITEMS + 1))
        except RuntimeError:
            taken = None
        if taken is None or len(taken) > MOST_ITEMS:
            self.complete = False
            return None
        return taken

    def layout(self, cls: type) -> Layout:
        """How instances of a class store attributes."""
        if id(cls) not in self._layouts:
            self._layouts[id(cls)] = layout(cls)
        return self._layouts[id(cls)]

    def _open(self, value: Any, holder: str, name: Name) -> None:
        cls = type(value)
        if id(cls) not in self._openers:
            self._openers[id(cls)] = None if compat.is_tracer(value) else openers_for(cls, CODE)
        openers = self._openers[id(cls)]
        if openers is None:
            self.tracers.append(Found(str(name), value, holder, self.passing))
            return
        for opener in openers:
            try:
                opener(value, name, self)
            except (AttributeError, TypeError, ValueError, RuntimeError):
                # C code of an extension refused, or another thread changed a container: one object less, and said so.
                self.complete = False
