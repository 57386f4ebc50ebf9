"""The contents of a module at one moment, and the difference of two such moments; the changes of a call, given to the user's objects.

All is read without running code of the user's.
"""

from __future__ import annotations

import functools
import operator
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from flax import nnx

from pytest_nnxcheck.compat import flax_modes, graph
from pytest_nnxcheck.compat.arrays import is_array, is_held_ref, is_in_ref, value_of
from pytest_nnxcheck.compat.owner import is_library
from pytest_nnxcheck.core.facts import Path
from pytest_nnxcheck.subject.subject import Subject, spell
from pytest_nnxcheck.walk.fingerprint import Known, equal, fingerprint, short
from pytest_nnxcheck.walk.raw_access import MISSING, class_dict, layout, mro, top_package

__tracebackhide__ = True  # pytest shows the frames of the user, not these


@dataclass(frozen=True, slots=True)
class Contents:
    """The contents of a module at one moment, by path, but for the values of its leaves."""

    variables: dict[Path, Any]
    metadata: dict[Path, Any]
    """The metadata of its Variables, by the path of the Variable and the name."""
    attributes: dict[Path, Any]
    """The fingerprints of the attributes of its nodes beside Variables and other nodes: what changes in place has another one then."""

    @classmethod
    def of(cls, module: Any) -> Contents:
        """The contents of a module as it is now."""
        found, known = dict(graph.variables(module)), Known()
        return cls(
            found,
            {
                (*path, name): value
                for path, each in found.items()
                for name, value in graph.variable_metadata(each).items()
            },
            {path: fingerprint(value, known=known) for path, value in graph.attributes(module, with_nodes=True)},
        )


def diff(
    before: Mapping[Any, Any], after: Mapping[Any, Any], same: Callable[[Any, Any], bool] = operator.eq
) -> Iterator[tuple[Any, Any, Any]]:
    """(path, value before, value after) of all that is not the ``same`` in both; the value is `MISSING` where there is none."""
    for path in dict.fromkeys((*before, *after)):
        was, became = before.get(path, MISSING), after.get(path, MISSING)
        if not same(was, became):
            yield path, was, became


# --- back into the user's objects


def write_back(subject: Subject, copy: Any) -> None:
    """Give the user's objects the values and attributes of the call's copy of the state."""
    values = dict(graph.raw_leaves(copy))
    for path, variable in graph.variables(subject.state):
        held, value = graph.variable_value(variable), values.get(path)
        # Beside abstract arrays the user's real ones stay, and the twin of a reference is as the call found it.
        stays = subject.abstract and (isinstance(held, jax.Array) or is_in_ref(held) or is_in_ref(value))
        if path in values and not stays:
            graph.set_variable_value(variable, value if is_held_ref(held) else where_it_was(value_of(value), held))
    if not subject.abstract:
        graft(subject.state, copy)


def where_it_was(value: Any, before: Any) -> Any:
    """The value on the devices of the one before it: a nesting with ``shard_map`` put it on all of them."""
    if not isinstance(value, jax.Array) or not isinstance(before, jax.Array):
        return value
    return value if value.sharding.device_set == before.sharding.device_set else jax.device_put(value, before.sharding)


def graft(mine: Any, copy: Any) -> None:
    """Give a graph node of the user the attributes that its copy has, arrays among them, as flax keeps them there: as data, or not.

    Nodes that both have in one place stay the user's own, wherever the copy has them by now. The values of Variables are written elsewhere.
    """
    pairs = counterparts(mine, copy)
    own = {id(other): node for node, other in pairs}
    for node, other in pairs:
        if not isinstance(other, nnx.Variable):
            take_over(node, other, own)


