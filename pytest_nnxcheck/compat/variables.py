"""Tracers and Variables, read without running their code."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from flax import nnx
from jax._src import core

from pytest_nnxcheck.compat.arrays import describe, is_held_ref, is_ref, value_of
from pytest_nnxcheck.compat.owner import is_library_file, of_file
from pytest_nnxcheck.core.text import near

__tracebackhide__ = True  # pytest shows the frames of the user, not these


_mro: Callable[[type], tuple[type, ...]] = type.__dict__["__mro__"].__get__

_NNX = {
    "Variable": "variable",
    "VariableState": "variable",
    "List": "nnx list",
    "Dict": "nnx dict",
    "Object": "node",
    "Pytree": "node",
}
"""Classes of `flax.nnx` and their kinds. Flax 0.12 has no VariableState, flax before has no List and no Pytree, and 0.11 no Dict."""

# By id, since the hash of a class may be the code of its metaclass.
_KINDS = {
    id(jax.core.Tracer): "tracer",
    **({id(jax.Ref): "reference"} if hasattr(jax, "Ref") else {}),
    **{id(vars(nnx)[name]): kind for name, kind in _NNX.items() if name in vars(nnx)},
}


def is_variable(value: object) -> bool:
    """True if a value is a Variable; asks its class alone, see `kind_of`."""
    return kind_of(type(value)) == "variable"


def kind_of(cls: type) -> str:
    """The kind of a class in the walk: ``tracer``, ``array``, ``reference``, ``variable``, ``nnx list``, ``nnx dict``, ``node``, or empty.

    Looks at the class only: `isinstance` would ask the object for its ``__class__``, which may be the user's code.
    On jax 0.4 concrete arrays are virtual subclasses of `jax.Array`, an abstract class. All versions.
    """
    for base in _mro(cls):
        if id(base) in _KINDS:
            return _KINDS[id(base)]
    module = type.__dict__["__module__"].__get__(cls)
    from_jax = isinstance(module, str) and module.partition(".")[0] in ("jax", "jaxlib")
    return "array" if from_jax and issubclass(cls, jax.Array) else ""


def is_tracer(value: object) -> bool:
    """True if the value is a jax tracer, by its class alone. `jax.core.Tracer` is public. All versions."""
    return any(base is jax.core.Tracer for base in _mro(type(value)))


def _read(value: object, name: str, default: Any = None) -> Any:
    """Read an attribute past the object's own ``__getattr__``, which has hooks, trace checks and warnings."""
    try:
        return object.__getattribute__(value, name)
    except AttributeError:
        return default


_ABSENT: Any = object()
_FIELDS = frozenset(("raw_value", "_raw_value", "value", "type", "_trace_state", "_var_metadata", "_aval", "_refs"))
"""The attributes of a Variable that are no metadata; the last two are those of a reference that no Variable holds."""


def variable_value(variable: Any) -> Any:
    """The raw value of a Variable (or VariableState); a reference that no Variable holds is its own.

    Public access (``.value``, ``[...]``) runs the Variable's hooks and warns by version; the slot is ``_raw_value`` from
    flax 0.12, ``raw_value`` before, and ``value`` in a VariableState. All versions.
    """
    for name in ("_raw_value", "raw_value", "value"):
        if (value := _read(variable, name, _ABSENT)) is not _ABSENT:
            return value
    return variable if is_ref(variable) else None


def variable_kind(variable: Any) -> str:
    """The Variable type as the user knows it, such as ``Param``; a VariableState carries it in ``type``. All versions."""
    is_state = any(base.__name__ == "VariableState" for base in type(variable).__mro__)
    return str((_read(variable, "type") if is_state else type(variable)).__name__)


def is_pinned(variable: Any) -> bool:
    """True if flax refuses every write to a Variable here, since it was made in another trace.

    No public way on flax before 0.12, where only a write that raises shows it. All versions.
    """
    trace = _read(variable, "_trace_state")
    return trace is not None and not trace.is_valid()


