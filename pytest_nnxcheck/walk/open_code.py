"""Openers for code and the objects that run it: functions, classes, caches, frames, exceptions, generators, contexts."""

from __future__ import annotations

import contextvars
import functools
import sys
import threading
from types import (
    AsyncGeneratorType,
    BuiltinMethodType,
    CellType,
    CoroutineType,
    FrameType,
    FunctionType,
    GeneratorType,
    MethodType,
    MethodWrapperType,
    TracebackType,
)
from typing import Any

from pytest_nnxcheck.compat import variables
from pytest_nnxcheck.compat.owner import is_library
from pytest_nnxcheck.walk.open_data import open_attributes, put_items
from pytest_nnxcheck.walk.raw_access import (
    MISSING,
    class_dict,
    class_name,
    code_names,
    module_namespace,
    mro,
    read_slot,
    top_package,
)
from pytest_nnxcheck.walk.snapshot import CACHE, CELL, CLASS, CONTEXT, DICT, FUNCTION, NAMES, paired
from pytest_nnxcheck.walk.visit import ATOMS, Name, Visit, key_text, step

_NOT_STATE = frozenset(
    (
        *"__dict__ __weakref__ __slots__ __annotations__ __annotations_cache__ __annotate_func__ __annotate__".split(),
        *"__orig_bases__ __parameters__ __type_params__ __abstractmethods__ _abc_impl".split(),
        *"__dataclass_fields__ __dataclass_params__ __match_args__".split(),
    )
)
"""Attributes of classes and functions that Python, `abc`, `typing` and `dataclasses` keep for themselves."""

# --- functions -----------------------------------------------------------------------------------------------------------


def open_function(function: FunctionType, name: Name, visit: Visit) -> None:
    open_closure(function, name, visit)
    if is_library(dict.get(function.__globals__, "__name__")):
        visit.keep(name, NAMES, (function.__dict__, ("__wrapped__",)))
        visit.put(dict.get(function.__dict__, "__wrapped__"), "attribute", name)
        return
    visit.keep(name, FUNCTION, function)
    open_defaults(function, name, visit)
    open_function_attributes(function, name, visit)
    open_globals(function, visit)


def keeper(function: FunctionType, name: Name) -> str:
    """The path of the object that keeps a function; empty if its own name says so, or if it is a variable of another function."""
    whole = function.__qualname__
    names = (whole, whole.rpartition("<locals>.")[2])
    named = f"{name.base}.".startswith(tuple(f"{own}." for own in names))
    variable = name.note and name.base.isidentifier()
    return name.keeper or ("" if named or variable else name.base)


def open_closure(function: FunctionType, name: Name, visit: Visit) -> None:
    note, kept_by = f"closure of {function.__qualname__}", keeper(function, name)
    for variable, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        captured = Name(variable, note, kept_by)
        visit.put(visit.keep(captured, CELL, cell)[0], "closure", captured)


def open_defaults(function: FunctionType, name: Name, visit: Visit) -> None:
    code, note, kept_by = function.__code__, f"default of {function.__qualname__}", keeper(function, name)
    defaults = function.__defaults__ or ()
    positional = code.co_varnames[: code.co_argcount][-len(defaults) :] if defaults else ()
    # Defaults may be longer than the arguments where someone wrote them by hand: zip stops at the shorter.
    pairs = [*zip(positional, defaults, strict=False), *(function.__kwdefaults__ or {}).items()]
    if function.__kwdefaults__ is not None:
        visit.keep(f"{function.__qualname__}.__kwdefaults__", DICT, function.__kwdefaults__)
    for argument, value in pairs:
        visit.put(value, "default argument", Name(argument, note, kept_by))


def open_function_attributes(function: FunctionType, name: Name, visit: Visit) -> None:
    for key, value in paired(visit.keep(name, DICT, function.__dict__)):
        if key not in _NOT_STATE:
            visit.put(value, "attribute", name if key == "__wrapped__" else name.then(step(key)))


def open_globals(function: FunctionType, visit: Visit) -> None:
    """Open the globals that a function names. Of a module among them, open the attributes that the function names."""
    names = tuple(dict.fromkeys(code_names(function.__code__)))
    open_names(function.__globals__, names, "", visit, {id(function.__globals__)})
    for key in names:
        if key not in function.__globals__ and (module := imported(key, function.__globals__)) is not None:
            open_module(module, names, f"{key}.", visit, {id(function.__globals__)})


def open_names(namespace: dict[str, Any], names: tuple[str, ...], prefix: str, visit: Visit, opened: set[int]) -> None:
    held = visit.keep(prefix or str(dict.get(namespace, "__name__")), NAMES, (namespace, names))
    for key, value in zip(names, held, strict=True):
        if id(type(value)) not in ATOMS and value is not MISSING:
            open_module(value, names, f"{prefix}{key}.", visit, opened)
            visit.put(value, "global", Name(f"{prefix}{key}"))


def open_module(value: Any, names: tuple[str, ...], prefix: str, visit: Visit, opened: set[int]) -> None:
    namespace = module_namespace(value)
    if namespace is not None and id(namespace) not in opened:
        opened.add(id(namespace))
        open_names(namespace, names, prefix, visit, opened)


def imported(name: str, namespace: dict[str, Any]) -> Any:
    """Find a module that a function imports inside its body."""
    package = dict.get(namespace, "__package__")
    relative = sys.modules.get(f"{package}.{name}") if type(package) is str and package else None
    return relative if relative is not None else sys.modules.get(name)


# --- classes -------------------------------------------------------------------------------------------------------------


