"""Caches that the call reaches are as in a fresh process before it: what ran earlier decides no verdict.

A warm cache hides what a cold one keeps: if the call fills it under a transform, it keeps a tracer. Cold is what was there after the import of the
modules, see `after_import`; an object that was made later has cold places where a method fills them. A place is a cache if the call, traced with the
place cold, fills it again. Only one that leads to arrays of jax hides anything. What is filled on purpose before the call stays, see `on_purpose`.
"""

from __future__ import annotations

import contextlib
import dis
import functools
from collections.abc import Callable, Container, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any, Literal

import jax

from pytest_nnxcheck.compat import graph, refusals
from pytest_nnxcheck.compat.owner import is_library, owner
from pytest_nnxcheck.subject import after_import, on_purpose
from pytest_nnxcheck.subject.entries import composed, entries, mixed
from pytest_nnxcheck.subject.on_purpose import CONSTRUCTORS, Code, codes_behind, nested, wrapped
from pytest_nnxcheck.subject.profile import profile
from pytest_nnxcheck.subject.subject import Subject, users_function
from pytest_nnxcheck.walk import snapshot
from pytest_nnxcheck.walk.raw_access import (
    MISSING,
    cell_content,
    class_dict,
    layout,
    mro,
    top_package,
    unbounded_store,
)
from pytest_nnxcheck.walk.snapshot import PlaceKind
from pytest_nnxcheck.walk.visit import Name
from pytest_nnxcheck.walk.walk import Walk

MOST_TRIALS = 8
"""Traces of the call that look for caches, for one call."""

PutBack = Callable[[], None]
MakeCold = Callable[[], PutBack]
"""Makes a cache cold, and returns a function that makes it warm again."""


class RunFromCold(BaseException):
    """The body of the test runs again, from its start, with some caches cold: it fills them on purpose, and earlier tests may have filled more of them.

    Not an ``Exception``, which a test body might swallow.
    """

    def __init__(self, cold: Mapping[str, MakeCold], warm: Container[str] = ()) -> None:
        super().__init__()
        self.cold = cold
        self.warm = warm
        """The names of caches that it left cold: something else had filled them."""


def emptied(
    subject: Subject, found: Walk, known: dict[Any, Any], put_back: list[PutBack], *, from_cold: bool = False
) -> bool:
    """Make the caches that a walk met cold, and add functions to ``put_back`` that put back what was in them. True if there was one.

    ``known`` keeps which places are caches. Nothing can put back the entries of a `functools.lru_cache` with a bound: its next call computes them.
    Raises `RunFromCold` for one that the body fills on purpose, where it can run again ``from_cold``.
    """
    before, made = len(put_back), [made for made in made_caches(found) if any(map(leads_to_arrays, made.values))]
    state = {id(graph.variable_value(variable)) for _, variable in graph.variables(subject.state)}
    possible = list(possible_caches(found, state))
    warm = {*(each.path for each in made), *(place.name for place in possible)}
    if left_cold := known.get(("cold", subject.name), frozenset()) - warm:
        known["cold", subject.name], known["left cold", subject.name] = frozenset(), left_cold
        raise RunFromCold({}, left_cold)
    if not warm:
        return False
    left_cold = known.get(("left cold", subject.name), frozenset())
    key = ("purpose", subject.name, left_cold)
    if key not in known:
        known[key] = Purpose.of(subject, found, left_cold)
    purpose: Purpose = known[key]
    anew = dict[str, MakeCold]()
    for each in made:
        match purpose.calls(each):
            case "":
                put_back.append(each.empty())
            case "anew" if each.function is not None:
                anew[each.path] = each.empty
    for filler, part in parts_by_filler(possible, purpose, anew=from_cold):
        if cold := cold_entries(subject, found, part, known):
            make_cold = functools.partial(part.make_cold, cold)
            anew.update({part.name: make_cold} if filler else {})
            put_back.extend([] if filler else [make_cold()])
    if from_cold and anew and ("cold", subject.name) not in known:
        known["cold", subject.name] = frozenset(anew)
        raise RunFromCold(anew)
    return len(put_back) > before


def parts_by_filler(
    possible: Iterable[PossibleCache], purpose: Purpose, *, anew: bool
) -> Iterator[tuple[Filler, PossibleCache]]:
    """The parts of places that nothing fills on purpose, and those that the body fills ``anew`` and that were there after the import."""
    for place in possible:
        fillers = {key: purpose.fills(place, key) for key in place.changed}
        for filler in ("", "anew") if anew and place.remembered else ("",):
            part = place.of(key for key in place.changed if fillers[key] == filler)
            if part.arrays:
                yield filler, part


