"""DiT-XL/2 of artifex on latents of 32 x 32 x 4: a step of adamw for 64 images on one chip, of the package's own blocks and with remat of each.

Run it with ``pytest examples/real_size/diffusion_models.py --nnx-target v5e``, with avitai-artifex installed. The package computes the levels of noise
in numpy, which `nnx.eval_shape` refuses: the test builds that part alone with values, 60 kB. Nothing else is allocated. Without remat the program for
the CPU keeps 81 GiB for the backward pass. The compiler for TPUs fits the step on the chip, and computes a part of the forward pass twice.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

BATCH, SIZE, CHANNELS, CLASSES = 64, 32, 4, 1000
Wrap = Callable[[Any], Callable[..., Any]]


class Rematerialized(nnx.Module):
    """A block under remat."""

    def __init__(self, block: Any) -> None:
        self.block = block

    def __call__(self, tokens: Any, condition: Any, *, deterministic: bool = False) -> Any:
        call = nnx.remat(lambda block, tokens, condition: block(tokens, condition, deterministic=deterministic))
        return call(self.block, tokens, condition)


def make(remat: bool) -> Any:
    """The model of the published size, and its optimizer."""
    backbone = importlib.import_module("artifex.generative_models.models.backbones.dit")
    model = backbone.DiffusionTransformer(
        img_size=SIZE,
        patch_size=2,
        in_channels=CHANNELS,
        hidden_size=1152,
        depth=28,
        num_heads=16,
        num_classes=CLASSES,
        rngs=nnx.Rngs(0),
    )
    if remat:
        model.blocks = nnx.List([Rematerialized(block) for block in model.blocks])
    return model, nnx.Optimizer(model, optax.adamw(1e-4), wrt=nnx.Param)


def schedule() -> Any:
    """The package's own levels of noise."""
    core = "artifex.generative_models.core"
    config = importlib.import_module(f"{core}.configuration").NoiseScheduleConfig(name="linear")
    return importlib.import_module(f"{core}.noise_schedule").create_noise_schedule(config)


def step(model: Any, optimizer: Any, levels: Any, latents: Any, noise: Any, times: Any, labels: Any) -> Any:
    """A training step."""
    noisy = levels.add_noise(latents, noise, times)

    def loss_of(model: Any) -> Any:
        return jnp.square(model(noisy, times, labels) - noise).mean()

    loss, gradients = nnx.value_and_grad(loss_of)(model)
    optimizer.update(model, gradients)
    return loss


@pytest.mark.nnx_invariants(transforms="jit", styles="functional", sweep="singles", max_examples=0)
@pytest.mark.parametrize("remat", [False, True], ids=("published", "remat"))
def test_training(nnx_wrap: Wrap, remat: bool) -> None:
    pytest.importorskip("artifex", reason="avitai-artifex is not installed")
    images = jax.ShapeDtypeStruct((BATCH, SIZE, SIZE, CHANNELS), jnp.float32)
    ids = jax.ShapeDtypeStruct((BATCH,), jnp.int32)
    loss = nnx_wrap(step)(*nnx.eval_shape(lambda: make(remat)), schedule(), images, images, ids, ids)
    assert loss.shape == ()
