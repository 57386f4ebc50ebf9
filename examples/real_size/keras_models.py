"""ResNet-152 of keras on flax.nnx, built by `nnx.eval_shape`: 256 images on one chip.

Run it with ``pytest examples/real_size/keras_models.py --nnx-target v5e``, with keras installed. Nothing is allocated.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

os.environ |= {"KERAS_BACKEND": "jax", "KERAS_NNX_ENABLED": "true"}  # read once, when keras is imported

Wrap = Callable[[Any], Callable[..., Any]]


@pytest.mark.nnx_invariants(transforms="jit", styles="functional", sweep="singles", max_examples=0)
def test_inference(nnx_wrap: Wrap) -> None:
    pytest.importorskip("keras", reason="keras is not installed")
    applications = importlib.import_module("keras.applications")
    model = nnx.eval_shape(lambda: applications.ResNet152(weights=None))
    logits = nnx_wrap(model)(jax.ShapeDtypeStruct((256, 224, 224, 3), jnp.float32))
    assert logits.shape == (256, 1000)
