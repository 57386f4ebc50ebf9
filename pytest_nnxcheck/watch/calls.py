"""The first call of an nnx module that a test makes outside of any transform, by `sys.monitoring`: the test could be marked.

A call in the test itself is preferred to one in a function that it calls: there, the test may have no variable that holds the module.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from types import CodeType, FrameType
from typing import Any

from pytest_nnxcheck.walk.raw_access import class_name, mro
from pytest_nnxcheck.watch import frames

_TRANSFORMS = ("jax", "flax", "equinox")


@dataclass(frozen=True, slots=True)
class Call:
    """A call of a module."""

    type: str
    """The class of the module."""
    file: str
    line: int
    """The line of the test that led to the call."""


class Calls:
    """Keeps the first call for as long as `of_test` lasts."""

    def __init__(self) -> None:
        self.first: Call | None = None
        self._is_own = False
        self._test: CodeType | None = None

    @contextlib.contextmanager
    def of_test(self, code: CodeType | None) -> Iterator[None]:
        """Listen, from nothing, for calls that the code of a test's function leads to."""
        self.first, self._is_own, self._test = None, False, code
        try:
            yield
        finally:
            self._test = None

    def started(self, code: CodeType, _offset: int) -> object:
        """The callback of ``PY_START``. It disables itself for functions that are not named ``__call__``: they cost one event each."""
        if code.co_name != "__call__" or not code.co_argcount:
            return sys.monitoring.DISABLE  # type: ignore[attr-defined,unused-ignore]  # there is no callback before Python 3.12
        if self._test is None or self._is_own:
            return None
        frame = sys._getframe(1)  # noqa: SLF001 - documented, and faster than `inspect`
        caller = next(frames.of_user(frame.f_back), None)
        is_own = caller is not None and caller.f_code is self._test
        if self.first is not None and not is_own:
            return None
        called = frame.f_locals.get(code.co_varnames[0])
        if _is_module(called) and not inside_a_transform(frame):
            test = frames.of_test(frame, self._test)
            if test is not None:
                self.first = Call(class_name(type(called)), test.f_code.co_filename, test.f_lineno)
                self._is_own = is_own
        return None


def _is_module(value: Any) -> bool:
    # While it is being imported, flax.nnx is a module without its names.
    module = getattr(sys.modules.get("flax.nnx"), "Module", None)
    return module is not None and any(base is module for base in mro(type(value)))


def inside_a_transform(frame: FrameType) -> bool:
    """Whether a library that traces has called the function of a frame: its tracers are alive then."""
    packages = (str(outer.f_globals.get("__name__")).partition(".")[0] for outer in frames.callers(frame))
    return any(package in _TRANSFORMS for package in packages)
