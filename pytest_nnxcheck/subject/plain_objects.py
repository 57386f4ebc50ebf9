"""Plain Python objects that hold graph nodes or arrays: a dataclass that nobody registered, a trainer with its model.

jax takes such an object for one leaf, and what it holds would be captured instead of handed in. Here the object is opened: what
it holds becomes leaves of the call, and while the call runs, the object itself holds the values of the program.
"""

from __future__ import annotations

import argparse
import dataclasses
import enum
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.tree_util import DictKey, GetAttrKey, keystr, register_pytree_with_keys

from pytest_nnxcheck.compat import graph
from pytest_nnxcheck.compat.owner import is_library, owner
from pytest_nnxcheck.walk.openers import holds_state
from pytest_nnxcheck.walk.raw_access import MISSING, layout, mro, top_package

__tracebackhide__ = True  # pytest shows the frames of the user, not these

DEEPEST = 6
"""The depth of objects inside objects: a trainer, its state, the optimizer of that."""

_OPEN = (types.SimpleNamespace, argparse.Namespace)
"""Classes of the standard library whose instances are the user's data."""


class _Same:
    """An object as part of a tree structure: compared by identity, since ``==`` is the user's code."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)


@dataclass(frozen=True, slots=True)
class Opened:
    """An object, and those of its fields that hold graph nodes or arrays."""

    original: Any
    fields: tuple[tuple[str, Any], ...]
    """("attribute" or "item", name) of each."""
    values: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Bare:
    """An `nnx.State`, down to its arrays: from flax 0.12 on it holds Variables, which are graph nodes elsewhere."""

    treedef: Any
    texts: tuple[str, ...]
    values: tuple[Any, ...]


def _keys_of_opened(opened: Opened) -> Any:
    keys = [GetAttrKey(name) if kind == "attribute" else DictKey(name) for kind, name in opened.fields]
    return list(zip(keys, opened.values, strict=True)), (_Same(opened.original), opened.fields)


def _keys_of_bare(bare: Bare) -> Any:
    keys = [_Text(text) for text in bare.texts]
    return list(zip(keys, bare.values, strict=True)), (bare.treedef, bare.texts)


@dataclass(frozen=True)
class _Text:
    """A key of several steps."""

    text: str

    def __str__(self) -> str:
        return self.text


register_pytree_with_keys(Opened, _keys_of_opened, lambda aux, values: Opened(aux[0].value, aux[1], tuple(values)))
register_pytree_with_keys(Bare, _keys_of_bare, lambda aux, values: Bare(aux[0], aux[1], tuple(values)))


def is_leaf(value: Any) -> bool:
    """True if `open_up` looks at a value as a whole."""
    return isinstance(value, nnx.State) or graph.is_graph_node(value)


def open_up(tree: Any, above: tuple[int, ...] = ()) -> Any:
    """The tree, with every plain object that holds graph nodes or arrays as an `Opened`, every `nnx.State` as a `Bare`."""
    leaves, treedef = jax.tree_util.tree_flatten(tree, is_leaf=is_leaf)
    opened = [_open(leaf, above) for leaf in leaves]
    if all(old is new for old, new in zip(leaves, opened, strict=True)):
        return tree
    return jax.tree_util.tree_unflatten(treedef, opened)


def _open(leaf: Any, above: tuple[int, ...]) -> Any:
    if isinstance(leaf, nnx.State):
        with_paths, treedef = jax.tree_util.tree_flatten_with_path(leaf)
        texts = (keystr(path).removesuffix(".value").removesuffix(".raw_value") for path, _ in with_paths)
        return Bare(treedef, tuple(texts), tuple(value for _, value in with_paths))
    if id(leaf) in above or len(above) >= DEEPEST or not _may_open(leaf):
        return leaf
    also_numpy = dataclasses.is_dataclass(leaf)
    kept = []
    for field, value in _fields(leaf):
        try:
            inside = open_up(value, (*above, id(leaf)))
            has_arrays = any(_counts(value, also_numpy) for value in jax.tree_util.tree_leaves(inside, is_leaf=is_leaf))
        except (TypeError, ValueError):
            continue  # a container that jax cannot flatten: it stays what it is
        if has_arrays:
            kept.append((field, inside))
    return Opened(leaf, tuple(field for field, _ in kept), tuple(value for _, value in kept)) if kept else leaf


def _counts(value: Any, also_numpy: bool) -> bool:
    arrays = (jax.Array, jax.ShapeDtypeStruct, np.ndarray) if also_numpy else (jax.Array, jax.ShapeDtypeStruct)
    return isinstance(value, arrays) or graph.is_graph_node(value)


def _may_open(value: Any) -> bool:
    """True if an object is the user's data: no class, no member of an enum; an object of a library only if it holds state."""
    cls = type(value)
    if isinstance(value, type | enum.Enum | jax.Array) or graph.is_graph_node(value):
        return False
    if cls in _OPEN:
        return True
    if is_library(top_package(cls)) and not holds_state(value):
        return False
    # jax and flax take apart objects of their own classes, and of classes made of these.
    return not any(owner(top_package(base)) in ("jax", "flax") for base in mro(cls))


def _fields(value: Any) -> list[tuple[tuple[str, Any], Any]]:
    """The attributes and items of an object, read without running its code."""
    stored = layout(type(value))
    own = stored.read(value) or {}
    contents: list[tuple[tuple[str, Any], Any]] = [(("attribute", name), held) for name, held in own.items()]
    contents += [(("attribute", name), held) for name, held in stored.read_slots(value) if held is not MISSING]
    if isinstance(value, dict):
        contents += [(("item", name), held) for name, held in dict.items(value)]
    elif isinstance(value, list):
        contents += [(("item", index), held) for index, held in enumerate(list.__iter__(value))]
    return contents


