"""Tell which values are arrays, their types, sizes and shardings. Copy, stack and index arrays without a compile for each shape."""

from __future__ import annotations

import contextlib
import functools
import inspect
import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import flax
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax._src.state import discharge
from jax.interpreters import pxla

from pytest_nnxcheck.core.errors import Unfit
from pytest_nnxcheck.core.facts import ArrayType
from pytest_nnxcheck.core.nesting import Misfit

__tracebackhide__ = True  # pytest shows the frames of the user, not these

NUMBERS = (bool, int, float, complex)
"""The Python numbers that jax takes for arrays."""


@functools.cache
def _copies_by_transfer() -> bool:
    """True if `jax.device_put` with ``may_alias=False`` gives a buffer of its own.

    Public, but jax 0.4.33 has no such argument, and jax 0.5.3 ignores it without a sharding; jax 0.6.2, 0.10 and 0.12 heed it.
    """
    array = jax.device_put(np.ones(16), jax.local_devices()[0])  # under jax.set_mesh, jnp.ones lies on all devices
    try:
        copy = jax.device_put(array, may_alias=False)
    except TypeError:
        return False
    return bool(copy.unsafe_buffer_pointer() != array.unsafe_buffer_pointer())


def _is_plain(array: Any) -> bool:
    """True if a NumPy array can replace this array: it is bound to no device, no key and not weakly typed."""
    return (
        isinstance(array, jax.Array)
        and not isinstance(array, jax.core.Tracer)
        and not jnp.issubdtype(array.dtype, jax.dtypes.prng_key)
        and not array.aval.weak_type
        and _copies_by_transfer()
        and not array.committed
        and array.devices() == jax.device_put(0).devices()
    )


def _owned(value: Any) -> Any:
    """A new array in its own buffer. A first `device_put` may adopt the buffer of an aligned NumPy array, which cannot be donated."""
    return jax.device_put(jax.device_put(value), may_alias=False)


def copied(array: Any) -> Any:
    """The array in a buffer of its own; of a reference another reference. All versions."""
    if isinstance(array, jax.Array) and array.sharding.num_devices == 1 and _copies_by_transfer():
        return jax.device_put(array, may_alias=False)
    if is_ref(array):
        return jax.new_ref(value_of(array), kind=array.aval.kind)
    try:
        return jnp.copy(array)
    except ValueError:
        # Under jax.set_mesh nothing is computed on an array that is committed to other devices.
        return jax.device_put(array, array.sharding, may_alias=False)


def stacked(array: Any, length: int) -> Any:
    """The array many times over, along a new leading axis. All versions."""
    if not _is_plain(array):
        return jnp.stack([array] * length)
    return _owned(np.stack([np.asarray(array)] * length))


def first(array: Any) -> Any:
    """The first element of the leading axis. All versions."""
    return _owned(np.asarray(array)[0]) if _is_plain(array) else array[0]


def nbytes(array: Any, sharding: Any = None) -> int:
    """Bytes on one device of an array or its abstract twin, key arrays included; 0 for a Python number."""
    if not hasattr(array, "shape"):
        return 0
    sharding = sharding or getattr(array, "sharding", None)
    several = isinstance(sharding, jax.sharding.Sharding) and sharding.num_devices > 1
    shape = sharding.shard_shape(array.shape) if several else array.shape
    return int(math.prod(shape) * array.dtype.itemsize)


def byte_bounds(array: Any) -> tuple[int, int]:
    """First and one-past-last address of a NumPy array: `numpy.byte_bounds` moved in NumPy 2. Tried on NumPy 1.26, 2.4, 2.5."""
    module = np.lib.array_utils if hasattr(np.lib, "array_utils") else np
    start, end = module.byte_bounds(array)
    return start, end


def array_type(array: Any) -> ArrayType:
    """The type of an array; of anything else the name of its type, of a tracer's type of the user's own too."""
    if hasattr(array, "shape") and hasattr(array, "dtype"):
        return ArrayType(array.dtype.name, tuple(array.shape))
    return ArrayType(type(array).__name__, None)


def quantizes(old: ArrayType, new: ArrayType) -> bool:
    """True if a conversion of an array is never made by a promotion of types: of floats to what has eight bits and fewer, or is no float."""
    return None not in (old.shape, new.shape) and bits(old.dtype) > 8 >= bits(new.dtype)


def bits(dtype: str) -> int:
    """The bits of a float or complex number; 0 for every other type."""
    try:
        kind = jnp.dtype(dtype)
    except TypeError:  # a key of random numbers
        return 0
    return 8 * kind.itemsize if jnp.issubdtype(kind, jnp.inexact) else 0


def describe(array: Any) -> str:
    """The type of an array as text: ``float32[8,64]``."""
    return str(array_type(array))


