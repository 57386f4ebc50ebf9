"""The roots of a walk: the frames of the user's code with their local variables, and what a test can reach when its call has ended.

No root is at the level of the process.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from types import CodeType, FrameType, FunctionType
from typing import Any

from pytest_nnxcheck.compat.owner import is_library, is_of_jax_or_flax, of_frame
from pytest_nnxcheck.core.text import near
from pytest_nnxcheck.walk.raw_access import class_dict, class_name, code_names, mro, top_package

_MOST = 8
_CALLERS = ("pytest_pyfunc_call", "pytest_fixture_setup")


def callers(frame: FrameType) -> Iterator[FrameType]:
    """The frames that a frame was called from, the nearest first."""
    outer = frame.f_back
    while outer is not None:
        yield outer
        outer = outer.f_back


def inside_a_transform(frame: FrameType) -> bool:
    """True if jax or flax has called the function of a frame: its tracers are alive then. Other libraries trace by calling jax."""
    return any(map(is_of_jax_or_flax, callers(frame)))


def frame_of_test(frame: FrameType, code: CodeType) -> FrameType | None:
    """The frame of a test's function, by its code, that led to a frame; none where a fixture is in between, which the test asked for by name."""
    inner = itertools.takewhile(lambda outer: outer.f_code.co_name not in _CALLERS, callers(frame))
    return next((outer for outer in inner if outer.f_code is code), None)


def of_user(frame: FrameType | None) -> Iterator[FrameType]:
    """The frames that are the user's, the innermost first, up to where pytest called."""
    count = 0
    while frame is not None and count < _MOST and frame.f_code.co_name not in _CALLERS:
        if of_frame(frame) == "user":
            count += 1
            yield frame
        frame = frame.f_back


def line(users: list[FrameType]) -> str:
    """``path:line (function)`` of the innermost; nothing where there is none."""
    if not users:
        return ""
    code = users[0].f_code
    return near(f"{code.co_filename}:{users[0].f_lineno} ({code.co_name})")


def local_variables(users: Iterable[FrameType]) -> list[Root]:
    """The roots of a walk; pytest keeps parts of an assertion under names that start with ``@``."""
    return [root for frame in users for root in frame.f_locals.items() if not root[0].startswith("@")]


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
