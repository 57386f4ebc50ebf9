"""Programs for one chip that its compiler may treat in a way of its own: narrow types, loops, kernels, the memory of the host, what a function captures."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import pallas
from jax.experimental.custom_partitioning import custom_partitioning
from jax.experimental.pallas.ops.tpu.flash_attention import flash_attention
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel, splash_attention_mask
from jax.sharding import SingleDeviceSharding

from benchmarks.on_targets.programs import Call, abstract

BFLOAT = jnp.bfloat16
TEXT, HEADS = 2048, 8
"""Tokens of a text, and heads of 128."""


def shape(*sizes: int, dtype: Any = jnp.float32, memory: str = "") -> jax.ShapeDtypeStruct:
    """An abstract argument; with a ``memory``, in that of the device or the host."""
    sharding = SingleDeviceSharding(jax.devices()[0], memory_kind=memory) if memory else None
    return jax.ShapeDtypeStruct(sizes, dtype, sharding=sharding)


# --- training steps


class MLP(nnx.Module):
    """Two layers, with a spec of their shardings or none."""

    def __init__(self, width: int, hidden: int, rngs: nnx.Rngs, spec: Any = None, **dtypes: Any) -> None:
        init = nnx.initializers.lecun_normal()
        up, down = (init if spec is None else nnx.with_partitioning(init, each) for each in (spec, spec and spec[::-1]))
        self.up = nnx.Linear(width, hidden, kernel_init=up, use_bias=spec is None, rngs=rngs, **dtypes)
        self.down = nnx.Linear(hidden, width, kernel_init=down, use_bias=spec is None, rngs=rngs, **dtypes)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down(nnx.gelu(self.up(x)))


class Stack(nnx.Module):
    """Eight layers in a scan over a remat, that compute in bfloat16."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        make: Any = nnx.vmap(lambda rngs: MLP(1024, 4096, rngs, dtype=BFLOAT))
        split: Any = nnx.split_rngs(splits=8)
        self.layers = split(make)(rngs)

    def __call__(self, x: jax.Array) -> Any:
        layer: Any = nnx.remat(lambda layer, x: x + layer(x), graph_updates=False)
        scan: Any = nnx.scan(layer, in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
        return scan(self.layers, x)


class Masters(nnx.Module):
    """The weights of a model in float32, and the moments of adamw, in one box beside it."""

    def __init__(self, model: nnx.Module) -> None:
        weights = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), nnx.pure(nnx.state(model, nnx.Param)))
        self.weights = nnx.Variable(weights)
        self.moments = nnx.Variable(optax.adamw(1e-3).init(weights))

    def update(self, model: nnx.Module, gradients: Any) -> None:
        """Update the masters, and give the model their values in bfloat16."""
        wide = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), nnx.pure(gradients))
        weights = self.weights.get_value()
        updates, moments = optax.adamw(1e-3).update(wide, self.moments.get_value(), weights)
        weights = optax.apply_updates(weights, updates)
        self.weights.set_value(weights)
        self.moments.set_value(moments)
        nnx.update(model, jax.tree.map(lambda leaf: leaf.astype(BFLOAT), weights))


def with_adamw(make: Callable[[nnx.Rngs], Any]) -> Any:
    """A model and its optimizer, abstract."""

    def both(rngs: nnx.Rngs) -> tuple[Any, Any]:
        model = make(rngs)
        return model, nnx.Optimizer(model, optax.adamw(1e-3), wrt=nnx.Param)

    return abstract(both)


def with_masters(rngs: nnx.Rngs) -> tuple[Any, Masters]:
    """A model in bfloat16 and its masters."""
    model = MLP(2048, 8192, rngs, dtype=BFLOAT, param_dtype=BFLOAT)
    return model, Masters(model)


def mlp_with_adamw() -> Any:
    """Two layers in float32, and adamw."""
    return with_adamw(lambda rngs: MLP(2048, 8192, rngs))


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


# --- weights in a loop


