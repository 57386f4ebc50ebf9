"""The decoder: token ids to the logits of the next token."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from pocketlm.config import Config
from pocketlm.layers import Stack


class Decoder(nnx.Module):
    def __init__(self, config: Config, *, rngs: nnx.Rngs) -> None:
        self.config = config
        self.embed = nnx.Embed(config.vocabulary, config.width, rngs=rngs)
        self.norm = nnx.BatchNorm(config.width, rngs=rngs)
        self.dropout = nnx.Dropout(config.dropout, rngs=rngs)
        self.stack = Stack(config, rngs=rngs)
        self.head = nnx.Linear(config.width, config.vocabulary, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Ids (batch, length) to logits (batch, length, vocabulary)."""
        x = self.stack(self.dropout(self.norm(self.embed(tokens))))
        return self.head(x)

    def start_decoding(self, batch: int, length: int) -> None:
        """Switch to evaluation, with an empty cache for so many tokens."""
        self.eval()
        self.stack.start_cache(batch, length)
        self.position = nnx.Cache(jnp.zeros((), jnp.int32))

    def decode(self, token: jax.Array) -> jax.Array:
        """Ids (batch,) of the next token to logits (batch, vocabulary); the cache moves on."""
        x = self.stack.decode(self.norm(self.embed(token[:, None])), self.position[...])
        self.position[...] = self.position[...] + 1
        return self.head(x)[:, 0]
