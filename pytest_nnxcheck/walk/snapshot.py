"""The mutable places that a walk passed, and putting them back.

Leaks live outside the module too (caches, globals, classes) and outlast the example: a poisoned cache makes every later
nesting fail, and shrinking tells lies. A place is kept as a shallow copy of what it held; containers are refilled in place, so
that everybody who holds them sees the old content.
"""

from __future__ import annotations

import collections
import contextlib
import contextvars
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import CellType, FunctionType, ModuleType
from typing import TYPE_CHECKING, Any

from pytest_nnxcheck.walk.raw_access import (
    MISSING,
    Layout,
    LruCache,
    are,
    cache_entries,
    cell_content,
    class_dict,
    mro,
    same,
    same_dict,
)

if TYPE_CHECKING:
    import numpy as np

Contents = Iterable[Any]
_PARTS = ("__defaults__", "__kwdefaults__", "__dict__", "__code__")
"""What of a function can be replaced."""
_CLASS_UPKEEP = frozenset(
    "__dict__ __weakref__ __doc__ __slots__ __abstractmethods__ __annotations__ __annotations_cache__".split()
)


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of place: how one is put back, and what it holds where that is not what it held; both of (place, what was saved of it)."""

    put_back: Callable[[Any, Any], None]
    changed: Callable[[Any, Any], Contents]


class Places:
    """What the mutable places held at the time of a walk. Holds strong references, arrays among them."""

    def __init__(self) -> None:
        self._kept: list[tuple[str, Kind, Any, Any]] = []

    def __len__(self) -> int:
        return len(self._kept)

    def and_those(self, others: Places) -> Places:
        """These places and others, as one."""
        places = Places()
        places._kept = self._kept + others._kept
        return places

    def restore(self) -> tuple[str, ...]:
        """Put every place back as it was at the walk. Returns the places that could not be put back, normally none.

        Values are put back by identity: the content of arrays, and of generators' frames, stays as it is. A context variable
        that was unset cannot be unset again without its token: it is set to `None`.
        """
        failed = []
        for name, kind, place, saved in self._kept:
            try:
                kind.put_back(place, saved)
            except (TypeError, AttributeError, ValueError, RuntimeError):
                failed.append(name)
        return tuple(failed)

    def changes(self) -> Iterator[Any]:
        """What the places hold that changed since the walk. Raises what C code raises where another thread changes a container meanwhile."""
        for _, kind, place, saved in self._kept:
            yield from kind.changed(place, saved)

    def keep_list(self, name: str, value: list[Any], items: list[Any]) -> None:
        self._kept.append((name, _LIST, value, items))

    def keep_deque(self, name: str, value: collections.deque[Any], items: list[Any]) -> None:
        self._kept.append((name, _DEQUE, value, items))

    def keep_set(self, name: str, value: set[Any]) -> None:
        self._kept.append((name, _SET, value, set.copy(value)))

    def keep_dict(self, name: str, value: dict[Any, Any]) -> None:
        if any(base is collections.OrderedDict for base in mro(type(value))):
            self._kept.append((name, _ORDERED, value, _ordered_items(value)))
        else:
            self._kept.append((name, _DICT, value, dict(dict.items(value))))

    def keep_attributes(self, name: str, value: Any, stored: Layout) -> None:
        own = stored.read(value)
        saved = (type(value), stored, None if own is None else own.copy(), stored.read_slots(value))
        self._kept.append((name, _ATTRIBUTES, value, saved))

    def keep_class(self, name: str, cls: type) -> None:
        self._kept.append((name, _CLASS, cls, (mro(cls), dict(class_dict(cls)))))

    def keep_function(self, name: str, function: FunctionType) -> None:
        self._kept.append((name, _FUNCTION, function, _parts(function)))

    def keep_cell(self, name: str, cell: CellType, content: Any) -> None:
        self._kept.append((name, _CELL, cell, content))

    def keep_names(self, name: str, namespace: dict[str, Any], names: Iterable[str]) -> None:
        saved = {key: dict.get(namespace, key, MISSING) for key in names}
        self._kept.append((name, _NAMES, namespace, saved))

    def keep_cache(self, name: str, cache: Any, entries: tuple[tuple[Any, Any], ...]) -> None:
        self._kept.append((name, _CACHE, cache, entries))

    def keep_context(self, name: str, variable: contextvars.ContextVar[Any], value: Any) -> None:
        self._kept.append((name, _CONTEXT, variable, value))

    def keep_objects(self, name: str, array: np.ndarray[Any, Any]) -> None:
        self._kept.append((name, _OBJECTS, array, array.copy()))


def _refill_list(value: list[Any], items: list[Any]) -> None:
    if not same(list.__iter__(value), items):
        list.__setitem__(value, slice(None), items)


def _refill_deque(value: collections.deque[Any], items: list[Any]) -> None:
    if not same(collections.deque.__iter__(value), items):
        collections.deque.clear(value)
        collections.deque.extend(value, items)


def _refill_set(value: set[Any], items: set[Any]) -> None:
    if not same(set.__iter__(value), items):
        set.clear(value)
        set.update(value, items)


def _refill_dict(value: dict[Any, Any], items: dict[Any, Any]) -> None:
    if not same_dict(dict(dict.items(value)), items):
        dict.clear(value)
        dict.update(value, items)


def _ordered_items(value: Any) -> list[tuple[Any, Any]]:
    """The items in the order that an `OrderedDict` keeps beside its dict, and that dict's own methods know nothing of."""
    held = {id(key): (key, item) for key, item in dict.items(value)}
    return [held[id(key)] for key in collections.OrderedDict.__iter__(value)]


