"""The values that parity compares: the leaves and the Python attributes of a state, read once, under the names that users know.

Arrays are kept by reference (those of jax never change); plain Python values are kept by `plain`, since a call may append to the very list.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import jax

from pytest_nnxcheck.compat import graph
from pytest_nnxcheck.compat.arrays import value_of
from pytest_nnxcheck.subject.subject import Subject
from pytest_nnxcheck.walk.fingerprint import is_array, plain

__tracebackhide__ = True  # pytest shows the frames of the user, not these

UNCHANGED: Any = type("Unchanged", (), {"__slots__": ()})()
"""The mark in place of the value of a leaf that a run did not replace."""


@dataclass(frozen=True, slots=True)
class Leaf:
    """One array of the state: its value, and the type of the Variable that holds it."""

    value: Any
    kind: str


@dataclass(frozen=True, slots=True)
class Facts:
    """The leaves of a state and its Python attributes, by path."""

    leaves: Mapping[str, Leaf]
    attributes: Mapping[str, Any]


NOTHING = Facts({}, {})


@dataclass(frozen=True, slots=True)
class Structure:
    """The content of an output."""

    names: tuple[str, ...]
    """The names of its arrays, in order."""
    others: Mapping[str, Any]
    """Its other leaves (strings, say) by name."""


@dataclass(frozen=True, slots=True)
class Effect:
    """The output of one run, and the state before and after it."""

    returned: Any = None
    """A tree of flat arrays, with the axes that the layers added."""
    names: Any = ()
    """The names of these, in the same tree."""
    output: tuple[Any, ...] = ()
    """The arrays of the un-nested output."""
    structure: Structure = Structure((), {})
    before: Facts = NOTHING
    after: Facts = NOTHING
    """The facts after the run; leaves that are the very arrays of ``before`` are marked."""
    error: Exception | None = None


def changed(before: Facts, after: Facts, earlier: Facts | None = None) -> Facts:
    """The facts after a run without the arrays that it did not replace, so that a kept effect holds no copy of the state.

    Where the state ``before`` is a copy of the state after an ``earlier`` run, such an array is taken from that run.
    """

    def leaf_of(name: str, leaf: Leaf) -> Leaf:
        if name not in before.leaves or before.leaves[name].value is not leaf.value:
            return leaf
        kept = earlier.leaves.get(name) if earlier is not None else None
        return Leaf(UNCHANGED if kept is None else kept.value, leaf.kind)

    return Facts({name: leaf_of(name, leaf) for name, leaf in after.leaves.items()}, after.attributes)


def read(subject: Subject, state: Any) -> Facts:
    """The facts of a state."""
    leaves = {}
    for path, variable in graph.variables(state):
        for key, value in jax.tree_util.tree_leaves_with_path(value_of(graph.variable_value(variable))):
            name = subject.path(path) + jax.tree_util.keystr(key)
            leaves[name] = Leaf(value, graph.variable_kind(variable))
    attributes = {}
    for path, value in graph.attributes(state):
        name = subject.path(path)
        leaves |= {name + place: Leaf(array, "attribute") for place, array in arrays_in(value)}
        if not is_array(value):
            attributes[name] = plain(value)
    return Facts(leaves, attributes)


def arrays_in(value: Any) -> Iterator[tuple[str, Any]]:
    """The arrays of a plain value, with their places in lists, tuples and dicts: ``[0]['a']``."""
    if is_array(value):
        yield "", value
    items: Iterable[tuple[Any, Any]] = ()
    if isinstance(value, list | tuple):
        items = enumerate(value)
    elif isinstance(value, dict):
        items = value.items()
    for key, item in items:
        yield from ((f"[{key!r}]{place}", array) for place, array in arrays_in(item))


def structure(names: tuple[str, ...], rebuild: Callable[[tuple[Any, ...]], Any], output: tuple[Any, ...]) -> Structure:
    """The names of an output's arrays, and its leaves that are no arrays."""
    named = ["output" + name for name in names]
    rebuilt = rebuild(output)
    leaves, _ = jax.tree_util.tree_flatten_with_path(rebuilt, is_leaf=graph.is_graph_node)
    others = {
        "output" + jax.tree_util.keystr(path): plain(leaf)
        for path, leaf in leaves
        if not (is_array(leaf) or graph.is_graph_node(leaf))
    }
    return Structure(tuple(named[: len(output)]), others)
