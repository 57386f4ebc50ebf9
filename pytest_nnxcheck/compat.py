"""Every touch of a name of jax or flax that depends on the version, or that is not public.

Each function says what it is for, why there is no public way, and on which versions it was tried:
jax 0.4.33 and 0.5.3 with flax 0.10.2, jax 0.6.2 with flax 0.10.7, jax 0.10.2 with flax 0.12.8, jax 0.12 with flax 0.12.12
("all versions" below).
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

__tracebackhide__ = True  # pytest shows the frames of the user, not these


# --- flax: graph nodes ---------------------------------------------------------------------------------------------------


def is_graph_node(value: object) -> bool:
    """Whether flax treats the value as a node of a graph: a Module, Rngs, Optimizer, or a Variable.

    `nnx.graph.is_graph_node` is public but says False of a Variable before flax 0.12, and True of one after. All versions.
    """
    from flax import nnx

    return isinstance(value, nnx.Variable) or bool(nnx.graph.is_graph_node(value))


def flat_state(state: Any) -> list[tuple[tuple[Any, ...], Any]]:
    """(path of the Variable, array) of every leaf of an `nnx.State`, in the order in which jax flattens it.

    `State.flat_state()` gives a dict or a `FlatState` by version; the key path of jax ends in the Variable's own attribute,
    which is left out here. All versions.
    """
    from jax.tree_util import DictKey, tree_flatten_with_path

    def keys(path: Any) -> tuple[Any, ...]:
        return tuple(key.key for key in itertools.takewhile(lambda key: isinstance(key, DictKey), path))

    return [(keys(path), leaf) for path, leaf in tree_flatten_with_path(state)[0]]


def serialized_buffer_assignment(compiled: Any) -> bytes | None:
    """XLA's ``BufferAssignmentProto`` of a compiled program, `None` where this jaxlib does not give it.

    No public way: ``memory_analysis()`` documents totals only. On jax 0.6.2 to 0.12 the proto is an attribute of
    its own, on jax 0.4.33 and 0.5.3 it is field 3 of an ``HloProto``. Tried on all versions, CPU.
    """
    from pytest_nnxcheck import hlo

    totals = compiled.memory_analysis()
    found = getattr(totals, "serialized_buffer_assignment_proto", None)
    whole = getattr(totals, "serialized_hlo_proto", None)
    try:
        return found or (bytes(hlo.raw(hlo.fields(whole), 3)) if whole else None)
    except (ValueError, TypeError):
        return None


def serialized_hlo_module(compiled: Any) -> bytes | None:
    """XLA's ``HloModuleProto`` of a compiled program as it was optimized, `None` where this jaxlib does not give it.

    No public way: ``as_text()`` has no instruction ids, which the buffer assignment names buffers by.
    Tried on all versions, CPU.
    """
    try:
        (module, *_) = compiled.runtime_executable().hlo_modules()
        proto: bytes = module.as_serialized_hlo_module_proto()
    except (AttributeError, ValueError, RuntimeError, NotImplementedError):
        return None
    return proto


# --- jax: jaxprs ---------------------------------------------------------------------------------------------------------


def open_jaxpr(jaxpr: Any) -> Any:
    """The jaxpr inside a closed one. jax 0.12 has one type for both, whose ``jaxpr`` may be itself; open ones pass. All versions."""
    return getattr(jaxpr, "jaxpr", jaxpr)


def scan_layout(eqn: Any) -> tuple[int, int]:
    """(constants, carries) of a scan equation: `num_consts`, `num_carry` up to jax 0.10, three flat trees from 0.12. All versions."""
    if "num_consts" in eqn.params:
        return eqn.params["num_consts"], eqn.params["num_carry"]
    consts, carry, _ = eqn.params["ft_in"].unpack()
    return len(list(consts)), len(list(carry))


# --- jax: staging --------------------------------------------------------------------------------------------------------


def staged(
    wrapper: Callable[..., Any], f: Callable[..., Any], on_compiled: Callable[[Any], None], **options: Any
) -> Any:
    """``wrapper(f, **options)`` (`jax.jit` or `nnx.jit`) that traces, lowers and compiles once, shows the compiled program, and runs it.

    `nnx.jit` of flax 0.10.2 has no ``trace``; there the `jax.jit` inside it is staged instead. All versions.
    """
    import jax

    def stage(jitted: Any) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            compiled = jitted.trace(*args).lower().compile(compiler_options=compiler_options())
            on_compiled(compiled)
            try:
                return compiled(*args)
            except TypeError as error:
                if "Computation compiled for" not in str(error):
                    raise
            # A leaked tracer was hoisted to a parameter that nobody passes (jax 0.5): the plain call says so in jax's words.
            return jitted(*args)

        return run

    jitted = wrapper(f, **options)
    if hasattr(jitted, "trace"):
        return stage(jitted)
    jit = jax.jit
    with mock.patch.object(jax, "jit", lambda *args, **kwargs: stage(jit(*args, **kwargs))):
        return wrapper(f, **options)


@contextlib.contextmanager
def quick_compiles() -> Iterator[None]:
    """Compile without most optimizations for a while: what runs outside of our own jit compiles in two thirds of the time.

    The option is public, but has no attribute to read it by; it is left alone where the backend is no CPU. All versions.
    """
    import jax

    before = jax.config.values["jax_disable_most_optimizations"]
    jax.config.update("jax_disable_most_optimizations", before or jax.default_backend() == "cpu")
    try:
        yield
    finally:
        jax.config.update("jax_disable_most_optimizations", before)


def compiler_options() -> dict[str, Any] | None:
    """Optimization level 0 gives the same buffers on the CPU, and compiles in half the time (1290 programs, all versions)."""
    import jax

    return {"xla_backend_optimization_level": 0} if jax.default_backend() == "cpu" else None


# --- tracers and Variables, read without running their code ----------------------------------------------------------------


@functools.cache
def _named_types() -> tuple[type, type, tuple[type, ...], type | None, type]:
    """Tracer, jax.Array, (Variable, VariableState), nnx.List (from flax 0.12), nnx.Dict. All versions."""
    import jax
    from flax import nnx

    variables = tuple(vars(nnx)[name] for name in ("Variable", "VariableState") if name in vars(nnx))
    return jax.core.Tracer, jax.Array, variables, vars(nnx).get("List"), nnx.Dict


def kind_of(cls: type) -> str:
    """What the walk takes instances of a class for: ``tracer``, ``array``, ``variable``, ``nnx list``, ``nnx dict`` or nothing.

    Looks at the class only: `isinstance` would ask the object for its ``__class__``, which may be the user's code.
    `jax.Array` is an abstract class of which concrete arrays are virtual subclasses on jax 0.4. All versions.
    """
    tracer, array, variables, nnx_list, nnx_dict = _named_types()
    bases = type.__dict__["__mro__"].__get__(cls)
    named = (("tracer", (tracer,)), ("variable", variables), ("nnx list", (nnx_list,)), ("nnx dict", (nnx_dict,)))
    for kind, types in named:
        if any(base is known for base in bases for known in types):
            return kind
    lowest = type.__dict__["__module__"].__get__(cls)
    from_jax = isinstance(lowest, str) and lowest.partition(".")[0] in ("jax", "jaxlib")
    return "array" if from_jax and issubclass(cls, array) else ""


def is_tracer(value: object) -> bool:
    """Whether the value is a jax tracer, by its class alone. `jax.core.Tracer` is public. All versions."""
    tracer = _named_types()[0]
    return any(base is tracer for base in type.__dict__["__mro__"].__get__(type(value)))


def _read(value: object, name: str, default: Any = None) -> Any:
    """An attribute without the object's own ``__getattr__`` (hooks, trace checks, warnings); s3 tracers raise there."""
    try:
        return object.__getattribute__(value, name)
    except AttributeError:
        return default


