"""A small language model of today: attention with dropout and a KV cache, BatchNorm, a training step."""

from __future__ import annotations

import jax
import optax
from flax import nnx


class Block(nnx.Module):
    """Attention and a feed-forward layer, each after a BatchNorm, each with dropout and a residual connection."""

    def __init__(self, width: int, heads: int, *, rngs: nnx.Rngs) -> None:
        self.before_attention = nnx.BatchNorm(width, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(heads, width, decode=False, rngs=rngs)
        self.before_feed_forward = nnx.BatchNorm(width, rngs=rngs)
        self.grow = nnx.Linear(width, 4 * width, rngs=rngs)
        self.shrink = nnx.Linear(4 * width, width, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)

    def __call__(self, x: jax.Array, mask: jax.Array | None = None) -> jax.Array:
        """(batch, length, width) to the same shape."""
        x = x + self.dropout(self.attention(self.before_attention(x), mask=mask))
        return x + self.dropout(self.shrink(nnx.gelu(self.grow(self.before_feed_forward(x)))))


class Decoder(nnx.Module):
    """Token ids to logits of the next token."""

    def __init__(self, *, vocabulary: int = 32, width: int = 16, heads: int = 2, rngs: nnx.Rngs) -> None:
        self.width = width
        self.embed = nnx.Embed(vocabulary, width, rngs=rngs)
        self.block = Block(width, heads, rngs=rngs)
        self.head = nnx.Linear(width, vocabulary, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Ids (batch, length) to logits (batch, length, vocabulary); no token sees a later one."""
        mask = nnx.make_causal_mask(tokens)
        return self.head(self.block(self.embed(tokens), mask))

    def start_decoding(self, batch: int, length: int) -> None:
        """Switch to evaluation, one token a call, with an empty KV cache for `length` tokens."""
        self.eval()
        self.block.attention.decode = True
        self.block.attention.init_cache((batch, length, self.width))

    def decode(self, token: jax.Array) -> jax.Array:
        """The next token's logits (batch, vocabulary) after one more token (batch,); the cache moves on."""
        return self.head(self.block(self.embed(token[:, None])))[:, 0]


def train_step(model: Decoder, tokens: jax.Array) -> jax.Array:
    """One step of gradient descent on the loss of the next token, which it returns."""

    def loss_of(model: Decoder) -> jax.Array:
        logits = model(tokens[:, :-1])
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

    loss, gradients = nnx.value_and_grad(loss_of)(model)
    parameters = nnx.state(model, nnx.Param)
    nnx.update(model, jax.tree.map(lambda parameter, gradient: parameter - 0.1 * gradient, parameters, gradients))
    return loss
