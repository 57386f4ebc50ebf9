"""What the tests of several packages share: a step of adam, and the settings of a first look at a stranger's model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

Wrap = Callable[[Any], Callable[..., Any]]

FORWARD = {"effort": "quick"}
STEP = {"effort": "quick", "styles": "argument,functional"}
"""A closure around a step is refused by every flax from 0.12 on: its optimizer changes."""


def token_loss(model: Any, ids: jax.Array) -> jax.Array:
    """The mean loss that a language model of the Mamba packages computes by itself."""
    loss: jax.Array = model(ids, labels=ids)["loss"]
    return loss


def square(model: Any, *inputs: jax.Array) -> jax.Array:
    """The mean square of what a model returns."""
    return jnp.mean(model(*inputs) ** 2)


def step_of(loss_of: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    """A training step: loss and gradients, and an update of the model's parameters."""

    def step(model: Any, optimizer: Any, *batch: jax.Array) -> jax.Array:
        loss, gradients = nnx.value_and_grad(loss_of)(model, *batch)
        optimizer.update(model, gradients)
        return loss

    return step


def adam(model: Any) -> Any:
    """An optimizer for all parameters of a model."""
    return nnx.Optimizer(model, optax.adamw(1e-3), wrt=nnx.Param)
