"""Programs through the plugin, and through a plain ahead-of-time compile: traced a second time on the devices of a topology, without `jax.export`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from benchmarks.on_targets.rows import Row, There, measured
from pytest_nnxcheck.compat.staging import configured
from pytest_nnxcheck.compat.targets import effort_options, limit_of, machine_of
from pytest_nnxcheck.core.chips import parse_target
from pytest_nnxcheck.xla.hlo import aliases

CHIPS = "v5e,v5p,v6e,h100"
SLICES = "v5e:2x4,h100:8"
Call = tuple[Callable[..., Any], tuple[Any, ...]]
"""A subject and its arguments, abstract."""


def rows_of(*shape: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
    """Abstract inputs."""
    return jax.ShapeDtypeStruct(shape, dtype)


class MLP(nnx.Module):
    """Two layers."""

    def __init__(self, width: int, hidden: int, rngs: nnx.Rngs, spec: Any = None, **dtypes: Any) -> None:
        init = nnx.initializers.lecun_normal()
        up, down = (init if spec is None else nnx.with_partitioning(init, each) for each in (spec, spec and spec[::-1]))
        self.up = nnx.Linear(width, hidden, kernel_init=up, use_bias=spec is None, rngs=rngs, **dtypes)
        self.down = nnx.Linear(hidden, width, kernel_init=down, use_bias=spec is None, rngs=rngs, **dtypes)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down(nnx.gelu(self.up(x)))


def with_adamw(make: Callable[[], Any]) -> tuple[Any, ...]:
    """A model and its optimizer, abstract."""

    def both() -> tuple[Any, Any]:
        model = make()
        return model, nnx.Optimizer(model, optax.adamw(1e-3), wrt=nnx.Param)

    pair: tuple[Any, ...] = nnx.eval_shape(both)
    return pair


def step(model: Any, optimizer: Any, x: jax.Array) -> Any:
    """A step of the optimizer."""
    loss, gradients = nnx.value_and_grad(lambda model: (model(x).astype(jnp.float32) ** 2).mean())(model)
    optimizer.update(model, gradients)
    return loss


def accumulated(model: Any, optimizer: Any, x: jax.Array) -> Any:
    """A step of the optimizer by the gradients of four batches."""
    graphdef, state = nnx.split(model)

    def add(sums: Any, batch: jax.Array) -> Any:
        loss, gradients = jax.value_and_grad(lambda state: (nnx.merge(graphdef, state)(batch) ** 2).mean())(state)
        return jax.tree.map(jnp.add, sums, gradients), loss

    gradients, losses = jax.lax.scan(add, jax.tree.map(jnp.zeros_like, state), x)
    optimizer.update(model, gradients)
    return losses.mean()


class Stack(nnx.Module):
    """Eight layers in a scan over a remat, that compute in bfloat16."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        make: Any = nnx.vmap(lambda rngs: MLP(1024, 4096, rngs, dtype=jnp.bfloat16))
        split: Any = nnx.split_rngs(splits=8)
        self.layers = split(make)(rngs)

    def __call__(self, x: jax.Array) -> Any:
        layer: Any = nnx.remat(lambda layer, x: x + layer(x), graph_updates=False)
        scan: Any = nnx.scan(layer, in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
        return scan(self.layers, x)


class Quantized(nnx.Module):
    """Eight layers of int8, each turned into bfloat16 where it is used."""

    def __init__(self) -> None:
        self.weights = nnx.Param(jnp.zeros((8, 4096, 4096), jnp.int8))
        self.scales = nnx.Param(jnp.ones((8, 1, 4096), jnp.bfloat16))

    def __call__(self, x: jax.Array) -> jax.Array:
        def layer(x: jax.Array, given: Any) -> Any:
            weights, scale = given
            return x @ (weights.astype(jnp.bfloat16) * scale), None

        return jax.lax.scan(layer, x, (self.weights[...], self.scales[...]))[0]


class Dropping(nnx.Module):
    """A layer with dropout."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.linear, self.dropout = nnx.Linear(4096, 4096, rngs=rngs), nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.dropout(self.linear(x))


class Wide(nnx.Module):
    """23 GiB of weights: more than a v5e has."""

    def __init__(self) -> None:
        self.weights = nnx.Param(jnp.zeros((24, 16_384, 16_384)))

    def __call__(self, x: jax.Array) -> jax.Array:
        return jax.lax.scan(lambda x, weights: (x @ weights, None), x, self.weights[...])[0]


PROGRAMS: dict[str, Callable[[], Call]] = {
    "step of adamw, float32": lambda: (step, (*with_adamw(lambda: MLP(2048, 8192, nnx.Rngs(0))), rows_of(2048, 2048))),
    "four batches a step": lambda: (
        accumulated,
        (*with_adamw(lambda: MLP(2048, 8192, nnx.Rngs(0))), rows_of(4, 512, 2048)),
    ),
    "scan over remat, bfloat16": lambda: (
        step,
        (*with_adamw(lambda: Stack(nnx.Rngs(0))), rows_of(4096, 1024, dtype=jnp.bfloat16)),
    ),
    "int8 weights in a scan": lambda: (nnx.eval_shape(Quantized), (rows_of(16, 4096, dtype=jnp.bfloat16),)),
    "dropout": lambda: (nnx.eval_shape(lambda: Dropping(nnx.Rngs(0))), (rows_of(4096, 4096),)),
    "24 GiB of weights": lambda: (nnx.eval_shape(Wide), (rows_of(8, 16_384),)),
}


def rows() -> Iterator[Row]:
    """The programs on one chip, then a sharded step on slices."""
    for name, make in PROGRAMS.items():
        function, args = make()
        yield with_plain(measured(name, function, args, CHIPS), function, args)
    mesh = Mesh(np.array(jax.devices()[:8]).reshape(4, 2), ("fsdp", "tp"), axis_types=(AxisType.Auto,) * 2)
    with jax.set_mesh(mesh):
        pair = with_adamw(lambda: MLP(4096, 16_384, nnx.Rngs(0), ("fsdp", "tp"), param_dtype=jnp.bfloat16))
        x = jax.ShapeDtypeStruct((4096, 4096), jnp.bfloat16, sharding=NamedSharding(mesh, P("fsdp")))
        row = measured("step of adamw, fsdp 4 x tp 2", step, (*pair, x), SLICES, devices=8)
    yield with_plain(row, step, (*pair, x), mesh)


def with_plain(row: Row, function: Any, args: Sequence[Any], mesh: Any = None) -> Row:
    """The row with what a plain compile says: at the effort that the plugin asked for, and at the default one."""

    def beside(there: There) -> There:
        same = plain(there.target, function, args, mesh, there.effort)
        default = same if there.effort == "default" else plain(there.target, function, args, mesh, "default")
        return replace(there, plain=same[0], plain_default=default[0], plain_fits=default[1], plain_kept=default[2])

    return replace(row, targets=tuple(map(beside, row.targets)))


def plain(word: str, function: Any, args: Sequence[Any], like: Any, effort: str) -> tuple[int | None, bool, int]:
    """The peak, whether it fits, and the donated leaves that keep their buffer: the state is donated, and the program traced on the target itself."""
    target = parse_target(word)
    devices, (limit, _) = machine_of(target).devices, limit_of(target.chip)
    mesh = None
    if like is not None:
        mesh = Mesh(np.array(devices).reshape(tuple(like.shape.values())), like.axis_names, axis_types=like.axis_types)

    def there(leaf: Any) -> Any:
        spec = getattr(getattr(leaf, "sharding", None), "spec", P())
        sharding = SingleDeviceSharding(devices[0]) if mesh is None else NamedSharding(mesh, spec)
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    whole = not isinstance(function, nnx.Module)
    nodes = tuple(arg for arg in (function, *args) if isinstance(arg, nnx.Module | nnx.Optimizer))
    graphdef, state = nnx.split(nodes)
    inputs = tuple(arg for arg in args if not isinstance(arg, nnx.Module | nnx.Optimizer))

    def call(state: Any, inputs: Any) -> Any:
        nodes = nnx.merge(graphdef, state)
        out = (function if whole else nodes[0])(*(nodes if whole else nodes[1:]), *inputs)
        return out, nnx.split(nodes)[1]

    jitted = jax.jit(call, donate_argnums=0, keep_unused=True)
    with configured(effort_options(effort)), contextlib.nullcontext() if mesh is None else jax.set_mesh(mesh):
        lowered = jitted.lower(jax.tree.map(there, state), jax.tree.map(there, inputs))
        try:
            compiled = lowered.compile()
        except jax.errors.JaxRuntimeError:
            return None, False, 0
    totals: Any = compiled.memory_analysis()
    parts = (totals.argument_size_in_bytes, totals.output_size_in_bytes, totals.temp_size_in_bytes)
    peak = sum(parts) - totals.alias_size_in_bytes if target.chip.gpu else totals.peak_memory_in_bytes
    return peak, peak <= limit, len({*(aliases(compiled) or {}).values()})
