"""Hashable stand-ins for values: values with equal stand-ins count as equal, although they are different objects.

A test body makes its functions and configurations anew for every nesting, so identity says too little; a name says too little
as well, for two lambdas of one test have the same. `fingerprint` answers whether a trace takes two values for alike, `exact`
whether a call gives the same result with either, `plain` which Python value one is. `equal` compares as jax does.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Mapping, Sized
from dataclasses import fields, is_dataclass
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import jax
import numpy as np

from pytest_nnxcheck.compat.arrays import describe
from pytest_nnxcheck.compat.graph import is_key
from pytest_nnxcheck.compat.owner import owner
from pytest_nnxcheck.walk.raw_access import MISSING, cell_content, class_dict, code_names, layout, mro, top_package

DEEPEST, LONGEST = 5, 200
"""The depth of references and the number of items that `fingerprint` looks at: an object of the user's may reach the whole program."""
_NUMBERS_AND_STRINGS = (str, int, float, complex, bool, bytes)
_ATOMS = (*_NUMBERS_AND_STRINGS, type(None), type(...), range, slice)
_OTHER = "other"
"""The mark in `plain` of a value that is no plain one."""


def is_array(value: Any) -> bool:
    """True if a value is an array of jax or NumPy, whatever it holds, or a NumPy number."""
    return isinstance(value, jax.Array | np.ndarray | np.generic)


# --- values that a trace takes for alike ----------------------------------------------------------------------------------------


Known = dict[tuple[int, int], tuple[Any, Any]]
"""The fingerprints of objects, by their id and the depth, each with the object, so that no id is used again."""


def fingerprint(value: Any, depth: int = DEEPEST, known: Known | None = None) -> Any:
    """A hashable stand-in, equal for values that a trace takes for alike: arrays of one type, code with the same captures, objects with the same attributes.

    It runs nobody's ``==``, ``hash`` or ``repr``, and raises nothing. ``known`` has those of what was met before: the layers of a model may all
    lead to each other.
    """
    cls, known = type(value), {} if known is None else known
    if cls in _ATOMS:
        return (cls, repr(value))
    if isinstance(value, type) or depth == 0:
        return id(value) if isinstance(value, type) else cls.__qualname__
    key = id(value), depth
    if key not in known:
        known[key] = value, of_object(value, depth - 1, known)
    return known[key][1]


def of_object(value: Any, depth: int, known: Known) -> tuple[Any, ...]:
    cls = type(value)
    if cls is FunctionType:
        return (value.__code__, *(fingerprint(part, depth, known) for part in held_by(value)))
    if cls is MethodType:
        return (fingerprint(value.__func__, depth, known), fingerprint(value.__self__, depth, known))
    if hasattr(cls, "shape") and hasattr(cls, "dtype"):
        return (cls.__qualname__, str(value.shape), str(value.dtype))
    return (cls.__qualname__, *of_items(value, depth, known), *of_attributes(value, depth, known))


def held_by(function: FunctionType) -> tuple[Any, ...]:
    """The values that a function holds beside its code: the content of its closure, and the defaults of its arguments."""
    cells = tuple(map(cell_content, function.__closure__ or ()))
    return cells, function.__defaults__, tuple((function.__kwdefaults__ or {}).items())


def of_items(value: Any, depth: int, known: Known) -> tuple[Any, ...]:
    if isinstance(value, dict):
        pairs = list(dict.items(value))[:LONGEST]
        return (len(value), *(fingerprint(item, depth, known) for pair in pairs for item in pair))
    if isinstance(value, list | tuple):
        return (len(value), *(fingerprint(item, depth, known) for item in list(value)[:LONGEST]))
    if isinstance(value, set | frozenset):
        return (frozenset(fingerprint(item, depth, known) for item in value),)
    return ()


def of_attributes(value: Any, depth: int, known: Known) -> tuple[Any, ...]:
    """The attributes of an object; for an object of a library only the function that it wraps."""
    stored = layout(type(value))
    own = stored.read(value) or {}
    if owner(top_package(type(value))) in ("jax", "flax"):
        own = {name: own[name] for name in ("__wrapped__", "fun", "f") if name in own}
    pairs = [*own.items(), *((name, held) for name, held in stored.read_slots(value) if held is not MISSING)]
    return tuple((name, fingerprint(held, depth, known)) for name, held in pairs[:LONGEST])


# --- values that decide a result -----------------------------------------------------------------------------------------------


class Unknown(Exception):
    """Raised for a value whose content is uncertain."""


MOST, LARGEST = 10_000, 2**26
"""The number of objects, and of items in one of them, that `exact` takes apart in a graph definition, and the bytes of an array that it reads there.

A definition may lead to a data set of the user's, and is read before every nesting.
"""


def exact(value: Any, *, in_graph: bool = False, seen: dict[int, tuple[int, Any]] | None = None) -> Any:
    """A hashable stand-in that holds all that a value can do to the result of a call: arrays by content, code with captures and globals.

    Raises `Unknown` for an object that a call may change, a bound method or a list as well. ``in_graph``: the value is a graph definition, where
    containers, functions and objects are taken apart; an object whose class has an ``==`` and a hash of its own compares by these, as for jax.
    """
    # Objects are kept with their numbers, so that no id is used again.
    seen = {} if seen is None else seen

    def inside(part: Any) -> Any:
        return exact(part, in_graph=in_graph, seen=seen)

    if isinstance(value, _ATOMS):
        return type(value), repr(value)  # for `==` zero is minus zero, and one is true
    if in_graph and is_large(value, len(seen)):
        raise Unknown
    if is_array(value):
        return content(value)
    if isinstance(value, tuple):
        return (type(value), *map(inside, value))
    # One object in two places differs from two that are alike: a call may change it.
    if id(value) in seen:
        return "again", seen[id(value)][0]
    seen[id(value)] = len(seen), value
    if isinstance(value, FunctionType):
        return of_function(value, inside)
    if in_graph:
        return in_definition(value, inside)
    if isinstance(value, type | ModuleType | BuiltinFunctionType):
        return value
    raise Unknown


