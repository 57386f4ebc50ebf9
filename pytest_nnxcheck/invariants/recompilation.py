"""A second call with arguments of the same types is not traced again, nor is a jit inside it, so that nothing is compiled for it."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any, Literal

import jax

from pytest_nnxcheck.compat import flax_modes, frames, graph
from pytest_nnxcheck.compat.arrays import NUMBERS, describe
from pytest_nnxcheck.compat.owner import is_library_file
from pytest_nnxcheck.core.catalogue import JIT, InvariantRow
from pytest_nnxcheck.core.nesting import Layer
from pytest_nnxcheck.core.notes import Fact, other_dtype
from pytest_nnxcheck.core.outcome import Finding, Words, uncounted
from pytest_nnxcheck.core.text import Row, beginning, near
from pytest_nnxcheck.engine.observe import traced_again
from pytest_nnxcheck.engine.ran import Ran
from pytest_nnxcheck.subject.subject import Subject, on_arrays, users_function
from pytest_nnxcheck.walk.fingerprint import equal, short

__tracebackhide__ = True  # pytest shows the frames of the user, not these

ROW = InvariantRow("recompilation", order=40, severity=50, compiled=True, runs=True)

MISSING = "missing"
"""The word of `TypeMoved` for a leaf or an attribute that is not there."""


def judge(ran: Ran) -> Iterator[Finding | Fact]:
    """Judge state that gets another type, so that the next call is traced again, and the jits inside that are traced in each call."""
    changed, inside = second_call(ran), inner_jits(ran)
    if any(MISSING in (each.before, each.after) for each in changed):
        yield Fact("adds state", ("recompilation",))
    else:
        yield from changed
    yield from inside


def second_call(ran: Ran) -> tuple[TypeMoved, ...]:
    """Find values that have another type after the call, so that a jit outside traces a second call again.

    Gives nothing where the jit does not trace it again, or where no jit outside takes the state. A functional jit takes leaves alone, and
    each call here builds it anew: a functional jit that the user keeps traces again where the types of the leaves differ.
    """
    call, observation = ran.call, ran.observation
    subject, nesting = call.subject, observation.nesting
    if not observation.settled:
        return ()
    if nesting.layers[:1] == (Layer(JIT, "functional"),):
        return tuple(types_moved(subject, subject.state, observation.state))
    if nesting.layers[:1] != (Layer(JIT),):
        return ()
    if not traced_again(call, nesting, observation.state):
        return ()
    return moved(subject, subject.state, observation.state)


def inner_jits(ran: Ran) -> tuple[JitTracedAgain, ...]:
    """The jits inside the call that trace the same in each; the same under every nesting."""
    call, observation = ran.call, ran.observation
    if not ran.measured or not observation.settled:
        return ()
    return call.tried("inner jits", lambda: jits_traced_again(call.subject))


# --- findings


@dataclass(frozen=True, slots=True, kw_only=True)
class TypeMoved(Finding):
    """An attribute, or the type of a leaf, that a call compiles for and then changes; empty where it cannot be named."""

    label: Literal["attribute", "leaf", ""] = ""
    type: str = ""
    """The Python type of an attribute."""
    before: str = ""
    after: str = ""
    hardened: bool = False
    """True if a leaf was made of a Python number, and is not any more."""

    def words(self, others: Sequence[Finding] = ()) -> Words:
        jits = [each for each in others if isinstance(each, JitTracedAgain)]
        every = [self, *(each for each in others if isinstance(each, TypeMoved))]
        traced = [row for each in jits[: self.SHOWN] for row in each.rows()]
        if not self.label:
            unnamed = "a second call with the same types is traced again: no attribute and no type of a leaf differs"
            return Words(unnamed, traced, "")
        rows = [row for each in every[: self.SHOWN] for row in each.rows()]
        summary = f"a second call is traced again: {self.path} has changed"
        return Words(summary, [*rows, *uncounted(every[self.SHOWN :]), *traced], self.cure())

    def rows(self) -> list[Row]:
        return [("changed", f"{self.path}   {self.before} before the call, {self.after} after it")]

    def cure(self) -> str:
        """Empty where no cure was tried."""
        old, new = (text.partition("[")[0] for text in (self.before, self.after))
        if self.label == "attribute":
            counts = self.type in ("int", "float")
            return COUNTED.format(path=self.path) if counts else ""
        if self.hardened:
            return (
                f"make it an array of its type where it is made first, jnp.asarray(value, jnp.{new}):"
                f" {self.path} was made of a Python number"
            )
        return other_dtype(old, new) if old != new else ""


COUNTED = (
    "keep the value in an nnx.Variable: {path} is a plain Python attribute, and every value of it is compiled anew"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class JitTracedAgain(Finding):
    """A function, named by ``path``, that a jit inside the call traces in each call, for arrays of the same types each time."""

    line: str
    """The line where the function begins; empty for one of a library."""
    called: tuple[str, ...]
    """The lines that call the jit."""
    times: int
    """The number of times that the jit traces it in one call."""

    def sentence(self) -> str:
        return f"each call traces {self.path} again, for the same types: it makes a jit anew, or a function that a jit is handed"

    def rows(self) -> list[Row]:
        """The number of times that a jit traces it, and the lines that call the jit."""
        times = f"{self.times} times" if self.times > 1 else "once"
        where = f" ({self.line})" if self.line else ""
        called = ", ".join(self.called)
        return [("traced", f"{self.path}{where}   {times} a call; its jit is called at {called}")]

    def cure(self) -> str:
        return (
            "make the jit once, outside of the call, at module level say, and hand it the same functions each time: a lambda or a partial that the"
            " call makes is another one in each call"
        )


# --- types and attributes that a jit compiles for, and a call replaces


def moved(subject: Subject, before: Any, after: Any) -> tuple[TypeMoved, ...]:
    """The parts of the state that differ after a call, so that a jit compiles again: attributes first, then the types of leaves. Never empty."""
    return (*attributes_moved(subject, before, after), *types_moved(subject, before, after)) or (TypeMoved(),)


def attributes_moved(subject: Subject, before: Any, after: Any) -> Iterator[TypeMoved]:
    old, new = (dict(graph.attributes(state)) for state in (before, after))
    for path in dict.fromkeys([*old, *new]):
        texts = [short(values[path]) if path in values else MISSING for values in (old, new)]
        if (path in old) != (path in new) or not equal(old[path], new[path], unknown=True, typed=True):
            kind = type(old.get(path)).__name__
            yield TypeMoved(subject.path(path), label="attribute", type=kind, before=texts[0], after=texts[1])


def types_moved(subject: Subject, before: Any, after: Any) -> Iterator[TypeMoved]:
    old, new = (dict(graph.raw_leaves(state)) for state in (before, after))
    for path in dict.fromkeys([*old, *new]):
        texts = [typed(leaves[path]) if path in leaves else MISSING for leaves in (old, new)]
        if texts[0] != texts[1]:
            hardened = path in old and path in new and weak(old[path]) and not weak(new[path])
            yield TypeMoved(subject.path(path), label="leaf", before=texts[0], after=texts[1], hardened=hardened)


def typed(leaf: Any) -> str:
    """The type of a leaf as jax tells it from another."""
    return f"{describe(leaf)}{', weakly typed' if weak(leaf) else ''}"


def weak(leaf: Any) -> bool:
    """True if a leaf is a number of Python's, or was made of one."""
    return isinstance(leaf, NUMBERS) or bool(getattr(leaf, "weak_type", False))


