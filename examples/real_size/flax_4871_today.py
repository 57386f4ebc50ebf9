"""What is left of google/flax#4871 on newer flax: `nnx.scan` over `nnx.remat` copies the stacked layers. Nothing is allocated.

Run it with ``pytest examples/real_size/flax_4871_today.py --nnx-target h100,v5p`` on flax 0.12: the parameters take 18.6 GiB, two
calls of the model in one program hold them twice, on every compiler. `graph_updates=False` is the cure. One test fails, by design.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from inspect import signature
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

DEPTH, WIDTH = 50, 10_000
NUMBER = jax.ShapeDtypeStruct((), jnp.float32)
Wrap = Callable[[Any], Callable[..., Any]]
without_cure = pytest.mark.skipif(
    "graph_updates" not in signature(nnx.remat).parameters, reason="the cure came with flax 0.12"
)


class Layer(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.param = nnx.Param(jax.random.normal(rngs(), (WIDTH, WIDTH)) / WIDTH)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.param @ x


class Model(nnx.Module):
    """Takes a number, sends a vector of it through the layers, and returns the sum."""

    def __init__(self, remat: Callable[..., Any], rngs: nnx.Rngs) -> None:
        @nnx.split_rngs(splits=DEPTH)
        @nnx.vmap(out_axes=nnx.StateAxes({...: 0}))
        def make_layer(rngs: nnx.Rngs) -> Layer:
            return Layer(rngs)

        self.layers, self.remat = make_layer(rngs), remat

    def __call__(self, x: jax.Array) -> jax.Array:
        @nnx.scan(in_axes=(nnx.StateAxes({...: 0}), nnx.Carry), out_axes=nnx.Carry)
        def forward(layer: Layer, x: jax.Array) -> jax.Array:
            return self.remat(Layer.__call__)(layer, x)

        return forward(self.layers, jnp.broadcast_to(x, (WIDTH,))).sum()


def two_calls(model: Model, x: jax.Array) -> jax.Array:
    return model(model(x))


@without_cure
@pytest.mark.nnx_invariants(memory_budget="30GB", transforms="jit", sweep="singles", max_examples=0)
@pytest.mark.parametrize("graph_updates", [True, False])
def test_two_calls(nnx_wrap: Wrap, graph_updates: bool) -> None:
    remat = partial(nnx.remat, graph_updates=graph_updates)
    model = nnx.eval_shape(lambda: Model(remat, nnx.Rngs(0)))
    assert nnx_wrap(two_calls)(model, NUMBER).shape == ()
