"""Stand-ins for values that no run computed: they have the right types, every read of one raises, and a watch sees such reads.

A nesting that was only traced has no values to hand out. A deleted array has shape, dtype and sharding, passes through tree functions, and
raises whenever its value is asked for; `Watch` sees that also where a test body swallows the exception.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from types import CodeType, FrameType
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np

from pytest_nnxcheck.compat.graph import is_key, zeros

__tracebackhide__ = True  # pytest shows the frames of the user, not these

_DELETED = "deleted"
"""The word in the message of jax and XLA for every read of a deleted array, on all versions."""
_TOOL = "pytest-nnxcheck"
_TOOL_IDS = (3, 4, 5, 2, 1)
"""Tool ids of `sys.monitoring`: first those that Python has given no meaning. Never that of debuggers: pytest-timeout stops no test while one runs."""


class ValuesNeeded(BaseException):
    """Values are needed that were not computed: by the test's ``of_body``, or by the engine for one nesting.

    Not an ``Exception``, which a test body might swallow.
    """

    def __init__(self, *, of_body: bool = False) -> None:
        super().__init__()
        self.of_body = of_body


def stand_in(wanted: Any) -> Any:
    """A deleted array of the type of ``wanted``, an abstract value."""
    if wanted.weak_type:
        scalar = jnp.asarray(np.zeros((), wanted.dtype).item())
        array = jnp.broadcast_to(scalar, wanted.shape) if wanted.shape else scalar
    else:
        array = zeros(wanted) if is_key(wanted) else jax.device_put(np.zeros(wanted.shape, wanted.dtype))
    array.delete()
    return array


def is_read(error: BaseException) -> bool:
    """True if an exception says that a deleted array was read."""
    return isinstance(error, Exception) and _DELETED in str(error)


class Watch:
    """A watch for reads of deleted arrays while a test body runs, also where the body swallows the exception.

    From Python 3.12 on it uses `sys.monitoring`, beside any debugger or coverage tool. Python 3.11 has one trace function for all: where
    somebody else has set it, the watch ``can_see`` nothing, and values have to be computed from the beginning.
    """

    def __init__(self) -> None:
        self.saw = False
        self.can_see = True
        self._stop: Callable[[], None] = lambda: None
        self._look: Any = None

    def __enter__(self) -> Self:
        self.saw = False
        if sys.version_info >= (3, 12):
            self._monitor()
        else:
            self._trace()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop()
        self._stop = lambda: None

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Look at nothing for a while: the engine calls thousands of functions, and reads no value that it was not given."""
        looking = sys.gettrace() if self._look is not None else None
        if looking is None or looking is not self._look:
            yield
            return
        sys.settrace(None)
        try:
            yield
        finally:
            sys.settrace(looking)

    def _note(self, error: BaseException) -> None:
        self.saw = self.saw or is_read(error)

    if sys.version_info >= (3, 12):

        def _monitor(self) -> None:
            monitoring = sys.monitoring
            tool = next((number for number in _TOOL_IDS if monitoring.get_tool(number) is None), None)
            self.can_see = tool is not None
            if tool is None:
                return

            def raised(_code: CodeType, _offset: int, error: BaseException) -> None:
                self._note(error)

            def stop() -> None:
                monitoring.set_events(tool, 0)
                monitoring.register_callback(tool, monitoring.events.RAISE, None)
                monitoring.free_tool_id(tool)

            monitoring.use_tool_id(tool, _TOOL)
            monitoring.register_callback(tool, monitoring.events.RAISE, raised)
            monitoring.set_events(tool, monitoring.events.RAISE)
            self._stop = stop

    else:

        def _trace(self) -> None:
            self.can_see = sys.gettrace() is None
            if not self.can_see:
                return

            def look(frame: FrameType, event: str, argument: Any) -> Any:
                frame.f_trace_lines = False
                if event == "exception":
                    self._note(argument[1])
                return look

            def stop() -> None:
                if sys.gettrace() is look:
                    sys.settrace(None)

            sys.settrace(look)
            self._look, self._stop = look, stop
