"""The reasons why a jit traces again: state with another type after a call, objects and inner jits that the same code makes anew each time."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import FrameType
from typing import Any

import jax
from flax import nnx

from pytest_nnxcheck.compat import flax_modes, frames, graph
from pytest_nnxcheck.compat.arrays import NUMBERS, describe, is_array
from pytest_nnxcheck.compat.owner import is_library_file
from pytest_nnxcheck.core.outcome import MISSING, JitTracedAgain, TypeMoved
from pytest_nnxcheck.core.text import beginning, near
from pytest_nnxcheck.subject.subject import Subject, on_arrays, spell
from pytest_nnxcheck.walk.fingerprint import equal, fingerprint

__tracebackhide__ = True  # pytest shows the frames of the user, not these

# --- types and attributes that a jit compiles for, and a call replaces


def moved(subject: Subject, before: Any, after: Any) -> tuple[TypeMoved, ...]:
    """The parts of the state that differ after a call, so that a jit compiles again: attributes first, then the types of leaves. Never empty."""
    return (*attributes_moved(subject, before, after), *types_moved(subject, before, after)) or (TypeMoved(),)


def attributes_moved(subject: Subject, before: Any, after: Any) -> Iterator[TypeMoved]:
    old, new = (dict(graph.attributes(state)) for state in (before, after))
    for path in dict.fromkeys([*old, *new]):
        texts = [short(values[path]) if path in values else MISSING for values in (old, new)]
        if (path in old) != (path in new) or not equal(old[path], new[path], unknown=True, typed=True):
            kind = type(old.get(path)).__name__
            yield TypeMoved(subject.path(path), label="attribute", type=kind, before=texts[0], after=texts[1])


def types_moved(subject: Subject, before: Any, after: Any) -> Iterator[TypeMoved]:
    old, new = (dict(graph.raw_leaves(state)) for state in (before, after))
    for path in dict.fromkeys([*old, *new]):
        texts = [typed(leaves[path]) if path in leaves else MISSING for leaves in (old, new)]
        if texts[0] != texts[1]:
            hardened = path in old and path in new and weak(old[path]) and not weak(new[path])
            yield TypeMoved(subject.path(path), label="leaf", before=texts[0], after=texts[1], hardened=hardened)


def typed(leaf: Any) -> str:
    """The type of a leaf as jax tells it from another."""
    return f"{describe(leaf)}{', weakly typed' if weak(leaf) else ''}"


def weak(leaf: Any) -> bool:
    """True if a leaf is a number of Python's, or was made of one."""
    return isinstance(leaf, NUMBERS) or bool(getattr(leaf, "weak_type", False))


# --- objects that the same code makes anew


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


# --- jits inside the call


@dataclass(frozen=True, slots=True)
class JitTrace:
    """One trace that a jit made of a function: its name, the line where it begins, and the types of the arrays."""

    function: str
    line: str
    types: tuple[str, ...]


def jits_traced_again(subject: Subject) -> tuple[JitTracedAgain, ...]:
    """The functions that the second of two calls traces for the same types as the first one; none where a call changes the types of the state.

    Both calls are made in one abstract evaluation, on the same module: the second one finds a jit that is kept there, or in a global.
    """
    first, second = traces_of_two_calls(subject)
    again = [(trace, called) for trace, called in second if trace in {trace for trace, _ in first}]
    lines: dict[tuple[str, str], list[str]] = {}
    for trace, called in again:
        lines.setdefault((trace.function, trace.line), []).append(called)
    return tuple(
        JitTracedAgain(function, line=line, called=tuple(dict.fromkeys(called)), times=len(called))
        for (function, line), called in lines.items()
    )


Traces = list[tuple[JitTrace, str]]
"""Traces of one call, each with the line that calls the jit."""


def traces_of_two_calls(subject: Subject) -> tuple[Traces, Traces]:
    """The traces by jits inside a call in the first of two calls, and in the second."""
    subject = subject.for_run()
    traces: tuple[Traces, Traces] = [], []
    types: list[Any] = []

    def twice(module: Any, *inputs: Any) -> None:
        types.append(types_of(module))
        for noted in traces:
            with frames.jits_traced(functools.partial(note, noted)):
                subject.program(module, *inputs)
            types.append(types_of(module))

    function, arguments = on_arrays(twice, subject)
    try:
        jax.eval_shape(function, *arguments)
    except Exception:  # noqa: BLE001 - the user's code may raise anything; a call that cannot be made twice is not judged
        return [], []
    before, *after = types
    return traces if all(equal(before, each, unknown=False) for each in after) else ([], [])


def types_of(module: Any) -> Any:
    """The static parts and types of a module that a jit compiles for."""
    graphdef, leaves = flax_modes.split(module)
    return graphdef, [*map(typed, jax.tree.leaves(leaves))]


def note(noted: Traces, jit: FrameType, caller: FrameType, by_library: bool) -> None:
    """Note the trace of a jit of the user's: the user calls it, or wrote the function."""
    trace, called = trace_of(jit, caller)
    if trace.line or not by_library:
        noted.append((trace, called))


def trace_of(jit: FrameType, caller: FrameType) -> tuple[JitTrace, str]:
    """The function that a jit traces, as its frame shows, and the line that calls the jit."""
    held = jit.f_locals
    function = plain(held.get("fun"))
    code = getattr(function, "__code__", None)
    line = beginning(code) if code and not is_library_file(code.co_filename) else ""
    name = getattr(function, "__qualname__", type(function).__qualname__)
    types = tuple(map(typed, jax.tree.leaves((held.get("args"), held.get("kwargs")))))
    return JitTrace(name, line, types), near(f"{caller.f_code.co_filename}:{caller.f_lineno}")


def plain(function: Any) -> Any:
    """The function that the user wrote, without the transforms and partials around it."""
    inner = inspect.unwrap(function) if callable(function) else function
    inner = inner.func if isinstance(inner, functools.partial) else getattr(inner, "__func__", inner)
    return inner if inner is function else plain(inner)
