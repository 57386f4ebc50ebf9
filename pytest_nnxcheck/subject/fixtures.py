"""The caches that a fixture fills on purpose: it finds them as in a fresh process, and what it fills is there for its tests.

A cache of a fixture is a place that the fixture's code fills, and other code that its test reaches too: what the fixture alone keeps, such as weights that
it has loaded, hides nothing from a call, and stays.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from pytest_nnxcheck.subject.after_import import Filling, identity
from pytest_nnxcheck.subject.caches import (
    MadeCache,
    PossibleCache,
    PutBack,
    leads_to_arrays,
    made_caches,
    possible_caches,
)
from pytest_nnxcheck.subject.entries import Entries, composed, entries
from pytest_nnxcheck.subject.on_purpose import CONSTRUCTORS, Code, codes_behind, handed_by, in_short, reached
from pytest_nnxcheck.walk import snapshot
from pytest_nnxcheck.walk.raw_access import MISSING, unbounded_store
from pytest_nnxcheck.walk.walk import Walk, walk

Roots = Iterable[tuple[str, object]]


class Setup:
    """A fixture that is being set up: the caches that it fills are as in a fresh process."""

    def __init__(self, name: str, function: Any, test: Any, arguments: Roots) -> None:
        """Make the caches cold: ``function`` is that of the fixture, ``arguments`` are the fixtures that it asks for."""
        self.name = name
        self._roots = [("", function), ("", test), *arguments]
        found = walk(self._roots)
        classes = [each for _, each, _ in found.places.of(snapshot.CLASS)]
        known = {argument: in_short(value) for argument, value in arguments}
        self._own = reached([code._replace(known={**known, **code.known}) for code in codes_behind(function)], classes)
        own = {id(code.code) for code in self._own}
        functions = [each for _, each, _ in found.places.of(snapshot.FUNCTION) if each.__name__ not in CONSTRUCTORS]
        others = [code for each in functions for code in codes_behind(each) if id(code.code) not in own]
        # What any code hands to a model, that may call.
        handed = [function for code in (*self._own, *others) for function in handed_by(code)]
        self._others = reached([*others, *handed], classes)
        self.put_back: list[PutBack] = [*map(emptied, self._made(found)), *map(made_cold, self._places(found))]
        """Functions that put back what was in the caches, where nothing else is there by then."""

    def filling(self) -> Filling:
        """Collect the entries that it has filled by now, relative to a fresh process."""
        found = walk(self._roots)
        filled: dict[tuple[int, int], tuple[Any, Entries]] = {}
        for made in self._made(found):
            held = [*snapshot.CACHE.read(made.cache)]
            pairs = zip(held[::2], held[1::2], strict=True)
            filled[id(snapshot.CACHE), id(made.cache)] = made.cache, {id(key): (key, item) for key, item in pairs}
        for place in self._places(found):
            now = entries(place.kind, place.place, place.now)
            changed = {key: now[key] for key in place.changed if key in now}
            filled[id(place.kind), identity(place.kind, place.place)] = place.place, changed
        return Filling(self.name, filled)

    def _made(self, found: Walk) -> Iterator[MadeCache]:
        for made in made_caches(found):
            if made.cache is not None and self._fills(made.is_called_by) and any(map(leads_to_arrays, made.values)):
                yield made

    def _places(self, found: Walk) -> Iterator[PossibleCache]:
        for place in possible_caches(found, ()):
            keys = [key for key in place.changed if self._fills(functools.partial(place.is_filled_by, key=key))]
            if place.remembered and (part := place.of(keys)).arrays:
                yield part

    def _fills(self, fills: Callable[[Code], bool]) -> bool:
        return any(map(fills, self._own)) and any(map(fills, self._others))


def emptied(made: MadeCache) -> PutBack:
    """Empty a `functools.lru_cache`. Gives a function that puts back its entries beside those that it has by then."""
    before = [*snapshot.CACHE.read(made.cache)]
    made.empty()

    def put_back() -> None:
        if unbounded_store(made.cache) is not None:
            snapshot.CACHE.write(made.cache, [*before, *snapshot.CACHE.read(made.cache)])

    return put_back


def made_cold(place: PossibleCache) -> PutBack:
    """Make entries of a place cold. Gives a function that puts back those that are still cold by then."""
    place.make_cold(place.changed)

    def put_back() -> None:
        held = list(place.kind.read(place.place))
        now, cold, then = (entries(place.kind, place.place, each) for each in (held, place.cold, place.now))
        untouched = [key for key in place.changed if now.get(key, NOTHING)[1] is cold.get(key, NOTHING)[1]]
        wanted = {key: item for key, item in now.items() if key not in untouched or key in then}
        wanted.update({key: then[key] for key in untouched if key in then})
        place.kind.write(place.place, composed(place.kind, place.place, held, wanted))

    return put_back


NOTHING = (None, MISSING)
