"""What a decoder is made of: one block, and a stack of them that is scanned over."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from pocketlm.config import Config


class Attention(nnx.Module):
    """Causal attention; with a cache, that of one more token."""

    keys: nnx.Cache[jax.Array]
    values: nnx.Cache[jax.Array]

    def __init__(self, config: Config, *, rngs: nnx.Rngs) -> None:
        self.config = config
        self.project = nnx.Linear(config.width, 3 * config.width, rngs=rngs)
        self.out = nnx.Linear(config.width, config.width, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """(batch, length, width) to the same shape; no position sees a later one."""
        query, key, value = self.heads_of(x)
        return self.merge(jax.nn.dot_product_attention(query, key, value, is_causal=True))

    def decode(self, x: jax.Array, position: jax.Array) -> jax.Array:
        """(batch, 1, width) of one position to the same shape; the cache keeps its key and value."""
        query, key, value = self.heads_of(x)
        self.keys[...] = jax.lax.dynamic_update_slice_in_dim(self.keys[...], key, position, axis=1)
        self.values[...] = jax.lax.dynamic_update_slice_in_dim(self.values[...], value, position, axis=1)
        seen = jnp.arange(self.keys[...].shape[1]) <= position
        mask = seen[None, None, None, :]
        return self.merge(jax.nn.dot_product_attention(query, self.keys[...], self.values[...], mask=mask))

    def heads_of(self, x: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        query, key, value = jnp.split(self.project(x), 3, axis=-1)
        shape = (*x.shape[:2], self.config.heads, self.config.head_width)
        return query.reshape(shape), key.reshape(shape), value.reshape(shape)

    def merge(self, y: jax.Array) -> jax.Array:
        return self.out(y.reshape(*y.shape[:2], self.config.width))


class Block(nnx.Module):
    """Attention and a feed-forward layer, each after a norm and with a residual connection."""

    def __init__(self, config: Config, *, rngs: nnx.Rngs) -> None:
        self.before_attention = nnx.RMSNorm(config.width, rngs=rngs)
        self.attention = Attention(config, rngs=rngs)
        self.before_feed_forward = nnx.RMSNorm(config.width, rngs=rngs)
        self.grow = nnx.Linear(config.width, 4 * config.width, rngs=rngs)
        self.shrink = nnx.Linear(4 * config.width, config.width, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.feed_forward(x + self.attention(self.before_attention(x)))

    def decode(self, x: jax.Array, position: jax.Array) -> jax.Array:
        return self.feed_forward(x + self.attention.decode(self.before_attention(x), position))

    def feed_forward(self, x: jax.Array) -> jax.Array:
        return x + self.shrink(nnx.gelu(self.grow(self.before_feed_forward(x))))


class Stack(nnx.Module):
    """Blocks whose parameters are stacked, one after the other; in training each is computed again for its gradient."""

    def __init__(self, config: Config, *, rngs: nnx.Rngs) -> None:
        @nnx.split_rngs(splits=config.depth)
        @nnx.vmap(in_axes=(0,), out_axes=0)
        def make_block(rngs: nnx.Rngs) -> Block:
            return Block(config, rngs=rngs)

        self.config = config
        self.blocks = make_block(rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        def forward(x: jax.Array, block: Block) -> jax.Array:
            return nnx.remat(Block.__call__, graph_updates=False)(block, x)

        return forward(x, self.blocks)

    def start_cache(self, batch: int, length: int) -> None:
        shape = (self.config.depth, batch, length, self.config.heads, self.config.head_width)
        self.blocks.attention.keys = nnx.Cache(jnp.zeros(shape))
        self.blocks.attention.values = nnx.Cache(jnp.zeros(shape))

    def decode(self, x: jax.Array, position: jax.Array) -> jax.Array:
        @nnx.scan(in_axes=(nnx.Carry, 0, None), out_axes=nnx.Carry)
        def forward(x: jax.Array, block: Block, position: jax.Array) -> jax.Array:
            return block.decode(x, position)

        return forward(x, self.blocks, position)
