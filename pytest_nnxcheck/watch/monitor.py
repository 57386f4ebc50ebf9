"""The local variables of a test at its return, and the first module that it calls, by `sys.monitoring`: from Python 3.12 on, and at no cost for other functions.

A model that a test builds for itself is gone when its call has ended. Before Python 3.12 only a profiler sees a function return, at a
cost for every call of every function: local variables are looked at there only where the test raised.
"""

from __future__ import annotations

import contextlib
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import CodeType, FrameType, FunctionType
from typing import Any

from pytest_nnxcheck.walk.raw_access import class_name, layout, mro, top_package
from pytest_nnxcheck.watch import leftovers

NAME = "pytest-nnxcheck"
_TOOLS = (3, 4)
"""The tool ids that Python has given no meaning."""


@dataclass(frozen=True, slots=True)
class ModuleCall:
    """A call of a module."""

    type: str
    """The class of the module."""
    file: str
    line: int
    """The line of the test that led to the call."""
    name: str = ""
    """The test's name for the module: ``net``, ``self.net``; empty where it has none."""


class Monitor:
    """Looks at the local variables of a test whenever it returns, and notes its first call of a module, for as long as `of` lasts."""

    def __init__(self) -> None:
        self.first_call: ModuleCall | None = None
        """The first call outside of any transform: the test could be marked."""
        self._is_own = False
        """True if the test itself makes it. In a function that it calls, it may have no variable that holds the module."""
        self._tool: int | None = None
        self._test: CodeType | None = None
        self._look: Callable[[Mapping[str, Any]], None]

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
        self.first_call, self._is_own = None, False
        self._test, self._look = functions[-1].__code__ if functions else None, look
        self._listen(on=True)
        try:
            yield
        except BaseException as error:
            for frame, _line in traceback.walk_tb(error.__traceback__):
                self._look_into(frame)
            raise
        finally:
            self._listen(on=False)
            self._test = None

    def _listen(self, *, on: bool) -> None:
        if sys.version_info >= (3, 12) and self._tool is not None and self._test is not None:
            events = sys.monitoring.events
            sys.monitoring.set_local_events(self._tool, self._test, events.PY_RETURN if on else events.NO_EVENTS)

    def _returned(self, _code: CodeType, _offset: int, _value: object) -> None:
        self._look_into(sys._getframe(1))  # noqa: SLF001 - documented, and faster than `inspect`

    def _look_into(self, frame: FrameType) -> None:
        # The same code runs further out in a decorator that leaves no ``__wrapped__``, around a helper that the test calls.
        is_inner = any(outer.f_code is frame.f_code for outer in leftovers.callers(frame))
        if frame.f_code is self._test and not is_inner and not leftovers.inside_a_transform(frame):
            variables = {name: value for name, value in frame.f_locals.items() if _may_hold(value)}
            if variables:
                self._look(variables)

    def _started(self, code: CodeType, _offset: int) -> object:
        """The callback of ``PY_START``. It disables itself for functions that are not named ``__call__``: they cost one event each."""
        if code.co_name != "__call__" or not code.co_argcount:
            return sys.monitoring.DISABLE  # type: ignore[attr-defined,unused-ignore]  # there is no callback before Python 3.12
        if self._test is None or self._is_own:
            return None
        frame = sys._getframe(1)  # noqa: SLF001 - documented, and faster than `inspect`
        caller = next(leftovers.of_user(frame.f_back), None)
        is_own = caller is not None and caller.f_code is self._test
        if self.first_call is not None and not is_own:
            return None
        called = frame.f_locals.get(code.co_varnames[0])
        if _is_module(called) and not leftovers.inside_a_transform(frame):
            test = leftovers.frame_of_test(frame, self._test)
            if test is not None:
                place, name = (test.f_code.co_filename, test.f_lineno), _name_in(test, called)
                self.first_call = ModuleCall(class_name(type(called)), *place, name)
                self._is_own = is_own
        return None


def _may_hold(value: object) -> bool:
    """True if a graph node may be behind a value; arrays and numbers hold none."""
    # By identity: `==` may be the code of the class's metaclass.
    return any(type(value) is container for container in (list, tuple, dict, set)) or top_package(type(value)) not in {
        "builtins",
        "numpy",
        "jax",
        "jaxlib",
    }


def _name_in(test: FrameType, module: Any) -> str:
    """The name by which the frame of a test has a module: a variable, an attribute or an item of one, else a global that its code names."""
    variables = dict(test.f_locals)
    variables |= {name: test.f_globals[name] for name in test.f_code.co_names if name in test.f_globals}
    for name, value in variables.items():
        if value is module:
            return name
    for name, value in variables.items():
        items = [(f"{name}.{key}", held) for key, held in (layout(type(value)).read(value) or {}).items()]
        if type(value) in (list, tuple):
            items = [(f"{name}[{number}]", held) for number, held in enumerate(value)]
        elif type(value) is dict:
            items = [(f"{name}[{key!r}]", held) for key, held in value.items()]
        for path, held in items:
            if held is module:
                return path
    return ""


def _is_module(value: Any) -> bool:
    # While it is being imported, flax.nnx is a module without its names.
    module = getattr(sys.modules.get("flax.nnx"), "Module", None)
    return module is not None and any(base is module for base in mro(type(value)))
