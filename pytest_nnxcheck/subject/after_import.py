"""The content of the user's mutable places after the import of the modules, before any test ran: what a fresh process would hold.

The plugin remembers it once for a session, when the tests are collected. An object that a fixture of a wider scope makes is remembered as the
fixture left it; what the fixtures of the test fill on purpose is added. Outside of pytest nothing is remembered.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from types import FunctionType
from typing import Any

from pytest_nnxcheck.compat import graph
from pytest_nnxcheck.compat.owner import is_library
from pytest_nnxcheck.subject.entries import Entries, composed, entries
from pytest_nnxcheck.walk import snapshot
from pytest_nnxcheck.walk.openers import open_closure, openers_for
from pytest_nnxcheck.walk.raw_access import MISSING, class_dict, code_names, module_namespace, mro, top_package
from pytest_nnxcheck.walk.snapshot import PlaceKind
from pytest_nnxcheck.walk.visit import ATOMS, Classes, Name, Opener, Visit

NAME = Name("")
"""Nobody reads the paths of what is remembered."""
UPKEEP = ("__", "_abc_", "_pytree__")
"""Starts of the names under which Python and flax keep things of their own in a class."""


Contents = dict[tuple[int, int], tuple[Any, list[Any]]]
"""Places with what they held, by the ids of the kind and of the place."""


@dataclass(frozen=True, slots=True)
class Filling:
    """The entries of places that a fixture filled on purpose, from where they were as in a fresh process."""

    fixture: str
    places: dict[tuple[int, int], tuple[Any, Entries]]
    """(place, entries), by the ids of the kind and of the place. Holds strong references, to the places too."""


class Remembered:
    """The contents of places, by the identity of each. Holds strong references, to the places too, so that no id is used again."""

    def __init__(self) -> None:
        self._layers: list[Contents] = []
        self._namespaces: dict[int, tuple[dict[str, Any], dict[str, Any]]] = {}
        self.fillings: list[Filling] = []
        """The entries that the fixtures which are set up have filled, the newest last."""
        self.fixtures: set[str] = set()
        """The names of the fixtures of the test that runs: what others filled is not there in a fresh process that runs this test alone."""

    def add(self, roots: Iterable[tuple[str, object]]) -> Callable[[], None]:
        """Remember the places that roots lead to, until the function that this returns is called. What is remembered by now stays."""
        visit = Visit(Classes(self._openers))
        visit.keeps_references = False
        visit.run([(NAME, value) for _, value in roots])
        layer: Contents = {
            (id(kind), identity(kind, place)): (place, held)
            for _, kind, place, held in visit.places
            # State is no cache, and its first arrays would be kept for as long.
            if not (kind is snapshot.ATTRIBUTES and graph.is_graph_node(place[0]))
        }
        self._layers.append(layer)

        def forget() -> None:
            # By identity: to compare contents would run the user's code.
            self._layers[:] = [each for each in self._layers if each is not layer]

        return forget

    def _openers(self, cls: type) -> tuple[Opener, ...]:
        """The openers of a walk; those of functions and classes read no more than leads on: a package has thousands."""
        if cls is FunctionType:
            return (self._open_function,)
        return (open_class,) if issubclass(cls, type) else openers_for(cls)

    def _open_function(self, function: FunctionType, name: Name, visit: Visit) -> None:
        if function.__closure__:
            open_closure(function, name, visit)
        if function.__dict__:
            visit.put(function.__dict__, "", NAME)
        namespace = function.__globals__
        if is_library(dict.get(namespace, "__name__")):
            return
        for default in (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()):
            visit.put(default, "", NAME)
        self._open_names(namespace, tuple(code_names(function.__code__)), visit)

    def _open_names(self, namespace: dict[str, Any], names: tuple[str, ...], visit: Visit) -> None:
        if id(namespace) not in self._namespaces:
            # Whole: a function that is made later may name what none names yet.
            self._namespaces[id(namespace)] = namespace, dict(namespace)
        for name in names:
            value = dict.get(namespace, name)
            if id(type(value)) in ATOMS or id(value) in visit.seen:
                continue
            if (inner := module_namespace(value)) is not None and inner is not namespace:
                self._open_names(inner, names, visit)
            visit.put(value, "", NAME)

    def content(self, kind: PlaceKind, place: Any) -> list[Any] | None:
        """The content of a place; `None` where it is not known."""
        held = self._imported(kind, place)
        key = (id(kind), identity(kind, place))
        fillings = (
            each.places[key][1] for each in self.fillings if each.fixture in self.fixtures and key in each.places
        )
        filled: Entries = {name: item for each in fillings for name, item in each.items()}
        if held is None or not filled:
            return held
        if kind is snapshot.CACHE:
            pairs: Entries = {id(key): (key, item) for key, item in zip(held[::2], held[1::2], strict=True)}
            return [part for pair in {**pairs, **filled}.values() for part in pair]
        return composed(kind, place, held, {**entries(kind, place, held), **filled})

    def _imported(self, kind: PlaceKind, place: Any) -> list[Any] | None:
        if kind is snapshot.NAMES:
            namespace, names = place
            _, then = self._namespaces.get(id(namespace), (None, None))
            return None if then is None else [then.get(name, MISSING) for name in names]
        key = (id(kind), identity(kind, place))
        return next((layer[key][1] for layer in self._layers if key in layer), None)


def identity(kind: PlaceKind, place: Any) -> int:
    """The id of the object that a place is of."""
    return id(place[0] if kind in (snapshot.ATTRIBUTES, snapshot.REFERENCE, snapshot.NAMES) else place)


def open_class(cls: type, name: Name, visit: Visit) -> None:  # noqa: ARG001  # every opener takes the same
    """Open a class of the user's."""
    if is_library(top_package(cls)):
        return
    visit.keep(NAME, snapshot.CLASS, cls)
    for key, value in class_dict(cls).items():
        if type(value) is FunctionType or not key.startswith(UPKEEP):
            visit.put(value, "", NAME)
    for base in mro(cls)[1:]:
        visit.put(base, "", NAME)


