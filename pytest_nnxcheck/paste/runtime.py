"""The part of a program beside the layers and the test: it takes a call apart, and runs or compiles it. `slicer` copies the functions that a program needs."""

from __future__ import annotations

import functools
import inspect
import operator
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from pytest_nnxcheck.compat import graph

__tracebackhide__ = True  # pytest shows the frames of the user, not these

Pack = Callable[..., tuple[Any, Callable[[Any], Any]]]
"""``pack(output, state, home)`` gives the arrays of an output, and what makes an output of them."""


# --- a call, taken apart


def is_node(value: Any) -> bool:
    return isinstance(value, nnx.Variable | nnx.State) or nnx.graph.is_graph_node(value)


def is_input(value: Any) -> bool:
    number = isinstance(value, np.ndarray | np.generic) and value.dtype.kind not in "OSUMm"
    return isinstance(value, nnx.State | jax.Array | jax.ShapeDtypeStruct) or number


def take_apart(call: Any, names: Sequence[str], pack: Pack) -> Any:
    """``(subject, args, kwargs)`` as a program of one node and arrays: the program, these, and what makes the output.

    ``names`` are those of the nodes: one node holds all of them, but where the only one is a module.
    """
    leaves, tree = jax.tree.flatten(call, is_leaf=is_node)
    nodes = [*{id(leaf): leaf for leaf in leaves if is_node(leaf) and not is_input(leaf)}.values()]
    inputs = [array for leaf in leaves if is_input(leaf) for array in jax.tree.leaves(leaf)]
    alone = len(nodes) == 1 and isinstance(nodes[0], nnx.Module)
    home = nodes[0] if alone else Nodes(**dict(zip(names, nodes, strict=True)))
    made: list[Any] = []

    def program(state: Any, *inputs: Any) -> Any:
        own = [state] if alone else [getattr(state, name) for name in names]
        mine, rest = dict(zip(map(id, nodes), own, strict=True)), iter(inputs)
        filled = [
            jax.tree.map(lambda _: next(rest), leaf) if is_input(leaf) else mine.get(id(leaf), leaf) for leaf in leaves
        ]
        subject, args, kwargs = jax.tree.unflatten(tree, filled)
        arrays, *made[:] = pack(subject(*args, **kwargs), state, home)
        return arrays

    return program, home, inputs or [jnp.zeros(())], lambda arrays: made[0](arrays)  # noqa: PLW0108


class Nodes(nnx.Module):
    def __init__(self, **nodes: Any) -> None:
        for name, node in nodes.items():
            setattr(self, name, node)


def arrays_of(output: Any, _state: Any, _home: Any) -> Any:
    values, tree = jax.tree.flatten(output)
    return tuple(map(jnp.asarray, values)), functools.partial(jax.tree.unflatten, tree)


def parts_of(output: Any, state: Any, home: Any) -> Any:
    """Split an output that holds more than arrays into its arrays and the function that makes an output of them.

    That function gives back the user's own node for a node of the state.
    """
    values, tree = jax.tree.flatten(output, is_leaf=is_node)
    parts = [part_of(value, state, home) for value in values]
    arrays, inner = jax.tree.flatten([array for array, _ in parts])
    makers = [make for _, make in parts]

    def rebuild(arrays: Any) -> Any:
        given = zip(makers, jax.tree.unflatten(inner, arrays), strict=True)
        return jax.tree.unflatten(tree, [make(array) for make, array in given])

    return tuple(map(jnp.asarray, arrays)), rebuild


def part_of(value: Any, state: Any, home: Any) -> tuple[Any, Callable[[Any], Any]]:
    if is_input(value) or isinstance(value, bool | int | float | complex):
        return value, lambda array: array
    if not is_node(value):
        return (), lambda _: value
    if (path := next((path for path, node in nnx.iter_graph(state) if node is value), None)) is not None:
        return (), lambda _: dict(nnx.iter_graph(home))[path]
    graphdef, leaves = nnx.split(Nodes(node=value))
    return leaves, lambda leaves: nnx.merge(graphdef, leaves).node  # type: ignore[attr-defined]


