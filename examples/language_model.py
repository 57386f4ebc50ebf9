"""Mistral 7B in flax.nnx: grouped-query attention with rotary positions, SwiGLU, a KV cache, a training step with adam.

The layers are stacked, scanned over and rematerialized, in one of three forms (`Config.form`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax
from flax import nnx

Form = Literal["remat", "no_graph_updates", "functional"]
"""`nnx.scan` over `nnx.remat`; the same with `graph_updates=False` (flax 0.12); `jax.lax.scan` over `jax.checkpoint`."""


@dataclass(frozen=True)
class Config:
    """Sizes of a model. Those of a KV cache are given when the model is made."""

    vocabulary: int
    width: int
    depth: int
    heads: int
    kv_heads: int
    head_width: int
    hidden: int
    rope_base: float = 1e6
    epsilon: float = 1e-5
    dtype: Any = jnp.bfloat16
    form: Form = "functional"


MISTRAL_7B = Config(32768, width=4096, depth=32, heads=32, kv_heads=8, head_width=128, hidden=14336)
"""mistralai/Mistral-7B-v0.3: 7 248 023 552 parameters."""

TINY = Config(64, width=16, depth=3, heads=4, kv_heads=2, head_width=8, hidden=32, dtype=jnp.float32)
"""The same model, small enough to run in a test."""


def rotate(x: jax.Array, positions: jax.Array, base: float) -> jax.Array:
    """Rotary positions of (batch, length, heads, head_width): the two halves of a head turn as pairs."""
    half = x.shape[-1] // 2
    angles = positions[..., None] / base ** (jnp.arange(half) / half)
    sin, cos = jnp.sin(angles)[..., None, :], jnp.cos(angles)[..., None, :]
    left, right = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([left * cos - right * sin, right * cos + left * sin], axis=-1).astype(x.dtype)


class Attention(nnx.Module):
    """Causal attention in which several query heads share a key and a value; with a cache, that of the next token."""

    def __init__(self, c: Config, cache: tuple[int, int] | None, rngs: nnx.Rngs) -> None:
        linear = partial(nnx.Linear, use_bias=False, dtype=c.dtype, param_dtype=c.dtype, rngs=rngs)
        self.config = c
        self.query = linear(c.width, c.heads * c.head_width)
        self.key = linear(c.width, c.kv_heads * c.head_width)
        self.value = linear(c.width, c.kv_heads * c.head_width)
        self.out = linear(c.heads * c.head_width, c.width)
        if cache is not None:
            self.keys = nnx.Cache(jnp.zeros((*cache, c.kv_heads, c.head_width), c.dtype))
            self.values = nnx.Cache(jnp.zeros((*cache, c.kv_heads, c.head_width), c.dtype))

    def __call__(self, x: jax.Array, positions: jax.Array) -> jax.Array:
        c = self.config
        query, key, value = (
            layer(x).reshape(*x.shape[:2], -1, c.head_width) for layer in (self.query, self.key, self.value)
        )
        query, key = rotate(query, positions, c.rope_base), rotate(key, positions, c.rope_base)
        if not hasattr(self, "keys"):
            y = jax.nn.dot_product_attention(query, key, value, is_causal=True)
            return self.out(y.reshape(*x.shape[:2], -1))
        keys, values = remember(self.keys, key, positions), remember(self.values, value, positions)
        seen = jnp.arange(keys.shape[1]) <= positions[0, 0]
        y = jax.nn.dot_product_attention(query, keys, values, mask=seen[None, None, None, :])
        return self.out(y.reshape(*x.shape[:2], -1))


def remember(cache: nnx.Variable[Any], new: jax.Array, positions: jax.Array) -> jax.Array:
    """Write one position of a cache, and return the whole of it."""
    whole = jax.lax.dynamic_update_slice_in_dim(cache[...], new, positions[0, 0], axis=1)
    if hasattr(cache, "set_value"):
        cache.set_value(whole)
    else:  # flax 0.10
        cache.value = whole
    return whole


class Block(nnx.Module):
    """Attention and a feed-forward layer, each after an RMSNorm and with a residual connection."""

    def __init__(self, c: Config, cache: tuple[int, int] | None, rngs: nnx.Rngs) -> None:
        linear = partial(nnx.Linear, use_bias=False, dtype=c.dtype, param_dtype=c.dtype, rngs=rngs)
        norm = partial(nnx.RMSNorm, c.width, epsilon=c.epsilon, dtype=c.dtype, param_dtype=c.dtype, rngs=rngs)
        self.before_attention = norm()
        self.attention = Attention(c, cache, rngs)
        self.before_feed_forward = norm()
        self.gate = linear(c.width, c.hidden)
        self.up = linear(c.width, c.hidden)
        self.down = linear(c.hidden, c.width)

    def __call__(self, x: jax.Array, positions: jax.Array) -> jax.Array:
        x = x + self.attention(self.before_attention(x), positions)
        y = self.before_feed_forward(x)
        return x + self.down(nnx.silu(self.gate(y)) * self.up(y))


def nnx_scanned(remat: Callable[..., Any], blocks: Block, x: jax.Array, positions: jax.Array) -> jax.Array:
    """The stacked blocks one after the other, by `nnx.scan`."""

    @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
    def forward(x: jax.Array, block: Block) -> jax.Array:
        return remat(Block.__call__)(block, x, positions)

    return forward(x, blocks)


def jax_scanned(blocks: Block, x: jax.Array, positions: jax.Array) -> jax.Array:
    """The same by `jax.lax.scan`: parameters go in and do not come out, caches go in and come out."""
    graphdef, caches, parameters = nnx.split(blocks, nnx.Cache, ...)

    @jax.checkpoint
    def forward(x: jax.Array, state: tuple[Any, Any]) -> tuple[jax.Array, Any]:
        block = nnx.merge(graphdef, *state)
        return block(x, positions), nnx.state(block, nnx.Cache)

    x, caches = jax.lax.scan(forward, x, (caches, parameters))
    nnx.update(blocks, caches)
    return x


class Decoder(nnx.Module):
    """Token ids to the logits of the next token. With a cache (batch, length): one token a call."""

    def __init__(self, c: Config, *, cache: tuple[int, int] | None = None, rngs: nnx.Rngs) -> None:
        @nnx.split_rngs(splits=c.depth)
        @nnx.vmap(in_axes=(0,), out_axes=0)
        def make_block(rngs: nnx.Rngs) -> Block:
            return Block(c, cache, rngs)

        self.config = c
        self.embed = nnx.Embed(c.vocabulary, c.width, dtype=c.dtype, param_dtype=c.dtype, rngs=rngs)
        self.blocks = make_block(rngs)
        self.norm = nnx.RMSNorm(c.width, epsilon=c.epsilon, dtype=c.dtype, param_dtype=c.dtype, rngs=rngs)
        self.head = nnx.Linear(c.width, c.vocabulary, use_bias=False, dtype=c.dtype, param_dtype=c.dtype, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Ids (batch, length) to logits (batch, length, vocabulary)."""
        return self.logits(tokens, jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape))

    def decode(self, token: jax.Array, position: jax.Array) -> jax.Array:
        """Ids (batch,) of the token at a position to logits (batch, vocabulary); the cache keeps its key and value."""
        return self.logits(token[:, None], jnp.broadcast_to(position, (*token.shape, 1)))[:, 0]

    def logits(self, tokens: jax.Array, positions: jax.Array) -> jax.Array:
        x = self.embed(tokens)
        if self.config.form == "functional":
            x = jax_scanned(self.blocks, x, positions)
        elif self.config.form == "no_graph_updates":
            x = nnx_scanned(partial(nnx.remat, graph_updates=False), self.blocks, x, positions)
        else:
            x = nnx_scanned(nnx.remat, self.blocks, x, positions)
        return self.head(self.norm(x))


def with_adam(c: Config, rngs: nnx.Rngs) -> tuple[Decoder, nnx.Optimizer[Decoder]]:
    """A model and adam over its parameters, the two moments in their dtype."""
    model = Decoder(c, rngs=rngs)
    return model, nnx.Optimizer(model, optax.adam(1e-4), wrt=nnx.Param)


def train_step(model: Decoder, optimizer: nnx.Optimizer[Decoder], tokens: jax.Array) -> jax.Array:
    """One step of adam on the loss of the next token, which it returns."""

    def loss_of(model: Decoder) -> jax.Array:
        logits = model(tokens[:, :-1]).astype(jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

    loss, gradients = nnx.value_and_grad(loss_of)(model)
    if hasattr(optimizer, "model"):  # flax 0.10: the optimizer holds the model
        optimizer.update(gradients)
    else:
        optimizer.update(model, gradients)
    return loss