def open_class(cls: type, name: Name, visit: Visit) -> None:  # noqa: ARG001  # every opener takes the same
    if is_library(top_package(cls)):
        return
    own = class_name(cls)
    if variables.kind_of(cls) == "node":
        visit.nodes.append((own, cls))
    for key, value in paired(visit.keep(own, CLASS, cls)[1:]):
        if id(type(value)) not in ATOMS and key not in _NOT_STATE:
            visit.put(value, "class attribute", Name(f"{own}.{key}"))
    for base in (*mro(cls)[1:], type(cls)):
        visit.put(base, "class attribute", Name(class_name(base)))


# --- wrappers of code: each is a type of C code (or functools) with fields of known names -------------------------------------

FIELDS: dict[type, tuple[tuple[str, str], ...]] = {
    functools.partial: (("func", ".func"), ("args", ".args"), ("keywords", ".keywords")),
    property: (("fget", ""), ("fset", ""), ("fdel", "")),
    staticmethod: (("__func__", ""),),
    classmethod: (("__func__", ""),),
    MethodType: (("__func__", ""), ("__self__", ".__self__")),
    BuiltinMethodType: (("__self__", ".__self__"),),
    MethodWrapperType: (("__self__", ".__self__"),),
}


def open_fields(value: Any, name: Name, visit: Visit) -> None:
    base = next(base for base in FIELDS if issubclass(type(value), base))
    if base is functools.partial:
        visit.fleeting.append((open_fields, value, name))
    for field, text in FIELDS[base]:
        visit.put(read_slot(class_dict(base)[field], value), class_name(base), name.then(text))


def open_cell(cell: CellType, name: Name, visit: Visit) -> None:
    visit.put(visit.keep(name, CELL, cell)[0], "closure", name.then(".cell_contents"))


def open_cache(cache: Any, name: Name, visit: Visit) -> None:
    visit.fleeting.append((open_cache, cache, name))
    held = visit.keep(name, CACHE, cache)
    for index, (key, result) in enumerate(zip(held[::2], held[1::2], strict=True)):
        visit.put(result, "cache", name.then(f".cache[{key_text(key)}]"))
        visit.put(key, "cache", name.then(".cache").listed(index))
    open_function_attributes(cache, name, visit)


# --- frames --------------------------------------------------------------------------------------------------------------


def open_exception(error: BaseException, name: Name, visit: Visit) -> None:
    visit.fleeting.append((open_exception, error, name))
    fields = class_dict(BaseException)
    put_items(list(fields["args"].__get__(error)), "exception", name.then(".args"), visit)
    for field in ("__cause__", "__context__"):
        visit.put(fields[field].__get__(error), "exception", name.then(f".{field}"))
    if issubclass(type(error), BaseExceptionGroup):
        parts = class_dict(BaseExceptionGroup)["exceptions"].__get__(error)
        put_items(list(parts), "exception", name.then(".exceptions"), visit)
    if is_library(top_package(type(error))):
        open_attributes(error, name, visit)
    visit.put_last(fields["__traceback__"].__get__(error), "frame", name)


def open_traceback(traceback: TracebackType, name: Name, visit: Visit) -> None:
    visit.fleeting.append((open_traceback, traceback, name))
    links: list[TracebackType] = []
    link: TracebackType | None = traceback
    while link is not None:
        links.append(link)
        link = link.tb_next
    for link in reversed(links):  # innermost first: that frame names a tracer best
        open_locals(link.tb_frame, link.tb_lineno, name, visit)


def open_frame(frame: FrameType, name: Name, visit: Visit) -> None:
    visit.fleeting.append((open_frame, frame, name))
    open_locals(frame, frame.f_lineno, name, visit)


def open_locals(frame: FrameType, line: int | None, name: Name, visit: Visit, holder: str = "frame") -> None:
    """Open the local variables of a frame of the user's code."""
    if is_library(dict.get(frame.f_globals, "__name__")):
        return
    where = f"line {line} of {frame.f_code.co_name}, kept by {name}"
    local = frame.f_locals
    # The body of a class may run in a mapping of the user's metaclass.
    if type(local) is dict or class_name(type(local)) == "FrameLocalsProxy":
        for variable, value in list(local.items()):
            visit.put(value, holder, Name(variable, where))


SUSPENDED = {
    GeneratorType: ("gi_frame", "gi_yieldfrom"),
    CoroutineType: ("cr_frame", "cr_await"),
    AsyncGeneratorType: ("ag_frame", "ag_await"),
}


def open_generator(value: Any, name: Name, visit: Visit) -> None:
    visit.fleeting.append((open_generator, value, name))
    frame, waits_for = SUSPENDED[type(value)]
    suspended = read_slot(class_dict(type(value))[frame], value)
    if isinstance(suspended, FrameType):
        open_locals(suspended, suspended.f_lineno, name, visit, "generator")
    visit.put(read_slot(class_dict(type(value))[waits_for], value), "frame", name)


# --- contexts ------------------------------------------------------------------------------------------------------------


def open_context_variable(variable: contextvars.ContextVar[Any], name: Name, visit: Visit) -> None:
    visit.put(visit.keep(name, CONTEXT, variable)[0], "context variable", name.then(".get()"))


def open_thread_local(value: Any, name: Name, visit: Visit) -> None:
    """Open the part of a `threading.local` that belongs to this thread."""
    own = threading.local.__getattribute__(value, "__dict__")
    for key, item in paired(visit.keep(name, DICT, own)):
        visit.put(item, "attribute", name.then(step(key)))
