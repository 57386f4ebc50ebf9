"""Openers for each kind of object: data, code, and at the end `openers_for`, which says for a class which of them open its instances.

An opener hands the content of an object to the visit and keeps the object's places. It reads through `raw_access` only. Containers come first, then
instances and Variables, functions and classes, frames and contexts, and the tables that list them by the built-in base of a class.
"""

from __future__ import annotations

import collections
import concurrent.futures
import contextvars
import functools
import gc
import sys
import threading
import types
from typing import Any
from unittest import mock

import numpy as np

from pytest_nnxcheck.compat import flax_modes, graph
from pytest_nnxcheck.compat.arrays import is_ref, value_of
from pytest_nnxcheck.compat.owner import is_library, owner
from pytest_nnxcheck.walk import raw_access as raw
from pytest_nnxcheck.walk import snapshot
from pytest_nnxcheck.walk.visit import ATOMS, Name, Opener, Visit, key_text, step

_UPKEEP = frozenset(("_trace_state", "_object__state", "_pytree__state", "_pytree__nodes"))
"""Attributes in which flax keeps traces and marks of its own."""
_SEE_THROUGH = frozenset(("_mapping", "_dict"))
"""Attributes of `nnx.State` and `FrozenDict` that the user does not write: ``state['a']``."""
_STATE = frozenset(("array", "reference", "variable", "tracer"))
"""Kinds of objects that are state, by `graph.kind_of`."""
_CODE = frozenset(map(id, (types.FunctionType, types.MethodType, functools.partial)))


# --- containers ----------------------------------------------------------------------------------------------------------


def put_items(items: list[Any], holder: str, name: Name, visit: Visit) -> None:
    for index, item in enumerate(items):
        if id(type(item)) not in ATOMS:
            visit.put(item, holder, name.then(f"[{index}]"))


def open_list(value: list[Any], name: Name, visit: Visit) -> None:
    put_items(visit.keep(name, snapshot.LIST, value), "list", name, visit)


def open_deque(value: collections.deque[Any], name: Name, visit: Visit) -> None:
    put_items(visit.keep(name, snapshot.DEQUE, value), "deque", name, visit)


def open_tuple(value: tuple[Any, ...], name: Name, visit: Visit) -> None:
    fields = raw.class_dict(type(value)).get("_fields")
    if type(fields) is tuple and len(fields) == tuple.__len__(value):
        for field, item in zip(fields, tuple.__iter__(value), strict=True):
            visit.put(item, "tuple", name.then(step(field)))
    else:
        put_items(visit.take(tuple.__iter__(value)), "tuple", name, visit)


def open_set(value: Any, name: Name, visit: Visit) -> None:
    changeable = issubclass(type(value), set)
    for index, item in enumerate(
        visit.keep(name, snapshot.SET, value) if changeable else visit.take(frozenset.__iter__(value))
    ):
        visit.put(item, "set", name.listed(index))


def open_dict(value: dict[Any, Any], name: Name, visit: Visit) -> None:
    ordered = issubclass(type(value), collections.OrderedDict)
    for index, (key, item) in enumerate(
        snapshot.paired(visit.keep(name, snapshot.ORDERED if ordered else snapshot.DICT, value))
    ):
        if id(type(item)) not in ATOMS:
            visit.put(item, "dict", name.then(f"[{key_text(key)}]"))
        if id(type(key)) not in ATOMS:
            visit.put(key, "dict", name.listed(index))


def open_array(value: np.ndarray[Any, Any], name: Name, visit: Visit) -> None:
    visit.arrays.append((str(name), value))
    if raw.class_dict(np.ndarray)["dtype"].__get__(value).hasobject:
        plain = np.ndarray.view(value, np.ndarray)
        if plain.dtype == object:
            put_items(visit.keep(name, snapshot.OBJECTS, plain), "array", name, visit)


def open_jax_array(value: Any, name: Name, visit: Visit) -> None:
    visit.arrays.append((str(name), value))