# --- caches that functools made


@dataclass(frozen=True, slots=True)
class MadeCache:
    """A filled `functools.lru_cache` or `functools.cached_property`."""

    path: str
    function: Any
    """The function whose results it keeps; `None` for a property."""
    name: str
    """The name of the function, or of the property."""
    values: Sequence[Any]
    empty: Callable[[], PutBack]
    """Empties it, and returns a function that puts back what was in it."""
    cache: Any = None
    """The `functools.lru_cache`."""

    def is_called_by(self, code: Code) -> bool:
        """True if some code is that of its function, or names the property."""
        behind = next(codes_behind(self.function), None)
        return self.name in code.code.co_names if behind is None else behind.code is code.code


def made_caches(found: Walk) -> Iterator[MadeCache]:
    """The caches that functools made, as far as they were filled after the import."""
    for path, cache, held in found.places.of(snapshot.CACHE):
        then = after_import.content(snapshot.CACHE, cache) or []
        # With a bound, what is taken out is gone: one that the import has filled stays.
        if held and not snapshot.same(held, then) and not (then and unbounded_store(cache) is None):
            function = wrapped(cache)
            name = getattr(function, "__name__", "")
            yield MadeCache(str(path), function, name, held[1::2], functools.partial(cleared, cache, then), cache)
    for path, place, held in found.places.of(snapshot.ATTRIBUTES):
        value, stored = place
        if not stored.cached or (own := stored.read(value)) is None:
            continue
        before = entries(snapshot.ATTRIBUTES, place, after_import.content(snapshot.ATTRIBUTES, place) or [type(value)])
        for name, item in snapshot.attribute_items(stored, held):
            if name in stored.cached and before.get(name, (name, None))[1] is not item:
                yield MadeCache(f"{path}.{name}", None, name, [item], functools.partial(without, own, name))


def cleared(cache: Any, then: Sequence[Any]) -> PutBack:
    """Take the entries out of a `functools.lru_cache` that were not there ``then``."""
    store = unbounded_store(cache)
    if store is None:
        snapshot.CACHE.write(cache, [])
        return lambda: None
    before = [*snapshot.CACHE.read(cache)]
    snapshot.CACHE.write(cache, list(then))
    return lambda: snapshot.CACHE.write(cache, before)


def without(own: dict[str, Any], name: str) -> PutBack:
    """Take the value of a `functools.cached_property` out of the ``__dict__`` that holds it."""
    value = dict.pop(own, name)
    return lambda: dict.__setitem__(own, name, value)


# --- places that may be caches


@dataclass(frozen=True, slots=True)
class PossibleCache:
    """A place of the user's that may be a cache: it leads to arrays that it does not lead to where it is cold."""

    name: str
    label: str
    """The last name of its path: ``table`` of ``model.table["a"]``, ``t`` of a closure."""
    kind: PlaceKind
    place: Any
    now: list[Any]
    cold: list[Any]
    """The content in a fresh process."""
    remembered: bool
    """True if that is known; else it is what a method finds that fills the place."""
    changed: frozenset[Hashable]
    """The keys of the entries that are not as in a fresh process."""
    arrays: frozenset[Hashable]
    """The keys of the entries among them that lead to arrays now."""

    @property
    def by_name(self) -> bool:
        """True if its entries are attributes or variables, each a place of its own."""
        return self.kind in (snapshot.ATTRIBUTES, snapshot.CLASS, snapshot.NAMES)

    def of(self, keys: Iterable[Hashable]) -> PossibleCache:
        """The place with some of the entries that changed."""
        changed = frozenset(keys)
        return replace(self, changed=changed, arrays=self.arrays & changed)

    def attempts(self) -> list[frozenset[Hashable]]:
        """The sets of entries that may be a cache: those with arrays, all that changed, each one."""
        if self.kind in (snapshot.LIST, snapshot.DEQUE) and len(self.now) != len(self.cold):
            return [self.changed]
        one_by_one = [frozenset((key,)) for key in sorted(self.arrays, key=str)] if self.by_name else []
        return [*dict.fromkeys([self.arrays, self.changed, *one_by_one])]

    def is_filled_by(self, code: Code, key: Hashable) -> bool:
        """True if some code fills an entry."""
        if self.kind is snapshot.ATTRIBUTES and on_purpose.of_another(code, str(key), type(self.place[0])):
            return False
        if self.by_name or self.kind is snapshot.CELL:
            return on_purpose.fills(code, str(key) if self.by_name else self.label, attribute=True)
        by_key = self.remembered and type(key) is str and on_purpose.fills(code, key, attribute=True)
        return by_key or on_purpose.fills(code, self.label, attribute=False)

    def make_cold(self, keys: frozenset[Hashable]) -> PutBack:
        """Put entries back as they are in a fresh process. Gives a function that makes them warm again."""

        def write(content: list[Any]) -> None:
            present = list(self.kind.read(self.place))
            self.kind.write(self.place, mixed(self.kind, self.place, present, content, keys))

        write(self.cold)
        return lambda: write(self.now)

    def is_filled(self, keys: frozenset[Hashable]) -> bool:
        """True if entries that were made cold lead to arrays again."""
        cold = {id(item) for _, item in entries(self.kind, self.place, self.cold).values()}
        now = entries(self.kind, self.place, list(self.kind.read(self.place)))
        fresh = {key for key, (_, item) in now.items() if id(item) not in cold and leads_to_arrays(item)}
        return self.arrays & keys <= fresh if self.by_name else bool(fresh)


