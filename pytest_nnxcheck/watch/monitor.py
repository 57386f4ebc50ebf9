"""The starts of functions, and the returns of a test: by `sys.monitoring` from Python 3.12 on, by Python's profiling hook before.

`sys.monitoring` asks once about code that nobody wants to hear of. The profiling hook asks at each call, so that it is set where starts are wanted,
and only while a test runs: `--nnx-watch` alone looks at local variables from Python 3.12 on, and where the test raised.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping
from types import CodeType, FrameType, FunctionType
from typing import Any

from pytest_nnxcheck.walk.raw_access import top_package
from pytest_nnxcheck.watch import leftovers

NAME = "pytest-nnxcheck"
_TOOLS = (3, 4)
"""The tool ids that Python has given no meaning."""

Started = Callable[[FrameType], bool]
"""Hears of the start of a function. Returns False for code that it never wants to hear of again."""


class Monitor:
    """Looks at the local variables of a test whenever it returns, and tells of the functions that start, for as long as `of` lasts."""

    def __init__(self, started: Started | None = None) -> None:
        self._hears = started
        self._unwanted: set[CodeType] = set()
        """The code that a profiling hook passes over."""
        self._tool: int | None = None
        self._test: CodeType | None = None
        self._thread = 0
        self._look: Callable[[Mapping[str, Any]], None]

    @property
    def missing(self) -> str:
        """Why nothing is seen; empty where it is."""
        if sys.version_info < (3, 12):
            return "" if self._hears else "local variables of tests are watched from Python 3.12 on"
        what = "calls, and local variables of tests," if self._hears else "local variables of tests"
        return (
            "" if self._tool is not None else f"{what} are not watched: two other tools hold the ids of sys.monitoring"
        )

    def start(self) -> None:
        """Take a tool id that nobody has."""
        if sys.version_info >= (3, 12):
            monitoring = sys.monitoring
            for tool in _TOOLS:
                if monitoring.get_tool(tool) is None:
                    monitoring.use_tool_id(tool, NAME)
                    monitoring.register_callback(tool, monitoring.events.PY_RETURN, self._returned)
                    if self._hears is not None:
                        monitoring.register_callback(tool, monitoring.events.PY_START, self._started)
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
        those are in the traceback.

        Code of a wrapper is shared by all that its decorator was put on, and holds nothing of its own.
        """
        self._test, self._look = functions[-1].__code__ if functions else None, look
        self._thread = threading.get_ident()
        self._listen(on=True)
        before = sys.getprofile()
        try:
            if sys.version_info < (3, 12) and self._hears is not None:
                sys.setprofile(self._profiled)
            yield
        except BaseException as error:
            for frame, _line in traceback.walk_tb(error.__traceback__):
                self._look_into(frame)
            raise
        finally:
            if sys.version_info < (3, 12) and self._hears is not None:
                sys.setprofile(before)
            self._listen(on=False)
            self._test = None

    def _listen(self, *, on: bool) -> None:
        if sys.version_info >= (3, 12) and self._tool is not None and self._test is not None:
            events = sys.monitoring.events
            sys.monitoring.set_local_events(self._tool, self._test, events.PY_RETURN if on else events.NO_EVENTS)

    def _started(self, _code: CodeType, _offset: int) -> object:
        if self._test is None or threading.get_ident() != self._thread:
            return None
        is_wanted = self._hears is None or self._hears(sys._getframe(1))  # noqa: SLF001 - documented, and faster than `inspect`
        return None if is_wanted else sys.monitoring.DISABLE  # type: ignore[attr-defined,unused-ignore]  # there is no callback before Python 3.12

    def _returned(self, _code: CodeType, _offset: int, _value: object) -> None:
        self._look_into(sys._getframe(1))  # noqa: SLF001 - documented, and faster than `inspect`

    def _profiled(self, frame: FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_code not in self._unwanted:
            if self._hears is not None and not self._hears(frame):
                self._unwanted.add(frame.f_code)
        elif event == "return" and frame.f_code is self._test:
            self._look_into(frame)

    def _look_into(self, frame: FrameType) -> None:
        # The same code runs further out in a decorator that leaves no ``__wrapped__``, around a helper that the test calls.
        is_inner = any(outer.f_code is frame.f_code for outer in leftovers.callers(frame))
        if frame.f_code is self._test and not is_inner and not leftovers.inside_a_transform(frame):
            variables = {name: value for name, value in frame.f_locals.items() if _may_hold(value)}
            if variables:
                self._look(variables)


def _may_hold(value: object) -> bool:
    """True if a graph node may be behind a value; arrays and numbers hold none."""
    # By identity: `==` may be the code of the class's metaclass.
    return any(type(value) is container for container in (list, tuple, dict, set)) or top_package(type(value)) not in {
        "builtins",
        "numpy",
        "jax",
        "jaxlib",
    }