def take_over(mine: Any, copy: Any, own: dict[int, Any]) -> None:
    """Give one node the attributes of another; ``own`` has the user's node for each of the copy, by id.

    It writes without the hook of flax, which would decide anew whether the attribute is data, and without the user's, which has run.
    """
    stored, old, new = layout(type(mine)).read(mine) or {}, graph.attributes_of(mine), graph.attributes_of(copy)
    for name, given in new.items():
        held, value = old.get(name, MISSING), with_nodes(given, own)
        # A set has no order by which its nodes are those of another one.
        nodes_of_a_set = isinstance(held, set | frozenset) and any(map(graph.is_graph_node, held))
        if held is MISSING or not (nodes_of_a_set or same(held, value)):
            stored[name] = where_it_was(value, held)
    for name in old.keys() - new.keys():
        del stored[name]
    graph.take_marks(mine, copy)


def counterparts(mine: Any, copy: Any) -> list[tuple[Any, Any]]:
    """Each graph node of a copy, Variables among them, with that of the user's in the same place; with itself where there is none of its type."""
    pairs: dict[int, tuple[Any, Any]] = {}
    taken: set[int] = set()
    both, added = deque([(mine, copy)]), deque[Any]()
    while both or added:
        # Added nodes come last: they may be in another place, where the user has one.
        own, other = both.popleft() if both else (added.popleft(),) * 2
        if id(other) in pairs:
            continue
        if own is not other and (type(own) is not type(other) or id(own) in taken):
            added.append(other)
            continue
        pairs[id(other)] = own, other
        taken.add(id(own))
        old = graph.attributes_of(own) if own is not other else {}
        for name, value in graph.attributes_of(other).items():
            held = nodes_in(old.get(name))
            both += [(held.get(path), node) for path, node in nodes_in(value).items()]
    return list(pairs.values())


def nodes_in(value: Any) -> dict[Any, Any]:
    """The graph nodes, Variables among them, in a tree, by their places; a list in a plain value, as that of a Keras layer, has those of the copy in the copy."""
    if type(value) in graph.PLAIN:
        return {}
    leaves, _ = jax.tree_util.tree_flatten_with_path(value, is_leaf=graph.is_graph_node)
    return {path: leaf for path, leaf in leaves if graph.is_graph_node(leaf)}


def with_nodes(value: Any, own: dict[int, Any]) -> Any:
    """A tree with the user's own nodes in the place of those of the copy."""
    if not nodes_in(value):
        return value
    return jax.tree.map(lambda leaf: own.get(id(leaf), leaf), value, is_leaf=graph.is_graph_node)


def same(held: Any, value: Any) -> bool:
    """True if two trees have the very same nodes and arrays, and other leaves with equal fingerprints."""
    if held is value and type(value) in graph.PLAIN:
        return True
    flat: Any = [jax.tree.flatten(tree, is_leaf=graph.is_graph_node) for tree in (held, value)]
    (mine, old), (others, new) = flat
    return bool(old == new) and all(
        one is other or not (is_kept(one) or is_kept(other) or fingerprint(one) != fingerprint(other))
        for one, other in zip(mine, others, strict=True)
    )


def is_kept(leaf: Any) -> bool:
    """True if a leaf is compared by identity."""
    return graph.is_graph_node(leaf) or isinstance(leaf, jax.Array | np.ndarray)


def compared_by_value(state: Any) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """(path, value) of the plain objects of a graph that hold arrays and whose class has an ``==``, which compares these as well, most likely.

    Jax asks for it where the same code meets a second instance of the model.
    """
    for path, value in graph.attributes(state):
        if has_arrays_and_eq(value):
            yield path, value


def has_arrays_and_eq(value: Any) -> bool:
    """True if a value is a plain object with arrays, of a class of the user's with an ``==``; no tree is one."""
    cls = type(value)
    compares = any("__eq__" in class_dict(base) for base in mro(cls)[:-1])
    if not compares or is_library(top_package(cls)) or not jax.tree_util.all_leaves([value]):
        return False
    own = {} if graph.is_graph_node(value) else layout(cls).read(value) or {}
    return any(isinstance(item, jax.Array | np.ndarray) for item in own.values())


# --- parts of a call that the same code makes anew, and that a jit tells apart


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
