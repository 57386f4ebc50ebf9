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
from collections.abc import Callable, Iterable, Mapping
from types import CellType, FunctionType, ModuleType
from typing import TYPE_CHECKING, Any

from pytest_nnxcheck.inspection.raw_access import (
    MISSING,
    Layout,
    LruCache,
    cache_entries,
    class_dict,
    mro,
    same,
    same_dict,
)

if TYPE_CHECKING:
    import numpy as np

PutBack = Callable[[Any, Any], None]
_CLASS_UPKEEP = frozenset(
    "__dict__ __weakref__ __doc__ __slots__ __abstractmethods__ __annotations__ __annotations_cache__".split()
)


class Places:
    """What the mutable places held at the time of a walk. Holds strong references, arrays among them."""

    def __init__(self) -> None:
        self._kept: list[tuple[str, PutBack, Any, Any]] = []

    def __len__(self) -> int:
        return len(self._kept)

    def restore(self) -> tuple[str, ...]:
        """Put every place back as it was at the walk. Returns the places that could not be put back, normally none.

        Values are put back by identity: the content of arrays, and of generators' frames, stays as it is. A context variable
        that was unset cannot be unset again without its token: it is set to `None`.
        """
        failed = []
        for name, put_back, place, saved in self._kept:
            try:
                put_back(place, saved)
            except (TypeError, AttributeError, ValueError, RuntimeError):
                failed.append(name)
        return tuple(failed)

    def keep_list(self, name: str, value: list[Any], items: list[Any]) -> None:
        self._kept.append((name, _refill_list, value, items))

    def keep_deque(self, name: str, value: collections.deque[Any], items: list[Any]) -> None:
        self._kept.append((name, _refill_deque, value, items))

    def keep_set(self, name: str, value: set[Any]) -> None:
        self._kept.append((name, _refill_set, value, set.copy(value)))

    def keep_dict(self, name: str, value: dict[Any, Any]) -> None:
        if any(base is collections.OrderedDict for base in mro(type(value))):
            self._kept.append((name, _refill_ordered, value, _ordered_items(value)))
        else:
            self._kept.append((name, _refill_dict, value, dict(dict.items(value))))

    def keep_attributes(self, name: str, value: Any, stored: Layout) -> None:
        own = stored.read(value)
        saved = (stored, None if own is None else own.copy(), stored.read_slots(value))
        self._kept.append((name, _put_attributes, value, saved))

    def keep_class(self, name: str, cls: type) -> None:
        self._kept.append((name, _put_class, cls, dict(class_dict(cls))))

    def keep_function(self, name: str, function: FunctionType) -> None:
        self._kept.append((name, _put_defaults, function, (function.__defaults__, function.__kwdefaults__)))

    def keep_cell(self, name: str, cell: CellType, content: Any) -> None:
        self._kept.append((name, _put_cell, cell, content))

    def keep_names(self, name: str, namespace: dict[str, Any], names: Iterable[str]) -> None:
        saved = {key: dict.get(namespace, key, MISSING) for key in names}
        self._kept.append((name, _put_names, namespace, saved))

    def keep_cache(self, name: str, cache: Any, entries: tuple[tuple[Any, Any], ...]) -> None:
        self._kept.append((name, _clear_cache, cache, entries))

    def keep_context(self, name: str, variable: contextvars.ContextVar[Any], value: Any) -> None:
        self._kept.append((name, _put_context, variable, value))

    def keep_objects(self, name: str, array: np.ndarray[Any, Any]) -> None:
        self._kept.append((name, _put_objects, array, array.copy()))


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


def _put_attributes(value: Any, saved: tuple[Layout, dict[str, Any] | None, list[tuple[str, Any]]]) -> None:
    stored, attributes, slots = saved
    own = stored.read(value)
    if own is not None and attributes is not None:
        _refill_dict(own, attributes)
    for (_, descriptor), (_, before), (_, now) in zip(stored.slots, slots, stored.read_slots(value), strict=True):
        if before is MISSING and now is not MISSING:
            descriptor.__delete__(value)
        elif before is not now:
            descriptor.__set__(value, before)


def _put_class(cls: type, saved: Mapping[str, Any]) -> None:
    now = dict(class_dict(cls))
    for key in [key for key in now if key not in saved and key not in _CLASS_UPKEEP]:
        type.__delattr__(cls, key)
    for key, before in saved.items():
        if now.get(key, MISSING) is not before and key not in _CLASS_UPKEEP:
            type.__setattr__(cls, key, before)


def _put_defaults(function: FunctionType, saved: tuple[tuple[Any, ...] | None, dict[str, Any] | None]) -> None:
    function.__defaults__, function.__kwdefaults__ = saved


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
    if variable.get(MISSING) is not value:
        variable.set(None if value is MISSING else value)


def _put_objects(array: np.ndarray[Any, Any], saved: np.ndarray[Any, Any]) -> None:
    array[...] = saved
