"""The entries of a mutable place: the items of a container, the attributes of an object or a class, the names of a module."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from typing import Any

from pytest_nnxcheck.walk import snapshot
from pytest_nnxcheck.walk.raw_access import MISSING
from pytest_nnxcheck.walk.snapshot import PlaceKind

Entries = dict[Hashable, tuple[Any, Any]]
"""(key, item) of the entries of a place, by the key itself where it is a string or a number, else by its id: a hash may be the user's code."""


def entries(kind: PlaceKind, place: Any, held: Sequence[Any]) -> Entries:
    """The entries of a place that held some objects."""
    if kind is snapshot.ATTRIBUTES:
        pairs: Iterable[tuple[Any, Any]] = snapshot.attribute_items(place[1], held)
    elif kind is snapshot.CLASS:
        pairs = snapshot.paired(held[1:])
    elif kind in (snapshot.DICT, snapshot.ORDERED):
        pairs = snapshot.paired(held)
    elif kind is snapshot.NAMES:
        pairs = zip(place[1], held, strict=True)
    else:
        pairs = enumerate(held)
    return {key if type(key) in (str, int) else id(key): (key, item) for key, item in pairs if item is not MISSING}


def composed(kind: PlaceKind, place: Any, held: Sequence[Any], wanted: Entries) -> list[Any]:
    """The objects of a place that held some, with the ``wanted`` entries."""

    def item(key: Hashable) -> Any:
        return wanted.get(key, (None, MISSING))[1]

    if kind is snapshot.NAMES:
        return [item(name) for name in place[1]]
    if kind in (snapshot.CELL, snapshot.CONTEXT, snapshot.OBJECTS):
        return [item(number) for number in range(len(held))]
    if kind in (snapshot.LIST, snapshot.DEQUE):
        return [wanted[number][1] for number in sorted(wanted)]  # type: ignore[type-var]
    slots = place[1].slots if kind is snapshot.ATTRIBUTES else ()
    of_slots = {name for name, _ in slots}
    pairs = [pair for key, pair in wanted.items() if key not in of_slots]
    # The class of an object, the bases of a class.
    first = [] if kind in (snapshot.DICT, snapshot.ORDERED) else [held[0]]
    return [*first, *(item(name) for name, _ in slots), *(key for key, _ in pairs), *(value for _, value in pairs)]


def mixed(
    kind: PlaceKind, place: Any, present: Sequence[Any], other: Sequence[Any], keys: frozenset[Hashable]
) -> list[Any]:
    """The ``present`` objects of a place with the entries of some ``keys`` as in ``other`` content: gone where they are not in it."""
    wanted, source = entries(kind, place, present), entries(kind, place, other)
    if kind in (snapshot.DICT, snapshot.ORDERED, snapshot.LIST, snapshot.DEQUE) and keys >= source.keys():
        return list(other)
    for key in keys:
        if key in source:
            wanted[key] = source[key]
        else:
            wanted.pop(key, None)
    return composed(kind, place, present, wanted)
