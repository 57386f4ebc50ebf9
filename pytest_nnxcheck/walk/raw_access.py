"""Read Python objects without running anybody's code.

``obj.attr``, ``vars(obj)``, ``isinstance(obj, ...)``, ``obj == ...`` and even ``hash(type(obj))`` may run a property, a
``__getattr__`` or a metaclass of the user. The readers here go through the descriptors of ``type`` and ``object`` instead.
``issubclass(type(obj), list)`` asks the metaclass of `list`, which is no user's.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import CellType, CodeType, GetSetDescriptorType, MemberDescriptorType, ModuleType
from typing import Any

from pytest_nnxcheck.compat.owner import DEMO, is_library

MISSING: Any = object()

mro: Callable[[type], tuple[type, ...]] = type.__dict__["__mro__"].__get__
class_dict: Callable[[type], Mapping[str, Any]] = type.__dict__["__dict__"].__get__
class_name: Callable[[type], str] = type.__dict__["__name__"].__get__
_class_module: Callable[[type], Any] = type.__dict__["__module__"].__get__
_module_dict: Callable[[Any], dict[str, Any]] = class_dict(ModuleType)["__dict__"].__get__
LruCache: type = type(functools.cache(len))
"""The type of the wrapper that `functools.lru_cache` makes; it has no public name."""

_MAKERS = {"abc", "types"}
"""Modules that Python names as the module of a class which a call made."""


def top_package(cls: type) -> str:
    """The top-level package of a class; empty if its ``__module__`` is not a string.

    For a class that a call made, ``type(model)(name, bases, {})``, Python names the module whose code made it: `abc` or `types`.
    Such a class is the user's.
    """
    try:
        module = _class_module(cls)
    except AttributeError:
        return ""
    if type(module) is not str or (module in _MAKERS and class_name(cls) not in _module_dict(sys.modules[module])):
        return ""
    return module if module == DEMO else module.partition(".")[0]


def module_namespace(value: object) -> dict[str, Any] | None:
    """The names of a module that is the user's, `None` for anything else."""
    if not issubclass(type(value), ModuleType):
        return None
    namespace = _module_dict(value)
    return None if is_library(dict.get(namespace, "__name__")) else namespace


@dataclass(frozen=True, slots=True)
class Layout:
    """The storage of attributes in the instances of a class."""

    own_dict: Callable[[Any], dict[str, Any]] | None
    """A function that reads the ``__dict__`` of an instance."""
    slots: tuple[tuple[str, Any], ...]
    """(name, descriptor)."""
    hidden: bool
    """The class shadows ``__dict__`` with something of its own: attributes have no names that can be read."""
    cached: frozenset[str]
    """Attributes that a `functools.cached_property` sets."""

    def read(self, value: Any) -> dict[str, Any] | None:
        """The instance's ``__dict__`` itself."""
        own = self.own_dict(value) if self.own_dict is not None else None
        return own if type(own) is dict else None

    def read_slots(self, value: Any) -> list[tuple[str, Any]]:
        """(name, value) of the slots, `MISSING` for those that are not set."""
        return [(name, read_slot(descriptor, value)) for name, descriptor in self.slots]


def read_slot(descriptor: Any, value: Any) -> Any:
    """The value of a slot; `MISSING` if it is not set."""
    try:
        return descriptor.__get__(value)
    except AttributeError:
        return MISSING


def cell_content(cell: CellType) -> Any:
    """The value in a closure's cell; `MISSING` if it is empty."""
    try:
        return cell.cell_contents
    except ValueError:
        return MISSING


def code_names(code: CodeType) -> Iterator[str]:
    """The global, module and attribute names in a code object and in those inside it (lambdas, comprehensions)."""
    yield from code.co_names
    for constant in code.co_consts:
        if type(constant) is CodeType:
            yield from code_names(constant)


_LAYOUTS: dict[int, tuple[type, int, Layout]] = {}
"""The layouts of classes that live as long as the process, by the id of the class, since its hash is the user's code."""


def layout(cls: type) -> Layout:
    """The layout of the instances of a class. Those of a class that its module has by its name are kept: walks ask for them thousands of times."""
    bases = mro(cls)
    size = sum(len(class_dict(base)) for base in bases)  # a cached property that is added later
    known = _LAYOUTS.get(id(cls))
    if known is not None and known[1] == size:
        return known[2]
    found = _read_layout(bases)
    # A layout keeps its class. One that a test made goes with the test.
    with contextlib.suppress(AttributeError, TypeError, KeyError):  # a ``__module__`` of any type
        if _module_dict(sys.modules[_class_module(cls)]).get(class_name(cls)) is cls:
            _LAYOUTS[id(cls)] = cls, size, found
    return found


def _read_layout(bases: tuple[type, ...]) -> Layout:
    own_dict: Callable[[Any], dict[str, Any]] | None = None
    shadowed = False
    slots: list[tuple[str, Any]] = []
    cached: set[str] = set()
    for base in bases:
        names = class_dict(base)
        cached |= {name for name, item in names.items() if issubclass(type(item), functools.cached_property)}
        descriptor = names.get("__dict__")
        native = type(descriptor) in (GetSetDescriptorType, MemberDescriptorType)
        if own_dict is None and descriptor is not None and native:
            own_dict = descriptor.__get__
        shadowed = shadowed or (descriptor is not None and not native)
        if "__slots__" in names:
            slots += [(name, slot) for name, slot in names.items() if type(slot) is MemberDescriptorType]
    return Layout(own_dict, tuple(slots), hidden=shadowed and own_dict is None, cached=frozenset(cached))


def cache_entries(cache: Any) -> tuple[tuple[Any, Any], ...]:
    """(key, result) of each entry of a `functools.lru_cache`, which has no public way to its results.

    An unbounded cache is a dict of results. A bounded one shows the collector (key, result, type of the link) for every
    entry, and then its dict of links. CPython 3.11 to 3.13.
    """
    store = _cache_store(cache)
    if not store:
        return ()
    if not _is_linked(store):
        return tuple(store.items())
    links = gc.get_referents(cache)[1 : 1 + 3 * len(store)]
    results = {id(key): result for key, result in zip(links[::3], links[1::3], strict=False)}
    # In the order of the dict: each use of an entry moves its link.
    return tuple((key, results[id(key)]) for key in store if id(key) in results)


def unbounded_store(cache: Any) -> dict[Any, Any] | None:
    """The results of a `functools.lru_cache` without a bound, by their keys: what is written there is in the cache. `None` for one with a bound."""
    store = _cache_store(cache)
    # The method, which no attribute of the user's own replaces.
    bound = class_dict(LruCache)["cache_info"](cache).maxsize
    return store if bound is None else None


def _cache_store(cache: Any) -> dict[Any, Any] | None:
    held = gc.get_referents(cache)
    own = read_slot(class_dict(type(cache)).get("__dict__"), cache)
    return next((part for part in held if type(part) is dict and part is not own), None)


def _is_linked(store: dict[Any, Any]) -> bool:
    return class_name(type(next(iter(store.values())))) == "_lru_list_elem"