_ABSENT: Any = object()
_VARIABLE_FIELDS = frozenset(("raw_value", "_raw_value", "value", "type", "_trace_state", "_var_metadata"))


def variable_value(variable: Any) -> Any:
    """The raw value of a Variable (or VariableState).

    Public access (``.value``, ``[...]``) runs the Variable's hooks and warns by version; the slot is ``_raw_value`` from
    flax 0.12, ``raw_value`` before, and ``value`` in a VariableState. All versions.
    """
    for name in ("_raw_value", "raw_value", "value"):
        if (value := _read(variable, name, _ABSENT)) is not _ABSENT:
            return value
    return None


def variable_kind(variable: Any) -> str:
    """The Variable type as the user knows it, such as ``Param``; a VariableState carries it in ``type``. All versions."""
    described = (
        _read(variable, "type") if any(base.__name__ == "VariableState" for base in type(variable).__mro__) else None
    )
    return str((described or type(variable)).__name__)


def set_variable_value(variable: Any, raw: Any) -> None:
    """Put a raw value back, past the hooks and the check of the trace level, which no public setter leaves out. All versions."""
    for name in ("_raw_value", "raw_value", "value"):
        if _read(variable, name, _ABSENT) is not _ABSENT:
            object.__setattr__(variable, name, raw)
            return


def variable_metadata(variable: Any) -> dict[str, Any]:
    """The metadata of a Variable as it stands: a dict of its own from flax 0.10.7 (returned itself), before that the rest of
    the instance's ``__dict__`` (returned as a new dict). ``get_metadata`` is public, but a copy on some versions. All versions.
    """
    metadata: dict[str, Any] | None = _read(variable, "_var_metadata")
    if metadata is not None:
        return metadata
    return {key: value for key, value in (_read(variable, "__dict__") or {}).items() if key not in _VARIABLE_FIELDS}


def set_variable_metadata(variable: Any, metadata: dict[str, Any]) -> None:
    """Put metadata back: the attribute, not only its content, because flax replaces the dict. All versions."""
    if _read(variable, "_var_metadata") is not None:
        object.__setattr__(variable, "_var_metadata", metadata)
        return
    own = object.__getattribute__(variable, "__dict__")
    for key in [key for key in own if key not in _VARIABLE_FIELDS]:
        del own[key]
    own.update(metadata)


