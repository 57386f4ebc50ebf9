"""The objects that the same code makes anew for each nesting, and that a jit tells apart."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator, Mapping
from typing import Any

from flax import nnx

from pytest_nnxcheck.compat import flax_modes, graph
from pytest_nnxcheck.compat.arrays import is_array
from pytest_nnxcheck.subject.subject import Subject, spell
from pytest_nnxcheck.walk.fingerprint import equal, fingerprint

__tracebackhide__ = True  # pytest shows the frames of the user, not these


def static_parts(subject: Subject) -> dict[str, Any]:
    """The parts of a call's arguments that a jit compares beside the types of arrays, by name."""
    attributes = {path: value for path, value in graph.attributes(subject.state) if not str(path[-1]).isdigit()}
    # In a list with modules are items that are none: flax takes the list apart. Those of an `nnx.List` are attributes, named by digits, as well.
    nodes = [(tuple(path), value) for path, value in flax_modes.iter_graph(subject.state)]
    lists = {path for path, value in nodes if graph.is_graph_node(value) or graph.holds_nodes(value)}
    items = {path: value for path, value in nodes if path and path[:-1] in lists and path not in lists}
    metadata = {
        (*path, name): value
        for path, variable in graph.variables(subject.state)
        for name, value in graph.variable_metadata(variable).items()
    }
    parts = {**items, **attributes, **metadata}
    named = {subject.path(path): value for path, value in parts.items() if not is_upkeep(path[-1], value)}
    return {**named, **dict(subject.static)}


def is_upkeep(key: Any, value: Any) -> bool:
    """True if flax keeps an attribute for itself, or a jit takes it for data."""
    return graph.is_upkeep(key) or is_array(value) or isinstance(value, nnx.State)


def other_parts(first: Mapping[str, Any], now: Mapping[str, Any], *, by_value: bool) -> Iterator[str]:
    """The parts that are not equal to those of the same name, though the same code made them, each with its description. With ``by_value`` also those that other code or other values made."""
    for name, value in now.items():
        if name not in first or equal(first[name], value, unknown=True, typed=True):
            continue
        if by_value or fingerprint(first[name]) == fingerprint(value):
            yield from smallest_parts(name, first[name], value)


def smallest_parts(name: str, one: Any, other: Any) -> Iterator[str]:
    """The items of two containers that differ, or the values themselves: ``optimizer.tx.init (optax.chain.<locals>.init_fn)``."""
    items = (items_of(one), items_of(other))
    if items[0].keys() != items[1].keys() or not items[0]:
        yield f"{name} ({described(other)})"
        return
    for key, item in items[1].items():
        if not equal(items[0][key], item, unknown=True, typed=True):
            yield from smallest_parts(spell(name, (key,)), items[0][key], item)


def items_of(value: Any) -> dict[Any, Any]:
    """The items of a container of Python's, by field, number or key; empty for any other value."""
    if isinstance(value, dict):
        return value
    if not isinstance(value, tuple | list):
        return {}
    return dict(zip(getattr(value, "_fields", range(len(value))), value, strict=False))


def described(value: Any) -> str:
    """A part as one finds it: a function by its module and name, an object by its class."""
    if isinstance(value, functools.partial):
        return f"a partial of {described(value.func)}"
    if hasattr(value, "__qualname__"):
        return f"{value.__module__}.{value.__qualname__}"
    return short(value)


def short(value: Any) -> str:
    """A value in a message; an object that is no plain value, whose text may be an address, by its type alone."""
    plain = value is None or isinstance(value, bool | int | float | complex | str | bytes | tuple | list)
    return f"{value!r:.60}" if plain else f"a {type(value).__name__}"


def plain(function: Any) -> Any:
    """The function that the user wrote, without the transforms and partials around it."""
    inner = inspect.unwrap(function) if callable(function) else function
    inner = inner.func if isinstance(inner, functools.partial) else getattr(inner, "__func__", inner)
    return inner if inner is function else plain(inner)
