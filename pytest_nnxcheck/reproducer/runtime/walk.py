"""The search for tracers in a pasted program: the short form of `inspection.walk`, without its care for objects that answer back.

It names what it finds as that does, and does not enter the code of libraries either. Copied by `own_source`, as `long_form` is.
"""

from __future__ import annotations

import collections
import functools
import types
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from flax import nnx

from pytest_nnxcheck import compat
from pytest_nnxcheck.inspection.open_code import code_names
from pytest_nnxcheck.inspection.raw_access import LIBRARIES, LruCache, cache_entries, is_library

__tracebackhide__ = True  # pytest shows the frames of the user, not these

ATOMIC = (str, int, float, complex, bool, bytes, type(None), range, np.dtype)
VARIABLES = tuple(vars(nnx)[name] for name in ("Variable", "VariableState") if name in vars(nnx))
LISTS = getattr(nnx, "List", ())
VIEWED = ("_mapping", "_dict")
"""Attributes of `nnx.State` that its user does not write."""
MARKS = ("_trace_state", "_object__", "_pytree__", "_graph__")
"""How flax starts the names of the attributes in which it keeps marks of its own."""


def reachable(roots: list[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
    """(path, value) of everything that the roots hold, nearest first: modules, containers, closures, defaults, globals, caches."""
    seen = {id(value): value for _, value in roots}
    queue = collections.deque((path, "", value) for path, value in roots)
    while queue:
        path, note, value = queue.popleft()
        yield f"{path} ({note})" if note else path, value
        for inner_path, inner_note, inner in inside(path, note, value):
            if id(inner) not in seen and not isinstance(inner, ATOMIC):
                seen[id(inner)] = inner
                queue.append((inner_path, inner_note, inner))


def remaining_tracers(roots: list[tuple[str, Any]]) -> list[tuple[str, Any]]:
    """The tracers that the roots hold: no transform is at work any more, so each has outlived its trace."""
    return [(path, value) for path, value in reachable(roots) if isinstance(value, jax.core.Tracer)]


def inside(path: str, note: str, value: Any) -> Iterator[tuple[str, str, Any]]:
    """(path, what the path is in, value) of what an object holds."""
    kind = type(value)
    if isinstance(value, jax.core.Tracer | jax.Array | types.ModuleType | types.CodeType):
        return
    if isinstance(value, VARIABLES):
        yield path, note, compat.variable_value(value)
        yield from ((f"{path}.{key}", "metadata", item) for key, item in compat.variable_metadata(value).items())
    elif isinstance(value, types.FunctionType):
        yield from inside_function(path, value)
        return
    elif isinstance(value, type):
        yield from inside_class(value)
        return
    elif isinstance(value, LruCache):
        for number, (key, result) in enumerate(cache_entries(value)):
            yield f"{path}.cache[{key!r:.60}]", note, result
            yield f"list({path}.cache)[{number}]", note, key
    elif isinstance(value, BaseException):
        yield from inside_exception(path, value)
    else:
        yield from inside_container(path, note, value)
    if kind.__module__.partition(".")[0] not in LIBRARIES:
        yield kind.__name__, "", kind
    if not isinstance(value, VARIABLES):
        yield from inside_instance(path, note, value)


def inside_container(path: str, note: str, value: Any) -> Iterator[tuple[str, str, Any]]:
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        yield from ((f"{path}.{key}", note, item) for key, item in zip(value._fields, value, strict=True))
    elif isinstance(value, list | tuple | collections.deque) or (
        isinstance(value, np.ndarray) and value.dtype == object
    ):
        yield from ((f"{path}[{number}]", note, item) for number, item in enumerate(list(value)))
    elif isinstance(value, dict):
        for number, (key, item) in enumerate(list(value.items())):
            yield f"{path}[{key!r:.60}]", note, item
            yield f"list({path})[{number}]", note, key
    elif isinstance(value, set | frozenset):
        yield from ((f"list({path})[{number}]", note, item) for number, item in enumerate(list(value)))
    for owner, names in WRAPPERS:
        if isinstance(value, owner):
            yield from ((f"{path}{name}", note, getattr(value, name.lstrip("."), None)) for name in names)


WRAPPERS: Any = (
    (functools.partial, (".func", ".args", ".keywords")),
    (property, (".fget", ".fset", ".fdel")),
    ((staticmethod, classmethod), (".__func__",)),
    (types.MethodType, (".__func__", ".__self__")),
    (types.CellType, (".cell_contents",)),
    (types.GeneratorType, (".gi_frame",)),
    (types.FrameType, (".f_locals",)),
)


def inside_instance(path: str, note: str, value: Any) -> Iterator[tuple[str, str, Any]]:
    """Attributes; of a library's objects those of jax's own are left out."""
    package = type(value).__module__.partition(".")[0]
    if package in LIBRARIES - {"flax", "optax", "types", "collections", "functools"}:
        own = getattr(value, "__dict__", {}) if package in ("jax", "jaxlib") else {}
        yield from ((path, note, item) for item in list(own.values()) if isinstance(item, types.FunctionType))
        return
    for key, item in list(getattr(value, "__dict__", {}).items()):
        if isinstance(key, str) and not key.startswith(MARKS):
            step = (
                f"[{key}]" if isinstance(value, LISTS) else f"[{key!r}]" if isinstance(value, nnx.Dict) else f".{key}"
            )
            yield path if key in VIEWED else path + step, note, item
    for base in type(value).__mro__:
        for name, slot in vars(base).items():
            if isinstance(slot, types.MemberDescriptorType):
                yield f"{path}.{name}", note, getattr(value, name, None)


def inside_function(path: str, function: Any) -> Iterator[tuple[str, str, Any]]:
    name, code = function.__qualname__, function.__code__
    for variable, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        if cell != types.CellType():
            yield variable, f"closure of {name}", cell.cell_contents
    if is_library(function.__globals__.get("__name__")):
        yield path, "", getattr(function, "__wrapped__", None)
        return
    defaults = function.__defaults__ or ()
    positional = code.co_varnames[: code.co_argcount][-len(defaults) :] if defaults else ()
    pairs = [*zip(positional, defaults, strict=False), *(function.__kwdefaults__ or {}).items()]
    yield from ((argument, f"default of {name}", value) for argument, value in pairs)
    for key, value in vars(function).items():
        yield path if key == "__wrapped__" else f"{path}.{key}", "", value
    names = tuple(dict.fromkeys(code_names(code)))
    for key in names:
        value = function.__globals__.get(key)
        if isinstance(value, types.ModuleType) and not is_library(value.__name__):
            yield from ((f"{key}.{inner}", "", vars(value).get(inner)) for inner in names)
        yield key, "", value


def inside_class(cls: type) -> Iterator[tuple[str, str, Any]]:
    if cls.__module__.partition(".")[0] in LIBRARIES:
        return
    for key, value in vars(cls).items():
        if not (key.startswith("__") and key.endswith(("__", "_cache__"))) or isinstance(value, types.FunctionType):
            yield f"{cls.__name__}.{key}", "", value
    yield from ((base.__name__, "", base) for base in (*cls.__mro__[1:], type(cls)))


def inside_exception(path: str, error: BaseException) -> Iterator[tuple[str, str, Any]]:
    yield from ((f"{path}.args[{number}]", "", item) for number, item in enumerate(error.args))
    yield f"{path}.__cause__", "", error.__cause__
    yield f"{path}.__context__", "", error.__context__
    link = error.__traceback__
    while link is not None:
        if not is_library(link.tb_frame.f_globals.get("__name__")):
            where = f"line {link.tb_lineno} of {link.tb_frame.f_code.co_name}, kept by {path}"
            yield from ((variable, where, value) for variable, value in list(link.tb_frame.f_locals.items()))
        link = link.tb_next