def _refill_ordered(value: collections.OrderedDict[Any, Any], items: list[tuple[Any, Any]]) -> None:
    if not same(itertools.chain(*_ordered_items(value)), itertools.chain(*items)):
        collections.OrderedDict.clear(value)
        for key, item in items:
            collections.OrderedDict.__setitem__(value, key, item)


Attributes = tuple[type, Layout, dict[str, Any] | None, list[tuple[str, Any]]]


def _put_attributes(value: Any, saved: Attributes) -> None:
    _, stored, attributes, slots = saved
    own = stored.read(value)
    if own is not None and attributes is not None:
        _refill_dict(own, attributes)
    for (_, descriptor), (_, before), (_, now) in zip(stored.slots, slots, stored.read_slots(value), strict=True):
        if before is MISSING and now is not MISSING:
            descriptor.__delete__(value)
        elif before is not now:
            descriptor.__set__(value, before)


def _put_class(cls: type, parts: tuple[tuple[type, ...], Mapping[str, Any]]) -> None:
    _, saved = parts
    now = dict(class_dict(cls))
    for key in [key for key in now if key not in saved and key not in _CLASS_UPKEEP]:
        type.__delattr__(cls, key)
    for key, before in saved.items():
        if now.get(key, MISSING) is not before and key not in _CLASS_UPKEEP:
            type.__setattr__(cls, key, before)


def _parts(function: FunctionType) -> tuple[Any, ...]:
    return tuple(getattr(function, part) for part in _PARTS)


def _put_parts(function: FunctionType, saved: tuple[Any, ...]) -> None:
    for part, before, now in zip(_PARTS, saved, _parts(function), strict=True):
        if before is not now:
            setattr(function, part, before)


def _put_cell(cell: CellType, content: Any) -> None:
    if content is not MISSING:
        cell.cell_contents = content
        return
    with contextlib.suppress(ValueError):
        del cell.cell_contents


def _put_names(namespace: dict[str, Any], saved: dict[str, Any]) -> None:
    for key, before in saved.items():
        now = dict.get(namespace, key, MISSING)
        # A module imported meanwhile stays: an import is not undone by halves.
        if before is MISSING and type(now) is not ModuleType:
            dict.pop(namespace, key, None)
        elif before is not MISSING and before is not now:
            dict.__setitem__(namespace, key, before)


def _clear_cache(cache: Any, entries: tuple[tuple[Any, Any], ...]) -> None:
    # A cache that did not change keeps its results: their identity may matter to the user.
    now = cache_entries(cache)
    if not same(itertools.chain(*now), itertools.chain(*entries)):
        class_dict(LruCache)["cache_clear"](cache)


