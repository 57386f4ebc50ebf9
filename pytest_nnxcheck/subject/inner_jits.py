"""The jits inside a call that are made anew in each call, or handed something new each time: a second call with the same types traces them again."""

from __future__ import annotations

import functools
import inspect
from dataclasses import dataclass
from types import FrameType
from typing import Any

import jax

from pytest_nnxcheck.compat import flax_modes, frames, variables
from pytest_nnxcheck.compat.arrays import describe
from pytest_nnxcheck.core.outcome import JitTracedAgain
from pytest_nnxcheck.core.text import beginning, near
from pytest_nnxcheck.subject.staging import on_arrays
from pytest_nnxcheck.subject.subject import Subject
from pytest_nnxcheck.walk.fingerprint import equal

__tracebackhide__ = True  # pytest shows the frames of the user, not these


@dataclass(frozen=True, slots=True)
class JitTrace:
    """One trace that a jit made of a function: its name, the line where it begins, and the types of the arrays."""

    function: str
    line: str
    types: tuple[Any, ...]


def jits_traced_again(subject: Subject) -> tuple[JitTracedAgain, ...]:
    """The functions that the second of two calls traces for the same types as the first one; none where that leaves the state in other types.

    Both calls are made in one abstract evaluation, on the same module: what is kept there, or in a global, is there for the second one.
    """
    first, second = traces_of_two_calls(subject)
    again = [(trace, called) for trace, called in second if trace in {trace for trace, _ in first}]
    lines: dict[tuple[str, str], list[str]] = {}
    for trace, called in again:
        lines.setdefault((trace.function, trace.line), []).append(called)
    return tuple(
        JitTracedAgain(function, line=line, called=tuple(dict.fromkeys(called)), times=len(called))
        for (function, line), called in lines.items()
    )


Traces = list[tuple[JitTrace, str]]
"""Traces of one call, each with the line that calls the jit."""


def traces_of_two_calls(subject: Subject) -> tuple[Traces, Traces]:
    """What the jits inside a call trace in the first of two, and in the second."""
    subject = subject.for_run()
    traces: tuple[Traces, Traces] = [], []
    types: list[Any] = []

    def twice(module: Any, *inputs: Any) -> None:
        types.append(types_of(module))
        for noted in traces:
            with frames.jits_traced(functools.partial(note, noted)):
                subject.program(module, *inputs)
            types.append(types_of(module))

    function, arguments = on_arrays(twice, subject)
    try:
        jax.eval_shape(function, *arguments)
    except Exception:  # noqa: BLE001 - the user's code may raise anything; a call that cannot be made twice is not judged
        return [], []
    before, *after = types
    return traces if all(equal(before, each, unknown=False) for each in after) else ([], [])


def types_of(module: Any) -> Any:
    """What a jit that is handed a module compiles for."""
    graphdef, leaves = flax_modes.split(module)
    return graphdef, [*map(full_type, jax.tree.leaves(leaves))]


def full_type(leaf: Any) -> tuple[str, Any]:
    """The type of an array, and whether that gives way to another in a sum; of what is no array the class."""
    return describe(leaf), getattr(leaf, "weak_type", None)


def note(noted: Traces, jit: FrameType, caller: FrameType, by_library: bool) -> None:
    """Note the trace of a jit of the user's: the user calls it, or wrote the function."""
    trace, called = trace_of(jit, caller)
    if trace.line or not by_library:
        noted.append((trace, called))


def trace_of(jit: FrameType, caller: FrameType) -> tuple[JitTrace, str]:
    """What the frame of a jit tells of the function that it traces, and the line that calls the jit."""
    held = jit.f_locals
    function = plain(held.get("fun"))
    code = getattr(function, "__code__", None)
    line = beginning(code) if code and not variables.is_library_file(code.co_filename) else ""
    name = getattr(function, "__qualname__", type(function).__qualname__)
    types = tuple(map(full_type, jax.tree.leaves((held.get("args"), held.get("kwargs")))))
    return JitTrace(name, line, types), near(f"{caller.f_code.co_filename}:{caller.f_lineno}")


def plain(function: Any) -> Any:
    """The function that the user wrote, inside of what transforms and partials made of it."""
    inner = inspect.unwrap(function) if callable(function) else function
    inner = inner.func if isinstance(inner, functools.partial) else getattr(inner, "__func__", inner)
    return inner if inner is function else plain(inner)
