"""The loss of the next token, and a step that makes it smaller."""

from __future__ import annotations

import jax
import optax
from flax import nnx

from pocketlm.model import Decoder


def make_optimizer(decoder: Decoder, rate: float = 1e-3) -> nnx.Optimizer[Decoder]:
    return nnx.Optimizer(decoder, optax.adamw(rate), wrt=nnx.Param)


def loss_of(decoder: Decoder, tokens: jax.Array) -> jax.Array:
    logits = decoder(tokens[:, :-1])
    loss: jax.Array = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()
    return loss


def train_step(decoder: Decoder, optimizer: nnx.Optimizer[Decoder], tokens: jax.Array) -> jax.Array:
    """One step of adamw on the loss of the next token, which it returns."""
    loss: jax.Array
    loss, gradients = nnx.value_and_grad(loss_of)(decoder, tokens)
    optimizer.update(decoder, gradients)
    return loss
