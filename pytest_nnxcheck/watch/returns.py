"""The local variables of a test at its return, and the modules that it calls, by `sys.monitoring`: from Python 3.12 on, and at no cost for other functions.

A model that a test builds for itself is gone when its call has ended. Before Python 3.12 only a profiler sees a function return, at a
cost for every call of every function: local variables are looked at there only where the test raised.
"""

from __future__ import annotations

import contextlib
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from types import CodeType, FrameType, FunctionType
from typing import Any

from pytest_nnxcheck.walk.raw_access import top_package
from pytest_nnxcheck.watch import frames
from pytest_nnxcheck.watch.calls import Calls, inside_a_transform

NAME = "pytest-nnxcheck"
_TOOLS = (3, 4)
"""The tool ids that Python has given no meaning."""


class Returns:
    """Looks at the local variables of a function whenever it returns, and hears of calls, for as long as `of` lasts."""

    def __init__(self) -> None:
        self.calls = Calls()
        self._tool: int | None = None
        self._looks: dict[CodeType, Callable[[Mapping[str, Any]], None]] = {}

    @property
    def missing(self) -> str:
        """Why neither is known; empty if they are."""
        if sys.version_info < (3, 12):
            return "local variables of tests, and calls of modules, are watched from Python 3.12 on"
        if self._tool is not None:
            return ""
        return "local variables of tests, and calls of modules, are not watched: two other tools hold the ids of sys.monitoring"

    def start(self) -> None:
        """Take a tool id that nobody has."""
        if sys.version_info >= (3, 12):
            monitoring = sys.monitoring
            for tool in _TOOLS:
                if monitoring.get_tool(tool) is None:
                    monitoring.use_tool_id(tool, NAME)
                    monitoring.register_callback(tool, monitoring.events.PY_RETURN, self._returned)
                    monitoring.register_callback(tool, monitoring.events.PY_START, self.calls.started)
                    monitoring.set_events(tool, monitoring.events.PY_START)
                    self._tool = tool
                    return

    def stop(self) -> None:
        """Give the tool id back."""
        if sys.version_info >= (3, 12) and self._tool is not None:
            sys.monitoring.set_events(self._tool, sys.monitoring.events.NO_EVENTS)
            for event in (sys.monitoring.events.PY_START, sys.monitoring.events.PY_RETURN):
                sys.monitoring.register_callback(self._tool, event, None)
            sys.monitoring.free_tool_id(self._tool)
            self._tool = None

    @contextlib.contextmanager
    def of(self, functions: tuple[FunctionType, ...], look: Callable[[Mapping[str, Any]], None]) -> Iterator[None]:
        """Call ``look`` with the local variables of the last of the functions, which the others wrap, at each of its returns, and where it raised:
        those are in the traceback. Code of a wrapper is shared by all that its decorator was put on, and holds nothing of its own.
        """
        codes = [function.__code__ for function in functions[-1:]]
        self._looks = dict.fromkeys(codes, look)
        self._listen(codes, on=True)
        try:
            with self.calls.of_test(codes[0] if codes else None):
                yield
        except BaseException as error:
            for frame, _line in traceback.walk_tb(error.__traceback__):
                self._look_into(frame)
            raise
        finally:
            self._listen(codes, on=False)
            self._looks = {}

    def _listen(self, codes: list[CodeType], *, on: bool) -> None:
        if sys.version_info >= (3, 12) and self._tool is not None:
            events = sys.monitoring.events
            for code in codes:
                sys.monitoring.set_local_events(self._tool, code, events.PY_RETURN if on else events.NO_EVENTS)

    def _returned(self, _code: CodeType, _offset: int, _value: object) -> None:
        self._look_into(sys._getframe(1))  # noqa: SLF001 - documented, and faster than `inspect`

    def _look_into(self, frame: FrameType) -> None:
        look = self._looks.get(frame.f_code)
        if look is not None and not _is_inner(frame) and not inside_a_transform(frame):
            variables = {name: value for name, value in frame.f_locals.items() if _may_hold(value)}
            if variables:
                look(variables)


def _is_inner(frame: FrameType) -> bool:
    """Whether the same code runs further out: in a decorator that leaves no ``__wrapped__``, around a helper that the test calls."""
    return any(outer.f_code is frame.f_code for outer in frames.callers(frame))


def _may_hold(value: object) -> bool:
    """Whether a graph node may be behind a value; arrays and numbers hold none."""
    return top_package(type(value)) not in {"builtins", "numpy", "jax", "jaxlib"} or type(value) in {
        list,
        tuple,
        dict,
        set,
    }
