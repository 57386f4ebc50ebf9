"""Openers for each kind of object that holds data: containers, instances, Variables. Code is `open_code`.

An opener hands the content of an object to the visit and keeps the object's places. It reads through `raw_access` only.
"""

from __future__ import annotations

import collections
import functools
import gc
from collections.abc import Callable
from types import FunctionType, MethodType
from typing import Any

import numpy as np

from pytest_nnxcheck.compat import flax_modes, variables
from pytest_nnxcheck.compat.arrays import is_ref, value_of
from pytest_nnxcheck.compat.owner import owner
from pytest_nnxcheck.walk import snapshot
from pytest_nnxcheck.walk.raw_access import (
    Layout,
    class_dict,
    class_name,
    layout,
    top_package,
)
from pytest_nnxcheck.walk.snapshot import ATTRIBUTES, DEQUE, DICT, LIST, OBJECTS, ORDERED, SET, attribute_items, paired
from pytest_nnxcheck.walk.visit import ATOMS, Name, Visit, key_text, step

_UPKEEP = frozenset(("_trace_state", "_object__state", "_pytree__state", "_pytree__nodes"))
"""Attributes in which flax keeps traces and marks of its own."""
_SEE_THROUGH = frozenset(("_mapping", "_dict"))
"""Attributes of `nnx.State` and `FrozenDict` that the user does not write: ``state['a']``."""
_STATE = frozenset(("array", "reference", "variable", "tracer"))
"""Kinds of objects that are state, by `variables.kind_of`."""
_CODE = frozenset(map(id, (FunctionType, MethodType, functools.partial)))


# --- containers ----------------------------------------------------------------------------------------------------------


def put_items(items: list[Any], holder: str, name: Name, visit: Visit) -> None:
    for index, item in enumerate(items):
        if id(type(item)) not in ATOMS:
            visit.put(item, holder, name.then(f"[{index}]"))


def open_list(value: list[Any], name: Name, visit: Visit) -> None:
    put_items(visit.keep(name, LIST, value), "list", name, visit)


def open_deque(value: collections.deque[Any], name: Name, visit: Visit) -> None:
    put_items(visit.keep(name, DEQUE, value), "deque", name, visit)


def open_tuple(value: tuple[Any, ...], name: Name, visit: Visit) -> None:
    fields = class_dict(type(value)).get("_fields")
    if type(fields) is tuple and len(fields) == tuple.__len__(value):
        for field, item in zip(fields, tuple.__iter__(value), strict=True):
            visit.put(item, "tuple", name.then(step(field)))
    else:
        put_items(visit.take(tuple.__iter__(value)), "tuple", name, visit)


def open_set(value: Any, name: Name, visit: Visit) -> None:
    changeable = issubclass(type(value), set)
    for index, item in enumerate(visit.keep(name, SET, value) if changeable else visit.take(frozenset.__iter__(value))):
        visit.put(item, "set", name.listed(index))


def open_dict(value: dict[Any, Any], name: Name, visit: Visit) -> None:
    ordered = issubclass(type(value), collections.OrderedDict)
    for index, (key, item) in enumerate(paired(visit.keep(name, ORDERED if ordered else DICT, value))):
        if id(type(item)) not in ATOMS:
            visit.put(item, "dict", name.then(f"[{key_text(key)}]"))
        if id(type(key)) not in ATOMS:
            visit.put(key, "dict", name.listed(index))


def open_array(value: np.ndarray[Any, Any], name: Name, visit: Visit) -> None:
    visit.arrays.append((str(name), value))
    if class_dict(np.ndarray)["dtype"].__get__(value).hasobject:
        plain = np.ndarray.view(value, np.ndarray)
        if plain.dtype == object:
            put_items(visit.keep(name, OBJECTS, plain), "array", name, visit)


def open_jax_array(value: Any, name: Name, visit: Visit) -> None:
    visit.arrays.append((str(name), value))


def open_reference(value: Any, name: Name, visit: Visit) -> None:
    if visit.keeps_references:
        visit.keep(name, snapshot.REFERENCE, (value, value_of(value)))


