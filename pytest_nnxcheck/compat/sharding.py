"""Meshes, ``shard_map``, and shardings: those in the types of arrays, and those that a module is annotated with."""

from __future__ import annotations

import contextlib
import inspect
import warnings
from collections.abc import Callable
from typing import Any

import flax
import jax
from flax import nnx
from jax.interpreters import pxla

from pytest_nnxcheck.core.errors import Unfit
from pytest_nnxcheck.core.nesting import Misfit

__tracebackhide__ = True  # pytest shows the frames of the user, not these


def active_mesh() -> Any:
    """The mesh of ``with jax.set_mesh(mesh)``, or of ``with mesh``; `None` without one, or for a single device.

    `jax.sharding.get_mesh` came with jax 0.6, for the first form; the second is in ``thread_resources``, deprecated from jax 0.8.2
    on. All versions.
    """
    meshes = [jax.sharding.get_mesh()] if hasattr(jax.sharding, "get_mesh") else []
    with warnings.catch_warnings(), contextlib.suppress(AttributeError):
        warnings.simplefilter("ignore", DeprecationWarning)
        meshes.append(pxla.thread_resources.env.physical_mesh)
    return next((mesh for mesh in meshes if not mesh.empty and mesh.size > 1), None)


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
