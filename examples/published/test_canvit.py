"""canvit-nnx with a tiny backbone: the recurrent step with its state donated, and a training step through two glimpses."""

from __future__ import annotations

import importlib
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx
from training import FORWARD, STEP, Wrap, adam, step_of

pytest.importorskip("canvit_nnx", reason="canvit-nnx is not installed")
backbone = importlib.import_module("canvit_core.backbone")
config = importlib.import_module("canvit_core.config")
classification = importlib.import_module("canvit_nnx.model.classification")
viewpoints = importlib.import_module("canvit_nnx.viewpoint")
standardizer = importlib.import_module("canvit_nnx.model.standardizer")

GLIMPSE = jnp.ones((2, 16, 16, 3))


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> Any:
    tiny = backbone.ViTSpec(embed_dim=32, num_heads=4, num_blocks=2, patch_size=4)
    monkeypatch.setitem(backbone.BACKBONES, "vits16", tiny)
    sizes = {"canvas_num_heads": 2, "canvas_head_dim": 16, "num_canvas_registers": 2, "num_backbone_registers": 1}
    chosen = config.CanViTConfig("vits16", rw_stride=1, **sizes)
    return classification.CanViTForImageClassification(canvit_config=chosen, n_classes=5, rngs=nnx.Rngs(0))


def look(model: Any, glimpse: jax.Array, seen: Any, viewpoint: Any) -> Any:
    return model(glimpse=glimpse, state=seen, viewpoint=viewpoint)


@pytest.mark.nnx_invariants(**FORWARD, donate="state,seen")
def test_recurrent_step_with_its_state_donated(nnx_wrap: Wrap, model: Any) -> None:
    seen = model.init_state(batch_size=2, canvas_grid_size=4)
    logits, _ = nnx_wrap(look)(model, GLIMPSE, seen, viewpoints.Viewpoint.full_scene(batch_size=2))
    assert logits.shape == (2, 5)


def two_glimpses(model: Any, glimpse: jax.Array, labels: jax.Array) -> jax.Array:
    seen = model.init_state(batch_size=2, canvas_grid_size=4)
    for scale in (1.0, 0.5):
        viewpoint = viewpoints.Viewpoint(jnp.zeros((2, 2)), jnp.full((2,), scale))
        logits, seen = look(model, glimpse, seen, viewpoint)
    loss: jax.Array = optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()
    return loss


@pytest.mark.nnx_invariants(**STEP | {"transforms": "jit,scan"})
def test_training_step(nnx_wrap: Wrap, model: Any) -> None:
    assert nnx_wrap(step_of(two_glimpses))(model, adam(model), GLIMPSE, jnp.array([0, 1])).shape == ()


@pytest.mark.nnx_invariants(**FORWARD, invariants="tracers,memory,donation,parity")
def test_standardizer(nnx_wrap: Wrap) -> None:
    fitted = standardizer.PositionAwareStandardizer(n_positions=4, dim=8)
    fitted.fit(jnp.arange(3 * 4 * 8.0).reshape(3, 4, 8))
    assert nnx_wrap(fitted)(jnp.ones((3, 4, 8))).shape == (3, 4, 8)
