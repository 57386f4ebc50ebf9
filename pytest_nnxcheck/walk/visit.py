"""One walk under way: what was seen, what is still to be opened, what was found, and how the paths to it are written."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from pytest_nnxcheck.compat import variables
from pytest_nnxcheck.walk.raw_access import MISSING, Layout, class_name, layout
from pytest_nnxcheck.walk.snapshot import Kind, Places

_ATOMIC_TYPES = (str, int, float, complex, bool, bytes, type(None), type(...), type(NotImplemented), range, np.dtype)

ATOMS = frozenset(map(id, _ATOMIC_TYPES))
"""Types of values that hold nothing, by id: looking a type up would call its metaclass' ``__hash__``."""

_WRITTEN_OUT = frozenset(map(id, (str, int, float, bool, bytes, type(None))))

_LONGEST_KEY = 60

_LONGEST_NAME = 400

UNREADABLE = (AttributeError, LookupError, TypeError, ValueError, RuntimeError)
"""What reading an object raises where C code of an extension refuses, or another thread changes a container."""

Opener = Callable[[Any, "Name", "Visit"], None]


class Name(NamedTuple):
    """A path as the user would write it, and where it starts if that is not a root: ``scale[0]`` ``closure of act``.

    ``keeper`` is the path of what keeps that function, where it is not in the place that its own name says: ``model.act (closure of act: scale[0])``.
    """

    base: str
    note: str = ""
    keeper: str = ""

    def __str__(self) -> str:
        if self.keeper:
            return f"{self.keeper} ({self.note}: {self.base})"
        return f"{self.base} ({self.note})" if self.note else self.base

    def then(self, text: str) -> Name:
        """One step further; a path that grows without end (a long linked list) is cut."""
        head = self.base if len(self.base) < _LONGEST_NAME else self.base[: _LONGEST_NAME // 2] + "..."
        return self._replace(base=head + text)

    def listed(self, index: int) -> Name:
        """An element that has no key of its own."""
        return self._replace(base=f"list({self.base})[{index}]")


def key_text(key: object, depth: int = 2) -> str:
    """A key as the user would write it; only what runs nobody's ``__repr__`` is written out."""
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
"""Longer containers are looked at up to here; numbers and strings in them are not objects."""


@dataclass(frozen=True, slots=True)
class Found:
    """One tracer: where it is, what kind of thing holds it, and where a function is kept that captured it.

    ``holder`` is the Variable type's name for the value of a Variable, else one of attribute, list, tuple, dict, set, deque,
    nnx.List, nnx.Dict, closure, default argument, class attribute, cached property, global, cache, metadata, frame, generator, exception, input, or the name of a
    type.
    ``passing``: reached only through an exception among the roots, and gone when that is dropped.
    """

    path: str
    # Comparing tracers is an operation of jax.
    tracer: Any = field(compare=False)
    holder: str
    passing: bool = False
    keeper: str = ""


class Classes:
    """How the instances of classes are read, each class looked at once: ``openers_of`` tells how those of one are opened."""

    def __init__(self, openers_of: Callable[[type], tuple[Opener, ...]]) -> None:
        self._openers_of = openers_of
        # By the id of a class, since its hash is the user's code; classes are kept, so that no id is used again.
        self._openers: dict[int, tuple[type, tuple[Opener, ...] | None]] = {}
        self._layouts: dict[int, tuple[type, Layout]] = {}

    def openers(self, value: object) -> tuple[Opener, ...] | None:
        """How an object is opened; `None` for tracers, which never are."""
        cls = type(value)
        if id(cls) not in self._openers:
            self._openers[id(cls)] = cls, None if variables.is_tracer(value) else self._openers_of(cls)
        return self._openers[id(cls)][1]

    def layout(self, cls: type) -> Layout:
        """How instances of a class store attributes."""
        if id(cls) not in self._layouts:
            self._layouts[id(cls)] = cls, layout(cls)
        return self._layouts[id(cls)][1]


class Visit:
    """One walk under way."""

    def __init__(self, classes: Classes, most: int | None = None) -> None:
        self.classes = classes
        self.most = MOST_OBJECTS if most is None else most
        self.places = Places()
        self.tracers: list[Found] = []
        self.arrays: list[tuple[str, Any]] = []
        self.nodes: list[tuple[str, Any]] = []
        # Objects are kept, not only their ids, so that no id is used again while the walk runs.
        self.seen: dict[int, Any] = {id(MISSING): MISSING}
        # What changes without a place that tells: it is opened anew by whoever asks what changed.
        self.fleeting: list[tuple[Opener, Any, Name]] = []
        self.complete = True
        self.passing = False
        self._queue: deque[tuple[Any, str, Name]] = deque()
        self._last: deque[tuple[Any, str, Name]] = deque()

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
        if len(self.seen) > self.most:
            self.complete = False
            return
        self.seen[id(value)] = value
        self._queue.append((value, holder, name))

    def put_last(self, value: Any, holder: str, name: Name) -> None:
        """Take note of an object that is opened after everything that can be reached without it."""
        if value is not None and id(value) not in self.seen:
            self.seen[id(value)] = value
            self._last.append((value, holder, name))

    def take(self, items: Iterable[Any]) -> list[Any]:
        """The items of a container. Raises ValueError for too many, RuntimeError for one that another thread changes."""
        taken = list(itertools.islice(items, MOST_ITEMS + 1))
        if len(taken) > MOST_ITEMS:
            raise ValueError("too many items")
        return taken

    def keep(self, name: object, kind: Kind, place: Any) -> list[Any]:
        """Note a mutable place, and return what it holds."""
        held = self.take(kind.read(place))
        self.places.keep(name, kind, place, held)
        return held

    def _open(self, value: Any, holder: str, name: Name) -> None:
        openers = self.classes.openers(value)
        if openers is None:
            self.tracers.append(Found(str(name), value, holder, self.passing, name.keeper))
            return
        for opener in openers:
            try:
                opener(value, name, self)
            except UNREADABLE:
                # C code of an extension refused, or another thread changed a container: one object less, and said so.
                self.complete = False