def trace_identity(tracer: Any) -> Any:
    """What tells the trace that a tracer belongs to from every other; keep the object, not its id.

    No public way. ``_trace.main`` where it is set (the MainTrace of jax 0.4, the tag from 0.5), else ``_trace``. All versions.
    """
    trace = object.__getattribute__(tracer, "_trace")
    main = _read(trace, "main")
    return trace if main is None else main


def tracer_kind(tracer: Any) -> str:
    """The type of a tracer as jax names it, such as ``DynamicJaxprTracer``. All versions."""
    return str(type(tracer).__name__)


def tracer_line(tracer: Any) -> str:
    """Where a tracer was created, ``FILE:LINE (FUNCTION)``, or nothing where jax kept no line.

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


@functools.cache
def _library_directories() -> tuple[tuple[str, ...], str]:
    """The directories of jax, jaxlib, flax and this plugin, and that of the standard library."""
    import contextlib

    import flax
    import jax
    import jaxlib

    files = (jax.__file__, jaxlib.__file__, flax.__file__, __file__, contextlib.__file__)
    *packages, standard = (str(Path(str(file)).parent) + os.sep for file in files)
    return tuple(packages), standard


def is_library_file(file: str) -> bool:
    """Whether a frame's file is nobody's line: a library's, or generated. Installed packages may be the user's."""
    packages, standard = _library_directories()
    return file.startswith(("<", *packages)) or (file.startswith(standard) and "site-packages" not in file)


def _user_line(traceback: Any) -> str:
    """The innermost frame of a jax traceback that is not a library's."""
    for frame in traceback.frames if traceback is not None else ():
        if not is_library_file(frame.file_name):
            return f"{frame.file_name}:{frame.line_num} ({frame.function_name})"
    return ""


def variables(state: Any) -> list[tuple[tuple[Any, ...], Any]]:
    """(path, Variable) of every Variable of a graph node. All versions.

    `nnx.iter_graph` of flax 0.10 yields a shared Variable under each of its names: the first one counts.
    """
    from flax import nnx

    found: dict[int, tuple[tuple[Any, ...], Any]] = {}
    for path, node in nnx.iter_graph(state):
        if isinstance(node, nnx.Variable):
            found.setdefault(id(node), (tuple(path), node))
    return list(found.values())


def raw_leaves(state: Any) -> list[tuple[tuple[Any, ...], Any]]:
    """(path, value) of every Variable of a graph node, read without the trace checks of ``Variable.value``. All versions."""
    return [(path, variable_value(variable)) for path, variable in variables(state)]


def is_key(array: Any) -> bool:
    """Whether an array, or its abstract twin, holds PRNG keys. All versions."""
    import jax
    import jax.numpy as jnp

    return bool(jnp.issubdtype(array.dtype, jax.dtypes.prng_key))


def zeros(shape: Any) -> Any:
    """An array of zeros for an abstract one; `jnp.zeros` has none for key arrays, which are broadcast from one key. All versions."""
    import jax
    import jax.numpy as jnp

    if is_key(shape):
        data = jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct(shape.shape, shape.dtype))
        return jax.random.wrap_key_data(jnp.zeros(data.shape, data.dtype), impl=shape.dtype._impl)
    return jnp.zeros(shape.shape, shape.dtype)


def is_tracer_error(error: BaseException | None) -> bool:
    """Whether the exception is what jax raises when a tracer of an ended trace is used. All versions."""
    import jax

    return isinstance(error, jax.errors.UnexpectedTracerError)


def is_refusal(error: BaseException | None) -> bool:
    """Whether flax refused to touch a graph node from another trace level.

    `TraceContextError` is public; for a Variable flax raises a plain ValueError from its own files. All versions.
    """
    import traceback

    from flax import errors, nnx

    if isinstance(error, errors.TraceContextError):
        return True
    if not isinstance(error, ValueError) or "from different trace level" not in str(error):
        return False
    last = traceback.extract_tb(error.__traceback__)[-1].filename
    return str(Path(nnx.__file__).parent) in last


def scan_cure(remat: bool) -> str:
    """How to keep a scan over layers from writing its parameters back, on the installed flax: each cure is tested.

    Flax 0.12 has ``graph_updates=False``; from 0.10.7 on `nnx.scan` itself copies nothing; in 0.10.2 it copies whatever it scans over.
    """
    import flax

    version = tuple(int(part) for part in flax.__version__.split(".")[:2])
    functional = "jax.lax.scan over the state of nnx.split, with nnx.merge in its body"
    if remat and version >= (0, 12):
        return (
            "inside the scan write nnx.remat(f, graph_updates=False): nnx.scan copies back all that nnx.remat hands out"
        )
    return (
        f"scan with {functional}" + (" under jax.checkpoint" if remat else "") + ": parameters go in and never come out"
    )


def byte_bounds(array: Any) -> tuple[int, int]:
    """First and one-past-last address of a NumPy array: `numpy.byte_bounds` moved in NumPy 2. Tried on NumPy 1.26, 2.4, 2.5."""
    import numpy as np

    module = np.lib.array_utils if hasattr(np.lib, "array_utils") else np
    start, end = module.byte_bounds(array)
    return start, end
