"""Layers that map the call: ``vmap`` over an axis, ``shard_map`` over a mesh of all devices."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from pytest_nnxcheck.compat import sharding
from pytest_nnxcheck.transforms.layer import Plan, Program, first, functional, rebuild, stack

__tracebackhide__ = True  # pytest shows the frames of the user, not these


def axes(module: Any, plan: Plan) -> Any:
    """The leaves that the call writes mapped, the rest broadcast: a prefix where flax's mode refuses `nnx.StateAxes`."""
    filters: Any = {plan.written: 0, ...: None}
    return nnx.StateAxes(filters) if plan.graph_updates else nnx.prefix(module, filters)


def vmap_argument(f: Program, plan: Plan) -> Program:
    def layer(state: Any, *inputs: Any) -> Any:
        # Each element writes a state of its own: it has an axis before the map, and the first element is what one call leaves.
        nnx.update(state, stack(nnx.state(state, plan.written), plan.length))
        out = nnx.vmap(f, in_axes=(axes(state, plan), *(0 for _ in inputs)))(state, *inputs)
        nnx.update(state, first(nnx.state(state, plan.written)))
        return out

    return layer


def vmap_functional(f: Program, plan: Plan) -> Program:
    def layer(state: Any, *inputs: Any) -> Any:
        pure, changed, rest = functional(f, state, plan)
        changed, out = jax.vmap(pure, in_axes=(0, None, *(0 for _ in inputs)))(
            stack(changed, plan.length), rest, *inputs
        )
        nnx.update(state, first(changed))
        return out

    return layer


def stack_refs(tree: Any, length: int) -> Any:
    """A leading axis on every leaf; of a reference a new one."""

    def stacked(leaf: Any) -> Any:
        rows = jnp.stack([leaf[...]] * length)
        return jax.new_ref(rows) if isinstance(leaf, jax.Ref) else rows

    return jax.tree.map(stacked, tree)


def first_in_refs(tree: Any, before: Any) -> Any:
    """Element 0 of the leading axis of every leaf, written into the reference that the leaf was ``before``."""

    def written(leaf: Any, held: Any) -> Any:
        if not isinstance(held, jax.Ref):
            return leaf[0]
        held[...] = leaf[...][0]
        return held

    return jax.tree.map(written, tree, before)


def put(state: Any, leaves: Any) -> None:
    """Update a node; a reference that no Variable holds by another, where flax would write into the one that is there."""
    for name in [name for name, leaf in leaves.items() if isinstance(leaf, jax.Ref)]:
        delattr(state, name)
    nnx.update(state, leaves)


def vmap_argument_in_refs(f: Program, plan: Plan) -> Program:
    def layer(state: Any, *inputs: Any) -> Any:
        before = rebuild(nnx.state(state, plan.written))
        put(state, stack_refs(before, plan.length))
        out = nnx.vmap(f, in_axes=(axes(state, plan), *(0 for _ in inputs)))(state, *inputs)
        put(state, first_in_refs(nnx.state(state, plan.written), before))
        return out

    return layer


def vmap_functional_in_refs(f: Program, plan: Plan) -> Program:
    def layer(state: Any, *inputs: Any) -> Any:
        pure, before, rest = functional(f, state, plan, plan.written)
        written = stack_refs(before, plan.length)
        changed, out = jax.vmap(pure, in_axes=(0, None, *(0 for _ in inputs)))(written, rest, *inputs)
        first_in_refs(written, before)
        nnx.update(state, first(changed))
        return out

    return layer


def vmap_closure(f: Program, plan: Plan) -> Program:
    def layer(state: Any, *inputs: Any) -> Any:
        return nnx.vmap(lambda *inputs: f(state, *inputs))(*inputs)

    return layer


def vmap_jax_closure(f: Program, plan: Plan) -> Program:
    def layer(state: Any, *inputs: Any) -> Any:
        return jax.vmap(lambda *inputs: f(state, *inputs))(*inputs)

    return layer


REPLICATED = jax.sharding.PartitionSpec()


def mesh() -> Any:
    """All devices along one axis."""
    return jax.sharding.Mesh(jax.devices(), ("devices",))


def on_mesh(tree: Any) -> Any:
    """The arrays of a tree on every device, as one places a model before it is mapped: moved by the jit, none keeps its buffer."""
    everywhere = jax.sharding.NamedSharding(mesh(), REPLICATED)

    def place(leaf: Any) -> Any:
        if isinstance(leaf, jax.ShapeDtypeStruct):
            return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=everywhere)
        return jax.device_put(leaf, everywhere) if isinstance(leaf, jax.Array) else leaf

    return jax.tree.map(place, tree)


def shard_map_argument(f: Program, plan: Plan) -> Program:
    def layer(state: Any, *inputs: Any) -> Any:
        return sharding.nnx_shard_map(f, mesh(), REPLICATED)(state, *inputs)

    return layer


def shard_map_functional(f: Program, plan: Plan) -> Program:
    def layer(state: Any, *inputs: Any) -> Any:
        pure, changed, rest = functional(f, state, plan)
        changed, out = sharding.shard_map(pure, mesh(), REPLICATED)(changed, rest, *inputs)
        nnx.update(state, changed)
        return out

    return layer


def shard_map_closure(f: Program, plan: Plan) -> Program:
    def layer(state: Any, *inputs: Any) -> Any:
        return sharding.nnx_shard_map(lambda *inputs: f(state, *inputs), mesh(), REPLICATED)(*inputs)

    return layer


def shard_map_jax_closure(f: Program, plan: Plan) -> Program:
    def layer(state: Any, *inputs: Any) -> Any:
        return sharding.shard_map(lambda *inputs: f(state, *inputs), mesh(), REPLICATED)(*inputs)

    return layer