def _read(holder: Any, field: tuple[str, Any]) -> Any:
    kind, name = field
    try:
        if kind == "attribute":
            return object.__getattribute__(holder, name)
        return dict.__getitem__(holder, name) if isinstance(holder, dict) else list.__getitem__(holder, name)
    except (AttributeError, LookupError):
        return MISSING


def _write(holder: Any, field: tuple[str, Any], value: Any) -> None:
    kind, name = field
    if kind == "attribute":
        object.__setattr__(holder, name, value)
    elif isinstance(holder, dict):
        dict.__setitem__(holder, name, value)
    else:
        list.__setitem__(holder, name, value)


@contextmanager
def filled(tree: Any) -> Iterator[Any]:
    """The tree as the user wrote it, for as long as a call takes: opened objects themselves, holding the values that they were filled with.

    Then they get back what they held, except where the call has put something else: that is an effect of the call.
    """
    undo: list[Callable[[], None]] = []

    def fill(opened: Opened) -> Any:
        for field, value in zip(opened.fields, opened.values, strict=True):
            old, new = _read(opened.original, field), _map_opened(fill, value)
            _write(opened.original, field, new)
            undo.append(_undoing(opened.original, field, old, new))
        return opened.original

    try:
        yield _map_opened(fill, tree)
    finally:
        while undo:
            undo.pop()()


def _undoing(holder: Any, field: tuple[str, Any], old: Any, new: Any) -> Callable[[], None]:
    content = _content(new)

    def undo() -> None:
        if _read(holder, field) is new and _content(new) == content:
            _write(holder, field, old)

    return undo


def _content(value: Any) -> Any:
    """The content of a container, by identity."""
    leaves, treedef = jax.tree_util.tree_flatten(value, is_leaf=graph.is_graph_node)
    return [id(leaf) for leaf in leaves], treedef


def rebuilt(tree: Any) -> Any:
    """The tree of an output, with a new object of the same class for every opened one."""
    return _map_opened(_rebuild, tree)


def _rebuild(opened: Opened) -> Any:
    cls = type(opened.original)
    new = built_in(cls).__new__(cls)
    for field, value in _fields(opened.original):
        if field[0] == "item" and isinstance(new, list):
            list.append(new, value)
        else:
            _write(new, field, value)
    for field, value in zip(opened.fields, opened.values, strict=True):
        _write(new, field, rebuilt(value))
    return new


def built_in(cls: type) -> Any:
    """The first class in C of those that a class is made of: it makes an instance without the user's ``__new__`` and ``__init__``."""
    heap = 1 << 9
    return next(base for base in mro(cls) if not base.__flags__ & heap)


def _map_opened(change: Callable[[Opened], Any], tree: Any) -> Any:
    def change_leaf(leaf: Any) -> Any:
        if isinstance(leaf, Opened):
            return change(leaf)
        return jax.tree_util.tree_unflatten(leaf.treedef, leaf.values) if isinstance(leaf, Bare) else leaf

    return jax.tree_util.tree_map(
        change_leaf, tree, is_leaf=lambda value: isinstance(value, Opened | Bare) or graph.is_graph_node(value)
    )


def originals(tree: Any, name_of: Callable[[Any], str]) -> Iterator[tuple[str, Any]]:
    """The opened objects of a tree under their names, the outermost ones."""
    leaves = jax.tree_util.tree_leaves_with_path(
        tree, is_leaf=lambda value: isinstance(value, Opened) or graph.is_graph_node(value)
    )
    return ((name_of(path), leaf.original) for path, leaf in leaves if isinstance(leaf, Opened))


# --- static fields

_CONTAINERS = (tuple, list, dict, type(None))
"""Trees without static fields, and their subclasses that jax knows without a registration: named tuples, `OrderedDict`, `defaultdict`."""


def static_fields(tree: Any, name_of: Callable[[Any], str], path: Any = ()) -> Iterator[tuple[str, Any]]:
    """The static fields of a tree's objects of registered classes, each with its name: ``context.log``, a field that is metadata and no data.

    jax takes such an object apart and makes it anew, and each new one has the very same static fields: the call may put something into what they hold.
    """
    nodes = jax.tree_util.tree_leaves_with_path(tree, is_leaf=lambda value: is_leaf(value) or is_made_anew(value))
    for steps, node in nodes:
        if is_leaf(node) or not is_made_anew(node):
            continue
        here = (*path, *steps)
        children = jax.tree_util.tree_leaves_with_path(node, is_leaf=lambda value, node=node: value is not node)
        data = {id(child) for _, child in children}
        attributes = {name: value for (kind, name), value in _fields(node) if kind == "attribute"}
        yield from ((f"{name_of(here)}.{name}", value) for name, value in attributes.items() if id(value) not in data)
        if not attributes:  # C code keeps them, as those of a `jax.tree_util.Partial`
            yield name_of(here), jax.tree_util.tree_structure(node).node_data()[1]  # type: ignore[attr-defined]
        names = {id(value): (GetAttrKey(name),) for name, value in attributes.items()}
        for step, child in children:
            yield from static_fields(child, name_of, (*here, *names.get(id(child), step)))


def is_made_anew(value: Any) -> bool:
    """True if jax takes an object apart by a function that is registered for its class."""
    return not isinstance(value, (*_CONTAINERS, Opened, Bare)) and not jax.tree_util.all_leaves([value])
