"""Frames of Python in jax and flax: the transform that a frame is, and its caller.

They explain a failure and decide none. There is no public way to ask what a frame is: names of functions, many of them private, are
read by profiling hooks. Tried on all versions.
"""

from __future__ import annotations

import contextlib
import dis
import sys
from collections.abc import Callable, Iterable, Iterator
from types import FrameType, TracebackType
from typing import Any

from pytest_nnxcheck.compat.owner import is_of_jax_or_flax, of_frame, owner

_TRACES_JITTED = "cache_miss"

_DESCRIBES = frozenset({"eval_shape", "make_jaxpr_f", "lower", "trace", "jit_eval_shape", "jit_lower", "jit_trace"})
"""Functions of jax that trace one of the user's, and call it in no program: `jax.eval_shape`, `jax.make_jaxpr`, ``jit(f).lower``."""

_TAKES_GRAPHS_APART = (
    "flax.nnx.graph",
    "flax.nnx.variablelib",
    "flax.nnx.statelib",
    "flax.nnx.object",
    "flax.nnx.pytreelib",
)

"""The function that jax calls where a jitted function meets new arguments; no frame of Python is called before it."""

_IN = ".<locals>."
"""The text between the names of two functions where the first made the second: ``vmap.<locals>.vmap_f``."""

CUSTOM_RULES = ("custom_jvp", "custom_vjp")
"""The classes of jax whose objects are functions with their own rule for the derivative."""

_LOOPS = ("scan", "while_loop", "fori_loop", "cond", "switch")
_DERIVATIVES = ("grad", "value_and_grad", "jvp", "vjp", "linearize", "jacfwd", "jacrev", "hessian")
_FUNCTIONS = ("jit", "remat", "checkpoint", "vmap", "eval_shape", "checkify", "vectorize", *_LOOPS, *_DERIVATIVES)
_CALLED = {
    **{name: name for name in _FUNCTIONS},
    _TRACES_JITTED: "jit",
    **{f"{name}.__call__": name for name in CUSTOM_RULES},
}
"""The transforms, by the functions that a user's code calls."""


def transforms_by_itself(frame: FrameType) -> bool:
    """True if a function of jax calls a transform that the user did not write."""
    return frame.f_code.co_name in ("make_jaxpr_f", "custom_root") and of_frame(frame) == "jax"


def describes(frame: FrameType) -> bool:
    """True if a function of jax traces a user's function in this frame to describe its program, which is part of no other: `jax.eval_shape`, say.

    No public way. Tried on all versions.
    """
    return frame.f_code.co_name in _DESCRIBES and of_frame(frame) == "jax"


def hands_out(stack: Iterable[FrameType]) -> bool:
    """True if a transform of flax writes what it hands out in these frames, from the innermost one, and no code that it calls.

    No public way: by the module of the first frame that takes no graph apart. Tried on all versions.
    """
    between = ("ours", "jax", "python")
    modules = (str(frame.f_globals.get("__name__")) for frame in stack if of_frame(frame) not in between)
    of_others = (module for module in modules if not module.startswith(_TAKES_GRAPHS_APART))
    return next(of_others, "").startswith(("flax.nnx.extract", "flax.nnx.transforms"))


def called(frame: FrameType) -> str:
    """The transform whose function, or whose result, a user's code calls in this frame; empty for any other frame.

    Functions of flax may end in ``_wrapper``. `jax.lax.map` is a transform, `jax.tree.map` is none.
    """
    code = frame.f_code
    if code.co_name == "map":
        return "map" if ".control_flow" in str(frame.f_globals.get("__name__", "")) else ""
    name = _CALLED.get(code.co_name.removesuffix("_wrapper")) or _CALLED.get(code.co_qualname, "")
    name = name or _CALLED.get(code.co_qualname.partition(_IN)[0], "")
    return name if name and is_of_jax_or_flax(frame) else ""


def made_before(frame: FrameType) -> bool:
    """True if the frame is of a function that a transform made, ``jax.vmap(f)``, and not of the transform itself."""
    return frame.f_code.co_name == _TRACES_JITTED or _IN in frame.f_code.co_qualname


@contextlib.contextmanager
def jits_traced(note: Callable[[FrameType, FrameType, bool], None]) -> Iterator[None]:
    """Call ``note(jit, caller, by_library)`` for each function that a jit traces for a while.

    ``jit`` is the frame of the jit, which holds the function and its arguments, ``caller`` the user's frame. It is called ``by_library``
    where a function of jax or flax calls the jit: its own, as in `jax.numpy`, or the user's in ``jax.vmap(jax.jit(f))``.
    A jit that finds its trace in the caches of jax traces nothing. Tried on all versions.
    """

    def watch(frame: FrameType, event: str, _: Any) -> None:
        traces = event == "call" and frame.f_code.co_name.startswith(_TRACES) and of_frame(frame) == "jax"
        jit = _jit_of(frame) if traces else None
        if jit:
            caller, by_library = _caller_of(jit)
            if caller:
                note(jit, caller, by_library)

    with profiled(watch):
        yield


