"""dantinox: forward, a training step with checkpointing and a mixture of experts, decoding with donated caches in a tuple."""

from __future__ import annotations

import importlib
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx
from training import FORWARD, STEP, Wrap, adam, step_of

pytest.importorskip("dantinox", reason="dantinox is not installed")
config = importlib.import_module("dantinox.core.config")
model_of = importlib.import_module("dantinox.core.model")

IDS = (jnp.arange(2 * 16).reshape(2, 16) * 7) % 64
SMALL = {"dim": 32, "n_heads": 4, "head_size": 8, "num_blocks": 2, "vocab_size": 64, "max_context": 32}


def transformer(**more: Any) -> Any:
    return model_of.Transformer(config.ModelConfig(**SMALL | more), rngs=nnx.Rngs(0))


def next_token(model: Any, ids: jax.Array) -> jax.Array:
    out = model(ids)
    losses = optax.softmax_cross_entropy_with_integer_labels(out.logits[:, :-1], ids[:, 1:])
    loss: jax.Array = losses.mean() + out.aux_loss
    return loss


@pytest.mark.nnx_invariants(**FORWARD)
def test_forward(nnx_wrap: Wrap) -> None:
    assert nnx_wrap(transformer(attention="gqa", kv_heads=2))(IDS).logits.shape == (2, 16, 64)


@pytest.mark.nnx_invariants(**STEP | {"transforms": "jit,scan"})
@pytest.mark.parametrize("more", [{"dropout": 0.1}, {"ffn": "moe"}], ids=["dropout", "experts"])
def test_training_step(nnx_wrap: Wrap, more: dict[str, Any]) -> None:
    model = transformer(**more)
    model.gradient_checkpointing = True
    assert nnx_wrap(step_of(next_token))(model, adam(model), IDS).shape == ()


def decode(model: Any, token: jax.Array, caches: Any, cache_index: jax.Array) -> tuple[jax.Array, Any]:
    out = model(token, caches=caches, cache_index=cache_index, deterministic=True)
    return out.logits[:, -1].argmax(-1), out.kv_caches


@pytest.mark.nnx_invariants(**FORWARD, donate="state,caches")
@pytest.mark.parametrize("more", [{"attention": "mha"}, {"attention": "gqa", "kv_heads": 2}], ids=["mha", "gqa"])
def test_decoding_with_donated_caches(nnx_wrap: Wrap, more: dict[str, Any]) -> None:
    model = transformer(rope_dim=4, **more)
    empty = tuple((None, None) for _ in range(2))
    filled = model(IDS, caches=empty, cache_index=0, deterministic=True).kv_caches
    token, _ = nnx_wrap(decode)(model, IDS[:, :1], filled, jnp.int32(16))
    assert token.shape == (2,)
