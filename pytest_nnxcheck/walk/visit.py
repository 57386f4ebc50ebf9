"""A walk in progress: objects that were seen, objects that are still to be opened, findings, and how paths are written."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from pytest_nnxcheck.compat import graph
from pytest_nnxcheck.walk.raw_access import MISSING, class_name
from pytest_nnxcheck.walk.snapshot import PlaceKind, Places

_ATOMIC_TYPES = (str, int, float, complex, bool, bytes, type(None), type(...), type(NotImplemented), range, np.dtype)

ATOMS = frozenset(map(id, _ATOMIC_TYPES))
"""Types of values that hold nothing, by id: looking a type up would call its metaclass' ``__hash__``."""

_WRITTEN_OUT = frozenset(map(id, (str, int, float, bool, bytes, type(None))))
"""Types of keys that a path shows: their ``__repr__`` is not the user's code."""

_LONGEST_KEY, _LONGEST_NAME = 60, 400
"""Characters of a key and of a path in a message."""

UNREADABLE = (AttributeError, LookupError, TypeError, ValueError, RuntimeError)
"""Errors of objects that cannot be read: C code of an extension refuses, a container is too long, or another thread changes it."""

Opener = Callable[[Any, "Name", "Visit"], None]


class Name(NamedTuple):
    """A path as the user would write it: ``model.act (closure of act: scale[0])``."""

    base: str
    """The path from a root, or from a variable of a function: ``scale[0]``."""
    note: str = ""
    """The start of a path that does not start at a root: ``closure of act``."""
    keeper: str = ""
    """The path that keeps the function of a ``note``, if its own name does not say so: ``model.act``."""

    def __str__(self) -> str:
        if self.keeper:
            return f"{self.keeper} ({self.note}: {self.base})"
        return f"{self.base} ({self.note})" if self.note else self.base

    def then(self, text: str) -> Name:
        """One step further."""
        # A linked list gives a path that grows without end.
        head = self.base if len(self.base) < _LONGEST_NAME else self.base[: _LONGEST_NAME // 2] + "..."
        return self._replace(base=head + text)

    def listed(self, index: int) -> Name:
        """An element that has no key of its own."""
        return self._replace(base=f"list({self.base})[{index}]")


def key_text(key: object, depth: int = 2) -> str:
    """A key as the user would write it, without running the user's ``__repr__``."""
    if id(type(key)) in _WRITTEN_OUT:
        text = repr(key)
        return text if len(text) <= _LONGEST_KEY else text[:_LONGEST_KEY] + "..."
    if type(key) is tuple and depth:
        parts = ", ".join(key_text(part, depth - 1) for part in key[:8])
        return f"({parts},)" if len(key) == 1 else f"({parts})"
    return f"<{class_name(type(key))}>"


def step(key: object) -> str:
    """The text of an attribute."""
    return f".{key}" if type(key) is str else f"[{key_text(key)}]"


MOST_OBJECTS = 200_000
"""The fuse: the largest of 48 real models has 874 objects."""

MOST_ITEMS = 2_000_000
"""The fuse of one container. Its numbers and strings are no objects, so that `MOST_OBJECTS` does not bound it."""


@dataclass(frozen=True, slots=True)
class FoundTracer:
    """One tracer and its holder."""

    path: str
    # Comparing tracers is an operation of jax.
    tracer: Any = field(compare=False)
    holder: str
    """The type of a Variable that holds it as its value, else one of attribute, list, tuple, dict, set, deque, nnx.List, nnx.Dict, closure,
    default argument, class attribute, cached property, global, cache, metadata, frame, generator, exception, input, or the name of a type."""
    passing: bool = False
    """True if it is reached only through an exception among the roots, and gone with it."""
    keeper: str = ""
    """The path of a function that captured it: see `Name`."""

    @property
    def trace(self) -> tuple[int, int]:
        """The key of the trace that it is of."""
        return graph.trace_key(graph.trace_identity(self.tracer))


class Classes:
    """The openers of classes. Each class is looked at once."""

    def __init__(self, openers_of: Callable[[type], tuple[Opener, ...]]) -> None:
        self._openers_of = openers_of
        # By the id of a class, since its hash is the user's code; classes are kept, so that no id is used again.
        self._openers: dict[int, tuple[type, tuple[Opener, ...] | None]] = {}

    def openers(self, value: object) -> tuple[Opener, ...] | None:
        """The openers of an object; `None` for tracers, which are never opened."""
        cls = type(value)
        if id(cls) not in self._openers:
            self._openers[id(cls)] = cls, None if graph.is_tracer(value) else self._openers_of(cls)
        return self._openers[id(cls)][1]


class Visit:
    """A walk in progress."""

    def __init__(self, classes: Classes, most: int | None = None) -> None:
        self.classes = classes
        self.most = MOST_OBJECTS if most is None else most
        # Nearest first, each once.
        self.tracers: list[FoundTracer] = []
        # Arrays of jax and NumPy, with their paths.
        self.arrays: list[tuple[str, Any]] = []
        # Graph nodes and the user's classes of graph nodes, with their paths.
        self.nodes: list[tuple[str, Any]] = []
        self.places = Places()
        # Objects are kept, not only their ids, so that no id is used again while the walk is kept.
        self.seen: dict[int, Any] = {id(MISSING): MISSING}
        # Mocks of `unittest.mock`, which the walk opens last, and the tracers that they recorded.
        self.mocks: list[tuple[Name, Any]] = []
        self.recorded: list[FoundTracer] = []
        # Objects that may change and have no place to compare: `Walk.since` opens them again.
        self.fleeting: list[tuple[Opener, Any, Name]] = []
        # False if there were too many objects, or one could not be read: the walk did not look behind it.
        self.complete = True
        # A later walk meets references of copies, which nobody restores.
        self.keeps_references = True
        self.passing = False
        self._queue: deque[tuple[Any, str, Name]] = deque()
        self._last: deque[tuple[Any, str, Name]] = deque()

    def run(self, roots: list[tuple[Name, Any]]) -> None:
        """Open everything reachable from the roots. The frames of exceptions come last: most of their objects have a better name elsewhere."""
        for name, value in roots:
            self.put(value, "input", name)
        while self._queue or self._last:
            value, holder, name = self._queue.popleft() if self._queue else self._last.popleft()
            self._open(value, holder, name)

    def put(self, value: Any, holder: str, name: Name) -> None:
        """Queue an object to be opened, once, under the first name that reaches it."""
        if id(type(value)) in ATOMS or id(value) in self.seen:
            return
        if len(self.seen) > self.most:
            self.complete = False
            return
        self.seen[id(value)] = value
        self._queue.append((value, holder, name))

    def put_last(self, value: Any, holder: str, name: Name) -> None:
        """Queue an object to be opened after everything that can be reached without it."""
        if value is not None and id(value) not in self.seen:
            self.seen[id(value)] = value
            self._last.append((value, holder, name))

    def take(self, items: Iterable[Any]) -> list[Any]:
        """The items of a container. Raises ValueError for too many, RuntimeError for one that another thread changes."""
        taken = list(itertools.islice(items, MOST_ITEMS + 1))
        if len(taken) > MOST_ITEMS:
            raise ValueError("too many items")
        return taken

    def keep(self, name: object, kind: PlaceKind, place: Any) -> list[Any]:
        """Note a mutable place, and return its content."""
        held = self.take(kind.read(place))
        self.places.keep(name, kind, place, held)
        return held

    def _open(self, value: Any, holder: str, name: Name) -> None:
        openers = self.classes.openers(value)
        if openers is None:
            self.tracers.append(FoundTracer(str(name), value, holder, self.passing, name.keeper))
            return
        for opener in openers:
            try:
                opener(value, name, self)
            except UNREADABLE:
                # C code of an extension refused, or another thread changed a container: the walk goes on, and is not complete.
                self.complete = False