def open_reference(value: Any, name: Name, visit: Visit) -> None:
    if visit.keeps_references:
        visit.keep(name, snapshot.REFERENCE, (value, value_of(value)))


# --- instances -----------------------------------------------------------------------------------------------------------


def open_attributes(value: Any, name: Name, visit: Visit) -> None:
    stored = raw.layout(type(value))
    if stored.hidden:
        open_referents(value, name, visit)
        return
    held = visit.keep(name, snapshot.ATTRIBUTES, (value, stored))
    for key, item in snapshot.attribute_items(stored, held):
        if id(type(item)) not in ATOMS and key not in _UPKEEP:
            holder = "cached property" if key in stored.cached else "attribute"
            visit.put(item, holder, name if key in _SEE_THROUGH else name.then(step(key)))


def open_library_object(value: Any, name: Name, visit: Visit) -> None:
    """Open an object of a library only if it holds state: the attributes of other objects are the library's own business."""
    if holds_state(value):
        open_attributes(value, name, visit)
    else:
        visit.fleeting.append((open_library_object, value, name))


def holds_state(value: Any, *, in_variables: bool = True) -> bool:
    """True if an attribute of a library's object is an array or a Variable.

    An object of the same library that has an array, as Keras' Variables, counts as well.
    """
    package, stored = raw.top_package(type(value)), raw.layout(type(value))
    held = (*(stored.read(value) or {}).values(), *(item for _, item in stored.read_slots(value)))
    return any(
        graph.kind_of(type(item)) in _STATE
        or (in_variables and raw.top_package(type(item)) == package and holds_state(item, in_variables=False))
        for item in held
        if id(type(item)) not in ATOMS
    )


def open_class_of(value: Any, name: Name, visit: Visit) -> None:  # noqa: ARG001  # every opener takes the same
    visit.put(type(value), "class attribute", Name(raw.class_name(type(value))))


def open_referents(value: Any, name: Name, visit: Visit) -> None:
    """Open the objects that the garbage collector sees, without names: iterators, views, instances whose class shadows ``__dict__``."""
    visit.fleeting.append((open_referents, value, name))
    for index, item in enumerate(gc.get_referents(value)):
        if item is not type(value):
            visit.put(item, raw.class_name(type(value)), name.listed(index))


def open_jax_function(value: Any, name: Name, visit: Visit) -> None:
    """Open the user's functions in a library's object, and nothing else: ``jax.jit(f)``, ``jax.custom_vjp(f)``."""
    visit.fleeting.append((open_jax_function, value, name))
    for item in (raw.layout(type(value)).read(value) or {}).values():
        if id(type(item)) in _CODE or owner(raw.top_package(type(item))) == "jax":
            visit.put(item, "attribute", name)


def open_nnx_items(value: Any, name: Name, visit: Visit) -> None:
    """Open an `nnx.List` or `nnx.Dict`, which keep their items as attributes."""
    stored = raw.layout(type(value))
    visit.keep(name, snapshot.ATTRIBUTES, (value, stored))
    listed = graph.kind_of(type(value)) == "nnx list"
    for key, item in (stored.read(value) or {}).items():
        if id(type(item)) not in ATOMS and key not in _UPKEEP:
            text = f"[{key}]" if listed and type(key) is str and key.isdigit() else f"[{key_text(key)}]"
            visit.put(item, "nnx.List" if listed else "nnx.Dict", name.then(text))


def open_variable(value: Any, name: Name, visit: Visit) -> None:
    visit.keep(name, snapshot.ATTRIBUTES, (value, raw.layout(type(value))))
    held, metadata = graph.variable_value(value), graph.variable_metadata(value)
    # Flax that keeps no references may have metadata of this name that are the user's own.
    lost = metadata.get("ref") is True and flax_modes.takes_refs() and not is_ref(held)
    visit.put(held, "reference" if lost else graph.variable_kind(value), name)
    for key, item in snapshot.paired(visit.keep(name, snapshot.DICT, metadata)):
        if id(type(item)) not in ATOMS:
            visit.put(item, "metadata", Name(name.then(step(key)).base, "metadata"))


