"""The content of a value as a key: two values with equal keys do the same in a call. A value has no key where nobody can say that."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterator, Mapping
from itertools import chain
from types import CodeType, FunctionType
from typing import Any

import jax
import numpy as np

from pytest_nnxcheck.compat.arrays import describe
from pytest_nnxcheck.compat.graph import is_key
from pytest_nnxcheck.values.effects import is_array
from pytest_nnxcheck.walk.raw_access import cell_content, top_package

__tracebackhide__ = True  # pytest shows the frames of the user, not these


class Unknown(Exception):
    """A value whose content cannot be told for sure."""


def parts(value: Any, seen: dict[int, int]) -> Any:
    """A graph definition, or what it holds, as one that compares and does not change. Raises `Unknown`, and `TypeError` for what has no hash.

    A Variable's metadata may hold a dict, and a list may be a plain attribute: neither has a hash, and a call may change either. One that is
    there twice has another key than two that are alike. What a class of the user's own compares, it goes on comparing.
    """
    if is_array(value):
        return digest(value)
    if isinstance(value, tuple):
        return type(value), *(parts(item, seen) for item in value)
    if isinstance(value, FunctionType):
        return behaviour(value)
    is_definition = dataclasses.is_dataclass(type(value)) and top_package(type(value)) == "flax"
    if not (is_definition or isinstance(value, Mapping | list | set | frozenset)):
        hash(value)
        return type(value), repr(value) if isinstance(value, float | complex) else value
    if id(value) in seen:
        return "again", seen[id(value)]
    seen[id(value)] = len(seen)
    if is_definition:
        items: Any = (getattr(value, field.name) for field in dataclasses.fields(value))
    else:
        items = value.items() if isinstance(value, Mapping) else value
    held = [parts(item, seen) for item in items]
    return type(value), frozenset(held) if isinstance(value, set | frozenset) else tuple(held)


def behaviour(function: FunctionType) -> Any:
    """A function as what it does; itself, where that cannot be told, or where it has attributes."""
    try:
        return function if vars(function) else code(function)
    except Unknown:
        return function


def digest(value: Any) -> Any:
    """The content of an array, as a hash that collides for nobody."""
    if not is_array(value):
        return atom(value)
    array = np.asarray(jax.random.key_data(value) if is_key(value) else value)
    if array.dtype == object:
        raise Unknown
    return describe(value), hashlib.blake2b(np.ascontiguousarray(array).view(np.uint8).data, digest_size=20).digest()


def atom(value: Any) -> Any:
    """A plain value, told apart by type: ``1 == True == 1.0``."""
    if value is None or isinstance(value, bool | int | float | complex | str | bytes):
        return type(value), repr(value)
    if isinstance(value, tuple):
        return tuple(map(atom, value))
    if is_array(value):
        return digest(value)
    if isinstance(value, type) or type(value).__name__ in ("module", "builtin_function_or_method"):
        return value
    return code(value)


def code(function: Any, seen: frozenset[int] = frozenset()) -> Any:
    """A function as the code it runs, with all that the code captured. Raises `Unknown`, as for what holds an object: a bound method."""
    if not isinstance(function, FunctionType):
        raise Unknown
    own = function.__code__
    if id(function) in seen:
        return own
    seen |= {id(function)}
    cells = map(cell_content, function.__closure__ or ())
    defaults = [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
    held = [*cells, *defaults, *chain.from_iterable(vars(function).items())]
    captured = tuple(code(value, seen) if isinstance(value, FunctionType) else atom(value) for value in held)
    return own, captured, tuple(plain_globals(own, function.__globals__))


def plain_globals(own: CodeType, names: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """The numbers and strings among the globals that code names: a test may set them."""
    for name in own.co_names:
        if isinstance(names.get(name), bool | int | float | complex | str | bytes):
            yield name, atom(names[name])
    for inner in own.co_consts:
        if isinstance(inner, CodeType):
            yield from plain_globals(inner, names)