def unwrapped(value: Any) -> Any:
    """Take off the wrapper that jax 0.7.2 puts around a constant of NumPy's in a program; anything else stays as it is.

    The wrapper has no public name. All versions, 0.7.2 too.
    """
    cls = type(value)
    return value.val if (cls.__module__, cls.__name__) == ("jax._src.literals", "LiteralArray") else value


def as_array(leaf: Any) -> Any:
    """Turn a number, or an array of NumPy's, into a jax array of its own dtype; anything else stays as it is.

    `jax.checkpoint` of jax 0.7.2, 0.11 and 0.12 hands constants out as numbers and as arrays of NumPy's with a dtype. All versions.
    """
    leaf = unwrapped(leaf)
    if not isinstance(leaf, (*NUMBERS, np.ndarray, np.generic)):
        return leaf
    # Not asarray, which takes over an aligned buffer of NumPy's that the next call may write to.
    return jnp.array(leaf, jax.dtypes.canonicalize_dtype(leaf.dtype) if hasattr(leaf, "dtype") else None)


# --- references: `jax.Ref`, from jax 0.7 on, tried on jax 0.10.2 and 0.12.0.1. `buffer_of` and `discharged` have no public way.


def is_ref(value: Any) -> bool:
    """True if a value is a mutable array of `jax.new_ref`, or a tracer of one. Before jax 0.7 there are none."""
    kind = getattr(jax, "Ref", None)
    return kind is not None and isinstance(value, kind)


def is_held_ref(value: Any) -> bool:
    """True if a value is a reference that holds an array, and no tracer of one."""
    return is_ref(value) and not isinstance(value, jax.core.Tracer)


def is_in_ref(leaf: Any) -> bool:
    """True if a leaf is a reference, a tracer of one, or its abstract twin."""
    # Asked of types of jax alone: an `nnx.Rngs` answers any name, and a mock says yes.
    return is_ref(leaf) or (isinstance(leaf, jax.ShapeDtypeStruct) and bool(getattr(leaf, "is_ref", False)))


def buffer_of(value: Any) -> Any:
    """The array inside a reference, to ask where it lies; anything else as it is.

    A write leaves the same Python object there, so that neither its identity nor what it has cached says anything: nobody may keep it.
    """
    return value._refs._buf if is_held_ref(value) else value


def value_of(value: Any) -> Any:
    """The value of a reference now, in an array of its own; of a tracer of one the tracer of its value; anything else as it is."""
    if is_held_ref(value):
        with jax.ensure_compile_time_eval():
            return copied(buffer_of(value))
    return value[...] if is_ref(value) else value


def pointers_of_ref(ref: Any) -> tuple[int, ...]:
    """Device pointers of the shards of a reference, as they are now; none where it is empty."""
    buffer = buffer_of(ref)
    shards = getattr(buffer, "_base_array", buffer)._arrays
    return tuple(shard.unsafe_buffer_pointer() for shard in shards) if ref.size else ()


def discharged(closed: Any, *, last_values: bool = True) -> Any:
    """A traced program whose references among the arguments are arrays; captured ones stay. Their last values are more outputs, behind the others."""
    opened = getattr(closed, "jaxpr", closed)
    if not any(is_ref_type(var.aval) for var in opened.invars):
        return closed
    plain = discharge.discharge_state(closed)
    if last_values:
        return plain
    inner = getattr(plain, "jaxpr", plain)
    fewer = inner.replace(outvars=inner.outvars[: len(opened.outvars)], debug_info=opened.debug_info)
    return fewer if inner is plain else plain.replace(jaxpr=fewer)


def is_ref_type(aval: Any) -> bool:
    """True if a variable of a traced program is a reference."""
    return type(aval).__name__ == "AbstractRef"


def is_array(value: Any) -> bool:
    """True if jax accepts the value as an array; NumPy also has arrays of text, dates and objects."""
    if isinstance(value, jax.Array):
        return True
    if not isinstance(value, np.ndarray | np.generic):
        return False
    return value.dtype.kind in "biufc" or bool(value.dtype.kind == "V" and jnp.issubdtype(value.dtype, jnp.number))


HOST_MEMORY = "pinned_host"
"""The kind of memory of the host that programs for a chip read and write. All versions."""


def active_mesh(*, of_one: bool = False) -> Any:
    """The mesh of ``with jax.set_mesh(mesh)``, or of ``with mesh``; `None` without one, or for a single device unless ``of_one``.

    `jax.sharding.get_mesh` came with jax 0.6, for the first form; the second is in ``thread_resources``, deprecated from jax 0.8.2
    on. All versions.
    """
    meshes = [jax.sharding.get_mesh()] if hasattr(jax.sharding, "get_mesh") else []
    with warnings.catch_warnings(), contextlib.suppress(AttributeError):
        warnings.simplefilter("ignore", DeprecationWarning)
        meshes.append(pxla.thread_resources.env.physical_mesh)
    return next((mesh for mesh in meshes if not mesh.empty and (of_one or mesh.size > 1)), None)