def note_node(value: Any, name: Name, visit: Visit) -> None:
    visit.nodes.append((str(name), value))


_NOT_STATE = frozenset(
    (
        *"__dict__ __weakref__ __slots__ __annotations__ __annotations_cache__ __annotate_func__ __annotate__".split(),
        *"__orig_bases__ __parameters__ __type_params__ __abstractmethods__ _abc_impl".split(),
        *"__dataclass_fields__ __dataclass_params__ __match_args__".split(),
    )
)
"""Attributes of classes and functions that Python, `abc`, `typing` and `dataclasses` keep for themselves."""

# --- functions -----------------------------------------------------------------------------------------------------------


def open_function(function: types.FunctionType, name: Name, visit: Visit) -> None:
    if is_mock(dict.get(function.__dict__, "mock")):  # of `mock.create_autospec`
        open_mock(function, name, visit)
        return
    open_closure(function, name, visit)
    if is_library(dict.get(function.__globals__, "__name__")):
        visit.keep(name, snapshot.NAMES, (function.__dict__, ("__wrapped__",)))
        visit.put(dict.get(function.__dict__, "__wrapped__"), "attribute", name)
        return
    visit.keep(name, snapshot.FUNCTION, function)
    open_defaults(function, name, visit)
    open_function_attributes(function, name, visit)
    open_globals(function, visit)


def keeper(function: types.FunctionType, name: Name) -> str:
    """The path of the object that keeps a function; empty if its own name says so, or if it is a variable of another function."""
    whole = function.__qualname__
    names = (whole, whole.rpartition("<locals>.")[2])
    named = f"{name.base}.".startswith(tuple(f"{own}." for own in names))
    variable = name.note and name.base.isidentifier()
    return name.keeper or ("" if named or variable else name.base)


def open_closure(function: types.FunctionType, name: Name, visit: Visit) -> None:
    note, kept_by = f"closure of {function.__qualname__}", keeper(function, name)
    for variable, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        captured = Name(variable, note, kept_by)
        visit.put(visit.keep(captured, snapshot.CELL, cell)[0], "closure", captured)


def open_defaults(function: types.FunctionType, name: Name, visit: Visit) -> None:
    code, note, kept_by = function.__code__, f"default of {function.__qualname__}", keeper(function, name)
    defaults = function.__defaults__ or ()
    positional = code.co_varnames[: code.co_argcount][-len(defaults) :] if defaults else ()
    # Defaults may be longer than the arguments where someone wrote them by hand: zip stops at the shorter.
    pairs = [*zip(positional, defaults, strict=False), *(function.__kwdefaults__ or {}).items()]
    if function.__kwdefaults__ is not None:
        visit.keep(f"{function.__qualname__}.__kwdefaults__", snapshot.DICT, function.__kwdefaults__)
    for argument, value in pairs:
        visit.put(value, "default argument", Name(argument, note, kept_by))


def open_function_attributes(function: types.FunctionType, name: Name, visit: Visit) -> None:
    for key, value in snapshot.paired(visit.keep(name, snapshot.DICT, function.__dict__)):
        if key not in _NOT_STATE:
            visit.put(value, "attribute", name if key == "__wrapped__" else name.then(step(key)))


def open_globals(function: types.FunctionType, visit: Visit) -> None:
    """Open the globals that a function names. Of a module among them, open the attributes that the function names."""
    names = tuple(dict.fromkeys(raw.code_names(function.__code__)))
    open_names(function.__globals__, names, "", visit, {id(function.__globals__)})
    for key in names:
        if key not in function.__globals__ and (module := imported(key, function.__globals__)) is not None:
            open_module(module, names, f"{key}.", visit, {id(function.__globals__)})


def open_names(namespace: dict[str, Any], names: tuple[str, ...], prefix: str, visit: Visit, opened: set[int]) -> None:
    held = visit.keep(prefix or str(dict.get(namespace, "__name__")), snapshot.NAMES, (namespace, names))
    for key, value in zip(names, held, strict=True):
        if id(type(value)) not in ATOMS and value is not raw.MISSING:
            open_module(value, names, f"{prefix}{key}.", visit, opened)
            visit.put(value, "global", Name(f"{prefix}{key}"))


