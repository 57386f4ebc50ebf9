"""The jitted functions of flax and jax as objects: which call of one a frame is, and what they have traced by now."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import FrameType, FunctionType
from typing import Any

import jax

from pytest_nnxcheck.compat.staging import configured

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
def traced_apart(objects: Iterable[Any]) -> Iterator[None]:
    """Keep the traces that are made for a while out of the sight of later calls: a test may count its traces, or what its code does in them.

    jax finds a trace again only under equal options. This changes an option of a feature that is off by default, profile-guided latency estimation. Jitted functions among ``objects`` that nobody has called also forget what they traced, since a test may ask for the size of their cache:
    ``clear_cache`` is public, that size is not. Tried on jax 0.4.33, 0.5.3, 0.6.2 and 0.12.
    """
    unused = [jit for jit in map(jit_in, objects) if is_jitted(jit) and not jit._cache_size()]
    try:
        with configured({"jax_pgle_profiling_runs": jax.config.values["jax_pgle_profiling_runs"] + 1}):
            yield
    finally:
        for jit in unused:
            jit.clear_cache()
