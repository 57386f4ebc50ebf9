"""The language models of google-tunix, checked as its users would: `pip install google-tunix`, import, wrap.

Nothing of the package is changed. The big ones are abstract: compiled at their published size, never allocated.
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

pytest.importorskip("tunix", reason="google-tunix is not installed")
qwen3 = importlib.import_module("tunix.models.qwen3.model")
qwen2 = importlib.import_module("tunix.models.qwen2.model")
llama3 = importlib.import_module("tunix.models.llama3.model")

Wrap = Callable[[Any], Callable[..., Any]]
LENGTH = 6
TOKENS = jnp.arange(2 * LENGTH).reshape(2, LENGTH)
POSITIONS = jnp.broadcast_to(jnp.arange(LENGTH), TOKENS.shape)
CAUSAL = jnp.broadcast_to(jnp.tril(jnp.ones((LENGTH, LENGTH), bool)), (2, LENGTH, LENGTH))
SMALL = {
    "num_layers": 2,
    "vocab_size": 64,
    "embed_dim": 16,
    "hidden_dim": 32,
    "num_heads": 4,
    "head_dim": 8,
    "num_kv_heads": 2,
    "norm_eps": 1e-6,
    "rope_theta": 10_000,
}
FEW = {"sweep": "singles", "max_examples": 0}


def small_qwen3(**config: Any) -> Any:
    return qwen3.Qwen3(qwen3.ModelConfig(**SMALL, use_tied_embedding=True, **config), rngs=nnx.Rngs(0))


def abstract(*shape: int, dtype: Any = jnp.int32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


@pytest.mark.nnx_invariants(**FEW)
@pytest.mark.parametrize("remat", ["NONE", "BLOCK", "DECODER"])
def test_qwen3(nnx_wrap: Wrap, remat: str) -> None:
    model = nnx_wrap(small_qwen3(remat_config=qwen3.RematConfig[remat]))
    logits, cache = model(TOKENS, POSITIONS, None, CAUSAL)
    assert logits.shape == (2, LENGTH, 64)
    assert jnp.isfinite(logits).all()
    assert cache is None


@pytest.mark.nnx_invariants(**FEW)
def test_qwen3_mixture_of_experts(nnx_wrap: Wrap) -> None:
    model = nnx_wrap(small_qwen3(num_experts=2, num_experts_per_tok=1))
    assert model(TOKENS, POSITIONS, None, CAUSAL)[0].shape == (2, LENGTH, 64)


@pytest.mark.nnx_invariants(**FEW)
def test_qwen3_hidden_states(nnx_wrap: Wrap) -> None:
    """The call sows its hidden states: it adds to the state."""
    model = nnx_wrap(small_qwen3())
    assert model(TOKENS, POSITIONS, None, CAUSAL, output_hidden_states=True)[0].shape == (2, LENGTH, 64)


class Decoding(nnx.Module):
    """A model of the package with its cache, a dict of arrays, as state: every buffer of it must be kept."""

    def __init__(self, model: Any, batch: int, length: int) -> None:
        self.model = model
        self.cache = nnx.Cache(model.init_cache(batch, length, jnp.float32))

    def __call__(self, token: Any, position: Any, mask: Any) -> Any:
        logits, cache = self.model(token, position, self.cache.get_value(), mask)
        self.cache.set_value(cache)
        return logits[:, -1]


@pytest.mark.nnx_invariants(**FEW)
def test_qwen3_decoding(nnx_wrap: Wrap) -> None:
    decoding = nnx_wrap(Decoding(small_qwen3(), 2, LENGTH))
    mask = jnp.zeros((2, 1, LENGTH), bool).at[..., 0].set(True)
    assert decoding(TOKENS[:, :1], POSITIONS[:, :1], mask).shape == (2, 64)
    assert (decoding.cache.get_value()["layer_0"]["end_index"] >= 1).all()  # a loop calls it twice


@pytest.mark.nnx_invariants(**FEW)
@pytest.mark.parametrize("family", ["qwen2", "llama3"])
def test_other_families(nnx_wrap: Wrap, family: str) -> None:
    module, name = {"qwen2": (qwen2, "Qwen2"), "llama3": (llama3, "Llama3")}[family]
    more = {"use_tied_embedding": True} if family == "qwen2" else {}
    model = getattr(module, name)(module.ModelConfig(**SMALL, **more), rngs=nnx.Rngs(0))
    assert nnx_wrap(model)(TOKENS, POSITIONS, None, CAUSAL)[0].shape == (2, LENGTH, 64)


def train_step(model: Any, optimizer: Any, tokens: Any, positions: Any, mask: Any) -> Any:
    def loss_of(model: Any) -> Any:
        logits, _ = model(tokens, positions, None, mask)
        return optax.softmax_cross_entropy_with_integer_labels(logits[:, :-1], tokens[:, 1:]).mean()

    loss, gradients = nnx.value_and_grad(loss_of)(model)
    optimizer.update(model, gradients)
    return loss


@pytest.mark.nnx_invariants(transforms="jit,scan", styles="argument,functional", **FEW)
def test_training_of_qwen3(nnx_wrap: Wrap) -> None:
    model = small_qwen3(remat_config=qwen3.RematConfig.BLOCK)
    optimizer = nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)
    assert nnx_wrap(train_step)(model, optimizer, TOKENS, POSITIONS, CAUSAL) > 0


@pytest.mark.nnx_invariants(transforms="jit", styles="functional", sweep="singles", max_examples=0)
class TestAtRealSize:
    """Qwen3-8B, 36 layers, in float32: the package's default."""

    def test_forward(self, nnx_wrap: Wrap) -> None:
        model = nnx.eval_shape(lambda: qwen3.Qwen3(qwen3.ModelConfig.qwen3_8b(), rngs=nnx.Rngs(0)))
        logits, _ = nnx_wrap(model)(abstract(1, 1024), abstract(1, 1024), None, abstract(1, 1024, 1024, dtype=bool))
        assert logits.shape == (1, 1024, 151_936)

    def test_decoding(self, nnx_wrap: Wrap) -> None:
        decoding = nnx.eval_shape(
            lambda: Decoding(qwen3.Qwen3(qwen3.ModelConfig.qwen3_8b(), rngs=nnx.Rngs(0)), batch=4, length=2048),
        )
        logits = nnx_wrap(decoding)(abstract(4, 1), abstract(4, 1), abstract(4, 1, 2048, dtype=bool))
        assert logits.shape == (4, 151_936)
