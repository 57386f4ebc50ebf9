"""The roots of a walk: what a test can reach when its call has ended. No root is at the level of the process."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from types import FunctionType
from typing import Any

from pytest_nnxcheck.compat.owner import is_library
from pytest_nnxcheck.walk.raw_access import class_dict, class_name, code_names, mro, top_package

Root = tuple[str, object]


def bodies(function: object) -> tuple[FunctionType, ...]:
    """The function of a test and those that it wraps: hypothesis, decorators and parametrized methods hide the one that was written."""
    functions: dict[int, FunctionType] = {}
    pending = [function]
    while pending:
        candidate = pending.pop(0)
        if type(candidate) is not FunctionType or id(candidate) in functions:
            continue
        functions[id(candidate)] = candidate
        own = candidate.__dict__
        pending += [own.get("__wrapped__"), getattr(own.get("hypothesis"), "inner_test", None)]
    return tuple(functions.values())


def of_test(function: object, instance: object, fixtures: Iterable[Root]) -> list[Root]:
    """The fixtures of a test, the attributes of its instance, and what its code names: globals, closures, defaults, helpers."""
    functions = bodies(function)
    names = {name for body in functions for name in code_names(body.__code__)}
    return [*fixtures, *_of_instance(instance, names), *((body.__name__, body) for body in functions)]


def of_other_tests(instance: object) -> tuple[object, ...]:
    """The instance of a test and its classes, which lead to the code of other tests. `of_test` lists the parts that are for this one."""
    if instance is None:
        return ()
    return (instance, *(cls for cls in mro(type(instance)) if not is_library(top_package(cls))))


def files_of_test(function: object, instance: object, module: str) -> frozenset[str]:
    """The names of the modules that a test is written in: its own, and those of the classes that it inherits from."""
    return frozenset((module, *(_written(code)[0] for code in (*bodies(function), *of_other_tests(instance)[1:]))))


def code_by_file(objects: Iterable[object], files: frozenset[str]) -> tuple[list[object], list[Root]]:
    """The functions and classes that are written in ``files``, and those of the user's other modules.

    Of the others those at module level alone: what a function makes ends with the test.
    """
    own, others = list[object](), list[Root]()
    for value in objects:
        file, name = _written(value)
        if file in files:
            own.append(value)
        elif file and not is_library(file) and "<locals>" not in name:
            others.append((name, value))
    return own, others


def _written(value: Any) -> tuple[str, str]:
    """The module and the qualified name of a function or a class; empty for anything else."""
    file: object
    if type(value) is FunctionType:
        file, name = value.__module__, value.__qualname__
    elif issubclass(type(value), type):
        file, name = class_dict(value).get("__module__"), class_dict(type)["__qualname__"].__get__(value)
    else:
        return "", ""
    return (file if type(file) is str else ""), name


def _of_instance(instance: object, names: set[str]) -> Iterator[Root]:
    """``self.model``, the attributes of the classes, and the methods that the test names: the others are for other tests."""
    if instance is None:
        return
    own: Any = getattr(instance, "__dict__", {})
    yield from ((f"self.{name}", value) for name, value in list(own.items()) if not name.startswith("_outcome"))
    for cls in mro(type(instance)):
        if is_library(top_package(cls)):
            continue
        for name, value in class_dict(cls).items():
            if not name.startswith("__") and (name in names or type(value) is not FunctionType):
                yield f"{class_name(cls)}.{name}", value
