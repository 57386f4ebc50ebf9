"""Look for the cause of a failure among the transforms in the user's own call: which it was, and what it captured.

The call is made once more on a fresh copy, watched: an exception that leaves a trace holds no user frame on some versions, and a
silent leak raises none.
"""

from __future__ import annotations

import contextlib
import dis
import functools
import inspect
import itertools
from collections.abc import Callable, Mapping
from dataclasses import replace
from types import FrameType, FunctionType, MethodType, ModuleType
from typing import Any, TypeVar
from unittest import mock

import jax
from flax import nnx

from pytest_nnxcheck.compat import graph
from pytest_nnxcheck.compat.frames import called, followed, made_before, profiled, transforms_by_itself
from pytest_nnxcheck.compat.owner import is_library, is_of_jax_or_flax, of_frame
from pytest_nnxcheck.core.facts import Leak
from pytest_nnxcheck.core.notes import CapturedBy, CapturedNode, MergedVariables
from pytest_nnxcheck.core.text import beginning, near
from pytest_nnxcheck.subject.originals import leak
from pytest_nnxcheck.subject.subject import Subject, copy_leaf, on_arrays, spell
from pytest_nnxcheck.walk.raw_access import MISSING, cell_content, layout
from pytest_nnxcheck.walk.walk import walk

__tracebackhide__ = True  # pytest shows the frames of the user, not these

SHOWN = 4
"""Transforms, and tracers, that explain an exception: the first."""

DEEPEST = 3
"""The number of functions that captured one another to follow to a module."""

T = TypeVar("T")


def captured(subject: Subject) -> tuple[CapturedBy, ...]:
    """The transforms that the call, made once more, applies to a function which captured a graph node, or that made the function of the call."""
    captures: dict[CapturedBy, list[Any]] = {}
    running: list[FrameType] = []

    def watch(frame: FrameType, event: str, _: Any) -> None:
        if event == "return" and running and frame is running[-1]:
            running.pop()
        # A capture inside another transform that captured belongs to the outer one.
        name = called(frame) if event == "call" and not running else ""
        if not name:
            return
        caller = user_caller(frame)
        nodes = captured_nodes(frame) if caller else {}
        if caller and nodes:
            running.append(frame)
            capture = CapturedBy(name, line_of(frame, caller), tuple(nodes))
            # The result of `nnx.value_and_grad` is named after the gradient, and a function that the call transformed is named where it did that.
            told = any(other.nodes == capture.nodes for other in captures)
            if not (told and made_before(frame)):
                captures[capture] = list(nodes.values())

    def look() -> tuple[CapturedBy, ...]:
        first = list(captures.items())[:SHOWN]
        return tuple(replace(capture, leaks=bool(walk([("", nodes)]).tracers)) for capture, nodes in first)

    # A function that was traced before would not be traced again.
    jax.clear_caches()
    return rehearse(subject, subject.function, profiled(watch), look)


def line_of(frame: FrameType, caller: FrameType) -> str:
    """The line that called a transform; for one that made the function of the call itself, the line where that function begins."""
    if of_frame(caller) != "ours":
        return near(f"{caller.f_code.co_filename}:{caller.f_lineno}")
    values = (frame.f_locals.get(name) for name in frame.f_code.co_freevars)
    functions = [
        type(value).__call__ if graph.is_graph_node(value) else inspect.unwrap(value)
        for value in values
        if callable(value)
    ]
    code = next((function.__code__ for function in functions if is_users(function)), caller.f_code)
    return beginning(code)


def captured_by_call(subject: Subject) -> tuple[CapturedBy, ...]:
    """The graph nodes that the user's function captured itself, or takes from the globals that it names."""
    function = inspect.unwrap(subject.function)
    code = getattr(function, "__code__", None)
    if code is None:
        return ()
    nodes = tuple(nodes_of(function))
    return (CapturedBy("", beginning(code), nodes),) if nodes else ()


