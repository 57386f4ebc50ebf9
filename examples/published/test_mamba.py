"""mamba2-jax and mamba3-jax: forward, a training step, and decoding with a donated cache that is a list of tuples."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from training import FORWARD, STEP, Wrap, adam, step_of, token_loss

mamba2 = pytest.importorskip("mamba2_jax", reason="mamba2-jax is not installed")
modeling2 = pytest.importorskip("mamba2_jax.modeling")
modeling3 = pytest.importorskip("mamba3_jax.modeling", reason="mamba3-jax is not installed")

IDS = (jnp.arange(2 * 24).reshape(2, 24) * 7) % 1000
MODELS = {
    "mamba2": (modeling2.Mamba2ForCausalLM, mamba2.Mamba2Config.tiny(), modeling2.create_empty_cache),
    "mamba3": (modeling3.Mamba3ForCausalLM, modeling3.Mamba3Config.tiny(), modeling3.create_empty_cache),
    "mamba3 mimo": (modeling3.Mamba3ForCausalLM, modeling3.Mamba3Config.tiny_mimo(), modeling3.create_empty_cache),
}
every_model = pytest.mark.parametrize("name", MODELS)


def made(name: str) -> Any:
    model, config, _ = MODELS[name]
    return model(config, rngs=nnx.Rngs(0))


@pytest.mark.nnx_invariants(**FORWARD)
@every_model
def test_forward(nnx_wrap: Wrap, name: str) -> None:
    out = nnx_wrap(made(name))(IDS, labels=IDS)
    assert out["logits"].shape[:2] == IDS.shape
    assert out["loss"].shape == ()


@pytest.mark.nnx_invariants(**STEP)
@pytest.mark.parametrize("name", ["mamba2", "mamba3"])
def test_training_step(nnx_wrap: Wrap, name: str) -> None:
    model = made(name)
    assert nnx_wrap(step_of(token_loss))(model, adam(model), IDS).shape == ()


def decode(model: Any, token: jax.Array, cache: Any) -> tuple[jax.Array, Any]:
    out = model(token, cache=cache)
    return out["logits"][:, -1].argmax(-1), out["cache"]


@pytest.mark.nnx_invariants(**FORWARD, donate="state,cache")
@every_model
def test_decoding_with_a_donated_cache(nnx_wrap: Wrap, name: str) -> None:
    _, config, empty_cache = MODELS[name]
    token, _ = nnx_wrap(decode)(made(name), jnp.array([[3], [5]]), empty_cache(config, batch_size=2))
    assert token.shape == (2,)
