"""The user's objects get what a call left in its copy of the state: values, and Variables, nodes and attributes that it added or took away."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from flax import nnx

from pytest_nnxcheck import compat
from pytest_nnxcheck.inspection.fingerprint import fingerprint
from pytest_nnxcheck.inspection.raw_access import LIBRARIES, MISSING, class_dict, layout, mro, top_package
from pytest_nnxcheck.subject.subject import Subject

__tracebackhide__ = True  # pytest shows the frames of the user, not these

UPKEEP = ("_pytree__", "_object__", "_trace_state", "_graph__")
"""How flax starts the attributes in which it keeps marks of its own."""


def write_back(subject: Subject, copy: Any) -> None:
    """Give the user's objects what the call left in its copy of the state."""
    values = dict(compat.raw_leaves(copy))
    for path, variable in compat.variables(subject.state):
        # The user's real arrays stay, where the call was checked with abstract ones beside them.
        real = subject.abstract and isinstance(compat.variable_value(variable), jax.Array)
        if path in values and not real:
            compat.set_variable_value(variable, where_it_was(values[path], compat.variable_value(variable)))
    if not subject.abstract:
        graft(subject.state, copy)


def where_it_was(value: Any, before: Any) -> Any:
    """The value on the devices of the one before it: a nesting with ``shard_map`` put it on all of them."""
    if not isinstance(value, jax.Array) or not isinstance(before, jax.Array):
        return value
    return value if value.sharding.device_set == before.sharding.device_set else jax.device_put(value, before.sharding)


def graft(mine: Any, copy: Any, seen: set[int] | None = None) -> None:
    """Give a graph node of the user the attributes that its copy has, arrays among them, further in wherever both hold nodes.

    The values of Variables are not touched: those that both have are written elsewhere.
    """
    seen = set() if seen is None else seen
    if id(mine) in seen or isinstance(mine, nnx.Variable) or type(mine) is not type(copy):
        return
    seen.add(id(mine))
    stored, old, new = layout(type(mine)).read(mine) or {}, attributes(mine), attributes(copy)
    for name, value in new.items():
        held = old.get(name, MISSING)
        own, copied = nodes_in(held), nodes_in(value)
        if held is MISSING or (compat.is_graph_node(value) and type(held) is not type(value)):
            setattr(mine, name, value)
        elif own or copied:
            # A set has no order by which its nodes are those of another one.
            for node, other in zip(own, copied, strict=False) if not isinstance(held, set | frozenset) else ():
                graft(node, other, seen)
        elif has_arrays(held) and has_arrays(value):
            # Not by the hook of flax, which would ask anew whether the attribute is data.
            stored[name] = where_it_was(value, held)
        elif held is not value and fingerprint(held) != fingerprint(value):
            setattr(mine, name, value)
    for name in old.keys() - new.keys():
        delattr(mine, name)


def nodes_in(value: Any) -> list[Any]:
    """The graph nodes, Variables among them, in a tree: of a container that flax takes for a plain value, as that of a Keras layer, the copy lists those of the copy."""
    leaves = list(value) if isinstance(value, set | frozenset) else jax.tree.leaves(value, is_leaf=compat.is_graph_node)
    return [leaf for leaf in leaves if compat.is_graph_node(leaf)]


def has_arrays(value: Any) -> bool:
    return any(isinstance(leaf, jax.Array | np.ndarray) for leaf in jax.tree.leaves(value))


def attributes(node: Any) -> dict[str, Any]:
    own = layout(type(node)).read(node) or {}
    return {name: value for name, value in own.items() if not name.startswith(UPKEEP)}


def statics(state: Any) -> tuple[Any, ...]:
    """What the nodes of a graph hold beside Variables and other nodes, to compare before a call and after it."""
    return tuple(
        (str(path), name, fingerprint(value))
        for path, node in compat.iter_graph(state)
        if compat.is_graph_node(node) and not isinstance(node, nnx.Variable)
        for name, value in attributes(node).items()
        if not compat.is_graph_node(value)
    )


def compared_by_value(state: Any) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """(path, value) of the plain objects of a graph that hold arrays and whose class has an ``==``, which compares these as well, most likely.

    Jax asks for it where the same code meets a second instance of the model.
    """
    for path, node in compat.iter_graph(state):
        own = attributes(node) if compat.is_graph_node(node) and not isinstance(node, nnx.Variable) else {}
        yield from (((*path, name), value) for name, value in own.items() if has_arrays_and_eq(value))


def has_arrays_and_eq(value: Any) -> bool:
    """Whether a value is a plain object with arrays, of a class of the user's with an ``==``; no tree is one."""
    cls = type(value)
    compares = any("__eq__" in class_dict(base) for base in mro(cls)[:-1])
    if not compares or top_package(cls) in LIBRARIES or not jax.tree_util.all_leaves([value]):
        return False
    own = {} if compat.is_graph_node(value) else layout(cls).read(value) or {}
    return any(isinstance(item, jax.Array | np.ndarray) for item in own.values())
