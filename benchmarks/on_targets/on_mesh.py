"""Programs over a mesh of eight devices: a step of an optimizer, and experts whose tokens are sent between devices."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from benchmarks.on_targets.one_chip import BFLOAT, MLP, Then, partitioned, step, with_adamw
from benchmarks.on_targets.programs import Call, abstract

DEVICES, EXPERTS, WIDTH, HIDDEN, TOKENS = 8, 8, 1024, 4096, 8192


def mesh_of(**axes: int) -> Mesh:
    """A mesh of the simulated devices, by the sizes of its axes."""
    devices = np.array(jax.devices()[:DEVICES]).reshape(*axes.values())
    return Mesh(devices, (*axes,), axis_types=(AxisType.Auto,) * len(axes))


def cut(mesh: Mesh, spec: P, *sizes: int, dtype: Any = BFLOAT) -> jax.ShapeDtypeStruct:
    """An abstract argument, cut over a mesh."""
    return jax.ShapeDtypeStruct(sizes, dtype, sharding=NamedSharding(mesh, spec))


def sharded_step(mesh: Mesh) -> Call:
    """A step of adamw, its weights cut over both axes."""
    pair = with_adamw(lambda rngs: MLP(4096, 16_384, rngs, ("fsdp", "tp"), param_dtype=BFLOAT))
    return step, (*pair, cut(mesh, P("fsdp"), 4096, 4096))


class Experts(nnx.Module):
    """One expert a device, and a router that sends each token to the device of its expert."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        def weights(*sizes: int) -> nnx.Param[jax.Array]:
            return nnx.Param(jnp.zeros(sizes, BFLOAT), sharding=("experts", None, None))

        self.router = nnx.Linear(WIDTH, EXPERTS, rngs=rngs)
        self.up, self.down = weights(EXPERTS, WIDTH, HIDDEN), weights(EXPERTS, HIDDEN, WIDTH)

    def __call__(self, x: jax.Array) -> Any:
        chosen = jax.nn.softmax(self.router(x)).argmax(-1)

        def sent(x: jax.Array) -> Any:
            return jax.lax.all_to_all(x.reshape(EXPERTS, -1, WIDTH), "experts", 0, 0).reshape(-1, WIDTH)

        def on_a_device(x: jax.Array, chosen: jax.Array, up: jax.Array, down: jax.Array) -> Any:
            order = jnp.argsort(chosen)
            return sent(jax.nn.gelu(sent(x[order]) @ up[0]) @ down[0])[jnp.argsort(order)]

        specs = (P("experts"),) * 4
        mapped = jax.shard_map(on_a_device, in_specs=specs, out_specs=P("experts"))
        return mapped(x, chosen, self.up[...], self.down[...])


class Grouped(nnx.Module):
    """All experts on each device, and a part of the hidden axis."""

    def __init__(self) -> None:
        self.up = nnx.Param(jnp.zeros((EXPERTS, WIDTH, HIDDEN), BFLOAT), sharding=(None, None, "experts"))

    def __call__(self, x: jax.Array, sizes: jax.Array) -> jax.Array:
        return jax.lax.ragged_dot(x, self.up[...], sizes)


class Ragged(nnx.Module):
    """A layer whose outputs are sent to other devices, to each its number of rows."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.linear = nnx.Linear(WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x: jax.Array, sizes: jax.Array) -> Any:
        def on_a_device(x: jax.Array, sizes: jax.Array) -> Any:
            starts = jnp.cumsum(sizes) - sizes
            return jax.lax.ragged_all_to_all(x, jnp.zeros_like(x), starts, sizes, starts, sizes, axis_name="experts")

        mapped = jax.shard_map(on_a_device, in_specs=(P("experts"), P()), out_specs=P("experts"), check_vma=False)
        return mapped(self.linear(x), sizes)


def counts() -> jax.ShapeDtypeStruct:
    """The number of rows of each expert."""
    return jax.ShapeDtypeStruct((EXPERTS,), jnp.int32)


def rows_of(mesh: Mesh, dtype: Any = BFLOAT) -> jax.ShapeDtypeStruct:
    """Tokens, cut over the devices."""
    return cut(mesh, P("experts"), TOKENS, WIDTH, dtype=dtype)


BY_EXPERTS = {"experts": EXPERTS}
PROGRAMS: dict[str, tuple[dict[str, int], Callable[[Mesh], Call]]] = {
    "step of adamw, fsdp 4 x tp 2": ({"fsdp": 4, "tp": 2}, sharded_step),
    "experts by `all_to_all`": (BY_EXPERTS, lambda mesh: (abstract(Experts), (rows_of(mesh),))),
    "experts by `ragged_dot`": (
        BY_EXPERTS,
        lambda _: (nnx.eval_shape(Grouped), (jax.ShapeDtypeStruct((TOKENS, WIDTH), BFLOAT), counts())),
    ),
    "`ragged_all_to_all`": (BY_EXPERTS, lambda mesh: (abstract(Ragged), (rows_of(mesh, jnp.float32), counts()))),
    "`custom_partitioning` over 8": (
        BY_EXPERTS,
        lambda mesh: (
            abstract(lambda rngs: Then(256, partitioned, rngs)),
            (cut(mesh, P("experts"), 256, 256, dtype=jnp.float32),),
        ),
    ),
}
"""The axes of a mesh, and the program on it."""