def _put_context(variable: contextvars.ContextVar[Any], value: Any) -> None:
    if variable.get(MISSING) is value:
        return
    if value is MISSING:  # it has no value but its default, which an empty context tells
        with contextlib.suppress(LookupError):
            value = contextvars.Context().run(variable.get)
    variable.set(None if value is MISSING else value)


def _put_objects(array: np.ndarray[Any, Any], saved: np.ndarray[Any, Any]) -> None:
    if _in_objects(array, saved) or array.shape != saved.shape:
        array[...] = saved


# --- what a place holds that changed


def _in_list(value: list[Any], items: list[Any]) -> Contents:
    kept = list.__len__(value) == len(items) and are(list.__iter__(value), items)
    return () if kept else list.__iter__(value)


def _in_deque(value: collections.deque[Any], items: list[Any]) -> Contents:
    return () if same(collections.deque.__iter__(value), items) else tuple(collections.deque.__iter__(value))


def _in_set(value: set[Any], items: set[Any]) -> Contents:
    return () if same(set.__iter__(value), items) else tuple(set.__iter__(value))


def _in_dict(value: dict[Any, Any], items: dict[Any, Any]) -> Contents:
    now = value if type(value) is dict else dict(dict.items(value))
    return () if same_dict(now, items) else (*now.keys(), *now.values())


def _in_ordered(value: collections.OrderedDict[Any, Any], items: list[tuple[Any, Any]]) -> Contents:
    return (
        ()
        if same(itertools.chain(*_ordered_items(value)), itertools.chain(*items))
        else itertools.chain(*_ordered_items(value))
    )


def _in_attributes(value: Any, saved: Attributes) -> Contents:
    cls, stored, attributes, slots = saved
    changed = [now for (_, before), (_, now) in zip(slots, stored.read_slots(value), strict=True) if now is not before]
    if type(value) is not cls:
        changed.append(type(value))
    own = stored.read(value)
    return changed if own is None else (*changed, *_in_dict(own, attributes or {}))


def _in_class(cls: type, saved: tuple[tuple[type, ...], dict[str, Any]]) -> Contents:
    bases, attributes = saved
    return (*(() if mro(cls) is bases else mro(cls)), *_in_dict(dict(class_dict(cls)), attributes))


def _in_function(function: FunctionType, saved: tuple[Any, ...]) -> Contents:
    return [now for now, before in zip(_parts(function), saved, strict=True) if now is not before]


def _in_cell(cell: CellType, content: Any) -> Contents:
    now = cell_content(cell)
    return () if now is content else (now,)


def _in_names(namespace: dict[str, Any], saved: dict[str, Any]) -> Contents:
    now = (dict.get(namespace, key, MISSING) for key in saved)
    return [item for item, before in zip(now, saved.values(), strict=True) if item is not before]


def _in_cache(cache: Any, entries: tuple[tuple[Any, Any], ...]) -> Contents:
    now = cache_entries(cache)
    return () if same(itertools.chain(*now), itertools.chain(*entries)) else itertools.chain(*now)


def _in_context(variable: contextvars.ContextVar[Any], value: Any) -> Contents:
    now = variable.get(MISSING)
    return () if now is value else (now,)


def _in_objects(array: np.ndarray[Any, Any], saved: np.ndarray[Any, Any]) -> Contents:
    return () if same(array.flat, saved.flat) else array.flat


_LIST, _DEQUE, _SET = Kind(_refill_list, _in_list), Kind(_refill_deque, _in_deque), Kind(_refill_set, _in_set)
_DICT, _ORDERED = Kind(_refill_dict, _in_dict), Kind(_refill_ordered, _in_ordered)
_ATTRIBUTES, _CLASS = Kind(_put_attributes, _in_attributes), Kind(_put_class, _in_class)
_FUNCTION, _CELL = Kind(_put_parts, _in_function), Kind(_put_cell, _in_cell)
_NAMES, _CONTEXT = Kind(_put_names, _in_names), Kind(_put_context, _in_context)
_CACHE, _OBJECTS = Kind(_clear_cache, _in_cache), Kind(_put_objects, _in_objects)