def set_variable_value(variable: Any, raw: Any) -> None:
    """Put a raw value back, past the hooks and the check of the trace level, which no public setter leaves out. A reference stays, and takes in a value of its own type. All versions."""
    held = variable_value(variable)
    if is_held_ref(held) and not is_tracer(raw) and describe(raw) == describe(held):
        held[...] = value_of(raw)
        return
    for name in ("_raw_value", "raw_value", "value"):
        if _read(variable, name, _ABSENT) is not _ABSENT:
            object.__setattr__(variable, name, raw)
            return


def is_hijax(variable: Any) -> bool:
    """True if a Variable is one of the experimental hijax types: its value is no attribute. Flax 0.12.12; before 0.12 there are none."""
    return type(variable).__name__ == "HijaxVariable"


def variable_metadata(variable: Any) -> dict[str, Any]:
    """The metadata of a Variable.

    From flax 0.10.7 on it is a dict of its own, which is returned itself; before, the rest of the instance's ``__dict__``, returned as a new
    dict. ``get_metadata`` is public, but a copy on some versions. All versions.
    """
    metadata: dict[str, Any] | None = _read(variable, "_var_metadata")
    if metadata is not None:
        return metadata
    return {key: value for key, value in (_read(variable, "__dict__") or {}).items() if key not in _FIELDS}


def trace_identity(tracer: Any) -> tuple[Any, Any]:
    """The identity of the trace that a tracer belongs to; keep the objects alive, and compare by `trace_key`.

    No public way. ``_trace.main`` where it is set (the MainTrace of jax 0.4, the tag from 0.5), else ``_trace``. On jax 0.4 the body
    of a custom_vjp or a shard_map shares the MainTrace around it, one ``sublevel`` deeper. All versions.
    """
    trace = object.__getattribute__(tracer, "_trace")
    return getattr(trace, "main", None) or trace, getattr(trace, "sublevel", None)


def is_tracing() -> bool:
    """True if a trace is under way, in which a tracer may be alive; outside of any, every tracer has outlived its trace.

    No public way since `jax.core.trace_state_clean` is deprecated. All versions.
    """
    return not core.trace_state_clean()


def trace_key(identity: tuple[Any, Any]) -> tuple[int, int]:
    """`trace_identity` as a key, valid while the identity itself is kept."""
    main, sublevel = identity
    return id(main), 0 if sublevel is None else int(sublevel.level)


def tracer_kind(tracer: Any) -> str:
    """The type of a tracer as jax names it, such as ``DynamicJaxprTracer``. All versions."""
    return str(type(tracer).__name__)


def tracer_line(tracer: Any) -> str:
    """The line that created a tracer, ``FILE:LINE (FUNCTION)``; empty where jax kept no line.

    The public way is `jax.errors.UnexpectedTracerError`, raised by using the dead tracer eagerly; it has no line for vmap and
    grad tracers, and inside an outer trace nothing is raised. ``_line_info`` (jit, scan, ...) and ``source_info`` (vmap) are
    private but there on all versions. A tracer without either (grad) is unwrapped: ``val``, ``primal``. All versions.
    """
    while is_tracer(tracer):
        source = _read(tracer, "_line_info") or _read(tracer, "source_info")
        if source is not None and (line := _user_line(getattr(source, "traceback", None))):
            return line
        tracer = next((inner for name in ("val", "primal") if is_tracer(inner := _read(tracer, name))), None)
    return ""


def equation_line(eqn: Any) -> str:
    """The user's innermost line of a jaxpr's equation, ``path:line``; empty where jax kept none, or where it is outside of the call.

    No public way: `jax.extend.source_info_util.summarize` leaves out the frames of jax, but not those of flax, nor of a plugin. All versions.
    """
    traceback = _read(_read(eqn, "source_info"), "traceback")
    for frame in traceback.frames if traceback is not None else ():
        if of_file(frame.file_name) == "ours":
            return ""
        if not is_library_file(frame.file_name):
            return near(f"{frame.file_name}:{frame.line_num}")
    return ""


def _user_line(traceback: Any) -> str:
    """The innermost frame of a jax traceback that is not a library's."""
    for frame in traceback.frames if traceback is not None else ():
        if not is_library_file(frame.file_name):
            return near(f"{frame.file_name}:{frame.line_num} ({frame.function_name})")
    return ""