def is_large(value: Any, seen: int) -> bool:
    """True if a part of a graph definition is too large to be read, or so much was ``seen`` of it."""
    if is_array(value):
        return bool(value.nbytes > LARGEST)
    return seen > MOST or (isinstance(value, Sized) and len(value) > MOST)


def in_definition(value: Any, inside: Callable[[Any], Any]) -> Any:
    """A graph definition or an object in one."""
    cls = type(value)
    if isinstance(value, set | frozenset):
        return cls, frozenset(map(inside, value))
    if isinstance(value, Mapping | list):
        return (cls, *map(inside, value.items() if isinstance(value, Mapping) else value))
    # The metadata of a Variable may hold a dict: the definition as a whole may have no hash.
    if is_dataclass(cls) and top_package(cls) == "flax":
        return (cls, *(inside(getattr(value, field.name)) for field in fields(value)))
    if isinstance(value, MethodType):
        return cls, inside(value.__func__), inside(value.__self__)
    if isinstance(value, functools.partial):
        return cls, inside(value.func), inside(value.args), inside(value.keywords)
    # What a test makes anew for every nesting: a configuration, an object of optax whose methods are an optimizer.
    attributes = own_attributes(value)
    if attributes is not None:
        return cls, inside(attributes)
    hash(value)
    return cls, value


_COMPARING = {name: class_dict(object)[name] for name in ("__eq__", "__hash__")}


def own_attributes(value: Any) -> dict[str, Any] | None:
    """The attributes of an object that consists of them: one whose class lacks an ``==`` or a hash of its own. `None` for any other.

    jax and its like keep more in an object than its attributes.
    """
    cls = type(value)
    own = {name: next(names[name] for base in mro(cls) if name in (names := class_dict(base))) for name in _COMPARING}
    compared = own["__eq__"] is not _COMPARING["__eq__"] and own["__hash__"] is not None
    if compared or isinstance(value, type | ModuleType) or owner(top_package(cls)) in ("jax", "flax"):
        return None
    stored = layout(cls)
    attributes = stored.read(value)
    slots = {name: held for name, held in stored.read_slots(value) if held is not MISSING}
    return None if attributes is None and not slots else {**slots, **(attributes or {})}


def content(value: Any) -> Any:
    """The type of an array, and a hash of its content that does not collide in practice."""
    array = np.asarray(jax.random.key_data(value) if is_key(value) else value)
    if array.dtype == object:
        raise Unknown
    return describe(value), hashlib.blake2b(np.ascontiguousarray(array).view(np.uint8).data, digest_size=20).digest()


def of_function(function: FunctionType, inside: Callable[[Any], Any]) -> Any:
    """A function: its code, what it holds, and of the globals that it names the numbers and strings, which a test may set."""
    held = inside((*held_by(function), tuple(vars(function).items())))
    named = {name: function.__globals__.get(name) for name in code_names(function.__code__)}
    settable = {name: exact(value) for name, value in named.items() if isinstance(value, _NUMBERS_AND_STRINGS)}
    return function.__code__, held, tuple(settable.items())


# --- Python values -------------------------------------------------------------------------------------------------------


def plain(value: Any) -> Any:
    """A hashable stand-in of a Python value that `plain_text` shows; of an array or any other object it holds only the type."""
    if is_array(value):
        return (_OTHER, "array")
    if value is None or isinstance(value, _NUMBERS_AND_STRINGS):
        return (type(value).__name__, repr(value))
    if isinstance(value, list | tuple):
        return (type(value).__name__, *map(plain, value))
    if isinstance(value, set | frozenset):
        return (type(value).__name__, frozenset(map(plain, value)))
    if isinstance(value, dict):
        return (type(value).__name__, frozenset((plain(key), plain(item)) for key, item in value.items()))
    return (_OTHER, type(value).__name__)


def plain_type(value: Any) -> str:
    """The name of the type of a `plain` value; empty for a type that is not Python's own."""
    kind = value[0] if isinstance(value, tuple) else _OTHER
    return "" if kind == _OTHER else str(kind)


def plain_text(value: Any) -> str:
    """A `plain` value in a message."""
    kind, *parts = value
    if kind == _OTHER:
        return f"a {parts[0]}"
    return parts[0] if len(parts) == 1 and isinstance(parts[0], str) else f"another {kind}"


def equal(one: Any, other: Any, *, unknown: bool, typed: bool = False) -> bool:
    """True if two static values are equal to jax, which asks their ``==``; ``unknown`` where that raises, as for arrays.

    ``typed``: a jit also compares the types of what it is handed, ``1`` and ``1.0``, where a loop compares its carry by ``==`` alone.
    """
    if one is other:
        return True
    if typed and type(one) is not type(other):
        return False
    try:
        return bool(one == other)
    except Exception:  # noqa: BLE001 - the user's code may raise anything
        return unknown


def show(value: Any) -> str:
    """A static value for messages, whatever its ``__repr__`` does."""
    try:
        text = repr(value)
    except Exception:  # noqa: BLE001 - the user's code may raise anything
        text = f"<{type(value).__qualname__}>"
    return text if len(text) <= 80 else f"{text[:77]}..."


def short(value: Any) -> str:
    """A value in a message; an object that is no plain value, whose text may be an address, by its type alone."""
    plain = value is None or isinstance(value, bool | int | float | complex | str | bytes | tuple | list)
    return f"{value!r:.60}" if plain else f"a {type(value).__name__}"