def open_module(value: Any, names: tuple[str, ...], prefix: str, visit: Visit, opened: set[int]) -> None:
    namespace = raw.module_namespace(value)
    if namespace is not None and id(namespace) not in opened:
        opened.add(id(namespace))
        open_names(namespace, names, prefix, visit, opened)


def imported(name: str, namespace: dict[str, Any]) -> Any:
    """Find a module that a function imports inside its body."""
    package = dict.get(namespace, "__package__")
    relative = sys.modules.get(f"{package}.{name}") if type(package) is str and package else None
    return relative if relative is not None else sys.modules.get(name)


# --- mocks ---------------------------------------------------------------------------------------------------------------


def is_mock(value: object) -> bool:
    """True for a mock of `unittest.mock`."""
    return any(base is mock.NonCallableMock for base in raw.mro(type(value)))


def open_mock(value: Any, name: Name, visit: Visit) -> None:
    """Leave a mock to the end of the walk: it is no state, but the test's record of what it is handed, see `records_of`."""
    visit.mocks.append((name, value))


def records_of(value: Any, name: Name, visit: Visit) -> list[tuple[Name, Any]]:
    """The data that a mock holds, its calls first, each under the name of what was called. The code behind a mock is none of it."""
    if type(value) is types.FunctionType:
        held = snapshot.paired(visit.keep(name, snapshot.DICT, value.__dict__))
        calls = dict.get(value.__dict__, "mock_calls")
    else:
        stored = raw.layout(type(value))
        held = snapshot.attribute_items(stored, visit.keep(name, snapshot.ATTRIBUTES, (value, stored)))
        calls = raw.class_dict(mock.NonCallableMock)["mock_calls"].__get__(value)
    called = [(name.then(f".{call[0]}" if call[0] else ""), call) for call in calls or () if len(call) > 2]
    data = [
        (name if key.startswith("_") else name.then(step(key)), item)
        for key, item in held
        if key not in _ABOVE and (is_mock(item) or not issubclass(type(item), _BEHIND))
    ]
    return [*called, *data]


_ABOVE = ("_mock_parent", "_mock_new_parent")
"""Attributes by which a mock knows the one that it is an attribute of."""
_BEHIND = (type, types.FunctionType, types.MethodType, types.BuiltinMethodType, functools.partial)
"""Types of what a mock runs or replaces."""


# --- classes -------------------------------------------------------------------------------------------------------------


def open_class(cls: type, name: Name, visit: Visit) -> None:  # noqa: ARG001  # every opener takes the same
    if is_library(raw.top_package(cls)):
        return
    own = raw.class_name(cls)
    if graph.kind_of(cls) == "node":
        visit.nodes.append((own, cls))
    for key, value in snapshot.paired(visit.keep(own, snapshot.CLASS, cls)[1:]):
        if id(type(value)) not in ATOMS and key not in _NOT_STATE:
            visit.put(value, "class attribute", Name(f"{own}.{key}"))
    for base in (*raw.mro(cls)[1:], type(cls)):
        visit.put(base, "class attribute", Name(raw.class_name(base)))


# --- wrappers of code: each is a type of C code (or functools) with fields of known names -------------------------------------

FIELDS: dict[type, tuple[tuple[str, str], ...]] = {
    functools.partial: (("func", ".func"), ("args", ".args"), ("keywords", ".keywords")),
    property: (("fget", ""), ("fset", ""), ("fdel", "")),
    staticmethod: (("__func__", ""),),
    classmethod: (("__func__", ""),),
    types.MethodType: (("__func__", ""), ("__self__", ".__self__")),
    types.BuiltinMethodType: (("__self__", ".__self__"),),
    types.MethodWrapperType: (("__self__", ".__self__"),),
}


