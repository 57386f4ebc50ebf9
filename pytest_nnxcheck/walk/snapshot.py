"""Keep the mutable places that a walk passed, and put them back.

Leaks live outside the module too (caches, globals, classes) and outlast the example: a poisoned cache makes every later
nesting fail, and shrinking tells lies. A place is kept with the objects that it held; they are written back into the place
itself, so that everybody who holds it sees the old content.
"""

from __future__ import annotations

import collections
import contextlib
import contextvars
import itertools
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import CellType, FunctionType, ModuleType
from typing import Any, NamedTuple

import numpy as np

from pytest_nnxcheck.walk.raw_access import (
    MISSING,
    Layout,
    LruCache,
    cache_entries,
    cell_content,
    class_dict,
    mro,
    read_slot,
    unbounded_store,
)


class PlaceKind(NamedTuple):
    """A kind of mutable place. A place has changed if reading it gives other objects; writing the old ones restores it."""

    read: Callable[[Any], Iterable[Any]]
    """The objects in a place, in order. Runs no code of the user's."""
    write: Callable[[Any, list[Any]], None]
    """A function that puts objects back into a place that holds others. Keys and items of sets are hashed again."""


class Places:
    """The content of mutable places at the time of a walk. Holds strong references, arrays among them."""

    def __init__(self) -> None:
        self._kept: list[tuple[object, PlaceKind, Any, list[Any]]] = []

    def keep(self, name: object, kind: PlaceKind, place: Any, held: list[Any]) -> None:
        """Add a place and its content. The text of ``name`` is made only if the place cannot be restored."""
        self._kept.append((name, kind, place, held))

    def of(self, kind: PlaceKind) -> Iterator[tuple[object, Any, list[Any]]]:
        """The places of one kind: name, place, and what it held at the walk."""
        return ((name, place, held) for name, each, place, held in self._kept if each is kind)

    def __iter__(self) -> Iterator[tuple[object, PlaceKind, Any, list[Any]]]:
        """All places: name, kind, place, and what it held at the walk."""
        return iter(self._kept)

    def and_those(self, others: Places) -> Places:
        """These places and others, as one."""
        places = Places()
        places._kept = self._kept + others._kept
        return places

    def restore(self) -> tuple[str, ...]:
        """Put every place back as it was at the walk. Returns the places that could not be put back, normally none.

        Values are put back by identity: the content of arrays, and of generators' frames, stays as it is; that of a reference is a value. A context variable
        that was unset cannot be unset again without its token: it is set to `None`.
        """
        failed = []
        for name, kind, place, held in self._kept:
            try:
                if not same(list(kind.read(place)), held):
                    kind.write(place, held)
            except (TypeError, AttributeError, ValueError, RuntimeError):
                failed.append(str(name))
        return tuple(failed)

    def changes(self) -> Iterator[Any]:
        """The objects in the places that were not there at the walk. Raises one of `visit.UNREADABLE` if another thread changes a container."""
        for _, kind, place, held in self._kept:
            now = list(kind.read(place))
            if not same(now, held):
                # The walk has met an object that is still at its position. Most changes add an item or replace one.
                yield from (item for n, item in enumerate(now) if n >= len(held) or item is not held[n])


def same(now: Sequence[Any], held: Sequence[Any]) -> bool:
    """True if two lists hold the very same objects; ``==`` would run the user's code."""
    return len(now) == len(held) and all(map(operator.is_, now, held))


# --- containers ----------------------------------------------------------------------------------------------------------


def write_list(value: list[Any], held: list[Any]) -> None:
    list.__setitem__(value, slice(None), held)


def write_deque(value: collections.deque[Any], held: list[Any]) -> None:
    collections.deque.clear(value)
    collections.deque.extend(value, held)


def write_set(value: set[Any], held: list[Any]) -> None:
    set.clear(value)
    set.update(value, held)


def read_dict(value: dict[Any, Any]) -> Iterator[Any]:
    """The keys, then the values."""
    return itertools.chain(dict.keys(value), dict.values(value))


def paired(held: Sequence[Any]) -> Iterator[tuple[Any, Any]]:
    """The items of a dict whose keys and values were read."""
    half = len(held) // 2
    return zip(held[:half], held[half:], strict=True)


def write_dict(value: dict[Any, Any], held: list[Any]) -> None:
    dict.clear(value)
    dict.update(value, paired(held))


def read_ordered(value: collections.OrderedDict[Any, Any]) -> list[Any]:
    """The keys and values in the order that an `OrderedDict` keeps beside its dict, and that dict's own methods know nothing of."""
    keys = list(collections.OrderedDict.__iter__(value))
    # By id, since the hash of a key may be the user's code.
    items = {id(key): item for key, item in dict.items(value)}
    return [*keys, *(items[id(key)] for key in keys)]


def write_ordered(value: collections.OrderedDict[Any, Any], held: list[Any]) -> None:
    collections.OrderedDict.clear(value)
    for key, item in paired(held):
        collections.OrderedDict.__setitem__(value, key, item)


def write_objects(array: np.ndarray[Any, Any], held: list[Any]) -> None:
    # Not `np.array`, which takes an item apart that is a list.
    array[...] = np.fromiter(held, dtype=object, count=len(held)).reshape(array.shape)


