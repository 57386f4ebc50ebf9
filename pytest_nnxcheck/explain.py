"""What an exception of the user's code has to do with its transforms: the loop, what it captured, the way out."""

from __future__ import annotations

import contextlib
import inspect
import traceback
from types import FrameType
from typing import Any
from unittest import mock

from flax import nnx

from pytest_nnxcheck import compat
from pytest_nnxcheck.invariants.tracers import carry_advice
from pytest_nnxcheck.nesting import TRANSFORMS, Layer
from pytest_nnxcheck.observe import Leak, Observation, leak
from pytest_nnxcheck.subject import Subject, copy
from pytest_nnxcheck.walk import walk

LOOPS = (*TRANSFORMS, "fori_loop", "cond", "switch", "grad", "value_and_grad", "checkpoint")


def first_line(error: BaseException) -> str:
    """``ValueError: the first line of its text``, short enough for a table."""
    text = str(error).strip().partition("\n")[0]
    name = type(error).__name__
    return f"{name}: {text[:160]}" if text else name


def causes(subject: Subject, error: BaseException, found: Observation | None) -> tuple[str, ...]:
    """Notes for the user's exception: tracers that it left, and the transform that captured a module."""
    texts = []
    leaks = (found.leaks or found.dropped) if found else ()
    if not leaks and compat.is_tracer_error(error):
        leaks = inside(subject)
    for leak in leaks[:4]:
        texts.append(f"tracer left in {leak.path}: {leak.type}" + (f", created at {leak.line}" if leak.line else ""))
    if compat.is_refusal(error) or compat.is_tracer_error(error):
        texts += captured(error)
    return tuple(texts)


def inside(subject: Subject) -> tuple[Leak, ...]:
    """Tracers left in modules that the call itself merged: it is made once more, and what `nnx.merge` returns is kept."""
    merged: list[tuple[str, Any]] = []
    merge = nnx.merge

    def keep(*args: Any, **kwargs: Any) -> Any:
        caller = inspect.currentframe()
        user = caller.f_back if caller else None
        where = f"{user.f_code.co_filename}:{user.f_lineno}" if user else "an unknown line"
        node = merge(*args, **kwargs)
        merged.append((f"{type(node).__name__} (merged at {where})", node))
        return node

    state = copy(subject.state)
    places = walk(subject.roots(state)).places
    with mock.patch.object(nnx, "merge", keep), contextlib.suppress(Exception):
        # Without its jit: a function that was traced before is not traced again.
        subject.program_of(inspect.unwrap(subject.function))(state, *subject.inputs)
    leaks = tuple(leak(each, None) for each in walk(merged).tracers)
    places.restore()
    return leaks


def captured(error: BaseException) -> list[str]:
    """The transforms on the way to the exception whose function captured a graph node."""
    frames = [(frame, line) for frame, line in traceback.walk_tb(error.__traceback__)]
    texts = []
    for (caller, line), (frame, _) in zip(frames, frames[1:], strict=False):
        name = frame.f_code.co_name.removesuffix("_wrapper")
        if name not in LOOPS or not library(frame) or library(caller):
            continue
        nodes = captured_nodes(frame)
        if nodes:
            where = f"{caller.f_code.co_filename}:{line}"
            texts.append(f"{name} at {where} captured {', '.join(nodes)}; {way_out(name)}")
    return texts[:2]


def way_out(name: str) -> str:
    return carry_advice(Layer(name)) if name in TRANSFORMS else f"pass the module as an argument of nnx.{name}"


def library(frame: FrameType) -> bool:
    return str(frame.f_globals.get("__name__", "")).partition(".")[0] in ("jax", "flax")


def captured_nodes(frame: FrameType) -> list[str]:
    """Names and types of the graph nodes in the closures of the functions that a transform was called with."""
    names: dict[str, None] = {}
    for value in list(frame.f_locals.values()):
        for item in value if isinstance(value, tuple) else (value,):
            function = inspect.unwrap(item) if callable(item) else item
            for name, held in closure_of(function).items():
                if compat.is_graph_node(held):
                    names[f"{name} ({type(held).__name__})"] = None
    return list(names)


def closure_of(function: Any) -> dict[str, Any]:
    """What a Python function captured, by name; a bound method captured its ``self``."""
    if inspect.ismethod(function):
        return {"self": function.__self__, **closure_of(function.__func__)}
    if not inspect.isfunction(function):
        return {}
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    found = {}
    for name, cell in cells:
        try:
            found[name] = cell.cell_contents
        except ValueError:
            continue
    return found