def open_fields(value: Any, name: Name, visit: Visit) -> None:
    base = next(base for base in FIELDS if issubclass(type(value), base))
    if base is functools.partial:
        visit.fleeting.append((open_fields, value, name))
    for field, text in FIELDS[base]:
        visit.put(raw.read_slot(raw.class_dict(base)[field], value), raw.class_name(base), name.then(text))


def open_cell(cell: types.CellType, name: Name, visit: Visit) -> None:
    visit.put(visit.keep(name, snapshot.CELL, cell)[0], "closure", name.then(".cell_contents"))


def open_cache(cache: Any, name: Name, visit: Visit) -> None:
    visit.fleeting.append((open_cache, cache, name))
    held = visit.keep(name, snapshot.CACHE, cache)
    for index, (key, result) in enumerate(zip(held[::2], held[1::2], strict=True)):
        visit.put(result, "cache", name.then(f".cache[{key_text(key)}]"))
        visit.put(key, "cache", name.then(".cache").listed(index))
    open_function_attributes(cache, name, visit)


# --- frames --------------------------------------------------------------------------------------------------------------


def open_exception(error: BaseException, name: Name, visit: Visit) -> None:
    visit.fleeting.append((open_exception, error, name))
    fields = raw.class_dict(BaseException)
    put_items(list(fields["args"].__get__(error)), "exception", name.then(".args"), visit)
    for field in ("__cause__", "__context__"):
        visit.put(fields[field].__get__(error), "exception", name.then(f".{field}"))
    if issubclass(type(error), BaseExceptionGroup):
        parts = raw.class_dict(BaseExceptionGroup)["exceptions"].__get__(error)
        put_items(list(parts), "exception", name.then(".exceptions"), visit)
    if is_library(raw.top_package(type(error))):
        open_attributes(error, name, visit)
    visit.put_last(fields["__traceback__"].__get__(error), "frame", name)


def open_traceback(traceback: types.TracebackType, name: Name, visit: Visit) -> None:
    visit.fleeting.append((open_traceback, traceback, name))
    links: list[types.TracebackType] = []
    link: types.TracebackType | None = traceback
    while link is not None:
        links.append(link)
        link = link.tb_next
    for link in reversed(links):  # innermost first: that frame names a tracer best
        open_locals(link.tb_frame, link.tb_lineno, name, visit)


def open_frame(frame: types.FrameType, name: Name, visit: Visit) -> None:
    visit.fleeting.append((open_frame, frame, name))
    open_locals(frame, frame.f_lineno, name, visit)


def open_locals(frame: types.FrameType, line: int | None, name: Name, visit: Visit, holder: str = "frame") -> None:
    """Open the local variables of a frame of the user's code."""
    if is_library(dict.get(frame.f_globals, "__name__")):
        return
    where = f"line {line} of {frame.f_code.co_name}, kept by {name}"
    local = frame.f_locals
    # The body of a class may run in a mapping of the user's metaclass.
    if type(local) is dict or raw.class_name(type(local)) == "FrameLocalsProxy":
        for variable, value in list(local.items()):
            visit.put(value, holder, Name(variable, where))


SUSPENDED = {
    types.GeneratorType: ("gi_frame", "gi_yieldfrom"),
    types.CoroutineType: ("cr_frame", "cr_await"),
    types.AsyncGeneratorType: ("ag_frame", "ag_await"),
}


def open_generator(value: Any, name: Name, visit: Visit) -> None:
    visit.fleeting.append((open_generator, value, name))
    frame, waits_for = SUSPENDED[type(value)]
    suspended = raw.read_slot(raw.class_dict(type(value))[frame], value)
    if isinstance(suspended, types.FrameType):
        open_locals(suspended, suspended.f_lineno, name, visit, "generator")
    visit.put(raw.read_slot(raw.class_dict(type(value))[waits_for], value), "frame", name)


# --- contexts ------------------------------------------------------------------------------------------------------------


def open_context_variable(variable: contextvars.ContextVar[Any], name: Name, visit: Visit) -> None:
    visit.put(visit.keep(name, snapshot.CONTEXT, variable)[0], "context variable", name.then(".get()"))


