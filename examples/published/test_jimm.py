"""jax-image-models: a ViT with dropout and gradient checkpointing raises; without dropout it passes. docs/published.md tells the story."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import pytest
from flax.errors import TraceContextError
from jax.sharding import AxisType

from pytest_nnxcheck import check

if TYPE_CHECKING:
    from training import Wrap

pytest.importorskip("jimm", reason="jax-image-models is not installed")
VisionTransformer = importlib.import_module("jimm").VisionTransformer

IMAGES = jnp.ones((2, 16, 16, 3))
SMALL = {"num_classes": 5, "img_size": 16, "patch_size": 8, "num_layers": 2, "num_heads": 2, "mlp_dim": 32}


@pytest.fixture(autouse=True)
def mesh() -> Iterator[None]:
    """The axes that its constructor and its call name."""
    with jax.set_mesh(jax.make_mesh((1, 1), ("data", "fsdp"), axis_types=(AxisType.Explicit,) * 2)):
        yield


def vit(dropout: float) -> Any:
    return VisionTransformer(**SMALL, hidden_size=16, dropout_rate=dropout, use_gradient_checkpointing=True)


def test_dropout_under_its_checkpointing_raises() -> None:
    """jax.checkpoint captures the layer, and flax refuses the write of its random count."""
    with pytest.raises(TraceContextError) as raised:
        check(vit(0.1), IMAGES, transforms="jit", styles="argument")
    notes = " ".join(" ".join(raised.value.__notes__).split())
    assert "captured TransformerEncoder; pass the module as an argument" in notes


@pytest.mark.nnx_invariants(transforms="jit", styles="argument")
def test_checkpointing_without_dropout(nnx_wrap: Wrap) -> None:
    assert nnx_wrap(vit(0.0))(IMAGES).shape == (2, 5)