def context_of_mesh(axes: Sequence[tuple[str, int]]) -> str:
    """An expression for the context of a mesh with these axes, over the first devices, whose axes the compiler shards.

    `jax.set_mesh` came with jax 0.7, and takes effect as it is called; before it, a mesh is its own context. `jax.make_mesh` came with jax 0.4.35.
    """
    names, sizes = (tuple(column) for column in zip(*axes, strict=True))
    if hasattr(jax, "set_mesh"):
        return f"jax.set_mesh(jax.make_mesh({sizes}, {names}, axis_types=(jax.sharding.AxisType.Auto,) * {len(names)}))"
    return f"jax.sharding.Mesh(__import__('numpy').reshape(jax.devices()[:{math.prod(sizes)}], {sizes}), {names})"


def on_devices(sharding: Any, mesh: Any) -> Any:
    """The same sharding on real devices; on flax 0.12 `nnx.eval_shape` gives the shape of a mesh without devices.

    Raises `ValueError` where no mesh of that shape can be made of the devices at hand. All versions.
    """
    if not isinstance(sharding, jax.sharding.NamedSharding) or isinstance(sharding.mesh, jax.sharding.Mesh):
        return sharding
    wanted = sharding.mesh
    if mesh is None or mesh.axis_names != wanted.axis_names or mesh.axis_sizes != wanted.axis_sizes:
        mesh = jax.make_mesh(wanted.axis_sizes, wanted.axis_names, axis_types=wanted.axis_types)
    return jax.sharding.NamedSharding(mesh, sharding.spec)


def in_type(array: Any, axes: int = 0) -> Any:
    """The sharding in the type of an array, or of its abstract twin, behind so many leading ``axes``; `None` without one.

    A type has one where the mesh has explicit axes, as `jax.make_mesh` makes them from jax 0.9 on. Tried on all versions; jax before 0.5 has none.
    """
    sharding = getattr(array, "sharding", None)
    kinds = getattr(jax.sharding, "AxisType", None)
    if not isinstance(sharding, jax.sharding.NamedSharding) or kinds is None:
        return None
    if kinds.Explicit not in sharding.mesh.axis_types:
        return None
    spec = jax.sharding.PartitionSpec(*(None,) * axes, *sharding.spec)
    return jax.sharding.NamedSharding(sharding.mesh.abstract_mesh, spec)


def annotated(state: Any, mesh: Any) -> Any:
    """The shardings that the Variables of a state are annotated with, in a tree like the state; replicated without annotation.

    `nnx.get_named_sharding` of flax 0.12 asks for a concrete mesh; it leaves a Variable without annotation out of its tree or
    replicates it, by version. All versions.
    """
    replicated = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    shardings = jax.tree.leaves(nnx.get_named_sharding(state, mesh))
    leaves, treedef = jax.tree.flatten(state)
    whole = len(shardings) == len(leaves) and all(isinstance(sharding, jax.sharding.Sharding) for sharding in shardings)
    return jax.tree.unflatten(treedef, shardings if whole else [replicated] * len(leaves))


def shard_map(f: Callable[..., Any], mesh: Any, spec: Any) -> Callable[..., Any]:
    """``f`` over a mesh, with one spec for all that goes in and comes out.

    `jax.shard_map` from jax 0.6 on, before that in `jax.experimental`; the check that outputs are replicated is ``check_vma`` and
    ``check_rep``. It is off, as it refuses loops whose carry starts from constants. All versions.
    """
    if hasattr(jax, "shard_map"):
        return jax.shard_map(f, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    from jax.experimental.shard_map import shard_map as experimental

    mapped: Callable[..., Any] = experimental(f, mesh=mesh, in_specs=spec, out_specs=spec, check_rep=False)
    return mapped


def nnx_shard_map(f: Callable[..., Any], mesh: Any, spec: Any) -> Callable[..., Any]:
    """``f`` over a mesh, with modules among the arguments; flax has `nnx.shard_map` from 0.10.7 on. Raises `Unfit` before. All versions."""
    if not hasattr(nnx, "shard_map"):
        raise Unfit(Misfit("no nnx.shard_map", flax.__version__))
    check = "check_vma" if "check_vma" in inspect.signature(nnx.shard_map).parameters else "check_rep"
    options: dict[str, Any] = {check: False}
    return nnx.shard_map(f, mesh=mesh, in_specs=spec, out_specs=spec, **options)