@contextlib.contextmanager
def profiled(watch: Callable[[FrameType, str, Any], None]) -> Iterator[None]:
    """Set Python's profiling hook for a while."""
    before = sys.getprofile()
    sys.setprofile(watch)
    try:
        yield
    finally:
        sys.setprofile(before)


@contextlib.contextmanager
def followed(watch: Callable[[FrameType, int], None]) -> Iterator[None]:
    """Call ``watch`` with the frame and the number of each line of the user's own code that has run, for a while: by Python's tracing hook."""

    def enter(frame: FrameType, _event: str, _: Any) -> Callable[..., Any] | None:
        if of_frame(frame) != "user":
            return None
        running = 0

        def step(frame: FrameType, event: str, _: Any) -> Callable[..., Any]:
            nonlocal running
            if running and event in ("line", "return"):
                watch(frame, running)
            running = frame.f_lineno
            return step

        return step

    before = sys.gettrace()
    sys.settrace(enter)
    try:
        yield
    finally:
        sys.settrace(before)


_TRACES, _INFERS = "trace_to_jaxpr", "_infer_params"
"""The beginnings of the names of jax's functions that trace a function, and of those by which a jit does so.

Both are needed: up to jax 0.6 the derivative of a function is traced below its jit as well.
"""

_HANDS_ON = ("reraise_with_filtered_traceback", "update_context_manager_wrapper")
"""Functions between a jit and its caller: the user calls the jit by them all the same."""


def _jit_of(frame: FrameType) -> FrameType | None:
    """The frame of the jit that traces here; `None` for a loop or a derivative inside the function, or a trace without a jit."""
    above, infers = frame.f_back, False
    while above is not None and is_of_jax_or_flax(above):
        infers = infers or above.f_code.co_name.startswith(_INFERS)
        if above.f_code.co_name == _TRACES_JITTED:
            return above if infers else None
        above = above.f_back
    return None


def _caller_of(jit: FrameType) -> tuple[FrameType | None, bool]:
    """The user's frame that calls a jit, and whether it calls a function of jax or flax that does."""
    above, by_library = jit.f_back, False
    while above is not None and is_of_jax_or_flax(above):
        module = str(above.f_globals.get("__name__", ""))
        by_library |= above.f_code.co_name not in _HANDS_ON and not module.startswith("flax.nnx.transforms")
        above = above.f_back
    return above, by_library


_OF_FAULTS = (AttributeError, LookupError, NameError, AssertionError)
"""Exceptions that jax and flax do not raise for what a caller hands them: where none of their frames is the innermost, the code of that frame is at fault."""


def raised_by_library(error: BaseException) -> bool:
    """True if code of jax or flax raised an exception. Tried on all versions.

    jax takes the frames of both out of a traceback. The innermost frame is then the user's, and its instruction is a call, not a raise.
    """
    entry = _innermost(error)
    if entry is None or is_of_jax_or_flax(entry.tb_frame):
        return entry is not None
    return _instruction(entry) != "RAISE_VARARGS" and not isinstance(error, _OF_FAULTS)


def raised_by_us(error: BaseException) -> str:
    """The place in this package that raised an exception by mistake, ``FILE:LINE in FUNCTION``; empty for any other exception.

    An exception that leaves a call of ours may be that of the code which was called, in C or in jax. Tried on all versions.
    """
    entry = _innermost(error)
    if entry is None or of_frame(entry.tb_frame) != "ours" or owner(type(error).__module__) == "ours":
        return ""
    instruction, code = _instruction(entry), entry.tb_frame.f_code
    calls = instruction.startswith(("CALL", "PRECALL", "SEND"))
    if instruction == "RAISE_VARARGS" or (calls and not isinstance(error, _OF_FAULTS)):
        return ""
    own = __name__.partition(".")[0]
    return f"{own}{code.co_filename.rpartition(own)[2]}:{entry.tb_lineno} in {code.co_name}"


def _innermost(error: BaseException) -> TracebackType | None:
    """The innermost entry of a traceback."""
    entry = error.__traceback__
    while entry is not None and entry.tb_next is not None:
        entry = entry.tb_next
    return entry


def _instruction(entry: TracebackType) -> str:
    """The name of the instruction that raised."""
    return dis.opname[entry.tb_frame.f_code.co_code[entry.tb_lasti]]