def merged_inside(subject: Subject) -> tuple[Leak | MergedVariables, ...]:
    """Variables of another trace in the modules that the call itself merged, else tracers that are left in those: what `nnx.merge` returns is
    looked at, there and afterwards.
    """
    merged: list[tuple[str, Any]] = []
    pinned: dict[MergedVariables, None] = {}
    merge = nnx.merge

    def keep(*args: Any, **kwargs: Any) -> Any:
        frame = inspect.currentframe()
        user = frame.f_back if frame else None
        where = near(f"{user.f_code.co_filename}:{user.f_lineno}") if user else "an unknown line"
        node = merge(*args, **kwargs)
        merged.append((f"{type(node).__name__} (merged at {where})", node))
        paths = [spell("", path) for path, variable in graph.variables(node) if graph.is_pinned(variable)]
        if paths and "copy" in inspect.signature(merge).parameters:
            pinned[MergedVariables(where, type(node).__name__, tuple(paths))] = None
        return node

    def look() -> tuple[Leak, ...]:
        return tuple(leak(tracer, None) for tracer in walk(merged).tracers)

    # Without its jit, whose trace ends before what was merged is looked at.
    leaks = rehearse(subject, inspect.unwrap(subject.function), mock.patch.object(nnx, "merge", keep), look)
    return tuple(pinned) or leaks


MOST_LINES = 2_000
"""Lines after which tracers are looked for: a walk takes a few milliseconds."""


def lines_that_keep(subject: Subject, wanted: frozenset[str]) -> dict[str, str]:
    """The line that puts a tracer to each of these paths, where one is known: jax makes an argument, and has no line for it. The call is traced once more, line by line."""
    lines = dict[str, str]()
    looks = itertools.count()
    own = subject.for_run()

    def body(state: Any, *inputs: Any) -> Any:
        def held() -> set[str]:
            return {tracer.path for tracer in walk(subject.roots(state)).tracers} & wanted

        before = held()  # a Variable of the state holds a tracer of this trace from the start

        def watch(frame: FrameType, line: int) -> None:
            if wanted - before - lines.keys() and next(looks) < MOST_LINES:
                for path in held() - before:
                    lines.setdefault(path, near(f"{frame.f_code.co_filename}:{line}"))

        with followed(watch):
            return own.program(state, *inputs)

    traced, arguments = on_arrays(body, own)
    with subject.undone(subject.state), contextlib.suppress(Exception):  # the user's code may raise anything
        jax.eval_shape(traced, *arguments)
    jax.clear_caches()
    return lines


def rehearse(
    subject: Subject,
    function: Callable[..., Any],
    watching: contextlib.AbstractContextManager[Any],
    look: Callable[[], T],
) -> T:
    """Call the function on a copy, in place of the subject's, and return the result of ``look``. Every change is undone."""
    state, inputs = subject.fresh(), jax.tree.map(copy_leaf, subject.inputs)
    program = subject.for_run(function).program
    with subject.undone(state):
        # The user's code may raise anything.
        with contextlib.suppress(Exception), watching:
            if subject.abstract:
                traced, arguments = on_arrays(program, subject, state)
                jax.eval_shape(traced, *arguments)
            else:
                program(state, *inputs)
        seen = look()
    jax.clear_caches()
    return seen


def user_caller(frame: FrameType) -> FrameType | None:
    """The user's frame that called a transform; None where another function of jax called it that is one, or has its own use for it."""
    above = frame.f_back
    while above is not None and is_of_jax_or_flax(above):
        if called(above) or transforms_by_itself(above):
            return None
        above = above.f_back
    return above


