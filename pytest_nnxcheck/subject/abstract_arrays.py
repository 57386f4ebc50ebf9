"""The abstract twins of arrays: shape, dtype, and where they would lie on the devices of a mesh."""

from __future__ import annotations

import functools
from typing import Any

import jax
import numpy as np

from pytest_nnxcheck.compat import arrays as meshes
from pytest_nnxcheck.compat import flax_modes, graph
from pytest_nnxcheck.compat.arrays import is_held_ref, is_in_ref
from pytest_nnxcheck.core.errors import CheckError

__tracebackhide__ = True  # pytest shows the frames of the user, not these


def abstract_leaf(leaf: Any, placed: jax.sharding.Sharding | None = None, *, in_ref: bool = False) -> Any:
    """The abstract twin of an array, an object of its own; anything else as it is.

    Its sharding is kept where it has several devices, or is of the memory of the host; without one it lies as ``placed`` says. A reference, and one ``in_ref``, has the twin of
    a reference. Raises `CheckError`.
    """
    if isinstance(leaf, np.ndarray | np.generic):
        return jax.ShapeDtypeStruct(leaf.shape, jax.dtypes.canonicalize_dtype(leaf.dtype), sharding=placed)
    if not isinstance(leaf, jax.Array | jax.ShapeDtypeStruct) and not is_held_ref(leaf):
        return leaf
    sharding = on_devices(leaf.sharding)
    kept = sharding is not None and (sharding.num_devices > 1 or sharding.memory_kind == meshes.HOST_MEMORY)
    reference = {"is_ref": True} if in_ref or is_in_ref(leaf) else {}
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding if kept else placed, **reference)


def abstract_inputs(inputs: Any) -> tuple[Any, ...]:
    """The abstract twins of inputs: under a mesh they are replicated, as a new array would be. Raises `CheckError`."""
    mesh = meshes.active_mesh()
    placed = None if mesh is None else jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    return tuple(abstract_leaf(leaf, placed) for leaf in inputs)


def abstract_state(state: Any) -> Any:
    """The abstract twin of an `nnx.State`: under a mesh its leaves lie as they are annotated. Raises `CheckError`.

    Without a mesh, arrays that no Variable holds stay as they are: flax (0.12) takes an abstract value in a dict for a static one.
    """
    mesh = meshes.active_mesh()
    if mesh is None:
        return jax.tree.map(abstract_variable, state, is_leaf=graph.is_variable)
    return jax.tree.map(abstract_leaf, state, meshes.annotated(state, mesh))


def abstract_variable(leaf: Any) -> Any:
    """The abstract twin of a Variable. `nnx.eval_shape` drops that its array is a reference, and keeps the metadata that say so."""
    if not graph.is_variable(leaf):
        return leaf
    in_ref = flax_modes.takes_refs() and graph.variable_metadata(leaf).get("ref") is True
    return jax.tree.map(functools.partial(abstract_leaf, in_ref=in_ref), leaf)


def on_devices(sharding: Any) -> Any:
    """The sharding on the devices at hand. Raises `CheckError` where they are too few for it."""
    try:
        return meshes.on_devices(sharding, meshes.active_mesh())
    except ValueError as error:
        raise CheckError(
            f"an abstract array is sharded as {sharding.spec} over a mesh of {sharding.mesh.size} devices, and there are"
            f" {jax.device_count()}: run with --nnx-devices {sharding.mesh.size} ({error})"
        ) from None
