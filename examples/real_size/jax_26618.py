"""jax-ml/jax#26618: optimizer steps in a `jax.lax.scan` hold more on a GPU than they need. Nothing is allocated.

Run it with ``pytest examples/real_size/jax_26618.py``: the compiler of the CPU keeps the budget. With ``--nnx-target h100`` the
test fails, by design: the compiler of a GPU gives the kernels of convolutions another layout inside the loop than outside, and
copies the whole state of the optimizer with them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

STEPS, BATCH, SIDE, CHANNELS, DEPTH = 4, 4, 4, 1024, 6
IMAGES = jax.ShapeDtypeStruct((STEPS, BATCH, SIDE, SIDE, CHANNELS), jnp.float32)
Wrap = Callable[[Any], Callable[..., Any]]


def make() -> tuple[Any, Any]:
    """Six convolutions and adam: 648 MiB."""
    rngs = nnx.Rngs(0)
    layers = [nnx.Conv(CHANNELS, CHANNELS, (3, 3), rngs=rngs) for _ in range(DEPTH)]
    model = nnx.Sequential(*(part for layer in layers for part in (layer, nnx.relu)))
    return model, nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)


def train(model: Any, optimizer: Any, images: jax.Array) -> jax.Array:
    """Four steps of adam, in one program."""
    graphdef, state = nnx.split((model, optimizer))

    def step(state: Any, x: jax.Array) -> tuple[Any, jax.Array]:
        model, optimizer = nnx.merge(graphdef, state)
        loss, gradients = nnx.value_and_grad(lambda model: (model(x) ** 2).mean())(model)
        optimizer.update(model, gradients)
        return nnx.state((model, optimizer)), loss

    state, losses = jax.lax.scan(step, state, images)
    nnx.update((model, optimizer), state)
    return losses


@pytest.mark.nnx_invariants(memory_budget="1GiB", transforms="jit", sweep="singles", max_examples=0)
def test_train(nnx_wrap: Wrap) -> None:
    model, optimizer = nnx.eval_shape(make)
    assert nnx_wrap(train)(model, optimizer, IMAGES).shape == (STEPS,)
