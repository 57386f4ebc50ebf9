"""Writes that a call makes to copies of the caller's Variables, and reads of the caller's own past its arguments.

A transform of jax takes a module apart and hands its function a copy, and so does `nnx.merge`: what that writes reaches the caller only if the copy
comes back. While the call is traced, each Variable that it gets carries a mark in its metadata, which its copies inherit.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
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
from pytest_nnxcheck.walk.walk import walk

__tracebackhide__ = True  # pytest shows the frames of the user, not these

MARK = "nnxcheck_mark"
"""The name of a mark among the metadata of a Variable."""


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
class CopyWatch:
    """Marks the Variables of one trace, and notes the writes to their copies. A context manager."""

    trace: object = field(default_factory=object)
    written: dict[Path, Write] = field(default_factory=dict)
    """The last write to a copy of each Variable."""
    returned: set[Path] = field(default_factory=set)
    """The Variables that the call returns a copy of."""
    _copies: dict[int, Any] = field(default_factory=dict)
    """The copies that were written, by id."""
    _patches: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)

    def __enter__(self) -> Self:
        self._patches.enter_context(graph.writes_noted(self._note, MARK))
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
            marks = (graph.variable_metadata(variable).get(MARK) for variable in variables_in(output))
            self.returned.update(mark.path for mark in marks if isinstance(mark, Mark) and mark.original)
            return output

        return call

    def _note(self, variable: Any, before: Any) -> None:
        mark = graph.variable_metadata(variable).get(MARK)
        if not isinstance(mark, Mark) or mark != Mark(self.trace) or isinstance(variable, nnx.Intermediate):
            return
        if mark.original in (0, id(variable)) or mark.kind is not type(variable):
            return
        # A copy has the value of the caller's, until it is written. What was computed from that, a gradient or a sum, takes over the metadata too.
        if id(variable) not in self._copies and graph.is_computed(before):
            return
        if (place := where_written(inspect.currentframe())) is not None:
            self._copies[id(variable)] = variable
            self.written[mark.path] = Write(mark.path, *place, random=isinstance(variable, nnx.RngState))

    def _meant(self, copy: Any) -> None:
        """A copy of `nnx.clone`, which is made on purpose."""
        for variable in variables_in(copy):
            graph.set_metadata(variable, MARK, Mark(self.trace))


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


def where_written(frame: FrameType | None) -> tuple[str, str, str] | None:
    """The user's line that writes in a frame, the innermost transform of jax that the user called around it, and the line that calls that.

    `None` where the write is part of no program: the user asks for shapes, or for a program alone.
    """
    line, transform, stack = "", "", list[FrameType]()
    while frame is not None and not surrounds(frame.f_code.co_filename):
        stack.append(frame)
        frame = frame.f_back
    if any(map(frames.describes, stack)):
        return None
    for frame in stack:
        if of_frame(frame) == "user":
            here = near(f"{frame.f_code.co_filename}:{frame.f_lineno}")
            line = line or here
            if transform.startswith("jax."):
                return line, transform, here
        elif is_of_jax_or_flax(frame) and (name := frames.called(frame)):
            # Those of flax call those of jax: the outermost is the one that the user calls.
            transform = spelled(name) if of_frame(frame) == "jax" else "nnx"
    return line, transform if transform.startswith("jax.") else "", ""


def spelled(transform: str) -> str:
    """The public name of a transform of jax."""
    return f"jax.{transform}" if hasattr(jax, transform) else f"jax.lax.{transform}"


def lost(
    watch: CopyWatch,
    changed: Collection[Path],
    leaves: Mapping[Path, Any],
    read: Collection[Path],
    outputs: Sequence[tuple[str, Any, Collection[Path]]],
) -> tuple[Write, ...]:
    """The writes that no one gets: the caller's Variable is not ``changed``, and nothing that is returned holds the copy.

    An output holds it if it has the type of the leaf, the leaf goes into it, and it is no output without a name: the result of a forward call.
    The new value of a leaf that the program does not ``read`` is made of others: each output of its type may be it.
    ``outputs`` have a name, a type, and the leaves that go into each.
    """

    def is_out(path: Path) -> bool:
        leaf = leaves[path]
        return any(
            name
            and (path in made_of or path not in read)
            and (out.shape, out.dtype) == (getattr(leaf, "shape", ()), getattr(leaf, "dtype", None))
            for name, out, made_of in outputs
        )

    unseen = (path for path in leaves if path in watch.written and path not in changed and path not in watch.returned)
    return tuple(watch.written[path] for path in unseen if not is_out(path))


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
