"""Caches that the call reaches are empty before it, as in a fresh process: what ran earlier decides no verdict.

A warm cache hides what a cold one keeps: if the call fills it under a transform, it keeps a tracer. A cache is a `functools.lru_cache`, a
`functools.cached_property`, or a place that the call fills again where it finds it empty. Only one that holds arrays of jax hides anything. A
constructor that fills one does so before each call, in every process, and so does a module while it is imported.
"""

from __future__ import annotations

import ast
import contextlib
import dis
import functools
import inspect
import sys
from collections.abc import Callable, Iterable, Iterator, MutableMapping
from dataclasses import dataclass
from types import CodeType, FunctionType, ModuleType
from typing import Any

import jax

from pytest_nnxcheck.compat import graph
from pytest_nnxcheck.compat.owner import is_library
from pytest_nnxcheck.subject.profile import profile
from pytest_nnxcheck.subject.subject import Subject
from pytest_nnxcheck.walk import snapshot
from pytest_nnxcheck.walk.raw_access import LruCache, class_dict, code_names, mro, top_package
from pytest_nnxcheck.walk.walk import Walk, walk

CONSTRUCTORS = ("__init__", "__post_init__", "__new__", "setup")
MOST_TRIALS = 8
"""Places that are tried by a trace of the call, for one call."""

PutBack = Callable[[], None]


@dataclass(frozen=True, slots=True)
class PossibleCache:
    """A place that may be a cache: a dict, or an attribute that a method sets."""

    name: str
    held: MutableMapping[Any, Any]
    """The dict, or the ``__dict__`` of the object."""
    attribute: str = ""

    def empty(self) -> PutBack:
        """Empty it. Gives a function that puts back what was in it."""
        before = dict(self.held)

        def put_back() -> None:
            if self.attribute:
                self.held[self.attribute] = before[self.attribute]
            else:
                self.held.clear()
                self.held.update(before)

        if self.attribute:
            self.held[self.attribute] = None
        else:
            self.held.clear()
        return put_back

    @property
    def last(self) -> str:
        """The last name of its path: ``table`` of ``model.table``."""
        return self.attribute or self.name.partition(" (")[0].rpartition(".")[2]

    @property
    def is_filled(self) -> bool:
        """True if something is in it."""
        return self.held.get(self.attribute) is not None if self.attribute else bool(self.held)


def emptied(subject: Subject, found: Walk, known: dict[Any, Any]) -> list[PutBack]:
    """Empty the caches that a walk met. Gives functions that put back what was in them; ``known`` keeps which places are caches.

    Nothing can put back the entries of a `functools.lru_cache`: its next call computes them.
    """
    made = [made for made in made_caches(found) if holds_arrays(made[1])]
    possible = list(memos(found))
    if not made and not possible:
        return []
    functions = [*constructors(found), *called_at_import(found)]
    named = {*names_in(functions), *(function.__name__ for function in functions)}
    filled = set(names_in(filter(fills, functions)))
    return [
        *(empty() for name, _, empty in made if name not in named),
        *(memo.empty() for memo in possible if memo.last not in filled and is_cache(subject, found, memo, known)),
    ]


def made_caches(found: Walk) -> Iterator[tuple[str, Any, Callable[[], PutBack]]]:
    """The caches that functools made: the name of the function, what is in the cache, and a function that empties it."""
    for _, cache, held in found.places.of(snapshot.CACHE):
        if held:
            yield getattr(wrapped(cache), "__name__", ""), held[1::2], functools.partial(cleared, cache)
    for _, (value, stored), held in found.places.of(snapshot.ATTRIBUTES):
        for name, item in snapshot.attribute_items(stored, held) if stored.cached else ():
            if name in stored.cached and (own := stored.read(value)) is not None:
                yield name, item, functools.partial(without, own, name)


def wrapped(cache: Any) -> Any:
    """The function behind a `functools.lru_cache`."""
    return dict.get(class_dict(LruCache)["__dict__"].__get__(cache), "__wrapped__")


def cleared(cache: Any) -> PutBack:
    """Empty a `functools.lru_cache`, whose entries nothing can put back."""
    class_dict(LruCache)["cache_clear"](cache)
    return lambda: None


def without(own: dict[str, Any], name: str) -> PutBack:
    """Take the value of a `functools.cached_property` out of the ``__dict__`` that holds it."""
    value = dict.pop(own, name)
    return lambda: dict.__setitem__(own, name, value)


