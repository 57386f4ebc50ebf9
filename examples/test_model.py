"""The model's own tests: each body runs under many nestings of jit, remat, scan, vmap, while_loop and eval_shape."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import pytest
from flax import nnx

from model import Decoder, train_step

Wrap = Callable[[Any], Callable[..., Any]]
TOKENS = jnp.arange(12).reshape(2, 6)


@pytest.mark.nnx_invariants
def test_training_forward(nnx_wrap: Wrap) -> None:
    """Dropout draws new keys and BatchNorm moves its statistics: the call changes the state."""
    model = nnx_wrap(Decoder(rngs=nnx.Rngs(0)))
    assert model(TOKENS).shape == (2, 6, 32)


@pytest.mark.nnx_invariants(memory_budget="1MiB", styles="argument", sweep="singles", max_examples=0)
def test_evaluation_forward(nnx_wrap: Wrap) -> None:
    """The body reads values, so that every nesting computes them."""
    decoder = Decoder(rngs=nnx.Rngs(0))
    decoder.eval()
    logits = nnx_wrap(decoder)(TOKENS)
    assert jnp.isfinite(logits).all()


@pytest.mark.nnx_invariants(effort="quick")
def test_decoding(nnx_wrap: Wrap) -> None:
    """The KV cache is module state; one more token goes through it."""
    decoder = Decoder(rngs=nnx.Rngs(0))
    decoder.start_decoding(batch=2, length=6)
    logits = nnx_wrap(decoder.decode)(TOKENS[:, 0])
    assert logits.shape == (2, 32)


@pytest.mark.nnx_invariants(effort="quick", styles="argument")
def test_train_step(nnx_wrap: Wrap) -> None:
    """A function of a module: each parameter is donated and must keep its buffer. The quick effort in one style, as each program holds a gradient."""
    decoder = Decoder(rngs=nnx.Rngs(0))
    loss = nnx_wrap(train_step)(decoder, TOKENS)
    assert loss.shape == ()
