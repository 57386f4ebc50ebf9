"""The subject of a check: a callable, the graph nodes it touches (its state), and its inputs.

`bind` takes a call as the user wrote it apart, and `Subject.fresh` makes the state that every program gets.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from pytest_nnxcheck import compat
from pytest_nnxcheck.twins import abstract_inputs, abstract_state
from pytest_nnxcheck.verdicts import CheckError

__tracebackhide__ = True  # pytest shows the frames of the user, not these

Path = tuple[Any, ...]


class Nodes(nnx.Module):
    """The graph nodes of a subject that has several, or none, as one node; shared Variables stay shared."""

    def __init__(self, nodes: Mapping[str, Any]) -> None:
        for name, node in nodes.items():
            setattr(self, name, node)


@dataclass(frozen=True, slots=True)
class Place:
    """Where a leaf of the call's arguments comes from: a graph node by name, or an input by number."""

    node: str | None = None
    input: int | None = None


@dataclass(slots=True)
class Outbox:
    """The structure of what the subject returned last; its arrays travel through the program."""

    rebuild: Callable[[tuple[Any, ...]], Any] = field(default=lambda arrays: arrays)


@dataclass(frozen=True, slots=True)
class Subject:
    """One call of the user's object, taken apart.

    ``program(state, *inputs)`` returns a flat tuple of arrays; ``outbox`` gives them back the structure the user returned.
    ``program_of`` makes the same call of another function.
    """

    name: str
    function: Callable[..., Any]
    program: Callable[..., tuple[Any, ...]]
    program_of: Callable[[Callable[..., Any]], Callable[..., tuple[Any, ...]]]
    state: Any
    names: tuple[str, ...]
    inputs: tuple[Any, ...]
    input_names: tuple[str, ...]
    static: tuple[str, ...]
    outbox: Outbox
    abstract: bool

    def fresh(self) -> Any:
        """The same graph with arrays of its own: a donated copy leaves the user's arrays alone. All abstract, or none."""
        graphdef, leaves = compat.split(self.state)
        return nnx.merge(graphdef, abstract_state(leaves) if self.abstract else jax.tree.map(copy_leaf, leaves))

    def path(self, path: Path) -> str:
        """A path of the state as the user would write it: ``model.layers[0].kernel``."""
        root = "" if isinstance(self.state, Nodes) else self.names[0]
        return spell(root, path)

    def roots(self, state: Any) -> list[tuple[str, Any]]:
        """Where the walk over a copy of the state begins: the graph nodes under the user's names, then the code."""
        nodes = (
            [(name, getattr(state, name)) for name in self.names]
            if isinstance(state, Nodes)
            else [(self.names[0], state)]
        )
        return [*nodes, (function_name(self.function), self.function)]


def spell(root: str, path: Path) -> str:
    """Join a path onto its root: attributes after a dot, numbers and other keys in brackets."""
    parts = [f".{key}" if isinstance(key, str) and key.isidentifier() else f"[{key!r}]" for key in path]
    return (root + "".join(parts)).removeprefix(".")


def function_name(function: Any) -> str:
    """The name of the user's code in messages."""
    return getattr(function, "__qualname__", None) or type(function).__qualname__


