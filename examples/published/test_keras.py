"""keras on flax.nnx: dense layers hold, and one with a seed generator keeps a tracer. docs/published.md tells the story."""

from __future__ import annotations

import importlib
import os
from typing import Any

import jax.numpy as jnp
import pytest
from training import FORWARD, Wrap

from pytest_nnxcheck import check

os.environ |= {"KERAS_BACKEND": "jax", "KERAS_NNX_ENABLED": "true"}  # read once, when keras is imported
pytest.importorskip("keras", reason="keras is not installed")
layers = importlib.import_module("keras.layers")
Sequential = importlib.import_module("keras").Sequential

X = jnp.ones((3, 6))


def train(model: Any, x: Any) -> Any:
    return model(x, training=True)


@pytest.mark.nnx_invariants(**FORWARD)
def test_dense_layers(nnx_wrap: Wrap) -> None:
    model = Sequential([layers.Input((6,)), layers.Dense(8, activation="relu"), layers.Dense(2)])
    assert nnx_wrap(train)(model, X).shape == (3, 2)


def test_the_seed_of_a_dropout_is_a_tracer_after_one_jit() -> None:
    """Its generator is a plain object, and its Variable no part of the graph."""
    report = check(train, layers.Dropout(0.5), X, **FORWARD)
    outcomes = {str(outcome.nesting): outcome for outcome in report.outcomes}
    assert outcomes["un-nested"].verdict == "held"
    assert [violation.invariant for violation in outcomes["jit"].violations] == ["tracers"]
    assert "model.seed_generator" in str(report)