def open_thread_local(value: Any, name: Name, visit: Visit) -> None:
    """Open the part of a `threading.local` that belongs to this thread."""
    own = threading.local.__getattribute__(value, "__dict__")
    for key, item in snapshot.paired(visit.keep(name, snapshot.DICT, own)):
        visit.put(item, "attribute", name.then(step(key)))


_OPEN_PACKAGES = frozenset(("flax", "optax"))
_OPEN_STANDARD = frozenset(("collections", "contextlib", "types", "functools", "queue", "weakref"))
_OPEN_CLASSES = frozenset((concurrent.futures.Future,))
"""Classes of other packages of the standard library whose instances hold the user's values, where the others there hold locks and threads."""

_BY_KIND: dict[str, Opener] = {
    "array": open_jax_array,
    "reference": open_reference,
    "variable": open_variable,
    "nnx list": open_nnx_items,
    "nnx dict": open_nnx_items,
}

_BY_BASE: dict[type, Opener] = {
    list: open_list,
    tuple: open_tuple,
    dict: open_dict,
    set: open_set,
    frozenset: open_set,
    collections.deque: open_deque,
    np.ndarray: open_array,
    types.FunctionType: open_function,
    type: open_class,
    types.CellType: open_cell,
    raw.LruCache: open_cache,
    BaseException: open_exception,
    types.TracebackType: open_traceback,
    types.FrameType: open_frame,
    contextvars.ContextVar: open_context_variable,
    threading.local: open_thread_local,
    mock.NonCallableMock: open_mock,
    **dict.fromkeys(FIELDS, open_fields),
    **dict.fromkeys(SUSPENDED, open_generator),
}
"""The openers of built-in types and their subclasses."""

# By id, since the hash of a class may be the code of its metaclass.
_BY_BASE_ID = {id(base): opener for base, opener in _BY_BASE.items()}

_WHOLE = frozenset(
    map(
        id,
        (
            np.ndarray,
            types.FunctionType,
            type,
            types.CodeType,
            types.ModuleType,
            raw.LruCache,
            threading.local,
            mock.NonCallableMock,
            types.TracebackType,
            types.FrameType,
        ),
    )
)
"""Types whose opener, if there is one, reads everything: their attributes and class are not opened as well."""


def openers_for(cls: type) -> tuple[Opener, ...]:
    """The openers of the instances of a class."""
    kind = graph.kind_of(cls)
    noted = (note_node,) if kind not in ("", "array", "reference") else ()
    if kind in _BY_KIND:
        return (*noted, _BY_KIND[kind], *_of_class(cls))
    for base in map(id, raw.mro(cls)):
        built_in = (_BY_BASE_ID[base],) if base in _BY_BASE_ID else ()
        if base in _WHOLE:
            return (*noted, *built_in)
        if built_in:
            return (*noted, *built_in, *_of_instance(cls), *_of_class(cls))
    return (*noted, *_of_instance(cls), *_of_class(cls))


def _of_class(cls: type) -> tuple[Opener, ...]:
    return () if is_library(raw.top_package(cls)) else (open_class_of,)


def _of_instance(cls: type) -> tuple[Opener, ...]:
    """Open an instance of a library's class only if such objects hold the user's state, or if this one does."""
    package = raw.top_package(cls)
    if not is_library(package) or any(raw.top_package(base) in _OPEN_PACKAGES for base in raw.mro(cls)):
        return (open_attributes,)
    if owner(package) == "jax":
        return (open_jax_function,)
    if _holds_unseen(cls, package):
        return (open_referents,)
    if package in _OPEN_STANDARD or cls in _OPEN_CLASSES:
        return (open_attributes,)
    return (open_library_object,)


def _holds_unseen(cls: type, package: str) -> bool:
    """True for iterators and views: C code that keeps the user's containers alive."""
    name = raw.class_name(cls)
    views = ("iterator", "dict_keys", "dict_values", "dict_items", "map", "zip", "filter", "enumerate", "reversed")
    return (
        package in ("itertools", "operator")
        or (package == "builtins" and name.endswith(views))
        or cls is types.MappingProxyType
    )