# --- jits inside the call


@dataclass(frozen=True, slots=True)
class JitTrace:
    """One trace that a jit made of a function: its name, the line where it begins, and the types of the arrays."""

    function: str
    line: str
    types: tuple[str, ...]


def jits_traced_again(subject: Subject) -> tuple[JitTracedAgain, ...]:
    """The functions that the second of two calls traces for the same types as the first one; none where a call changes the types of the state.

    Both calls are made in one abstract evaluation, on the same module: the second one finds a jit that is kept there, or in a global.
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
    """The traces by jits inside a call in the first of two calls, and in the second."""
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
    """The static parts and types of a module that a jit compiles for."""
    graphdef, leaves = flax_modes.split(module)
    return graphdef, [*map(typed, jax.tree.leaves(leaves))]


def note(noted: Traces, jit: FrameType, caller: FrameType, by_library: bool) -> None:
    """Note the trace of a jit of the user's: the user calls it, or wrote the function."""
    trace, called = trace_of(jit, caller)
    if trace.line or not by_library:
        noted.append((trace, called))


def trace_of(jit: FrameType, caller: FrameType) -> tuple[JitTrace, str]:
    """The function that a jit traces, as its frame shows, and the line that calls the jit."""
    held = jit.f_locals
    function = users_function(held.get("fun"))
    code = getattr(function, "__code__", None)
    line = beginning(code) if code and not is_library_file(code.co_filename) else ""
    name = getattr(function, "__qualname__", type(function).__qualname__)
    types = tuple(map(typed, jax.tree.leaves((held.get("args"), held.get("kwargs")))))
    return JitTrace(name, line, types), near(f"{caller.f_code.co_filename}:{caller.f_lineno}")