class Quantized(nnx.Module):
    """Eight layers of a narrow type, each turned into bfloat16 where it is used."""

    def __init__(self, dtype: Any) -> None:
        self.weights = nnx.Param(jnp.zeros((8, 4096, 4096), dtype))
        self.scales = nnx.Param(jnp.ones((8, 1, 4096), BFLOAT))

    def __call__(self, x: jax.Array) -> jax.Array:
        def layer(x: jax.Array, given: Any) -> Any:
            weights, scale = given
            return x @ (weights.astype(BFLOAT) * scale), None

        return jax.lax.scan(layer, x, (self.weights[...], self.scales[...]))[0]


class Wide(nnx.Module):
    """24 GiB of weights: more than a v5e has."""

    def __init__(self) -> None:
        self.weights = nnx.Param(jnp.zeros((24, 16_384, 16_384)))

    def __call__(self, x: jax.Array) -> jax.Array:
        return jax.lax.scan(lambda x, weights: (x @ weights, None), x, self.weights[...])[0]


class CastAhead(nnx.Module):
    """46 layers in float32 that compute in bfloat16: the compiler of a TPU casts them all before the loop, and only its default effort does."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        make: Any = nnx.vmap(lambda rngs: nnx.Linear(8192, 8192, use_bias=False, dtype=BFLOAT, rngs=rngs))
        split: Any = nnx.split_rngs(splits=46)
        self.layers = split(make)(rngs)

    def __call__(self, x: jax.Array) -> Any:
        scan: Any = nnx.scan(lambda layer, x: jnp.tanh(layer(x)), in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
        return scan(self.layers, x)


# --- operations


class Dropping(nnx.Module):
    """A layer with dropout, by a generator of random numbers."""

    def __init__(self, generator: str) -> None:
        rngs = nnx.Rngs(jax.random.key(0, impl=generator))
        self.linear, self.dropout = nnx.Linear(4096, 4096, rngs=rngs), nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.dropout(self.linear(x))


class Factored(nnx.Module):
    """A product with the factors of a matrix."""

    def __init__(self) -> None:
        self.weights = nnx.Param(jnp.zeros((256, 256)))

    def __call__(self, x: jax.Array) -> Any:
        weights = self.weights[...]
        square = weights @ weights.T
        first, second = jnp.linalg.qr(weights)
        factors = (first, second, jnp.linalg.eigh(square)[1], jnp.linalg.svd(weights)[0], jnp.linalg.cholesky(square))
        return x @ (sum(factors) + jnp.linalg.inv(weights + jnp.eye(256)))


class AlongARow(nnx.Module):
    """A Fourier transform, a sort, the largest values and running sums of each row."""

    def __init__(self) -> None:
        self.weights = nnx.Param(jnp.zeros((512,)))

    def __call__(self, x: jax.Array) -> Any:
        waves = jnp.fft.rfft(x * self.weights[...]).real.sum()
        largest = jax.lax.top_k(x, 8)[0].sum() + jax.lax.associative_scan(jnp.maximum, x, axis=-1)
        return waves + largest + jnp.sort(x, -1) + jnp.cumsum(x, -1)


class Pictures(nnx.Module):
    """Four convolutions, the first of three channels, and a BatchNorm in training mode."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.layers = nnx.List([nnx.Conv(channels, 64, (3, 3), rngs=rngs) for channels in (3, 64, 64, 64)])
        self.norm = nnx.BatchNorm(64, rngs=rngs)

    def __call__(self, x: jax.Array) -> Any:
        for layer in self.layers:
            x = nnx.relu(layer(x))
        return self.norm(x)


@custom_partitioning
def partitioned(x: jax.Array) -> jax.Array:
    """A function that says itself how it is cut over devices."""
    return jnp.sin(x)


partitioned.def_partition(
    infer_sharding_from_operands=lambda _, operands, __: operands[0].sharding,
    partition=lambda mesh, operands, _: (mesh, jnp.sin, operands[0].sharding, (operands[0].sharding,)),
    sharding_rule="i j -> i j",
)


class Then(nnx.Module):
    """A layer, and a function after it."""

    def __init__(self, width: int, function: Callable[[jax.Array], jax.Array], rngs: nnx.Rngs, **dtypes: Any) -> None:
        self.linear = nnx.Linear(width, width, rngs=rngs, **dtypes)
        self.function = function

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.function(self.linear(x))


