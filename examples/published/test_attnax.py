"""attnax: the kernel LITE reads the gate that the constructor made, and decoding with its cache cannot be jitted. docs/published.md tells the story."""

from __future__ import annotations

import importlib
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from training import FORWARD, Wrap

from pytest_nnxcheck import check

pytest.importorskip("attnax", reason="attnax is not installed")
attnax = importlib.import_module("attnax")
caches = importlib.import_module("attnax.cache")

X = jax.random.normal(jax.random.key(0), (2, 8, 32))


def attention(**kind: Any) -> Any:
    return attnax.MultiHeadAttention(nnx.Rngs(0), num_heads=4, in_features=32, **kind)


def test_lite_attention_reads_the_gate_of_the_model_that_was_built() -> None:
    """A closure holds it, and every transform works on a copy of the model."""
    report = check(attention(attention_type=attnax.AttentionType.LITE), X, **FORWARD)
    assert [violation.invariant for violation in report.violations] == ["updates"]
    assert "model.gate_proj.kernel is read past the arguments" in str(report)
    assert "attnax/kernels/attention.py" in "".join(str(report).split())  # a long path is wrapped


@pytest.mark.nnx_invariants(**FORWARD)
def test_plain_attention(nnx_wrap: Wrap) -> None:
    assert nnx_wrap(attention())(X).shape == X.shape


def test_decoding_with_its_cache_cannot_be_jitted() -> None:
    """The length of the cache becomes an int."""
    cache = caches.init_kv_layer_cache(1, 4, 8, 32, jnp.float32)

    def decode(model: Any, x: Any, keys: Any, values: Any, length: Any) -> Any:
        return model(x, kv_cache=caches.KVLayerCache(keys, values, length))[0]

    report = check(decode, attention(), X[:1, :1], cache.keys, cache.values, cache.length, **FORWARD)
    assert report.verdict == "failed"
    assert "ConcretizationTypeError" in str(report)