def memos(found: Walk) -> Iterator[PossibleCache]:
    """The places of the user's that may be caches: dicts of arrays, and attributes with an array that a method sets which is no constructor."""
    for name, place, held in found.places.of(snapshot.DICT):
        if type(place) is dict and holds_array(held[len(held) // 2 :]):
            yield PossibleCache(str(name), place)
    for name, (value, stored), held in found.places.of(snapshot.ATTRIBUTES):
        cls = type(value)
        if is_library(top_package(cls)) or graph.is_graph_node(value) or (own := stored.read(value)) is None:
            continue
        arrays = {key for key, item in snapshot.attribute_items(stored, held) if key in own and holds_array([item])}
        for key in sorted(arrays & set_by_methods(cls) - stored.cached) if arrays else ():
            yield PossibleCache(f"{name}.{key}", own, key)


def holds_array(values: Iterable[Any]) -> bool:
    """True if one of these values is an array of jax, or a tuple, list or dict that leads to one."""
    # jax sorts the keys of a dict, and those of the user's may have no order.
    ahead, seen = [*values], set[int]()
    while ahead:
        value = ahead.pop()
        if isinstance(value, jax.Array):
            return True
        if id(value) not in seen and type(value) in (tuple, list, dict):
            seen.add(id(value))
            ahead += value.values() if type(value) is dict else value
    return False


def set_by_methods(cls: type) -> set[str]:
    """The attributes that the methods of a class set, its constructors aside."""
    functions = [
        item
        for base in mro(cls)
        for name, item in class_dict(base).items()
        if type(item) is FunctionType and name not in CONSTRUCTORS
    ]
    return {
        str(instruction.argval)
        for function in functions
        for code in codes(function.__code__)
        for instruction in dis.get_instructions(code)
        if instruction.opname == "STORE_ATTR"
    }


def codes(code: CodeType) -> Iterator[CodeType]:
    """A code object and those inside it."""
    yield code
    for constant in code.co_consts:
        if type(constant) is CodeType:
            yield from codes(constant)


def is_cache(subject: Subject, found: Walk, memo: PossibleCache, known: dict[Any, Any]) -> bool:
    """True if a trace of the call fills a place again where it finds it empty. A call that needs what is there raises, or leaves it alone."""
    key = ("cache", subject.name, memo.name)
    if key not in known:
        known[key] = sum(each[0] == "cache" for each in known if type(each) is tuple) < MOST_TRIALS and refills(
            subject, found, memo
        )
    return bool(known[key])


def refills(subject: Subject, found: Walk, memo: PossibleCache) -> bool:
    """Empty a place, trace the call, and look whether it is filled."""
    filled = False
    with contextlib.suppress(Exception), subject.undone(subject.state, found):  # the user's code may raise anything
        memo.empty()
        profile(subject)
        filled = memo.is_filled
    return filled


def holds_arrays(value: Any) -> bool:
    """True if a value leads to an array of jax."""
    return any(isinstance(array, jax.Array) for _, array in walk([("", value)]).arrays)


# --- what a constructor fills


FILLING = frozenset(("STORE_SUBSCR", "MAP_ADD", "BUILD_CONST_KEY_MAP", "DICT_UPDATE"))
"""Operations of Python's that put something into a dict."""


def constructors(found: Walk) -> list[FunctionType]:
    """The constructors of the user's classes that a walk met, and the methods that they name."""
    own = [
        (name, item)
        for _, cls, _ in found.places.of(snapshot.CLASS)
        for name, item in class_dict(cls).items()
        if type(item) is FunctionType
    ]
    made = [function for name, function in own if name in CONSTRUCTORS]
    named = {*names_in(made)}
    return made + [function for name, function in own if name in named and name not in CONSTRUCTORS]


def called_at_import(found: Walk) -> list[FunctionType]:
    """The functions that the modules of the caches, and those of the user's classes, call while they are imported."""
    caches = (wrapped(cache) for _, cache, held in found.places.of(snapshot.CACHE) if held)
    makers = [*caches, *(cls for _, cls, _ in found.places.of(snapshot.CLASS))]
    names = sorted({str(getattr(maker, "__module__", "")) for maker in makers})
    there = [sys.modules[name] for name in names if name in sys.modules]
    return [
        function
        for module in there
        for name in calls_at_import(module)
        if type(function := inspect.unwrap(vars(module).get(name, module))) is FunctionType
    ]


@functools.cache
def calls_at_import(module: ModuleType) -> frozenset[str]:
    """The names of a module that its own top-level code calls; none where its source is not known."""
    try:
        ahead: list[ast.AST] = [ast.parse(inspect.getsource(module))]
    except (OSError, TypeError, SyntaxError):
        return frozenset()
    names: set[str] = set()
    while ahead:
        node = ahead.pop()
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            names.add(node.func.id)
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            ahead += ast.iter_child_nodes(node)
    return frozenset(names)


def fills(function: FunctionType) -> bool:
    """True if a function puts something into a dict, or is a method that sets an attribute."""
    operations = [each for code in codes(function.__code__) for each in dis.get_instructions(code)]
    sets = {"STORE_ATTR"} if function.__name__ not in CONSTRUCTORS else set[str]()
    return any(each.opname in FILLING | sets or (each.opname == "BUILD_MAP" and each.arg) for each in operations)


def names_in(functions: Iterable[FunctionType]) -> Iterator[str]:
    """The names in the code of functions, and of the functions of the same modules that they name."""
    seen: set[int] = set()
    ahead = list(functions)
    while ahead:
        function = ahead.pop()
        if id(function.__code__) in seen:
            continue
        seen.add(id(function.__code__))
        for name in code_names(function.__code__):
            yield name
            named = dict.get(function.__globals__, name)
            if type(named) is FunctionType:
                ahead.append(named)
