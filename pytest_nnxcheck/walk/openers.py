"""The openers for the instances of a class: for its built-in base, for attributes, for the class itself."""

from __future__ import annotations

import collections
import concurrent.futures
import contextvars
import threading
from types import CellType, CodeType, FrameType, FunctionType, MappingProxyType, ModuleType, TracebackType

import numpy as np

from pytest_nnxcheck.compat import variables
from pytest_nnxcheck.compat.owner import is_library, owner
from pytest_nnxcheck.walk import open_code, open_data
from pytest_nnxcheck.walk.raw_access import LruCache, class_name, mro, top_package
from pytest_nnxcheck.walk.visit import Opener

_OPEN_PACKAGES = frozenset(("flax", "optax"))
_OPEN_STANDARD = frozenset(("collections", "contextlib", "types", "functools", "queue", "weakref"))
_OPEN_CLASSES = frozenset((concurrent.futures.Future,))
"""Classes of other packages of the standard library whose instances hold the user's values, where the others there hold locks and threads."""

_BY_KIND: dict[str, Opener] = {
    "array": open_data.open_jax_array,
    "reference": open_data.open_reference,
    "variable": open_data.open_variable,
    "nnx list": open_data.open_nnx_items,
    "nnx dict": open_data.open_nnx_items,
}

_BY_BASE: dict[type, Opener] = {
    list: open_data.open_list,
    tuple: open_data.open_tuple,
    dict: open_data.open_dict,
    set: open_data.open_set,
    frozenset: open_data.open_set,
    collections.deque: open_data.open_deque,
    np.ndarray: open_data.open_array,
    FunctionType: open_code.open_function,
    type: open_code.open_class,
    CellType: open_code.open_cell,
    LruCache: open_code.open_cache,
    BaseException: open_code.open_exception,
    TracebackType: open_code.open_traceback,
    FrameType: open_code.open_frame,
    contextvars.ContextVar: open_code.open_context_variable,
    threading.local: open_code.open_thread_local,
    **dict.fromkeys(open_code.FIELDS, open_code.open_fields),
    **dict.fromkeys(open_code.SUSPENDED, open_code.open_generator),
}
"""The openers of built-in types and their subclasses."""

# By id, since the hash of a class may be the code of its metaclass.
_BY_BASE_ID = {id(base): opener for base, opener in _BY_BASE.items()}

_WHOLE = frozenset(
    map(
        id,
        (np.ndarray, FunctionType, type, CodeType, ModuleType, LruCache, threading.local, TracebackType, FrameType),
    )
)
"""Types whose opener, if there is one, reads everything: their attributes and class are not opened as well."""


def openers_for(cls: type) -> tuple[Opener, ...]:
    """The openers of the instances of a class."""
    kind = variables.kind_of(cls)
    noted = (open_data.note_node,) if kind not in ("", "array", "reference") else ()
    if kind in _BY_KIND:
        return (*noted, _BY_KIND[kind], *_of_class(cls))
    for base in map(id, mro(cls)):
        built_in = (_BY_BASE_ID[base],) if base in _BY_BASE_ID else ()
        if base in _WHOLE:
            return (*noted, *built_in)
        if built_in:
            return (*noted, *built_in, *_of_instance(cls), *_of_class(cls))
    return (*noted, *_of_instance(cls), *_of_class(cls))


def _of_class(cls: type) -> tuple[Opener, ...]:
    return () if is_library(top_package(cls)) else (open_data.open_class_of,)


def _of_instance(cls: type) -> tuple[Opener, ...]:
    """Open an instance of a library's class only if such objects hold the user's state, or if this one does."""
    package = top_package(cls)
    if not is_library(package) or any(top_package(base) in _OPEN_PACKAGES for base in mro(cls)):
        return (open_data.open_attributes,)
    if owner(package) == "jax":
        return (open_data.open_jax_function,)
    if _holds_unseen(cls, package):
        return (open_data.open_referents,)
    if package in _OPEN_STANDARD or cls in _OPEN_CLASSES:
        return (open_data.open_attributes,)
    return (open_data.open_library_object,)


def _holds_unseen(cls: type, package: str) -> bool:
    """True for iterators and views: C code that keeps the user's containers alive."""
    name = class_name(cls)
    views = ("iterator", "dict_keys", "dict_values", "dict_items", "map", "zip", "filter", "enumerate", "reversed")
    return (
        package in ("itertools", "operator")
        or (package == "builtins" and name.endswith(views))
        or cls is MappingProxyType
    )
