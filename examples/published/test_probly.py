"""probly: what a model is goes by the identity of its object, so that a copy of it, as every transform makes one, is another thing. docs/published.md tells the story."""

from __future__ import annotations

import importlib
from typing import Any

import jax.numpy as jnp
import pytest
from flax import nnx
from training import FORWARD, Wrap

from pytest_nnxcheck import check

pytest.importorskip("probly", reason="probly is not installed")
predict = importlib.import_module("probly.predictor").predict
transformation = importlib.import_module("probly.transformation")

X = jnp.ones((4, 3))


def network() -> nnx.Sequential:
    return nnx.Sequential(nnx.Linear(3, 8, rngs=nnx.Rngs(0)), nnx.relu, nnx.Linear(8, 2, rngs=nnx.Rngs(1)))


@pytest.mark.nnx_invariants(**FORWARD)
def test_dropout_that_is_added(nnx_wrap: Wrap) -> None:
    assert nnx_wrap(transformation.dropout(network(), p=0.5))(X).shape == (4, 2)


def test_a_copy_of_a_batchensemble_is_predicted_as_something_else() -> None:
    """The model as it is gives a sample of two members; its copy gives a plain array, which has no attribute `array`."""
    model = transformation.batchensemble(network(), num_members=2)

    def members(model: Any, x: Any) -> Any:
        return predict(model, x).array

    assert members(model, X).shape == (2, 4, 2)
    with pytest.raises(AttributeError, match="has no attribute 'array'"):
        check(members, model, X, **FORWARD)
