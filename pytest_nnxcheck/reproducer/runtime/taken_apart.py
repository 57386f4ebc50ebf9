"""How a pasted program takes a call apart, and puts its output together again.

Copied by `own_source`, as `long_form` is: the short form of `subject`.
"""

from __future__ import annotations

import enum
import functools
import inspect
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from pytest_nnxcheck import compat
from pytest_nnxcheck.compat.arrays import is_array
from pytest_nnxcheck.inspection.raw_access import LIBRARIES
from pytest_nnxcheck.subject.bind import argument_names, node_name
from pytest_nnxcheck.subject.subject import Nodes, copy_leaf, spell
from pytest_nnxcheck.transforms.layer import Program

__tracebackhide__ = True  # pytest shows the frames of the user, not these


@dataclass(frozen=True)
class Call:
    """One call, taken apart: ``program(state, *inputs)`` makes it, and returns arrays, which ``rebuild`` gives their structure."""

    program: Program
    state: Any
    inputs: tuple[Any, ...]
    input_names: tuple[str, ...]
    roots: Callable[[Any], list[tuple[str, Any]]]
    path: Callable[[Any], str]
    rebuild: Callable[[Any], Any]
    names: list[str]
    abstract: bool


def unwrapped(subject: Any, args: Any, kwargs: Any, name: str) -> tuple[Any, Any, Any, list[str], Any]:
    """The function behind a module, a bound method or a partial, its arguments and their names, and the object that it is called on."""
    while isinstance(subject, functools.partial) or compat.cached_partial(subject):
        if known := compat.cached_partial(subject):
            subject, args = known[0], (*known[1], *args)
        else:
            subject, args, kwargs = subject.func, (*subject.args, *args), {**subject.keywords, **kwargs}
    owner = subject.__self__ if inspect.ismethod(subject) else subject
    if inspect.isfunction(subject) or not flatten(owner, str)[0]:
        return subject, args, kwargs, argument_names(subject, args), None
    function = subject.__func__ if inspect.ismethod(subject) else type(subject).__call__
    own = name or ("model" if compat.is_graph_node(owner) else "self")
    return function, (owner, *args), kwargs, [own, *argument_names(function, (owner, *args))[1:]], owner


def take_apart(subject: Any, args: Any, kwargs: Any, name_of_owner: str = "") -> Call:
    """The call ``subject(*args, **kwargs)`` as a program of state and inputs."""
    function, args, kwargs, labels, owner = unwrapped(subject, args, kwargs, name_of_owner)

    def name(path: Any) -> str:
        root = labels[path[1].idx] if path[0].idx == 0 else str(path[1].key)
        return root + jax.tree_util.keystr(path[2:])

    parts, fill = flatten((args, kwargs), name)
    nodes: dict[str, Any] = {}
    home: dict[str, str] = {}
    inputs: list[tuple[str, Any]] = []
    places: list[Any] = []
    for label, part in parts:
        if compat.is_graph_node(part):
            places.append(node_name(nodes, label, part))
            home.setdefault(places[-1], label)
        else:
            places.append(len(inputs))
            inputs.append((label, part))
    single = len(nodes) == 1 and isinstance(next(iter(nodes.values())), nnx.Module)
    state = next(iter(nodes.values())) if single else Nodes(nodes)
    owned = {tuple(path): node for path, node in compat.iter_graph(state) if compat.is_graph_node(node)}
    last: list[Callable[[Any], Any]] = []
    outputs: list[str] = []

    def program(state: Any, *inputs: Any) -> Any:
        held = [inputs[at] if isinstance(at, int) else state if single else getattr(state, at) for at in places]
        undo: list[Callable[[], None]] = []
        new_args, new_kwargs = fill(iter(held), undo)
        try:
            found, again = flatten(function(*new_args, **new_kwargs), jax.tree_util.keystr, numbers=True)
        finally:
            for put_back in undo:
                put_back()
        arrays, make = pack([value for _, value in found], state, owned)
        outputs[:] = [each for each, value in found if not compat.is_graph_node(value)]
        last[:] = [lambda arrays: again(iter(make(arrays)), [])]
        return arrays

    def path(keys: Any) -> str:
        return spell(next(iter(home.values())), keys) if single else spell(home.get(keys[0], str(keys[0])), keys[1:])

    def roots(state: Any) -> list[tuple[str, Any]]:
        named = [(label, state if single else getattr(state, node)) for node, label in home.items()]
        objects = [] if owner is None or compat.is_graph_node(owner) else [(labels[0], owner)]
        return [*named, *objects, (getattr(function, "__qualname__", type(function).__qualname__), function)]

    def rebuilt(arrays: Any) -> Any:
        return last[0](arrays)

    values = [value for _, value in inputs] or [np.zeros((), np.float32)]
    every = [*values, *(value for _, value in compat.raw_leaves(state))]
    abstract = any(isinstance(value, jax.ShapeDtypeStruct) for value in every)
    values = [abstract_twin(value) if abstract else jnp.asarray(value) for value in values]
    names = tuple(label for label, _ in inputs)
    return Call(program, state, tuple(values), names, roots, path, rebuilt, outputs, abstract)


def is_whole(leaf: Any) -> bool:
    return isinstance(leaf, nnx.State) or compat.is_graph_node(leaf)


