"""Healthy models of real flax.nnx layers: under the defaults no nesting of them may break an invariant."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
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
    """A subject (a module, or a function of graph nodes), its arguments, and settings where the defaults would say something else of it."""

    subject: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)

    def __call__(self) -> Any:
        """Call the subject eagerly."""
        return self.subject(*self.args, **self.kwargs)


def assign(variable: nnx.Variable[Any], value: jax.Array) -> None:
    """Replace a Variable's value, dtype and all, in the spelling that the installed flax does not deprecate.

    ``variable[...] = value`` would keep the old dtype from flax 0.12.1 on.
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


def attention_that_decodes() -> nnx.MultiHeadAttention:
    layer = nnx.MultiHeadAttention(num_heads=2, in_features=WIDTH, decode=True, rngs=rngs())
    layer.init_cache((2, 16, WIDTH))
    return layer


def lstm_cell() -> Case:
    cell = nnx.LSTMCell(WIDTH, 4, rngs=rngs())
    return Case(cell, (cell.initialize_carry((2, WIDTH), rngs()), numbers((2, WIDTH))))


def sequential() -> nnx.Sequential:
    keys = rngs()
    return nnx.Sequential(nnx.Linear(WIDTH, 4, rngs=keys), nnx.relu, nnx.Linear(4, WIDTH, rngs=keys))


TOKENS = ((0, 3, 5), (7, 1, 0))
HEALTHY: dict[str, Callable[[], Case]] = {
    "linear": lambda: Case(nnx.Linear(WIDTH, 4, rngs=rngs()), (numbers(BATCH),)),
    "linear_general": lambda: Case(
        nnx.LinearGeneral((4, WIDTH), (2, 3), axis=(-2, -1), rngs=rngs()), (numbers(SEQUENCE),)
    ),
    "einsum": lambda: Case(nnx.Einsum("btd,dhk->bthk", (WIDTH, 2, 4), (2, 4), rngs=rngs()), (numbers(SEQUENCE),)),
    "conv": lambda: Case(nnx.Conv(3, 4, kernel_size=(3, 3), rngs=rngs()), (numbers((2, 6, 6, 3)),)),
    "embed": lambda: Case(nnx.Embed(10, WIDTH, rngs=rngs()), (jnp.array(TOKENS, jnp.int32),)),
    "layer_norm": lambda: Case(nnx.LayerNorm(WIDTH, rngs=rngs()), (numbers(BATCH),)),
    "rms_norm": lambda: Case(nnx.RMSNorm(WIDTH, rngs=rngs()), (numbers(BATCH),)),
    "group_norm": lambda: Case(nnx.GroupNorm(WIDTH, num_groups=2, rngs=rngs()), (numbers((2, 4, 4, WIDTH)),)),
    "batch_norm_train": lambda: Case(nnx.BatchNorm(WIDTH, use_running_average=False, rngs=rngs()), (numbers(BATCH),)),
    "batch_norm_eval": lambda: Case(nnx.BatchNorm(WIDTH, use_running_average=True, rngs=rngs()), (numbers(BATCH),)),
    "dropout": lambda: Case(nnx.Dropout(0.5, rngs=rngs()), (numbers(BATCH),)),
    "attention": lambda: Case(
        nnx.MultiHeadAttention(num_heads=2, in_features=WIDTH, decode=False, rngs=rngs()), (numbers(SEQUENCE),)
    ),
    "attention_decoding": lambda: Case(attention_that_decodes(), (numbers((2, 1, WIDTH)),)),
    "lstm_cell": lstm_cell,
    "gru_rnn": lambda: Case(nnx.RNN(nnx.GRUCell(WIDTH, 4, rngs=rngs()), rngs=rngs()), (numbers(SEQUENCE),)),
    "lora_linear": lambda: Case(nnx.LoRALinear(WIDTH, 4, lora_rank=2, rngs=rngs()), (numbers(BATCH),)),
    "weight_norm": lambda: Case(nnx.WeightNorm(nnx.Linear(WIDTH, 4, rngs=rngs()), rngs=rngs()), (numbers(BATCH),)),
    "sequential": lambda: Case(sequential(), (numbers(BATCH),)),
    "list_container": lambda: Case(ListOfBlocks(rngs()), (numbers(BATCH),)),
    "dict_container": lambda: Case(DictOfBranches(rngs()), (numbers(BATCH),)),
    "shared_weights": lambda: Case(TiedAutoencoder(rngs()), (numbers(BATCH),)),
    "scan_over_layers": lambda: Case(ScanOverLayers(rngs()), (numbers(BATCH),)),
    "remat_inside": lambda: Case(RematBlock(rngs()), (numbers(BATCH),)),
}
"""Factories of healthy cases; every call makes fresh state."""
if not hasattr(nnx, "WeightNorm"):  # it came after flax 0.10
    del HEALTHY["weight_norm"]
