"""jraphx: a graph network with batch statistics and dropout."""

from __future__ import annotations

import importlib
from typing import Any

import jax.numpy as jnp
import pytest
from flax import nnx
from training import FORWARD, STEP, Wrap, adam, square, step_of

pytest.importorskip("jraphx", reason="jraphx is not installed")
models = importlib.import_module("jraphx.nn.models")

X = jnp.arange(6 * 4.0).reshape(6, 4) / 10
EDGES = jnp.array([[0, 1, 2, 3, 4, 5], [1, 2, 3, 4, 5, 0]])


def network() -> Any:
    return models.GCN(4, 8, 2, out_features=3, dropout_rate=0.2, norm="batch_norm", rngs=nnx.Rngs(0))


@pytest.mark.nnx_invariants(**FORWARD)
def test_forward(nnx_wrap: Wrap) -> None:
    assert nnx_wrap(network())(X, EDGES).shape == (6, 3)


@pytest.mark.nnx_invariants(**STEP, invariants="tracers,memory,donation,parity")
def test_training_step(nnx_wrap: Wrap) -> None:
    """A third of what reaches the relu is zero but for rounding: fused operations put some of it on the other side."""
    model = network()
    assert nnx_wrap(step_of(square))(model, adam(model), X, EDGES).shape == ()
