"""Listen to the compiles of other people's code: each event holds the program, its call and its jaxpr."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import FrameType
from typing import Any

import jax
from jax._src import monitoring

from pytest_nnxcheck.compat.compile_cache import DIRECTORY, EQUAL_FROM

_EVENT = "/jax/core/compile/backend_compile_duration"


@dataclass(frozen=True, slots=True)
class Executable:
    """A raw executable of XLA, with the two methods of `jax.stages.Compiled` that `xla.buffers` calls."""

    loaded: Any

    def memory_analysis(self) -> Any:
        """The totals of its memory. All versions."""
        return self.loaded.get_compiled_memory_stats()

    def runtime_executable(self) -> Any:
        """The program as XLA has it."""
        return self.loaded

    def name(self) -> str:
        """Its name in jax, ``jit_step``. All versions."""
        return str(self.loaded.hlo_modules()[0].name)


@contextlib.contextmanager
def compiles(heard: Callable[[Executable, FrameType], None]) -> Iterator[None]:
    """Call ``heard(program, frame of jax)`` for each program that is compiled, or loaded from jax's persistent cache, for a while.

    The event is documented nowhere, and no public way leads to the programs of others. A listener is taken away by a public name from jax
    0.7 on, by a private one before. All versions.
    """

    def listener(event: str, duration_secs: float, **_more: Any) -> None:  # noqa: ARG001 - a name of the protocol
        if event == _EVENT:
            frame = sys._getframe(1)
            heard(_compiled_in(frame), frame)

    jax.monitoring.register_event_duration_secs_listener(listener)
    try:
        yield
    finally:
        name = "unregister_event_duration_listener"
        unregister = getattr(monitoring, name, None) or getattr(monitoring, f"_{name}_by_callback")
        with contextlib.suppress(
            AssertionError, ValueError
        ):  # somebody has called jax.monitoring.clear_event_listeners
            unregister(listener)


def _compiled_in(frame: FrameType) -> Executable:
    """The program that was just compiled: a local variable of jax's own, or else the newest of all that are alive.

    Neither is public. The list of all is the second choice: it takes 0.4 microseconds a program, and a suite has thousands. All versions.
    """
    at: FrameType | None = frame
    for _ in range(5):  # the frame that holds it is two or three further out
        if at is None:
            break
        for value in at.f_locals.values():
            if type(value).__name__ == "LoadedExecutable":
                return Executable(value)
        at = at.f_back
    return Executable(jax.local_devices()[0].client.live_executables()[0])


def arguments_of(frame: FrameType) -> tuple[Any, ...]:
    """The leaves of the arguments of the call that a frame of jax compiles for; none where it compiles ahead of any call.

    They are locals of the function in which jax handles a call that its cache misses. All versions.
    """
    names = _locals_of("cache_miss", "args", frame)
    return tuple(jax.tree.leaves((names["args"], names.get("kwargs")))) if names else ()


def traced_program(frame: FrameType) -> tuple[Any, tuple[bool, ...]] | None:
    """The closed jaxpr of the call that a frame of jax compiles for, and for each input whether it is donated; `None` ahead of any call.

    They are locals of the function that compiles a program that the cache of a call misses. All versions.
    """
    names = _locals_of("_pjit_call_impl_python", "jaxpr", frame)
    return (names["jaxpr"], tuple(names["donated_invars"])) if names else None


def _locals_of(function: str, name: str, frame: FrameType | None) -> dict[str, Any] | None:
    """The local variables of the innermost of these functions that holds one of this name, from a frame outwards."""
    while frame is not None:
        if frame.f_code.co_name == function and name in frame.f_locals:
            return frame.f_locals
        frame = frame.f_back
    return None


def warns_of_widened() -> bool:
    """True if jax warns of a donated buffer where an output of as many elements has another size, as before 0.8. Tried on all versions, and 0.7.2 to 0.9.2."""
    return bool(jax.__version_info__ < (0, 8))


def no_totals() -> str:
    """The reason why the totals of a program's memory may be wrong; empty if they are right. See `EQUAL_FROM`. All versions."""
    if jax.__version_info__ >= EQUAL_FROM or not jax.config.values.get(DIRECTORY):
        return ""
    return f"jax {jax.__version__} loads programs from {DIRECTORY} without their aliased bytes"
