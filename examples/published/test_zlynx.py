"""zlynx: every Llama is built with a tracer in it; with an array in its place it holds. docs/published.md tells the story."""

from __future__ import annotations

import importlib
from typing import Any

import jax.numpy as jnp
import pytest
from flax import nnx
from training import FORWARD, Wrap

from pytest_nnxcheck import check

pytest.importorskip("zlynx", reason="zlynx is not installed")
config = importlib.import_module("zlynx.model.meta.llama.config")
llama = importlib.import_module("zlynx.model.meta.llama.model")

IDS = jnp.zeros((2, 4), jnp.int32)
SMALL = {"vocab_size": 16, "hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 2, "dtype": "float32"}
HEADS = {"attention_head": 2, "kv_head": 1, "head_dim": 4, "max_position_embedding": 8}


def language_model() -> Any:
    return llama.LlamaLanguageModel(config.LlamaConfig(**SMALL, **HEADS), rngs=nnx.Rngs(0))


def logits(model: Any, ids: Any) -> Any:
    return model(ids, jnp.ones_like(ids)).logits


def test_a_model_is_built_with_a_tracer_in_it() -> None:
    """Its constructor is vmapped, and keeps an argument of its own as a plain attribute."""
    report = check(logits, language_model(), IDS, **FORWARD)
    assert [str(outcome.nesting) for outcome in report.broken] == ["un-nested"]
    assert [violation.invariant for violation in report.violations] == ["tracers"]
    assert "model.model.blocks.self_attention.layer_idx" in str(report)
    assert "nnx.data(" in str(report)


@pytest.mark.nnx_invariants(**FORWARD)
def test_with_an_array_in_its_place(nnx_wrap: Wrap) -> None:
    model = language_model()
    model.model.blocks.self_attention.layer_idx = nnx.data(jnp.arange(2))
    assert nnx_wrap(logits)(model, IDS).shape == (2, 4, 16)
