"""Writes that a call makes to copies of the caller's Variables, and reads of the caller's own past its arguments.

A transform of jax takes a module apart and hands its function a copy, and so does `nnx.merge`: what that writes reaches the caller only if the copy
comes back. While the call is traced, each Variable that it gets carries a mark in its metadata, which its copies inherit. A write is lost if the value
that the copy holds at the end is another than it was made with, and neither the caller's state nor an output of the call holds it. Where a copy was
written, the call is traced a second time for that: with names on these values, by which they are found in the program.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from types import FrameType
from typing import Any, Self

import jax
from flax import nnx

from pytest_nnxcheck.compat import frames, graph
from pytest_nnxcheck.compat.owner import is_of_jax_or_flax, of_frame, surrounds
from pytest_nnxcheck.core.facts import Path
from pytest_nnxcheck.core.text import near
from pytest_nnxcheck.jaxprs import flow
from pytest_nnxcheck.jaxprs.call_program import line_of
from pytest_nnxcheck.jaxprs.followed import NOTHING, Followed, follow, without_names
from pytest_nnxcheck.walk.walk import walk

__tracebackhide__ = True  # pytest shows the frames of the user, not these

MARK = "nnxcheck_mark"
"""The name of a mark among the metadata of a Variable."""


RETURNED = "returned"
"""The name of a value in a Variable that the call returns; with a path, of one that is the Variable of this path, or a copy of it."""


@dataclass(frozen=True, slots=True)
class Write:
    """A write to a copy of a Variable, which no one gets."""

    path: Path
    line: str
    """The user's line that writes; empty where all lines are a library's."""
    transform: str
    """The transform of jax that handed its function the copy: ``jax.jit``. Empty where the call made the copy itself."""
    called_at: str = ""
    """The line that calls that transform; empty where the call itself is one."""
    random: bool = False
    """True for the count of a stream of random numbers."""


@dataclass(frozen=True, slots=True)
class Read:
    """A read of a Variable of the caller's past the arguments: the traced program has its value of that time as a constant."""

    path: Path
    line: str
    holder: str
    """The path by which the call reaches it."""


@dataclass(frozen=True, slots=True)
class Mark:
    """The Variable of the call that a copy was made of, by id; 0 for a copy that is made on purpose.

    All marks of one trace are equal, since jax compares the metadata of trees that it maps over together. Marks of two traces are not, so that jax traces
    a function of the user's anew that it met before.
    """

    trace: object
    original: int = field(default=0, compare=False)
    kind: type | None = field(default=None, compare=False)
    """The type of that Variable. The moments of an optimizer take over the metadata of the parameters."""
    path: Path = field(default=(), compare=False)

    def __deepcopy__(self, _: Any) -> Mark:
        return Mark(self.trace)


@dataclass(slots=True)
class Copied:
    """A copy of a Variable that the call writes."""

    variable: Any
    path: Path
    """The path of the caller's Variable."""
    number: int
    """The number of the copy among those that are written."""
    before: Any
    """The value that it was copied with."""
    writes: int = 0
    """The number of writes so far."""
    is_written: bool = False
    """True if more than what a transform of flax hands out was written to it."""

    @property
    def first(self) -> str:
        """The name of the value that it was copied with."""
        return f"copy {self.number}"

    @property
    def last(self) -> str:
        """The name of the value that it was written with last."""
        return f"copy {self.number}, write {self.writes}"