def captured_nodes(frame: FrameType) -> dict[CapturedNode, Any]:
    """The graph nodes in the closures of the functions that a transform was called with, or that are such a function.

    A function that it made before has that function in its own closure; its arguments are no captures.
    """
    code, own = frame.f_code, frame.f_locals
    functions = code.co_freevars if made_before(frame) else code.co_varnames[: min(code.co_argcount, 1)]
    called_ones = [own.get(name) for name in functions]
    nodes = {captured_node("", node): node for node in called_ones if graph.is_graph_node(node)}
    for value in called_ones if made_before(frame) else list(own.values()):
        for item in value if isinstance(value, tuple | list) else (value,):
            nodes |= nodes_of(item)
    return nodes


def nodes_of(function: Any, depth: int = DEEPEST) -> dict[CapturedNode, Any]:
    """The graph nodes that a function captured, or a function that it captured."""
    nodes: dict[CapturedNode, Any] = {}
    for name, held in closure_of(function).items():
        nodes |= nodes_in(name, held, depth)
    return nodes


def nodes_in(name: str, held: Any, depth: int) -> dict[CapturedNode, Any]:
    """The graph nodes that a captured value is, or holds as a list, tuple or dict of them, as a function, or as an object that is none: a trainer, say."""
    if graph.is_graph_node(held):
        items = {name: held}
    elif isinstance(held, list | tuple | dict):
        items = {
            f"{name}[{key!r}]": item for key, item in (held.items() if isinstance(held, dict) else enumerate(held))
        }
    elif isinstance(held, FunctionType | MethodType | functools.partial):
        return nodes_of(held, depth - 1) if depth else {}
    else:
        attributes = {} if isinstance(held, type | ModuleType) else layout(type(held)).read(held) or {}
        items = {f"{name}.{key}": item for key, item in attributes.items()}
    return {captured_node(label, item): item for label, item in items.items() if graph.is_graph_node(item)}


def captured_node(name: str, node: Any) -> CapturedNode:
    return CapturedNode(name, type(node).__name__, graph.takes_variables() or not isinstance(node, nnx.Variable))


def is_users(function: Any) -> bool:
    """True if a value is a Python function, and none of a library."""
    return inspect.isfunction(function) and not is_library(function.__globals__.get("__name__"))


def globals_of(function: FunctionType) -> dict[str, Any]:
    """The globals that a function reads, by name. Its `co_names` have names of attributes as well."""
    read = {step.argval for step in dis.get_instructions(function.__code__) if step.opname == "LOAD_GLOBAL"}
    return {name: value for name, value in function.__globals__.items() if name in read}


def bound_by(function: functools.partial[Any]) -> dict[str, Any]:
    """The arguments that a partial holds, by the names of the parameters, and a module that it calls."""
    called_module = {"func": function.func} if graph.is_graph_node(function.func) else {}
    with contextlib.suppress(TypeError, ValueError):  # a function without a signature, or that refuses these arguments
        arguments = inspect.signature(function.func).bind_partial(*function.args, **function.keywords).arguments
        return {**arguments, **called_module}
    return called_module


def closure_of(function: Any) -> dict[str, Any]:
    """The values that a user's function captured or reads from the globals, by name; a bound method captured its ``self``, a partial its arguments.

    `nnx.jit` keeps the function in an object of flax' own.
    """
    if inspect.ismethod(function):
        return {"self": function.__self__, **closure_of(function.__func__)}
    if isinstance(function, functools.partial):
        return {**bound_by(function), **closure_of(function.func)}
    if not inspect.isfunction(function):
        return closure_of_wrapped(layout(type(function)).read(function))
    inner = closure_of_wrapped(function.__dict__)
    if not is_users(function):
        return inner
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    own = {name: content for name, cell in cells if (content := cell_content(cell)) is not MISSING}
    return {**globals_of(function), **own, **inner}


def closure_of_wrapped(attributes: Mapping[str, Any] | None) -> dict[str, Any]:
    """The values that the wrapped function captured, by name, or the wrapped module; ``attributes`` are those of the wrapper."""
    inner = (attributes or {}).get("__wrapped__")
    if graph.is_graph_node(inner):
        return {"": inner}
    return {} if inner is None else closure_of(inner)
