"""Fifteen programs of NNX models, abstract: layers, steps, and the language models of examples/."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
import language_model
import model as small

Call = tuple[Callable[..., Any], tuple[Any, ...]]
"""A subject and its arguments, abstract."""
FORMS = {
    form: language_model.Config(
        32768, width=2048, depth=8, heads=16, kv_heads=4, head_width=128, hidden=8192, form=form
    )
    for form in ("remat", "functional")
}


class Convolutions(nnx.Module):
    """Two convolutions of 64 channels, and a BatchNorm between them in training mode."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.first = nnx.Conv(64, 64, (3, 3), rngs=rngs)
        self.norm = nnx.BatchNorm(64, rngs=rngs)
        self.second = nnx.Conv(64, 64, (3, 3), rngs=rngs)

    def __call__(self, x: jax.Array) -> Any:
        return self.second(nnx.relu(self.norm(self.first(x))))


class Norms(nnx.Module):
    """Three normalizations, one after the other."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.layer = nnx.LayerNorm(2048, rngs=rngs)
        self.rms = nnx.RMSNorm(2048, rngs=rngs)
        self.group = nnx.GroupNorm(2048, 32, rngs=rngs)

    def __call__(self, x: jax.Array) -> Any:
        return self.group(self.rms(self.layer(x)))


def mlp(rngs: nnx.Rngs) -> nnx.Sequential:
    """Two layers with dropout between them."""
    return nnx.Sequential(
        nnx.Linear(1024, 4096, rngs=rngs), nnx.relu, nnx.Dropout(0.1, rngs=rngs), nnx.Linear(4096, 1024, rngs=rngs)
    )


def mlp_with_adam(rngs: nnx.Rngs) -> tuple[nnx.Sequential, nnx.Optimizer[Any]]:
    """The two layers, and adam over them."""
    module = mlp(rngs)
    return module, nnx.Optimizer(module, optax.adam(1e-3), wrt=nnx.Param)


def classified(module: nnx.Sequential, optimizer: nnx.Optimizer[Any], x: jax.Array, y: jax.Array) -> Any:
    """A step of adam on classes."""

    def loss_of(module: nnx.Sequential) -> Any:
        return optax.softmax_cross_entropy_with_integer_labels(module(x), y).mean()

    loss, gradients = nnx.value_and_grad(loss_of)(module)
    optimizer.update(module, gradients)
    return loss


def attention_with_dropout(rngs: nnx.Rngs) -> nnx.MultiHeadAttention:
    """Attention with heads of 64 in training mode."""
    return nnx.MultiHeadAttention(16, 1024, dropout_rate=0.1, decode=False, deterministic=False, rngs=rngs)


def attended(attention: nnx.MultiHeadAttention, x: jax.Array) -> Any:
    """Causal attention."""
    return attention(x, mask=nnx.make_causal_mask(x[..., 0]))


def attention_with_cache(rngs: nnx.Rngs) -> nnx.MultiHeadAttention:
    """Attention with heads of 64, and a cache of 8 texts of 2048 tokens."""
    attention = nnx.MultiHeadAttention(16, 1024, decode=True, rngs=rngs)
    attention.init_cache((8, 2048, 1024))
    return attention


def decoder(rngs: nnx.Rngs) -> small.Decoder:
    """examples/model.py at a width of 1024."""
    return small.Decoder(vocabulary=32000, width=1024, heads=16, rngs=rngs)


def decoder_with_cache(rngs: nnx.Rngs) -> small.Decoder:
    """The same, ready to decode 8 texts of 2048 tokens."""
    module = decoder(rngs)
    module.start_decoding(8, 2048)
    return module


def abstract(make: Callable[[nnx.Rngs], Any]) -> Any:
    """A model without values."""
    return nnx.eval_shape(lambda: make(nnx.Rngs(0)))


def floats(*shape: int) -> jax.ShapeDtypeStruct:
    """The shape of an argument."""
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def tokens(*shape: int) -> jax.ShapeDtypeStruct:
    """The shape of tokens."""
    return jax.ShapeDtypeStruct(shape, jnp.int32)


def language(form: str, cache: tuple[int, int] | None = None) -> language_model.Decoder:
    """examples/language_model.py with 8 layers at a width of 2048: 0.6 billion parameters in bfloat16."""
    return abstract(lambda rngs: language_model.Decoder(FORMS[form], cache=cache, rngs=rngs))


def language_with_adam(form: str) -> Any:
    """The same, and adam over it."""
    return abstract(lambda rngs: language_model.with_adam(FORMS[form], rngs))


PROGRAMS: dict[str, Callable[[], Call]] = {
    "`Linear`, 4096 to 4096": lambda: (
        abstract(lambda rngs: nnx.Linear(4096, 4096, rngs=rngs)),
        (floats(256, 4096),),
    ),
    "MLP with dropout": lambda: (abstract(mlp), (floats(512, 1024),)),
    "convolutions of 64 channels, `BatchNorm`": lambda: (abstract(Convolutions), (floats(32, 56, 56, 64),)),
    "`LayerNorm`, `RMSNorm`, `GroupNorm`": lambda: (abstract(Norms), (floats(8, 512, 2048),)),
    "`Embed`, 32 000 to 1024": lambda: (abstract(lambda rngs: nnx.Embed(32000, 1024, rngs=rngs)), (tokens(8, 512),)),
    "`RNN` of a `GRUCell`": lambda: (
        abstract(lambda rngs: nnx.RNN(nnx.GRUCell(1024, 1024, rngs=rngs))),
        (floats(32, 64, 1024),),
    ),
    "attention with dropout, 16 heads of 64": lambda: (
        attended,
        (abstract(attention_with_dropout), floats(8, 512, 1024)),
    ),
    "attention with a cache, one token": lambda: (abstract(attention_with_cache), (floats(8, 1, 1024),)),
    "step of adam, MLP with dropout": lambda: (
        classified,
        (*abstract(mlp_with_adam), floats(512, 1024), tokens(512)),
    ),
    "step of `examples/model.py`": lambda: (small.train_step, (abstract(decoder), tokens(8, 512))),
    "one token of `examples/model.py`": lambda: (abstract(decoder_with_cache).decode, (tokens(8),)),
    "`examples/language_model.py`, `functional`": lambda: (language("functional"), (tokens(1, 2048),)),
    "`examples/language_model.py`, `remat`": lambda: (language("remat"), (tokens(1, 2048),)),
    "one token of `examples/language_model.py`": lambda: (
        language("functional", (8, 2048)).decode,
        (tokens(8), tokens()),
    ),
    "step of adam, `examples/language_model.py`": lambda: (
        language_model.train_step,
        (*language_with_adam("functional"), tokens(1, 2049)),
    ),
}