@dataclass(slots=True)
class CopyWatch:
    """Marks the Variables of one trace, and notes the writes to their copies. A context manager."""

    follows: bool = False
    """True to name the values that it sees, so that `lost` finds them in the program."""
    trace: object = field(default_factory=object)
    written: dict[Path, Write] = field(default_factory=dict)
    """The last write to a copy of each Variable."""
    returned: set[Path] = field(default_factory=set)
    """The Variables that the call returns a copy of."""
    _copies: dict[int, Copied] = field(default_factory=dict)
    """The copies that were written, by id."""
    _named: list[Any] = field(default_factory=list)
    """The values that have a name alone: jax drops what nobody keeps."""
    _patches: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)

    def __enter__(self) -> Self:
        self._patches.enter_context(graph.writes_noted(self._note, self._replaced, MARK))
        self._patches.enter_context(graph.clones_noted(self._meant))
        return self

    def __exit__(self, *error: object) -> None:
        self._patches.close()

    def mark(self, module: Any) -> None:
        """Mark the Variables of the module that the call gets."""
        for path, variable in graph.variables(module):
            if isinstance(variable, nnx.Variable):
                mark = Mark(self.trace, id(variable), type(variable), tuple(path))
                graph.set_metadata(variable, MARK, mark)

    def around(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function of the call, with marks on the states among its arguments too: what it makes of them and of the module may be compared."""

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            for variable in variables_in((args, kwargs)):
                if MARK not in graph.variable_metadata(variable):
                    graph.set_metadata(variable, MARK, Mark(self.trace))
            output = function(*args, **kwargs)
            for variable in variables_in(output):
                self._return(variable)
            return output

        return call

    def _return(self, variable: Any) -> None:
        value, mark = graph.variable_value(variable), graph.variable_metadata(variable).get(MARK)
        self._name(value, RETURNED)
        if isinstance(mark, Mark) and mark.original:
            self.returned.add(mark.path)
            self._name(value, f"{RETURNED} {mark.path}")

    def _name(self, value: Any, name: str) -> Any:
        """The value with this name, if the watch follows values."""
        if self.follows:
            value = follow(value, name)
            self._named.append(value)
        return value

    def _note(self, variable: Any, before: Any) -> None:
        """A Variable with a mark was written."""
        mark = graph.variable_metadata(variable)[MARK]
        if not isinstance(mark, Mark) or mark != Mark(self.trace) or isinstance(variable, nnx.Intermediate):
            return
        if mark.original in (0, id(variable)) or mark.kind is not type(variable):
            return
        # A copy has the value of the caller's, until it is written. What was computed from that, a gradient or a sum, takes over the metadata too.
        if id(variable) not in self._copies and graph.is_computed(before):
            return
        if (place := where_written(inspect.currentframe())) is None:
            return
        line, transform, called_at, handed_out = place
        copied = self._copies.get(id(variable))
        if copied is None:
            copied = self._copies[id(variable)] = Copied(variable, mark.path, len(self._copies), before)
            self._name(before, copied.first)
        if not (handed_out and mark.path in self.written):
            self.written[mark.path] = Write(mark.path, line, transform, called_at, isinstance(variable, nnx.RngState))
        copied.writes += 1
        copied.is_written |= not handed_out
        if self.follows:
            graph.set_variable_value(variable, self._name(graph.variable_value(variable), copied.last))

    def _replaced(self, variable: Any, other: Any) -> None:
        """A module got another Variable in the place of one, which is its copy from now on."""
        mark, copied = graph.variable_metadata(variable).get(MARK), self._copies.get(id(variable))
        if not isinstance(mark, Mark) or mark.original in (0, id(variable)) or MARK in graph.variable_metadata(other):
            return
        before = copied.before if copied else graph.variable_value(variable)
        if graph.is_computed(before):
            return
        graph.set_metadata(other, MARK, Mark(self.trace, mark.original, type(other), mark.path))
        self._note(other, before)

    def _meant(self, copy: Any) -> None:
        """A copy of `nnx.clone`, which is made on purpose."""
        for variable in variables_in(copy):
            graph.set_metadata(variable, MARK, Mark(self.trace))

    def open(self, changed: Collection[Path]) -> bool:
        """True if a copy has another value at the end than it was made with, and the caller's Variable is not ``changed``."""
        return any(
            copied.path not in changed and graph.variable_value(copied.variable) is not copied.before
            for copied in self._copies.values()
        )

    def lost(
        self, jaxpr: Any, changed: Collection[Path], returned: Collection[int], stored: Collection[int]
    ) -> dict[Path, Write]:
        """The writes that no one gets: the caller's Variable is not ``changed``, and nothing that the call hands out holds what a copy of it holds at the end.

        The outputs of the jaxpr that hand a value out are those that the call has ``returned``, and those that it has ``stored`` in the caller's state, by
        number. A Variable that it returns hands out too what is made of the last value of its copies.
        """
        followed = Followed.of(jaxpr)
        types = {type_of(jaxpr.outvars[number].aval) for number in returned}
        written, held = set[Path](), set[Path]()
        for copied in self._copies.values():
            path, value = copied.path, graph.variable_value(copied.variable)
            last = followed.values.get(copied.last, [])
            before = NOTHING.union(*followed.values.get(copied.first, []))
            # A number of Python is no value of the program, and jax drops what a derivative does not need: that may be any output of its type.
            if any(not without_names(contents) <= before for contents in last) or (not last and copied.is_written):
                written.add(path)
            if not last and (path in self.returned or type_of(value) in types):
                held.add(path)
            large = [n for n in (*returned, *stored) if jaxpr.outvars[n].aval.size >= getattr(value, "size", 0)]
            handed_out = [*(followed.outputs[n] for n in large), *followed.values.get(RETURNED, [])]
            whole = any(copied.last in out or any(contents <= out for contents in last) for out in handed_out)
            if whole or copied.last in followed.made_of.get(f"{RETURNED} {path}", ()):
                held.add(path)
        return {path: self.written[path] for path in written - held - {*changed}}


def type_of(array: Any) -> tuple[Any, Any]:
    """The shape and the dtype of an array, or of its type."""
    return getattr(array, "shape", None), getattr(array, "dtype", None)


def variables_in(tree: Any) -> Iterator[Any]:
    """The Variables, and the states of Variables, in a tree."""
    try:
        leaves = jax.tree.leaves(tree, is_leaf=lambda leaf: graph.is_graph_node(leaf) or graph.is_variable(leaf))
    except (TypeError, ValueError):  # no tree of jax: another part says so
        return
    for leaf in leaves:
        if graph.is_variable(leaf):
            yield leaf
        elif graph.is_graph_node(leaf):
            yield from (variable for _, variable in graph.variables(leaf) if isinstance(variable, nnx.Variable))


def where_written(frame: FrameType | None) -> tuple[str, str, str, bool] | None:
    """The user's line that writes in a frame, the innermost transform of jax that the user called around it, and the line that calls that.

    Last, whether a transform writes what it hands out. `None` where the write is part of no program: the user asks for shapes, or for a program alone.
    """
    line, transform, stack = "", "", list[FrameType]()
    while frame is not None and not surrounds(frame.f_code.co_filename):
        stack.append(frame)
        frame = frame.f_back
    if any(map(frames.describes, stack)):
        return None
    handed_out = frames.hands_out(stack)
    for frame in stack:
        if of_frame(frame) == "user":
            here = near(f"{frame.f_code.co_filename}:{frame.f_lineno}")
            line = line or here
            if transform.startswith("jax."):
                return line, transform, here, handed_out
        elif is_of_jax_or_flax(frame) and (name := frames.called(frame)):
            # Those of flax call those of jax: the outermost is the one that the user calls.
            transform = spelled(name) if of_frame(frame) == "jax" else "nnx"
    return line, transform if transform.startswith("jax.") else "", "", handed_out


def spelled(transform: str) -> str:
    """The public name of a transform of jax."""
    return f"jax.{transform}" if hasattr(jax, transform) else f"jax.lax.{transform}"


def stale(traced: Any, state: Any, roots: Sequence[tuple[str, Any]]) -> tuple[Read, ...]:
    """The reads of a state past the arguments: a constant of the jaxpr is a leaf of it, and what the call got leads to the caller's own Variable.

    ``roots`` are those of the walk over what the call got. An array that a default argument or a global shares with a leaf is none.
    """
    held = {
        id(value): (tuple(path), variable)
        for path, variable in graph.variables(state)
        if (value := graph.variable_value(variable)) is not None
    }
    found = [(const, *held[id(const)]) for const in flow.constants(traced) if id(const) in held]
    names = {id(node): name for name, node in reversed(walk(roots).nodes)} if found else {}
    return tuple(
        Read(path, line_of(traced, const), names[id(variable)])
        for const, path, variable in found
        if id(variable) in names
    )
