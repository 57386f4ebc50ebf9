"""Writes to copies of the caller's Variables, and reads of the caller's own, while a call is traced.

A transform of jax takes a module apart and hands the function a copy, as `nnx.merge` does; what that function writes to the copy reaches the caller
only if the copy comes back. Each Variable that the call gets carries a mark in its metadata, which its copies inherit.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import jax
from flax import nnx

from pytest_nnxcheck.compat import frames, graph, variables
from pytest_nnxcheck.compat.owner import is_of_jax_or_flax, of_frame
from pytest_nnxcheck.core.facts import Path
from pytest_nnxcheck.core.text import near

__tracebackhide__ = True  # pytest shows the frames of the user, not these


MARK = "nnxcheck_original"
"""The name of a mark among the metadata of a Variable."""


class Mark:
    """The Variable that a copy was made of.

    All marks of one trace are equal: jax compares the metadata of two trees that it maps over. Those of two traces are not, so that jax traces a
    function of the user's again that it met before.
    """

    def __init__(self, trace: object, original: Any, path: Path) -> None:
        self.trace, self.original, self.path = trace, original, path

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Mark) and other.trace is self.trace

    def __hash__(self) -> int:
        return hash((MARK, id(self.trace)))

    def __repr__(self) -> str:
        return MARK

    def __deepcopy__(self, _: Any) -> Mark:
        return Mark(self.trace, None, ())


@dataclass(frozen=True, slots=True)
class Write:
    """The first write to a copy of a Variable."""

    path: Path
    line: str
    transform: str
    """The transform of jax that handed the function a copy; empty where the call made the copy itself."""
    called_at: str = ""
    """The line that calls the transform."""


@dataclass(slots=True)
class Watch:
    """Marks the Variables of one trace, and notes the writes to their copies."""

    trace: object = field(default_factory=object)
    writes: dict[Path, Write] = field(default_factory=dict)
    returned: set[Path] = field(default_factory=set)
    _meant: int = 0
    """Copies that are made on purpose are under way."""

    def mark(self, module: Any) -> None:
        """Mark the Variables of the module that the call gets."""
        for path, variable in graph.variables(module):
            if isinstance(variable, nnx.Variable):
                variables.set_metadata(variable, MARK, Mark(self.trace, variable, tuple(path)))

    def mark_of(self, variable: Any) -> Mark | None:
        mark = variables.variable_metadata(variable).get(MARK)
        ours = isinstance(mark, Mark) and mark.trace is self.trace
        # The metadata of a parameter is also that of its moments in an optimizer.
        return mark if ours and type(mark.original) is type(variable) else None

    def note(self, variable: Any) -> None:
        """A Variable was written."""
        mark = self.mark_of(variable)
        if self._meant or mark is None or mark.original is variable or mark.path in self.writes:
            return
        line, transform, called_at = stack(sys._getframe(1))
        self.writes[mark.path] = Write(mark.path, line, transform, called_at)

    def around(self, function: Any) -> Any:
        """The function of the call, whose arguments are marked and whose output is looked at."""

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            for variable in held_in((args, kwargs)):
                if MARK not in variables.variable_metadata(variable):
                    # A state that is no module: what is made of it compares equal to what is made of the module.
                    variables.set_metadata(variable, MARK, Mark(self.trace, None, ()))
            output = function(*args, **kwargs)
            for variable in held_in(output):
                mark = variables.variable_metadata(variable).get(MARK)
                if isinstance(mark, Mark):
                    self.returned.add(mark.path)
            return output

        return call

    @contextlib.contextmanager
    def __call__(self) -> Iterator[Watch]:
        with variables.writes_noted(self.note), self._copies_on_purpose():
            yield self

    @contextlib.contextmanager
    def _copies_on_purpose(self) -> Iterator[None]:
        clone, shapes, nnx_shapes = nnx.clone, jax.eval_shape, nnx.eval_shape

        def cloned(*args: Any, **kwargs: Any) -> Any:
            copy = clone(*args, **kwargs)
            for _, variable in graph.variables(copy):
                if isinstance(variable, nnx.Variable) and self.mark_of(variable):
                    variables.set_metadata(variable, MARK, Mark(self.trace, None, ()))
            return copy

        def paused(function: Any) -> Any:
            def call(*args: Any, **kwargs: Any) -> Any:
                self._meant += 1
                try:
                    return function(*args, **kwargs)
                finally:
                    self._meant -= 1

            return call

        from unittest import mock

        with mock.patch.object(nnx, "clone", cloned), mock.patch.object(jax, "eval_shape", paused(shapes)), mock.patch.object(nnx, "eval_shape", paused(nnx_shapes)):
            yield


def held_in(tree: Any) -> Iterator[Any]:
    """The Variables, and the states of Variables, in a tree."""
    for leaf in jax.tree.leaves(tree, is_leaf=lambda leaf: graph.is_graph_node(leaf) or variables.is_variable(leaf)):
        if variables.is_variable(leaf):
            yield leaf
        elif graph.is_graph_node(leaf):
            yield from (variable for _, variable in graph.variables(leaf) if isinstance(variable, nnx.Variable))


def stack(frame: FrameType | None) -> tuple[str, str, str]:
    """The user's line that writes, the transform of jax that handed it a copy, and the line that calls that."""
    line, transform = "", ""
    while frame is not None and (of_frame(frame) != "ours" or frame.f_globals is vars(variables)):
        if of_frame(frame) == "user":
            here = near(f"{frame.f_code.co_filename}:{frame.f_lineno}")
            line = line or here
            if transform.startswith("jax."):
                return line, transform, here
            transform = ""
        elif is_of_jax_or_flax(frame) and (name := frames.called(frame)):
            # Those of flax call those of jax: the outermost is the one that the user calls.
            transform = f"{'jax' if of_frame(frame) == 'jax' else 'nnx'}.{name}"
        frame = frame.f_back
    return (line, transform, "") if transform.startswith("jax.") else (line, "", "")