def possible_caches(found: Walk, state: Container[int]) -> Iterator[PossibleCache]:
    """The places of the user's that a walk met and that may be caches; ``state`` has the ids of the arrays of the state, which no cache holds."""
    namespaces: dict[int, tuple[dict[str, Any], dict[str, Any]]] = {}
    is_stored = functools.cache(functools.partial(is_put_into, found))
    for name, kind, place, held in found.places:
        if kind is snapshot.NAMES:
            # Each function names some: all of one module are one place.
            namespaces.setdefault(id(place[0]), (place[0], {}))[1].update(zip(place[1], held, strict=True))
        elif kind in KINDS and not (kind is snapshot.ATTRIBUTES and is_no_place(place[0])):
            cold = after_import.content(kind, place)
            if cold is not None:
                yield from changed_since(name, kind, place, held, cold)
            else:
                yield from made_later(name, kind, place, held, state, is_stored)
    for namespace, named in namespaces.values():
        place = (namespace, tuple(named))
        if (cold := after_import.content(snapshot.NAMES, place)) is not None:
            module = str(dict.get(namespace, "__name__"))
            yield from changed_since(module, snapshot.NAMES, place, [*named.values()], cold)


def label_of(name: object) -> str:
    """The last name of a path."""
    base = name.base if isinstance(name, Name) else str(name)
    return base.partition("[")[0].rpartition(".")[2]


KINDS = (
    *(snapshot.LIST, snapshot.DEQUE, snapshot.DICT, snapshot.ORDERED, snapshot.OBJECTS),
    *(snapshot.ATTRIBUTES, snapshot.CLASS, snapshot.CELL, snapshot.CONTEXT),
)
"""The kinds of places that may be caches, beside the names of modules."""


def is_no_place(value: Any) -> bool:
    """True for an object whose attributes are no cache: those of a graph node are state, those of jax' objects are its own."""
    package = top_package(type(value))
    return graph.is_graph_node(value) or (is_library(package) and owner(package) != "python")


def changed_since(
    name: object, kind: PlaceKind, place: Any, now: list[Any], cold: list[Any]
) -> Iterator[PossibleCache]:
    """A place that is not as it was after the import, if it leads to other arrays."""
    if snapshot.same(now, cold):
        return
    present, before = entries(kind, place, now), entries(kind, place, cold)
    changed = frozenset(
        key
        for key in present.keys() | before.keys()
        if present.get(key, (None, MISSING))[1] is not before.get(key, (None, MISSING))[1]
    )
    arrays = frozenset(key for key in changed & present.keys() if leads_to_arrays(present[key][1]))
    if arrays:
        yield PossibleCache(str(name), label_of(name), kind, place, now, cold, True, changed, arrays)


