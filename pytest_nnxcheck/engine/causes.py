"""What a failure has to do with the transforms inside the user's own call: which loop, what it captured, and what to write instead.

The call is made once more on a fresh copy, watched: an exception that leaves a trace holds no user frame on some versions, and a
silent leak raises none.
"""

from __future__ import annotations

import contextlib
import dis
import functools
import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from types import FrameType, ModuleType
from typing import Any
from unittest import mock

import jax
from flax import nnx

from pytest_nnxcheck import compat
from pytest_nnxcheck.compat.frames import TRACES_JITTED, called, transforms_by_itself
from pytest_nnxcheck.core.notes import CapturedBy, MergedVariables
from pytest_nnxcheck.core.observation import Leak
from pytest_nnxcheck.core.text import near
from pytest_nnxcheck.engine.abstract_run import trace
from pytest_nnxcheck.engine.observe import leak
from pytest_nnxcheck.inspection.raw_access import MISSING, cell_content, layout
from pytest_nnxcheck.inspection.walk import walk
from pytest_nnxcheck.subject.subject import Subject, spell

__tracebackhide__ = True  # pytest shows the frames of the user, not these

SHOWN = 4
"""Transforms, and tracers, that explain an exception: the first."""


def captured(subject: Subject) -> tuple[CapturedBy, ...]:
    """The transforms that the call, made once more, applies to a function which captured a graph node: where, and what."""
    captures: dict[CapturedBy, None] = {}
    running: list[FrameType] = []

    def watch(frame: FrameType, event: str, _: Any) -> None:
        if event == "return" and running and frame is running[-1]:
            running.pop()
        # What a transform captures inside another one that captured is the outer one's doing.
        name = called(frame) if event == "call" and not running else ""
        if not name:
            return
        caller = user_caller(frame)
        nodes = captured_nodes(frame) if caller else []
        if caller and nodes:
            running.append(frame)
            where = near(f"{caller.f_code.co_filename}:{caller.f_lineno}")
            # What `nnx.value_and_grad` returns is named after the gradient, and what the call jitted itself is named where it did.
            later = frame.f_code.co_name == TRACES_JITTED
            same = [other for other in captures if other.nodes == tuple(nodes) and (later or other.line == where)]
            if not any(other.transform.endswith(name) for other in same):
                captures[CapturedBy(name, where, tuple(nodes))] = None

    rehearse(subject, profiled(watch))
    return tuple(captures)[:SHOWN]


def captured_by_call(subject: Subject) -> tuple[CapturedBy, ...]:
    """The graph nodes that the user's function captured itself, or takes from the globals that it names."""
    function = inspect.unwrap(subject.function)
    code = getattr(function, "__code__", None)
    if code is None:
        return ()
    # Names of attributes are among `co_names` as well.
    read = {step.argval for step in dis.get_instructions(code) if step.opname == "LOAD_GLOBAL"}
    names = {name: value for name, value in function.__globals__.items() if name in read}
    held = {**names, **closure_of(function)}.items()
    nodes = tuple(f"{label} ({type(node).__name__})" for name, value in held for label, node in nodes_in(name, value))
    return (CapturedBy("", near(f"{code.co_filename}:{code.co_firstlineno}"), nodes),) if nodes else ()


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
        paths = [spell("", path) for path, variable in compat.variables(node) if compat.is_pinned(variable)]
        if paths and "copy" in inspect.signature(merge).parameters:
            pinned[MergedVariables(where, type(node).__name__, tuple(paths))] = None
        return node

    leaks = rehearse(subject, mock.patch.object(nnx, "merge", keep), merged)
    return tuple(pinned) or leaks


def rehearse(
    subject: Subject,
    watching: contextlib.AbstractContextManager[Any],
    kept: Sequence[tuple[str, Any]] = (),
) -> tuple[Leak, ...]:
    """The tracers in what was kept of the call, which is made once more on a copy; what it leaves is undone."""
    state = subject.fresh()
    places = walk(subject.roots(state)).places
    # Without its jit: a function that was traced before would not be traced again.
    program = subject.for_run(inspect.unwrap(subject.function)).program
    # The user's code may raise anything.
    with contextlib.suppress(Exception), watching:
        if subject.abstract:
            trace(program, state, subject.inputs, lambda _: False)
        else:
            program(state, *subject.inputs)
    leaks = tuple(leak(tracer, None) for tracer in walk(kept).tracers)
    places.restore()
    jax.clear_caches()
    return leaks


@contextlib.contextmanager
def profiled(watch: Callable[[FrameType, str, Any], None]) -> Any:
    """Python's profiling hook, for the time of one call."""
    before = sys.getprofile()
    sys.setprofile(watch)
    try:
        yield
    finally:
        sys.setprofile(before)


def library(frame: FrameType) -> bool:
    return str(frame.f_globals.get("__name__", "")).partition(".")[0] in ("jax", "flax")


def user_caller(frame: FrameType) -> FrameType | None:
    """The user's frame that called a transform; None where another function of jax called it that is one, or has its own use for it."""
    above = frame.f_back
    while above is not None and library(above):
        if called(above) or transforms_by_itself(above):
            return None
        above = above.f_back
    return above


def captured_nodes(frame: FrameType) -> list[str]:
    """Names and types of the graph nodes in the closures of the functions that a transform was called with, or that are such a function."""
    names: dict[str, None] = {}
    function = frame.f_locals.get(frame.f_code.co_varnames[0]) if frame.f_code.co_argcount else None
    if compat.is_graph_node(function):
        names[type(function).__name__] = None
    for value in list(frame.f_locals.values()):
        for item in value if isinstance(value, tuple | list) else (value,):
            for name, held in closure_of(item).items():
                for label, node in nodes_in(name, held):
                    names[f"{label} ({type(node).__name__})"] = None
    return list(names)


def nodes_in(name: str, held: Any) -> Iterator[tuple[str, Any]]:
    """The graph nodes that a captured value is, or holds as a list, tuple or dict of them, or as an object that is none: a trainer, say."""
    if compat.is_graph_node(held):
        yield name, held
    elif isinstance(held, list | tuple | dict):
        items = held.items() if isinstance(held, dict) else enumerate(held)
        yield from ((f"{name}[{key!r}]", node) for key, node in items if compat.is_graph_node(node))
    elif not isinstance(held, type | ModuleType):
        attributes = layout(type(held)).read(held) or {}
        yield from ((f"{name}.{key}", node) for key, node in attributes.items() if compat.is_graph_node(node))


def bound_by(function: functools.partial[Any]) -> dict[str, Any]:
    """The arguments that a partial holds, by the names of the parameters, and a module that it calls."""
    called_module = {"func": function.func} if compat.is_graph_node(function.func) else {}
    with contextlib.suppress(TypeError, ValueError):  # what has no signature, or refuses these arguments
        arguments = inspect.signature(function.func).bind_partial(*function.args, **function.keywords).arguments
        return {**arguments, **called_module}
    return called_module


def closure_of(function: Any) -> dict[str, Any]:
    """What a Python function captured, by name; a bound method captured its ``self``, a partial its arguments. That of `nnx.jit` is in an object of flax' own."""
    if inspect.ismethod(function):
        return {"self": function.__self__, **closure_of(function.__func__)}
    if isinstance(function, functools.partial):
        return {**bound_by(function), **closure_of(function.func)}
    if not inspect.isfunction(function):
        inner = (layout(type(function)).read(function) or {}).get("__wrapped__")
        return {} if inner is None else closure_of(inner)
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    return {name: content for name, cell in cells if (content := cell_content(cell)) is not MISSING}