# --- instances -----------------------------------------------------------------------------------------------------------


def open_attributes(value: Any, name: Name, visit: Visit) -> None:
    stored = visit.classes.layout(type(value))
    if stored.hidden:
        open_referents(value, name, visit)
        return
    held = visit.keep(name, ATTRIBUTES, (value, stored))
    for key, item in attribute_items(stored, held):
        if id(type(item)) not in ATOMS and key not in _UPKEEP:
            holder = "cached property" if key in stored.cached else "attribute"
            visit.put(item, holder, name if key in _SEE_THROUGH else name.then(step(key)))


def open_library_object(value: Any, name: Name, visit: Visit) -> None:
    """Open an object of a library only if it holds state: the attributes of other objects are the library's own business."""
    if holds_state(value, visit.classes.layout):
        open_attributes(value, name, visit)
    else:
        visit.fleeting.append((open_library_object, value, name))


def holds_state(value: Any, layout_of: Callable[[type], Layout] = layout, *, in_variables: bool = True) -> bool:
    """True if an attribute of a library's object is an array or a Variable.

    An object of the same library that has an array, as Keras' Variables, counts as well.
    """
    package, stored = top_package(type(value)), layout_of(type(value))
    held = (*(stored.read(value) or {}).values(), *(item for _, item in stored.read_slots(value)))
    return any(
        variables.kind_of(type(item)) in _STATE
        or (in_variables and top_package(type(item)) == package and holds_state(item, layout_of, in_variables=False))
        for item in held
        if id(type(item)) not in ATOMS
    )


def open_class_of(value: Any, name: Name, visit: Visit) -> None:  # noqa: ARG001  # every opener takes the same
    visit.put(type(value), "class attribute", Name(class_name(type(value))))


def open_referents(value: Any, name: Name, visit: Visit) -> None:
    """Open the objects that the garbage collector sees, without names: iterators, views, instances whose class shadows ``__dict__``."""
    visit.fleeting.append((open_referents, value, name))
    for index, item in enumerate(gc.get_referents(value)):
        if item is not type(value):
            visit.put(item, class_name(type(value)), name.listed(index))


def open_jax_function(value: Any, name: Name, visit: Visit) -> None:
    """Open the user's functions in a library's object, and nothing else: ``jax.jit(f)``, ``jax.custom_vjp(f)``."""
    visit.fleeting.append((open_jax_function, value, name))
    for item in (visit.classes.layout(type(value)).read(value) or {}).values():
        if id(type(item)) in _CODE or owner(top_package(type(item))) == "jax":
            visit.put(item, "attribute", name)


def open_nnx_items(value: Any, name: Name, visit: Visit) -> None:
    """Open an `nnx.List` or `nnx.Dict`, which keep their items as attributes."""
    stored = visit.classes.layout(type(value))
    visit.keep(name, ATTRIBUTES, (value, stored))
    listed = variables.kind_of(type(value)) == "nnx list"
    for key, item in (stored.read(value) or {}).items():
        if id(type(item)) not in ATOMS and key not in _UPKEEP:
            text = f"[{key}]" if listed and type(key) is str and key.isdigit() else f"[{key_text(key)}]"
            visit.put(item, "nnx.List" if listed else "nnx.Dict", name.then(text))


def open_variable(value: Any, name: Name, visit: Visit) -> None:
    visit.keep(name, ATTRIBUTES, (value, visit.classes.layout(type(value))))
    held, metadata = variables.variable_value(value), variables.variable_metadata(value)
    # Flax that keeps no references may have metadata of this name that are the user's own.
    lost = metadata.get("ref") is True and flax_modes.takes_refs() and not is_ref(held)
    visit.put(held, "reference" if lost else variables.variable_kind(value), name)
    for key, item in paired(visit.keep(name, DICT, metadata)):
        if id(type(item)) not in ATOMS:
            visit.put(item, "metadata", Name(name.then(step(key)).base, "metadata"))


def note_node(value: Any, name: Name, visit: Visit) -> None:
    visit.nodes.append((str(name), value))
