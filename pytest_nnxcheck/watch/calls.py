"""The first call of an nnx module outside of any transform, by `sys.monitoring`: a test that makes one could be marked.

Every function tells of its start once; only those that are named ``__call__`` tell of each.
"""

from __future__ import annotations

import contextlib
import itertools
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from types import CodeType, FrameType
from typing import Any

from pytest_nnxcheck.inspection.raw_access import class_dict, class_name, mro
from pytest_nnxcheck.watch import frames

_TRANSFORMS = ("jax", "flax", "equinox")

Span = tuple[int | None, int | None, int | None, int | None]
"""First and last line, first and last column, of an expression in the source: what `CodeType.co_positions` gives."""


@dataclass(frozen=True, slots=True)
class Call:
    """A module that was called: its class, the code that called it, and where in that."""

    type: str
    code: CodeType
    span: Span


class Calls:
    """Keeps the first call for as long as `of_test` lasts."""

    def __init__(self) -> None:
        self.first: Call | None = None
        self._listening = False

    @contextlib.contextmanager
    def of_test(self) -> Iterator[None]:
        """Listen, from nothing."""
        self.first, self._listening = None, True
        try:
            yield
        finally:
            self._listening = False

    def started(self, code: CodeType, _offset: int) -> object:
        """The callback of ``PY_START``: what cannot be a module is asked no more."""
        if code.co_name != "__call__" or not code.co_argcount:
            return sys.monitoring.DISABLE  # type: ignore[attr-defined,unused-ignore]  # there is no callback before Python 3.12
        if self._listening and self.first is None:
            frame = sys._getframe(1)  # noqa: SLF001 - documented, and faster than `inspect`
            called = frame.f_locals.get(code.co_varnames[0])
            if _is_module(called) and not inside_a_transform(frame):
                caller = _outermost(frame, type(called)).f_back
                self.first = Call(class_name(type(called)), caller.f_code, _span(caller)) if caller else None
        return None


def _is_module(value: Any) -> bool:
    # While it is being imported, flax.nnx is a module without its names.
    module = getattr(sys.modules.get("flax.nnx"), "Module", None)
    return module is not None and any(base is module for base in mro(type(value)))


def _outermost(frame: FrameType, cls: type) -> FrameType:
    """The frame of what the class has as its ``__call__``: that of a decorator, around the function that was written."""
    attribute = next((class_dict(base)["__call__"] for base in mro(cls) if "__call__" in class_dict(base)), None)
    code = getattr(attribute, "__code__", None)
    outer = itertools.dropwhile(lambda at: at.f_code is not code, [frame, *frames.callers(frame)])
    # more than one where the same decorator is there twice
    return [frame, *itertools.takewhile(lambda at: at.f_code is code, outer)][-1]


def _span(frame: FrameType) -> Span:
    return list(frame.f_code.co_positions())[frame.f_lasti // 2]


def inside_a_transform(frame: FrameType) -> bool:
    """Whether a library that traces has called the function of a frame: its tracers are alive then."""
    packages = (str(outer.f_globals.get("__name__")).partition(".")[0] for outer in frames.callers(frame))
    return any(package in _TRANSFORMS for package in packages)
