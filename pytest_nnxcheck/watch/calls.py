"""The first call of an nnx module outside of any transform, by `sys.monitoring`: a test that makes one could be marked.

Every function tells of its start once; only those that are named ``__call__`` tell of each.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from types import CodeType, FrameType
from typing import Any

from pytest_nnxcheck.inspection.raw_access import class_dict, class_name, mro

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
    nnx = sys.modules.get("flax.nnx")
    return nnx is not None and any(base is nnx.Module for base in mro(type(value)))


def _outermost(frame: FrameType, cls: type) -> FrameType:
    """The frame of what the class has as its ``__call__``: that of a decorator, around the function that was written."""
    attribute = next((class_dict(base)["__call__"] for base in mro(cls) if "__call__" in class_dict(base)), None)
    code = getattr(attribute, "__code__", None)
    outer: FrameType | None = frame
    while outer is not None and outer.f_code is not code:
        outer = outer.f_back
    while outer is not None and outer.f_back is not None and outer.f_back.f_code is code:  # the same decorator twice
        outer = outer.f_back
    return outer or frame


def _span(frame: FrameType) -> Span:
    return list(frame.f_code.co_positions())[frame.f_lasti // 2]


def inside_a_transform(frame: FrameType | None) -> bool:
    """Whether a library that traces has called the function of a frame: its tracers are alive then."""
    while (frame := frame.f_back if frame is not None else None) is not None:
        if str(frame.f_globals.get("__name__")).partition(".")[0] in _TRANSFORMS:
            return True
    return False