LIST, DEQUE = PlaceKind(list.__iter__, write_list), PlaceKind(collections.deque.__iter__, write_deque)
SET, DICT, ORDERED = (
    PlaceKind(set.__iter__, write_set),
    PlaceKind(read_dict, write_dict),
    PlaceKind(read_ordered, write_ordered),
)
OBJECTS = PlaceKind(lambda array: array.flat, write_objects)
"""An array of objects."""


def write_reference(place: tuple[Any, Any], held: list[Any]) -> None:  # noqa: ARG001  # every kind of place takes the same
    reference, value = place
    reference[...] = value


REFERENCE = PlaceKind(lambda _: [object()], write_reference)
"""A `jax.Ref`; the place is (reference, a copy of its value), since a write keeps the array inside.

Nothing tells whether it was written, so it always counts as changed, at no cost, and is written whenever it is restored.
"""

# --- instances and classes -----------------------------------------------------------------------------------------------


def read_attributes(place: tuple[Any, Layout]) -> list[Any]:
    """The class, the slots, and the names and values of the ``__dict__``."""
    value, stored = place
    own = stored.read(value) or {}
    return [type(value), *(read_slot(slot, value) for _, slot in stored.slots), *own.keys(), *own.values()]


def attribute_items(stored: Layout, held: Sequence[Any]) -> Iterator[tuple[str, Any]]:
    """(name, value) of attributes that were read."""
    first = 1 + len(stored.slots)
    names = (name for name, _ in stored.slots)
    return itertools.chain(paired(held[first:]), zip(names, held[1:first], strict=True))


def write_attributes(place: tuple[Any, Layout], held: list[Any]) -> None:
    value, stored = place
    first = 1 + len(stored.slots)
    own = stored.read(value)
    if own is not None:
        write_dict(own, held[first:])
    for (_, descriptor), before in zip(stored.slots, held[1:first], strict=True):
        if before is not MISSING:
            descriptor.__set__(value, before)
        elif read_slot(descriptor, value) is not MISSING:
            descriptor.__delete__(value)


_CLASS_UPKEEP = frozenset(
    "__dict__ __weakref__ __doc__ __slots__ __abstractmethods__ __annotations__ __annotations_cache__".split()
)
"""Attributes of a class that Python keeps for itself: some of them cannot be written."""


def read_class(cls: type) -> list[Any]:
    """The classes that it inherits from, as one object, and the names and values of the class itself."""
    names = class_dict(cls)
    return [mro(cls), *names.keys(), *names.values()]


def write_class(cls: type, held: list[Any]) -> None:
    before, now = dict(paired(held[1:])), dict(class_dict(cls))
    for key in now.keys() - before.keys() - _CLASS_UPKEEP:
        type.__delattr__(cls, key)
    for key, item in before.items():
        if now.get(key, MISSING) is not item and key not in _CLASS_UPKEEP:
            type.__setattr__(cls, key, item)


ATTRIBUTES = PlaceKind(read_attributes, write_attributes)
"""The attributes of an object; the place is (object, layout of its class)."""
CLASS = PlaceKind(read_class, write_class)

# --- code ----------------------------------------------------------------------------------------------------------------

_PARTS = ("__defaults__", "__kwdefaults__", "__dict__", "__code__")
"""Attributes of a function that can be assigned."""


def read_function(function: FunctionType) -> list[Any]:
    return [getattr(function, part) for part in _PARTS]


def write_function(function: FunctionType, held: list[Any]) -> None:
    for part, item in zip(_PARTS, held, strict=True):
        if getattr(function, part) is not item:
            setattr(function, part, item)


def write_cell(cell: CellType, held: list[Any]) -> None:
    if held[0] is MISSING:
        del cell.cell_contents
    else:
        cell.cell_contents = held[0]


def read_names(place: tuple[dict[str, Any], Sequence[str]]) -> list[Any]:
    namespace, names = place
    return [dict.get(namespace, name, MISSING) for name in names]


def write_names(place: tuple[dict[str, Any], Sequence[str]], held: list[Any]) -> None:
    namespace, names = place
    for name, item in zip(names, held, strict=True):
        if item is not MISSING:
            dict.__setitem__(namespace, name, item)
        # A module imported meanwhile stays: an import is not undone by halves.
        elif type(dict.get(namespace, name)) is not ModuleType:
            dict.pop(namespace, name, None)


def write_cache(cache: Any, held: list[Any]) -> None:
    store = unbounded_store(cache)
    if store is None:
        # An entry cannot be put back. Only a cache that changed is cleared: the identity of its results may matter to the user.
        class_dict(LruCache)["cache_clear"](cache)
    else:
        store.clear()
        store.update(zip(held[::2], held[1::2], strict=True))


def write_context(variable: contextvars.ContextVar[Any], held: list[Any]) -> None:
    value = held[0]
    if value is MISSING:  # it has no value but its default, which an empty context tells
        with contextlib.suppress(LookupError):
            value = contextvars.Context().run(variable.get)
    variable.set(None if value is MISSING else value)


FUNCTION = PlaceKind(read_function, write_function)
CELL = PlaceKind(lambda cell: [cell_content(cell)], write_cell)
NAMES = PlaceKind(read_names, write_names)
"""Some names of a namespace; the place is (namespace, names)."""
CACHE = PlaceKind(lambda cache: itertools.chain(*cache_entries(cache)), write_cache)
"""A `functools.lru_cache`: key and result of each entry in turn."""
CONTEXT = PlaceKind(lambda variable: [variable.get(MISSING)], write_context)