def printed(x: jax.Array) -> jax.Array:
    """Its argument, whose mean it prints."""
    jax.debug.print("mean {}", x.mean())
    return x


def of_a_gpu(x: jax.Array) -> Any:
    """A function of a library in C, on a GPU."""
    call = jax.ffi.ffi_call("of_a_library", jax.ShapeDtypeStruct(x.shape, x.dtype))
    return jax.lax.platform_dependent(x, cuda=call, default=lambda x: x)


class Captured(nnx.Module):
    """A layer, and two tables that belong to no module."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.linear = nnx.Linear(2048, 2048, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.linear(x) @ jnp.asarray(TABLE) + self.linear(x) @ TABLE


TABLE = np.ones((2048, 2048), np.float32)


# --- kernels


def doubled(x_ref: Any, out_ref: Any) -> None:
    """The body of a kernel."""
    out_ref[...] = x_ref[...] * 2


def in_one_block(x: jax.Array) -> Any:
    """The kernel with all of its argument in one block."""
    interpret = jax.default_backend() == "cpu"
    call = pallas.pallas_call(doubled, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype), interpret=interpret)
    return call(x)


def in_one_block_of_a_tpu(x: jax.Array) -> Any:
    """The same on a TPU; nothing of a kernel elsewhere."""
    call = pallas.pallas_call(doubled, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype))
    return jax.lax.platform_dependent(x, tpu=call, default=lambda x: x * 2)


def dense(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
    """Attention of jax.nn, with heads before tokens as the kernels have them."""
    swapped = (each.swapaxes(1, 2) for each in (query, key, value))
    return jax.nn.dot_product_attention(*swapped).swapaxes(1, 2)


def flash(query: jax.Array, key: jax.Array, value: jax.Array) -> Any:
    """The flash attention of jax."""
    return flash_attention(query, key, value, causal=True)


def splash(query: jax.Array, key: jax.Array, value: jax.Array) -> Any:
    """The splash attention of jax."""
    mask = splash_attention_mask.MultiHeadMask([splash_attention_mask.CausalMask((TEXT, TEXT)) for _ in range(HEADS)])
    kernel = splash_attention_kernel.make_splash_mha(mask, head_shards=1, q_seq_shards=1)
    return jax.vmap(kernel)(query, key, value)


def if_on_a_tpu(kernel: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    """A kernel of a TPU, and the attention of jax.nn elsewhere."""
    return lambda *args: jax.lax.platform_dependent(*args, tpu=kernel, default=dense)


class Attention(nnx.Module):
    """Attention in bfloat16 by a kernel."""

    def __init__(self, attend: Callable[..., jax.Array], rngs: nnx.Rngs) -> None:
        self.project = nnx.Linear(1024, 3 * 1024, rngs=rngs, dtype=BFLOAT)
        self.attend = attend

    def __call__(self, x: jax.Array) -> jax.Array:
        projected = self.project(x).reshape(*x.shape[:2], 3 * HEADS, 128).swapaxes(1, 2)
        return self.attend(*jnp.split(projected, 3, axis=1))


def attention(attend: Callable[..., jax.Array]) -> Call:
    """Attention by a kernel, of four texts."""
    return abstract(lambda rngs: Attention(attend, rngs)), (shape(4, TEXT, 1024, dtype=BFLOAT),)


# --- the memory of the host


class Offloading(nnx.Module):
    """Six layers whose outputs have a name."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.layers = nnx.List([nnx.Linear(2048, 2048, rngs=rngs) for _ in range(6)])

    def __call__(self, x: jax.Array) -> jax.Array:
        for layer in self.layers:
            x = checkpoint_name(jnp.tanh(layer(x)), "layer")
        return x


def offloaded(model: Offloading, x: jax.Array) -> Any:
    """The gradients, with the outputs of the layers kept in the memory of the host."""
    policy = jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[],
        names_which_can_be_offloaded=["layer"],
        offload_src="device",
        offload_dst="pinned_host",
    )
    call: Any = nnx.remat(lambda model, x: model(x), policy=policy, graph_updates=False)
    return nnx.grad(lambda model: (call(model, x) ** 2).mean())(model)