def unwrapped(subject: Any, args: Any, kwargs: Any) -> Any:
    """The function behind a method or a partial, with what that holds among its arguments."""
    if isinstance(subject, functools.partial):
        return unwrapped(subject.func, (*subject.args, *args), {**subject.keywords, **kwargs})
    if inspect.ismethod(subject):
        return subject.__func__, (subject.__self__, *args), kwargs
    known = graph.cached_partial(subject)
    return (subject, args, kwargs) if known is None else unwrapped(known[0], (*known[1], *args), kwargs)


# --- objects that jax cannot take apart

OPENED: dict[str, Any] = {}
"""The fields of each class that hold what a program must know: (name, whether it is an item). A program has its own table."""
FILLED: list[Any] = []
"""(object, field, its own value, that of the program) while a call runs."""


def get(owner: Any, name: Any, item: bool) -> Any:
    return owner[name] if item else getattr(owner, name, None)


def put(owner: Any, value: Any, name: Any, item: bool) -> None:
    (operator.setitem if item else object.__setattr__)(owner, name, value)


def opened(tree: Any) -> Any:
    """Let jax take objects apart by their fields; the same tree."""
    new = {type(value) for value in jax.tree.leaves(tree, is_leaf=is_node) if type(value).__qualname__ in OPENED}
    for cls in new:
        jax.tree_util.register_pytree_node(cls, read_fields, fill_fields)
    return opened(tree) if new else tree


def read_fields(owner: Any) -> Any:
    return [get(owner, *field) for field in OPENED[type(owner).__qualname__]], owner


def fill_fields(owner: Any, values: Any) -> Any:
    """The object itself, which holds the values of the program while the call runs."""
    for field, value in zip(OPENED[type(owner).__qualname__], values, strict=True):
        FILLED.append((owner, field, get(owner, *field), value))
        put(owner, value, *field)
    return owner


def emptied(output: Any, state: Any, home: Any) -> Any:
    """`parts_of`, after the objects hold their own values again, unless the call itself has put others there."""
    packed = parts_of(opened(output), state, home)
    for owner, field, old, new in FILLED:
        if get(owner, *field) is new:
            put(owner, old, *field)
    # Objects that are returned keep no tracers until they are made of arrays.
    jax.tree.map(lambda _: None, output, is_leaf=is_node)
    FILLED.clear()
    return packed


# --- state and arrays


def value_at(state: Any, *keys: Any) -> Any:
    """The value of the Variable with these keys, or a Python attribute."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(nnx.state(state)):
        if tuple(getattr(key, "key", "") for key in path)[: len(keys)] == keys:
            return leaf
    owner = dict(nnx.iter_graph(state))[keys[:-1]] if keys[:-1] else state
    return getattr(owner, str(keys[-1]), None)


# --- a program, staged

STAGED: list[Any] = []
"""The programs of the outermost jit: lowered, with the jitted function and its arguments."""


def staged(wrapper: Any, f: Any, finish: Any = None, jit: Any = jax.jit, **options: Any) -> Any:
    """``wrapper(f, **options)``, `jax.jit` or `nnx.jit`, lowered before it is called; ``finish`` gives the outputs in the place of a run."""

    def ahead(*given: Any, **options: Any) -> Any:
        def call(*args: Any) -> Any:
            jitted = jit(*given, **options)
            STAGED.append((jitted.lower(*args), jitted, args))
            return finish(STAGED[-1][0]) if finish else jitted(*args)

        return call

    with mock.patch("jax.jit", ahead):
        return (ahead if wrapper is jit else wrapper)(f, **options)


def types_of(lowered: Any) -> Any:
    """The types of the outputs of a program that is not run."""
    return jax.tree.map(lambda info: jax.ShapeDtypeStruct(info.shape, info.dtype), lowered.out_info)
