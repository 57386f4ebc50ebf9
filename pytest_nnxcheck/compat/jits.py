"""The jitted functions of flax and jax as objects: which call of one a frame is, and what they have traced by now."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import FrameType, FunctionType
from typing import Any

_JITTED = ("JitWrapped", "SimpleJitWrapped", "SimpleJitPartialWrapped")
"""The classes of what `nnx.jit` and `nnx.jit_partial` return."""


def called_jit(frame: FrameType) -> Any:
    """The object of `nnx.jit` whose call begins in a frame; `None` for another frame.

    No public type: `nnx.jit` returns an instance of a class of its own from flax 0.10.7 on, and a function with an attribute ``inner`` before. Tried on flax
    0.10.2, 0.10.7, 0.12.8 and 0.12.12.
    """
    code = frame.f_code
    if code.co_name == "__call__" and Path(code.co_filename).name == "compilation.py":
        owner = frame.f_locals.get(code.co_varnames[0])
        return owner if type(owner).__name__ in _JITTED else None
    if code.co_name == "update_context_manager_wrapper":
        function = function_of(frame)
        return function if is_jitted(getattr(function, "inner", None)) else None
    return None


def function_of(frame: FrameType) -> FunctionType | None:
    """The function that runs in a frame: by its name, or else that of all functions with its code whose closure is the frame's.

    Python has no way from a frame to its function.
    """
    code = frame.f_code
    named = frame.f_globals.get(code.co_name)
    if type(named) is FunctionType and named.__code__ is code:
        return named

    def is_it(function: Any) -> bool:
        if type(function) is not FunctionType or function.__code__ is not code:
            return False
        cells = zip(code.co_freevars, function.__closure__ or (), strict=True)
        with contextlib.suppress(ValueError):  # a cell that is still empty
            return all(frame.f_locals.get(name, cells) is cell.cell_contents for name, cell in cells)
        return False

    return next(filter(is_it, gc.get_referrers(code)), None)


def function_in(jitted: Any) -> Any:
    """The user's function in an object of `nnx.jit`. All versions."""
    return getattr(jitted, "__wrapped__", None) or getattr(jitted, "fun", jitted)


def jit_in(value: Any) -> Any:
    """The function of `jax.jit` in an object of `nnx.jit`, else the value itself: an object of the user's is asked for no attribute. All versions."""
    if type(value).__name__ in _JITTED:
        return value.jitted_fn
    return value.__dict__.get("inner", value) if type(value) is FunctionType else value


def is_jitted(value: Any) -> bool:
    """True for a function of `jax.jit`, whose type has no public name. All versions."""
    return type(value).__name__ == "PjitFunction"


@contextlib.contextmanager
def traced_anew(objects: Iterable[Any]) -> Iterator[None]:
    """Let jitted functions among some objects that nobody has called forget, at the end, what they traced meanwhile: a test may count its traces.

    ``clear_cache`` of a jitted function is public; the size of its cache is not, and without it a function that was called before would forget that too.
    All versions.
    """
    unused = [jit for jit in map(jit_in, objects) if is_jitted(jit) and not jit._cache_size()]
    try:
        yield
    finally:
        for jit in unused:
            jit.clear_cache()