class BesideTheHost(nnx.Module):
    """6 GiB of weights, and one layer that comes from the memory of the host."""

    def __init__(self) -> None:
        self.weights = nnx.Param(jnp.zeros((24, 8192, 8192)))

    def __call__(self, x: jax.Array, moments: jax.Array) -> Any:
        y = jax.lax.scan(lambda x, weights: (x @ weights, None), x, self.weights[...])[0]
        return y + jax.device_put(moments[0], jax.memory.Space.Device)[:8]


# --- all of them


def after_a_layer(function: Callable[[jax.Array], jax.Array], width: int = 256, **dtypes: Any) -> Call:
    """A function after a square layer."""
    model = abstract(lambda rngs: Then(width, function, rngs, **dtypes))
    return model, (shape(width, width, dtype=dtypes.get("dtype", jnp.float32)),)


def dropout(generator: str) -> Call:
    """A layer with dropout."""
    return nnx.eval_shape(lambda: Dropping(generator)), (shape(4096, 4096),)


PROGRAMS: dict[str, Callable[[], Call]] = {
    "step of adamw, float32": lambda: (step, (*mlp_with_adamw(), shape(2048, 2048))),
    "step of adamw, float32 masters beside the model": lambda: (
        step,
        (*abstract(with_masters), shape(2048, 2048, dtype=BFLOAT)),
    ),
    "four batches a step": lambda: (accumulated, (*mlp_with_adamw(), shape(4, 512, 2048))),
    "scan over remat, bfloat16": lambda: (step, (*with_adamw(Stack), shape(4096, 1024, dtype=BFLOAT))),
    "int8 weights in a scan": lambda: (
        nnx.eval_shape(lambda: Quantized(jnp.int8)),
        (shape(16, 4096, dtype=BFLOAT),),
    ),
    "int4 weights in a scan": lambda: (
        nnx.eval_shape(lambda: Quantized(jnp.int4)),
        (shape(16, 4096, dtype=BFLOAT),),
    ),
    "24 GiB of weights": lambda: (nnx.eval_shape(Wide), (shape(8, 16_384),)),
    "11 GiB of weights, cast before a loop": lambda: (abstract(CastAhead), (shape(512, 8192, dtype=BFLOAT),)),
    "dropout": lambda: dropout("threefry2x32"),
    "dropout, `rbg`": lambda: dropout("rbg"),
    "dropout, `unsafe_rbg`": lambda: dropout("unsafe_rbg"),
    "factors of a matrix": lambda: (nnx.eval_shape(Factored), (shape(256, 256),)),
    "transforms and sorts of rows": lambda: (nnx.eval_shape(AlongARow), (shape(64, 512),)),
    "convolution of 3 channels": lambda: (abstract(Pictures), (shape(32, 224, 224, 3),)),
    "`custom_partitioning`": lambda: after_a_layer(partitioned),
    "`jax.debug.print`": lambda: after_a_layer(printed),
    "a call of C on a GPU": lambda: after_a_layer(of_a_gpu),
    "captured tables": lambda: (abstract(Captured), (shape(8, 2048),)),
    "float64": lambda: after_a_layer(jnp.tanh, 256, dtype=jnp.float64, param_dtype=jnp.float64),
    "a kernel that is interpreted on a CPU": lambda: after_a_layer(in_one_block),
    "a kernel with a block of 16 MiB": lambda: after_a_layer(in_one_block_of_a_tpu, 2048),
    "flash attention on a TPU": lambda: attention(if_on_a_tpu(flash)),
    "flash attention": lambda: attention(flash),
    "splash attention on a TPU": lambda: attention(if_on_a_tpu(splash)),
    "remat with `pinned_host`": lambda: (offloaded, (abstract(Offloading), shape(8192, 2048))),
    "12 GiB in `pinned_host`": lambda: (
        nnx.eval_shape(BesideTheHost),
        (shape(8, 8192, memory="device"), shape(48, 8192, 8192, memory="pinned_host")),
    ),
}
IN_DOUBLE = frozenset({"float64"})
"""Programs that need `jax.enable_x64`."""