def bind(subject: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Subject:
    """Take a call apart. Raises `CheckError` for a subject that is not callable."""
    function, args, kwargs, labels = unwrap(subject, args, kwargs)
    leaves, treedef = jax.tree_util.tree_flatten_with_path((args, kwargs), is_leaf=compat.is_graph_node)
    nodes: dict[str, Any] = {}
    inputs: list[Any] = []
    input_names: list[str] = []
    places: list[Any] = []
    static: list[str] = []
    for path, leaf in leaves:
        label = name_of(path, labels)
        if compat.is_graph_node(leaf):
            places.append(Place(node=node_name(nodes, label, leaf)))
        elif isinstance(leaf, jax.Array | np.ndarray | np.generic | jax.ShapeDtypeStruct):
            places.append(Place(input=len(inputs)))
            inputs.append(leaf)
            input_names.append(label)
        else:
            places.append(leaf)
            static.append(f"{label}={leaf!r}")
    return assemble(subject, function, treedef, places, nodes, inputs, input_names, static)


def unwrap(
    subject: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, tuple[Any, ...], dict[str, Any], list[str]]:
    """The function behind a module, a bound method or a partial; what they hold, put among its arguments; names of those."""
    if not callable(subject):
        raise CheckError(
            f"nnx_wrap got {type(subject).__name__}, which is not callable: "
            "wrap a module with __call__, a bound method such as model.decode, or a function"
        )
    if isinstance(subject, functools.partial):
        return unwrap(subject.func, (*subject.args, *args), {**subject.keywords, **kwargs})
    owner = None
    if compat.is_graph_node(subject):
        owner, subject = subject, type(subject).__call__
    elif inspect.ismethod(subject) and compat.is_graph_node(subject.__self__):
        owner, subject = subject.__self__, subject.__func__
    if owner is None:
        return subject, args, kwargs, argument_names(subject, args)
    args = (owner, *args)
    return subject, args, kwargs, ["model", *argument_names(subject, args)[1:]]


def argument_names(function: Any, args: tuple[Any, ...]) -> list[str]:
    """The names of the parameters that take the positional arguments."""
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        parameters = []
    names = []
    for index in range(len(args)):
        last = parameters[min(index, len(parameters) - 1)] if parameters else None
        if last is None:
            names.append(f"argument {index}")
        elif last.kind is inspect.Parameter.VAR_POSITIONAL:
            names.append(f"{last.name}[{index - len(parameters) + 1}]")
        else:
            names.append(last.name)
    return names


def name_of(path: Any, labels: list[str]) -> str:
    """What the user calls a leaf of ``(args, kwargs)``: ``batch['x']``."""
    root = labels[path[1].idx] if path[0].idx == 0 else str(path[1].key)
    return root + jax.tree_util.keystr(path[2:])


def node_name(nodes: dict[str, Any], label: str, node: Any) -> str:
    """File a graph node under an attribute name; the same object keeps one name."""
    for name, known in nodes.items():
        if known is node:
            return name
    name = base = re.sub(r"\W+", "_", label).strip("_") or "node"
    while name in nodes:
        name = f"{base}_{len(nodes)}"
    nodes[name] = node
    return name


def assemble(
    subject: Any,
    function: Callable[..., Any],
    treedef: Any,
    places: list[Any],
    nodes: dict[str, Any],
    inputs: list[Any],
    input_names: list[str],
    static: list[str],
) -> Subject:
    """Put the parts of a call together as a program of state and inputs."""
    names = tuple(nodes)
    single = len(nodes) == 1 and isinstance(next(iter(nodes.values())), nnx.Module)
    state = nodes[names[0]] if single else Nodes(nodes)
    outbox = Outbox()

    def fill(place: Any, state: Any, inputs: tuple[Any, ...]) -> Any:
        if not isinstance(place, Place):
            return place
        if place.input is not None:
            return inputs[place.input]
        return state if single else getattr(state, str(place.node))

    def program_of(function: Callable[..., Any]) -> Callable[..., tuple[Any, ...]]:
        def program(state: Any, *inputs: Any) -> tuple[Any, ...]:
            args, kwargs = jax.tree_util.tree_unflatten(treedef, [fill(place, state, inputs) for place in places])
            arrays, outbox.rebuild = flatten_output(function(*args, **kwargs))
            return arrays

        return program

    values = [*inputs, *(value for _, value in compat.raw_leaves(state))]
    abstract = any(isinstance(value, jax.ShapeDtypeStruct) for value in values)
    # A program without inputs would give the layers nothing to map over and the guards no tracer to know their trace by.
    filled = inputs or [np.zeros((), np.float32)]
    return Subject(
        name=getattr(subject, "__qualname__", None) or type(subject).__qualname__,
        function=function,
        program=program_of(function),
        program_of=program_of,
        state=state,
        names=names,
        inputs=abstract_inputs(filled) if abstract else tuple(map(jnp.asarray, filled)),
        input_names=tuple(input_names),
        static=tuple(static),
        outbox=outbox,
        abstract=abstract,
    )


def flatten_output(output: Any) -> tuple[tuple[Any, ...], Callable[[tuple[Any, ...]], Any]]:
    """The arrays of an output, and the function that gives them back its structure.

    Numbers become arrays, as under `jax.jit`; graph nodes are split and merged again; other leaves (strings, say) stay as they are.
    """
    leaves, treedef = jax.tree_util.tree_flatten(output, is_leaf=compat.is_graph_node)
    parts: list[tuple[int, Callable[[tuple[Any, ...]], Any]]] = []
    arrays: list[Any] = []
    for leaf in leaves:
        found, rebuild = flatten_leaf(leaf)
        parts.append((len(found), rebuild))
        arrays.extend(found)

    def rebuild_all(arrays: tuple[Any, ...]) -> Any:
        rest, values = list(arrays), []
        for count, rebuild in parts:
            values.append(rebuild(tuple(rest[:count])))
            del rest[:count]
        return jax.tree_util.tree_unflatten(treedef, values)

    return tuple(arrays), rebuild_all


def flatten_leaf(leaf: Any) -> tuple[tuple[Any, ...], Callable[[tuple[Any, ...]], Any]]:
    """The arrays of one leaf of an output, and how to build the leaf from them."""
    if compat.is_graph_node(leaf):
        graphdef, state = compat.split(Nodes({"node": leaf}))
        values, treedef = jax.tree_util.tree_flatten(state)

        def rebuild(arrays: tuple[Any, ...]) -> Any:
            holder: Any = nnx.merge(graphdef, jax.tree_util.tree_unflatten(treedef, arrays))
            return holder.node

        return tuple(values), rebuild
    if isinstance(leaf, jax.Array | np.ndarray | np.generic | bool | int | float | complex):
        return (jnp.asarray(leaf),), lambda arrays: arrays[0]
    return (), lambda _: leaf


def copy_leaf(leaf: Any) -> Any:
    if isinstance(leaf, jax.Array):
        try:
            return jnp.copy(leaf)
        except ValueError:
            # Under jax.set_mesh nothing is computed on an array that is committed to other devices.
            return jax.device_put(leaf, leaf.sharding, may_alias=False)
    return np.array(leaf) if isinstance(leaf, np.ndarray) else leaf
