"""Healthy models of real flax.nnx layers: under the defaults no nesting of them may break an invariant.

`HEALTHY` maps a name to a factory of a fresh `Case`; `LEFT_OUT` gives the reason for every name that the installed
version of flax does not have.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import flax
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

FLAX = tuple(int(part) for part in flax.__version__.split(".")[:3])
WIDTH = 8
BATCH = (3, WIDTH)
SEQUENCE = (2, 4, WIDTH)


@dataclass(frozen=True)
class Case:
    """A subject (a module, or a function of graph nodes) and the arguments to call it with."""

    subject: Callable[..., Any]
    args: tuple[Any, ...]

    def __call__(self) -> Any:
        """Call the subject eagerly."""
        return self.subject(*self.args)


def assign(variable: nnx.Variable[Any], value: jax.Array) -> None:
    """Replace a Variable's value, dtype and all, in the spelling that the installed flax does not deprecate.

    ``variable[...] = value`` would keep the old dtype on flax 0.12.
    """
    if hasattr(variable, "set_value"):
        variable.set_value(value)
    else:
        variable.value = value


def node_list(nodes: Iterable[Any]) -> Any:
    """A list of graph nodes: `nnx.List` from flax 0.12 on, where a plain list is static; a plain list before."""
    return nnx.List(nodes) if FLAX >= (0, 12) else list(nodes)


def node_dict(nodes: Mapping[str, Any]) -> Any:
    """A dict of graph nodes: `nnx.Dict` from flax 0.12 on, where a plain dict is static; a plain dict before."""
    return nnx.Dict(nodes) if FLAX >= (0, 12) else dict(nodes)


def numbers(shape: tuple[int, ...]) -> jax.Array:
    """float32 inputs that are neither constant nor zero, so that statistics move; drawn without a program to compile."""
    return jnp.asarray(np.random.default_rng(1).standard_normal(shape, np.float32))


def rngs() -> nnx.Rngs:
    return nnx.Rngs(0)


class Residual(nnx.Module):
    """A block ``[batch, width] -> [batch, width]``."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.linear = nnx.Linear(WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return x + nnx.gelu(self.linear(self.norm(x)))


class ListOfBlocks(nnx.Module):
    """Blocks held in a list of graph nodes."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.blocks = node_list(Residual(rngs) for _ in range(2))

    def __call__(self, x: jax.Array) -> jax.Array:
        for block in self.blocks:
            x = block(x)
        return x


class DictOfBranches(nnx.Module):
    """Branches held in a dict of graph nodes."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.branches = node_dict({name: nnx.Linear(WIDTH, WIDTH, rngs=rngs) for name in ("left", "right")})

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.branches["left"](x) * nnx.sigmoid(self.branches["right"](x))