def made_later(
    name: object, kind: PlaceKind, place: Any, now: list[Any], state: Container[int], is_stored: Callable[[str], bool]
) -> Iterator[PossibleCache]:
    """The places that may be caches of an object that was made after the import, if they lead to arrays.

    These are a dict, a list and a variable of a closure that code of the walk puts something into, and the attributes of an object that its
    constructor does not set, or a method as well. ``is_stored`` says whether code puts something into a name.
    """
    label = label_of(name)

    def possible(
        cold: list[Any], changed: Iterable[Hashable], arrays: Iterable[Hashable], how: str = ""
    ) -> PossibleCache:
        keys = frozenset(changed), frozenset(arrays)
        return PossibleCache(f"{name}{how}", label, kind, place, now, cold, False, *keys)

    present = entries(kind, place, now)
    if kind is snapshot.ATTRIBUTES:
        if is_library(top_package(type(place[0]))):
            return
        arrays = {key for key, (_, item) in present.items() if leads_to_arrays(item, state)} - place[1].cached
        by_methods, by_constructors = attributes_set(type(place[0])) if arrays else (frozenset(), {})
        if arrays := {key for key in arrays if key in by_methods or key not in by_constructors}:
            # As the constructor leaves them.
            cold = {key: item for key, item in present.items() if key not in arrays}
            cold.update(
                {
                    key: (key, by_constructors[key])
                    for key in (arrays | by_methods) & by_constructors.keys() & present.keys()
                }
            )
            changed = {key for key in present if key not in cold or cold[key][1] is not present[key][1]}
            yield possible(composed(kind, place, now, cold), changed, arrays)
    elif kind in (snapshot.DICT, snapshot.ORDERED):
        if any(leads_to_arrays(value, state) for value in now[len(now) // 2 :]):
            yield possible([], present, present)
    elif kind in (snapshot.LIST, snapshot.CELL):
        arrays = {key for key, (_, item) in present.items() if leads_to_arrays(item, state)}
        if not arrays or not is_stored(label):
            return
        yield possible([None if key in arrays else item for key, (_, item) in present.items()], arrays, arrays)
        if kind is snapshot.LIST:
            yield possible([], present, arrays, " without items")


def is_put_into(found: Walk, label: str) -> bool:
    """True if a function of a walk puts something into a variable of a closure or a container with this last name."""
    for _, function, _ in found.places.of(snapshot.FUNCTION):
        codes = [*nested(function.__code__)]
        # Sources are parsed for the few functions that have the name: a walk meets thousands, of hundreds of files.
        named = any(
            label in names
            for code in codes
            for names in (code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars)
        )
        if named and any(map(functools.partial(puts_into, label), codes)):
            return True
    return False


def puts_into(label: str, code: CodeType) -> bool:
    """True if some code puts something into a variable of a closure or a container with this last name."""
    if label in (on_purpose.filled_containers(code) or ()):
        return True
    return label in code.co_freevars and any(
        op.opname == "STORE_DEREF" and op.argval == label for op in dis.get_instructions(code)
    )


def attributes_set(cls: type) -> tuple[frozenset[Hashable], dict[Hashable, Any]]:
    """The attributes that the methods of a class set, and those that its constructors set, each with the literal that they set it to, or `None`."""
    by_methods = set[Hashable]()
    by_constructors: dict[Hashable, Any] = {
        name: default(cls, name) for name in on_purpose.member(cls, "__dataclass_fields__") or ()
    }
    for base in mro(cls):
        for name, item in class_dict(base).items():
            if type(item) is not FunctionType:
                continue
            stored = {name for code in nested(item.__code__) for name in on_purpose.attributes_of(code)}
            if name in CONSTRUCTORS:
                literals = on_purpose.literals(item.__code__)
                by_constructors = {**{key: literals.get(key) for key in stored}, **by_constructors}
            else:
                by_methods |= stored
    return frozenset(by_methods), by_constructors


def default(cls: type, name: str) -> Any:
    """The default of a field of a dataclass, if it has one that nobody can change; else `None`."""
    value = on_purpose.member(cls, name)
    return value if type(value) in (int, float, str, bool, tuple) else None


# --- arrays


def leads_to_arrays(value: Any, left_out: Container[int] = ()) -> bool:
    """True if a value is an array of jax, or leads to one by what it holds: items, attributes, closures; those ``left_out`` by their ids aside."""
    # No code of the user's runs, and no globals are looked at: those of a function are places of their own.
    ahead, seen = [value], set[int]()
    while ahead and len(seen) < MOST_HELD:
        value = ahead.pop()
        cls = type(value)
        if id(value) in seen or id(value) in left_out or cls in (str, int, float, bool, bytes, type(None)):
            continue
        if isinstance(value, jax.Array):
            return True
        seen.add(id(value))
        if issubclass(cls, list | tuple | set | frozenset):
            ahead += list(value)
        elif issubclass(cls, dict):
            ahead += dict.values(value)
        elif cls is FunctionType:
            ahead += map(cell_content, value.__closure__ or ())
        elif cls is MethodType:
            ahead += (value.__self__, value.__func__)
        elif cls is CellType:
            ahead.append(cell_content(value))
        elif not issubclass(cls, type | ModuleType):
            stored = layout(cls)
            ahead += (stored.read(value) or {}).values()
            ahead += (item for _, item in stored.read_slots(value) if item is not MISSING)
    return False


MOST_HELD = 10_000
"""Objects that are looked at for an array."""

# --- trials


def cold_entries(
    subject: Subject, found: Walk, place: PossibleCache, known: dict[Any, Any]
) -> frozenset[Hashable] | None:
    """The entries of a place that a trace of the call fills again where it finds them cold; `None` if it is no cache.

    A call that needs what is there raises, or leaves it alone.
    """
    attempts = place.attempts()
    key = ("cache", subject.name, place.name)
    if key not in known:
        known[key] = None
        for number, keys in enumerate(attempts):
            tried = known["trials", subject.name] = known.get(("trials", subject.name), 0) + 1
            if tried <= MOST_TRIALS and refills(subject, found, place, keys):
                known[key] = number
                break
    number = known[key]
    return attempts[number] if number is not None and number < len(attempts) else None


def refills(subject: Subject, found: Walk, place: PossibleCache, keys: frozenset[Hashable]) -> bool:
    """Make entries cold, trace the call, and look whether they are filled. A call that raises met no cache, but for a tracer that one kept."""
    filled = False
    with contextlib.suppress(Exception), subject.undone(subject.state, found):  # the user's code may raise anything
        place.make_cold(keys)
        try:
            profile(subject)
        except Exception as error:  # noqa: BLE001 - the user's code may raise anything
            error.__traceback__ = None
            filled = refusals.is_tracer_error(error) and place.is_filled(keys)
        else:
            filled = place.is_filled(keys)
    return filled


# --- what is filled on purpose

Filler = Literal["", "anew", "before"]
"""The code that fills a place on purpose: none; the body of the test, anew each time that it runs; code that ran before."""


@dataclass(frozen=True, slots=True)
class Purpose:
    """The code that fills places on purpose before the call."""

    body: tuple[Code, ...]
    """The body of the test, and what it calls."""
    constructors: tuple[Code, ...]
    """The constructors of the classes that the walk met, and what they call."""
    fixtures: Mapping[str, tuple[Code, ...]]
    """The fixtures of the test, and what each calls."""
    setups: tuple[Code, ...]
    """Other code that prepares the test, and what it calls."""
    imported: tuple[Code, ...]
    """The functions that the top-level code of modules calls, and what they call."""
    left_cold: frozenset[str]
    """The names of places that were cold when the body ran, and that it left cold."""

    @classmethod
    def of(cls, subject: Subject, found: Walk, left_cold: frozenset[str]) -> Purpose:
        """The code that runs before a call whose walk is given."""
        classes = [each for _, each, _ in found.places.of(snapshot.CLASS)]
        caches = (wrapped(cache) for _, cache, held in found.places.of(snapshot.CACHE) if held)
        modules = {str(getattr(maker, "__module__", "")) for maker in (*caches, *classes)}
        own = [code.code for code in codes_behind(users_function(subject.function))]
        imported = on_purpose.called_at_import(modules)

        def code(start: Iterable[Code]) -> tuple[Code, ...]:
            return tuple(on_purpose.reached(start, classes, own))

        return cls(
            body=code(on_purpose.BODY),
            constructors=code(on_purpose.constructors(classes)),
            fixtures={name: code(start) for name, start in on_purpose.FIXTURES.items()},
            setups=code(on_purpose.SETUPS),
            imported=code(imported),
            left_cold=left_cold,
        )

    def calls(self, made: MadeCache) -> Filler:
        """The code that calls the function behind a cache."""
        known = made.cache is not None and after_import.is_remembered()
        before = self.before(snapshot.CACHE, made.cache, known=known)
        return self.filler(made.path, made.is_called_by, before, self.constructors)

    def fills(self, place: PossibleCache, key: Hashable) -> Filler:
        """The code that fills an entry of a place."""
        before = self.before(place.kind, place.place, known=place.remembered)
        # Of an object that was there, the constructor has run.
        there = place.remembered and place.kind is snapshot.ATTRIBUTES
        return self.filler(
            place.name, lambda code: place.is_filled_by(code, key), before, () if there else self.constructors
        )

    def before(self, kind: PlaceKind, place: Any, *, known: bool) -> Iterator[Code]:
        """The code that fills a place before the body runs; without that whose part in the content is ``known``."""
        yield from self.setups
        fillers = after_import.fillers(kind, place) if known else ()
        for name, codes in self.fixtures.items():
            yield from () if name in fillers else codes
        yield from () if known else self.imported

    def filler(
        self, name: str, fill: Callable[[Code], bool], before: Iterable[Code], constructors: Iterable[Code]
    ) -> Filler:
        """The code that fills a place of some name: that ran ``before`` the body, the body, or a constructor, wherever that runs."""
        left_cold = name in self.left_cold
        if any(map(fill, before)) or (left_cold and any(map(fill, constructors))):
            return "before"
        return "anew" if not left_cold and any(map(fill, (*self.body, *constructors))) else ""