def flatten(tree: Any, name: Callable[[Any], str], *, numbers: bool = False, above: tuple[int, ...] = ()) -> Any:
    """(name, value) of the graph nodes and arrays in a tree, and the function that makes the tree of others in their place."""
    try:
        leaves, treedef = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_whole)
    except (TypeError, ValueError):
        return [], lambda _values, _undo: tree  # a container that jax cannot flatten holds no state
    pieces = [flatten_leaf(leaf, name(path), numbers=numbers, above=above) for path, leaf in leaves]

    def fill(values: Iterator[Any], undo: list[Any]) -> Any:
        return jax.tree_util.tree_unflatten(treedef, [make(values, undo) for _, make in pieces])

    return [part for parts, _ in pieces for part in parts], fill


def flatten_leaf(leaf: Any, name: str, *, numbers: bool, above: tuple[int, ...]) -> Any:
    if isinstance(leaf, nnx.State):
        found, treedef = jax.tree_util.tree_flatten_with_path(leaf)
        paths = [jax.tree_util.keystr(path).removesuffix(".value").removesuffix(".raw_value") for path, _ in found]
        parts = [(name + path, value) for path, (_, value) in zip(paths, found, strict=True)]
        return parts, lambda values, _: jax.tree_util.tree_unflatten(treedef, [next(values) for _ in found])
    number = numbers and isinstance(leaf, bool | int | float | complex)
    if compat.is_graph_node(leaf) or is_array(leaf) or isinstance(leaf, jax.ShapeDtypeStruct) or number:
        return [(name, leaf)], lambda values, _: next(values)
    above = (*above, id(leaf))
    inner = fields(leaf) if len(above) == len({*above}) < DEEPEST else []
    held = {key: flatten(value, keyed(name + key), above=above) for key, value in inner}
    held = {key: parts for key, parts in held.items() if parts[0]}

    def fill(values: Iterator[Any], undo: list[Any]) -> Any:
        """The object itself, which holds the values of the program while the call runs."""
        for key, (_, make) in held.items():
            old, new = dict(fields(leaf))[key], make(values, undo)
            put(leaf, key, new)
            undo.append(functools.partial(put_if, leaf, key, new, old))
        return leaf

    return [part for parts, _ in held.values() for part in parts], fill


DEEPEST = 7


def keyed(name: str) -> Callable[[Any], str]:
    return lambda path: name + jax.tree_util.keystr(path)


def put_if(owner: Any, key: str, new: Any, old: Any) -> None:
    """What the call itself has put there stays."""
    if dict(fields(owner)).get(key) is new:
        put(owner, key, old)


def fields(value: Any) -> list[tuple[str, Any]]:
    """What a plain object of the user holds: (``.name`` or ``['key']``, value)."""
    packages = [base.__module__.partition(".")[0] for base in type(value).__mro__]
    known = packages[0] in LIBRARIES and not isinstance(value, types.SimpleNamespace)
    if isinstance(value, type | enum.Enum) or known or {"jax", "jaxlib", "flax"}.intersection(packages):
        return []
    places = [vars(base).items() for base in type(value).__mro__ if base is not types.SimpleNamespace]
    slots = [name for place in places for name, slot in place if inspect.ismemberdescriptor(slot)]
    found = [*getattr(value, "__dict__", {}).items(), *((name, getattr(value, name, None)) for name in slots)]
    items = dict.items(value) if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [*((f".{key}", held) for key, held in found), *((f"[{key!r}]", held) for key, held in items)]


def put(owner: Any, key: str, value: Any) -> None:
    """Set a field by the name that `fields` gives it."""
    if key.startswith("."):
        object.__setattr__(owner, key[1:], value)
    else:
        place = next(each for each in (owner if isinstance(owner, dict) else range(len(owner))) if f"[{each!r}]" == key)
        (dict if isinstance(owner, dict) else list).__setitem__(owner, place, value)


def pack(values: list[Any], state: Any, owned: Any) -> Any:
    """The arrays of an output, graph nodes taken apart, and what makes the output's values of them; nodes of the state are the user's own."""
    mine = {id(node): tuple(path) for path, node in compat.iter_graph(state) if compat.is_graph_node(node)}
    arrays: list[Any] = []
    makers: list[Callable[[Any], Any]] = []
    for value in values:
        if id(value) in mine:
            makers.append(functools.partial(lambda path, _: owned.get(path), mine[id(value)]))
        elif compat.is_graph_node(value):
            graphdef, leaves = compat.split(Nodes({"node": value}))
            flat, treedef = jax.tree.flatten(leaves)
            makers.append(
                functools.partial(unpack_node, graphdef, treedef, slice(len(arrays), len(arrays) + len(flat)))
            )
            arrays += flat
        else:
            makers.append(functools.partial(lambda index, arrays: arrays[index], len(arrays)))
            arrays.append(jnp.asarray(value))
    return tuple(arrays), lambda arrays: [make(arrays) for make in makers]


def unpack_node(graphdef: Any, treedef: Any, part: slice, arrays: Any) -> Any:
    merged: Any = nnx.merge(graphdef, jax.tree.unflatten(treedef, arrays[part]))
    return merged.node


def copied(state: Any) -> Any:
    """The same graph with arrays of its own: what a run donates is not the user's."""
    graphdef, leaves = compat.split(state)
    return nnx.merge(graphdef, jax.tree.map(copy_leaf, leaves))


def abstract_twin(leaf: Any) -> Any:
    """The shape of an array, an object of its own, with its sharding where it lies on several devices."""
    if not hasattr(leaf, "shape"):
        return leaf
    sharding = getattr(leaf, "sharding", None)
    several = sharding is not None and len(sharding.device_set) > 1
    kind = (
        leaf.dtype if isinstance(leaf, jax.Array | jax.ShapeDtypeStruct) else jax.dtypes.canonicalize_dtype(leaf.dtype)
    )
    return jax.ShapeDtypeStruct(leaf.shape, kind, sharding=sharding if several else None)