class TiedAutoencoder(nnx.Module):
    """Two layers that share one kernel Variable."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.encoder = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.decoder = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.decoder.kernel = self.encoder.kernel

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.decoder(nnx.relu(self.encoder(x)))


class ScanOverLayers(nnx.Module):
    """Three blocks with stacked parameters, made by `nnx.vmap` and applied by `nnx.scan`."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        @nnx.split_rngs(splits=3)
        @nnx.vmap(in_axes=(0,), out_axes=0)
        def make(rngs: nnx.Rngs) -> Residual:
            return Residual(rngs)

        self.blocks = make(rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        def forward(x: jax.Array, block: Residual) -> jax.Array:
            return block(x)

        return forward(x, self.blocks)


class RematBlock(nnx.Module):
    """A block that is rematerialized inside the call."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.block = Residual(rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return nnx.remat(lambda block, x: block(x))(self.block, x)


def linear() -> Case:
    return Case(nnx.Linear(WIDTH, 4, rngs=rngs()), (numbers(BATCH),))


def linear_general() -> Case:
    return Case(nnx.LinearGeneral((4, WIDTH), (2, 3), axis=(-2, -1), rngs=rngs()), (numbers(SEQUENCE),))


def einsum() -> Case:
    return Case(nnx.Einsum("btd,dhk->bthk", (WIDTH, 2, 4), (2, 4), rngs=rngs()), (numbers(SEQUENCE),))


def conv() -> Case:
    return Case(nnx.Conv(3, 4, kernel_size=(3, 3), rngs=rngs()), (numbers((2, 6, 6, 3)),))


def embed() -> Case:
    tokens = jnp.array([[0, 3, 5], [7, 1, 0]], jnp.int32)
    return Case(nnx.Embed(num_embeddings=10, features=WIDTH, rngs=rngs()), (tokens,))


def layer_norm() -> Case:
    return Case(nnx.LayerNorm(WIDTH, rngs=rngs()), (numbers(BATCH),))


def rms_norm() -> Case:
    return Case(nnx.RMSNorm(WIDTH, rngs=rngs()), (numbers(BATCH),))


def group_norm() -> Case:
    return Case(nnx.GroupNorm(WIDTH, num_groups=2, rngs=rngs()), (numbers((2, 4, 4, WIDTH)),))


def batch_norm_train() -> Case:
    return Case(nnx.BatchNorm(WIDTH, use_running_average=False, rngs=rngs()), (numbers(BATCH),))


def batch_norm_eval() -> Case:
    return Case(nnx.BatchNorm(WIDTH, use_running_average=True, rngs=rngs()), (numbers(BATCH),))


def dropout() -> Case:
    return Case(nnx.Dropout(0.5, rngs=rngs()), (numbers(BATCH),))


def attention() -> Case:
    layer = nnx.MultiHeadAttention(num_heads=2, in_features=WIDTH, decode=False, rngs=rngs())
    return Case(layer, (numbers(SEQUENCE),))


def attention_decoding() -> Case:
    layer = nnx.MultiHeadAttention(num_heads=2, in_features=WIDTH, decode=True, rngs=rngs())
    layer.init_cache((2, 16, WIDTH))
    return Case(layer, (numbers((2, 1, WIDTH)),))


def lstm_cell() -> Case:
    cell = nnx.LSTMCell(WIDTH, 4, rngs=rngs())
    return Case(cell, (cell.initialize_carry((2, WIDTH), rngs()), numbers((2, WIDTH))))


def gru_rnn() -> Case:
    return Case(nnx.RNN(nnx.GRUCell(WIDTH, 4, rngs=rngs()), rngs=rngs()), (numbers(SEQUENCE),))


def lora_linear() -> Case:
    return Case(nnx.LoRALinear(WIDTH, 4, lora_rank=2, rngs=rngs()), (numbers(BATCH),))


def weight_norm() -> Case:
    return Case(nnx.WeightNorm(nnx.Linear(WIDTH, 4, rngs=rngs()), rngs=rngs()), (numbers(BATCH),))


def sequential() -> Case:
    keys = rngs()
    layers = (nnx.Linear(WIDTH, 4, rngs=keys), nnx.relu, nnx.Linear(4, WIDTH, rngs=keys))
    return Case(nnx.Sequential(*layers), (numbers(BATCH),))


def list_container() -> Case:
    return Case(ListOfBlocks(rngs()), (numbers(BATCH),))


def dict_container() -> Case:
    return Case(DictOfBranches(rngs()), (numbers(BATCH),))


def shared_weights() -> Case:
    return Case(TiedAutoencoder(rngs()), (numbers(BATCH),))


def scan_over_layers() -> Case:
    return Case(ScanOverLayers(rngs()), (numbers(BATCH),))


def remat_inside() -> Case:
    return Case(RematBlock(rngs()), (numbers(BATCH),))


FACTORIES: tuple[Callable[[], Case], ...] = (
    linear,
    linear_general,
    einsum,
    conv,
    embed,
    layer_norm,
    rms_norm,
    group_norm,
    batch_norm_train,
    batch_norm_eval,
    dropout,
    attention,
    attention_decoding,
    lstm_cell,
    gru_rnn,
    lora_linear,
    weight_norm,
    sequential,
    list_container,
    dict_container,
    shared_weights,
    scan_over_layers,
    remat_inside,
)

LEFT_OUT: dict[str, str] = {} if hasattr(nnx, "WeightNorm") else {"weight_norm": "nnx.WeightNorm came after flax 0.10"}
"""Why a name is missing from `HEALTHY` on the installed version of flax."""

HEALTHY: dict[str, Callable[[], Case]] = {
    factory.__name__: factory for factory in FACTORIES if factory.__name__ not in LEFT_OUT
}
"""Factories of healthy cases; every call makes fresh state."""
