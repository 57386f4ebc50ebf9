"""The functions of jax and flax that are a transform at work, as frames of Python have them.

No public way to ask what a frame is: names of functions, many of them private, read by profiling hooks. Tried on all versions.
"""

from __future__ import annotations

import contextlib
import dis
import functools
import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any
from unittest import mock

import jax

from pytest_nnxcheck.core.text import near

LAX = ("scan", "while_loop", "fori_loop", "cond", "switch")
"""The transforms of `jax.lax`, which `nnx` has too."""

GRADIENTS = ("grad", "value_and_grad")

DERIVATIVES = ("jvp", "vjp", "linearize", "jacfwd", "jacrev", "hessian")
"""Those of jax that differentiate a function and have no twin in every flax."""

TRACES_JITTED = "cache_miss"
"""What jax calls where a function that `jax.jit` made, wherever that was, meets new arguments; no frame of Python is called before."""

_IN = ".<locals>."
"""What the name of a function has behind that of the one which made it: ``vmap.<locals>.vmap_f``."""

CUSTOM_RULES = ("custom_jvp", "custom_vjp")
"""The classes of jax whose objects are functions with a rule of their own for the derivative."""

_FUNCTIONS = (
    "jit",
    "remat",
    "checkpoint",
    "vmap",
    "eval_shape",
    "checkify",
    "vectorize",
    *LAX,
    *GRADIENTS,
    *DERIVATIVES,
)
_CALLED = {
    **{name: name for name in _FUNCTIONS},
    TRACES_JITTED: "jit",
    **{f"{name}.__call__": name for name in CUSTOM_RULES},
}
"""The transforms, by the functions that a user's code calls."""

MAP = "map"
"""`jax.lax.map`, which nnx has not; `jax.tree.map` is another."""

_LIBRARIES = ("jax", "jaxlib", "flax")
_BY_ITSELF = ("make_jaxpr_f", "custom_root")


_DEVICES = ("devices", "local_devices", "device_count", "local_device_count", "default_backend")
"""The functions of jax that a branch on the device asks."""


@contextlib.contextmanager
def devices_asked(*, on: bool) -> Iterator[dict[str, None]]:
    """The lines that ask jax for its devices or its backend for a while, ``jax.devices() at path:line``; those of jax and flax themselves are left out.

    Nothing of jax is touched unless it is ``on``.
    """
    lines: dict[str, None] = {}
    noted = {name: _noted(name, lines) for name in _DEVICES if on}
    with mock.patch.multiple(jax, **noted) if on else contextlib.nullcontext():
        yield lines


def _noted(name: str, lines: dict[str, None]) -> Any:
    function = getattr(jax, name)

    @functools.wraps(function)
    def noted(*args: Any, **kwargs: Any) -> Any:
        caller = sys._getframe(1)
        if _package(caller) not in _LIBRARIES:
            lines[f"jax.{name}() at {near(caller.f_code.co_filename)}:{caller.f_lineno}"] = None
        return function(*args, **kwargs)

    return noted


def transforms_by_itself(frame: FrameType) -> bool:
    """Whether a function of jax calls another transform for what it was handed: the user did not write that one."""
    return frame.f_code.co_name in _BY_ITSELF and _package(frame) == "jax"


def called(frame: FrameType) -> str:
    """The transform that a user's code calls by a function of jax or flax, or has called for what it calls now; else empty.

    Functions of flax may have ``_wrapper`` behind the name.
    """
    code = frame.f_code
    if code.co_name == MAP:
        return MAP if ".control_flow" in str(frame.f_globals.get("__name__", "")) else ""
    name = _CALLED.get(code.co_name.removesuffix("_wrapper")) or _CALLED.get(code.co_qualname, "")
    name = name or _CALLED.get(code.co_qualname.partition(_IN)[0], "")
    return name if name and _package(frame) in ("jax", "flax") else ""


def made_before(frame: FrameType) -> bool:
    """Whether what is called is what a transform made, ``jax.vmap(f)``, and not the transform: that was called before, wherever it was."""
    return frame.f_code.co_name == TRACES_JITTED or _IN in frame.f_code.co_qualname


@contextlib.contextmanager
def jits_traced(note: Callable[[FrameType, FrameType, bool], None]) -> Iterator[None]:
    """Hand on each function that a jit traces for a while: the frame of the jit, which holds the function and its arguments, the user's that calls it, and whether that is by a function of jax or flax.

    Such a function has the jit for itself, as those of `jax.numpy` do, or was handed it by the user: ``jax.vmap(jax.jit(f))``.

    A jit that finds its trace in the caches of jax traces nothing. Tried on all versions.
    """
    before = sys.getprofile()

    def watch(frame: FrameType, event: str, _: Any) -> None:
        traces = event == "call" and frame.f_code.co_name.startswith(_TRACES) and _package(frame) == "jax"
        jit = _jit_of(frame) if traces else None
        if jit:
            caller, by_library = _caller_of(jit)
            if caller:
                note(jit, caller, by_library)

    sys.setprofile(watch)
    try:
        yield
    finally:
        sys.setprofile(before)


_TRACES, _INFERS = "trace_to_jaxpr", "_infer_params"
"""How the functions of jax begin that trace a function, and by which a jit does so: up to jax 0.6 its derivative is traced below it as well."""

_HANDS_ON = ("reraise_with_filtered_traceback", "update_context_manager_wrapper")


def _jit_of(frame: FrameType) -> FrameType | None:
    """The frame of the jit that traces here; `None` for a loop or a derivative inside the function, or a trace of its own."""
    above, infers = frame.f_back, False
    while above is not None and _package(above) in _LIBRARIES:
        infers = infers or above.f_code.co_name.startswith(_INFERS)
        if above.f_code.co_name == TRACES_JITTED:
            return above if infers else None
        above = above.f_back
    return None


def _caller_of(jit: FrameType) -> tuple[FrameType | None, bool]:
    """The user's frame that calls a jit, and whether it calls a function of jax or flax that does."""
    above, by_library = jit.f_back, False
    while above is not None and _package(above) in _LIBRARIES:
        module = str(above.f_globals.get("__name__", ""))
        by_library |= above.f_code.co_name not in _HANDS_ON and not module.startswith("flax.nnx.transforms")
        above = above.f_back
    return above, by_library


def raised_by_library(error: BaseException) -> bool:
    """Whether code of jax or flax raised an exception. Tried on all versions.

    jax takes the frames of both out of a traceback: the innermost that is left is the user's, and calls where it would raise.
    """
    entry = error.__traceback__
    while entry is not None and entry.tb_next is not None:
        entry = entry.tb_next
    if entry is None:
        return False
    raises = entry.tb_frame.f_code.co_code[entry.tb_lasti] == dis.opmap["RAISE_VARARGS"]
    return _package(entry.tb_frame) in _LIBRARIES or not raises


def _package(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", "")).partition(".")[0]