_SESSIONS: list[Remembered] = []
"""The contents that the sessions of this process remember, the innermost last: a test may run pytest."""


def remember(roots: Iterable[tuple[str, object]]) -> Callable[[], None]:
    """Remember what roots lead to until the function that this returns is called."""
    remembered = Remembered()
    remembered.add(roots)
    _SESSIONS.append(remembered)
    return lambda: _SESSIONS.remove(remembered)


def also(roots: Iterable[tuple[str, object]]) -> Callable[[], None]:
    """Remember the places of an object that was made later, if anything is remembered, until the function that this returns is called."""
    return _SESSIONS[-1].add(roots) if _SESSIONS else lambda: None


def content(kind: PlaceKind, place: Any) -> list[Any] | None:
    """The content of a place after the import; `None` where it is not known, as of an object that a test made."""
    return _SESSIONS[-1].content(kind, place) if _SESSIONS else None


@contextlib.contextmanager
def running(fixtures: Iterable[str]) -> Iterator[None]:
    """Count what some fixtures fill to what is there in a fresh process, while a test of theirs runs."""
    if not _SESSIONS:
        yield
        return
    session, before = _SESSIONS[-1], _SESSIONS[-1].fixtures
    session.fixtures = {*fixtures}
    try:
        yield
    finally:
        session.fixtures = before


def fillers(kind: PlaceKind, place: Any) -> frozenset[str]:
    """The fixtures of the test that runs whose part in the content of a place is known."""
    key = (id(kind), identity(kind, place))
    session = _SESSIONS[-1] if _SESSIONS else Remembered()
    return frozenset(
        each.fixture for each in session.fillings if each.fixture in session.fixtures and key in each.places
    )


def filled(filling: Filling) -> Callable[[], None]:
    """Remember what a fixture filled on purpose, until the function that this returns is called."""
    session = _SESSIONS[-1]
    session.fillings.append(filling)
    # The fixture may have been asked for by its name alone.
    session.fixtures.add(filling.fixture)

    def forget() -> None:
        session.fillings[:] = [each for each in session.fillings if each is not filling]

    return forget


def is_remembered() -> bool:
    """True inside of a session that remembers."""
    return bool(_SESSIONS)
