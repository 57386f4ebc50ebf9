"""Marked tests: each body runs under nestings of jit, remat, scan, vmap, while_loop and eval_shape."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import pytest
from flax import nnx

from pocketlm import Config, Decoder, Probe, decode_step, make_optimizer, train_step

Wrap = Callable[[Any], Callable[..., Any]]
TOKENS = jnp.arange(12).reshape(2, 6)


@pytest.mark.nnx_invariants
def test_forward(nnx_wrap: Wrap) -> None:
    decoder = nnx_wrap(Decoder(Config(), rngs=nnx.Rngs(0)))
    assert decoder(TOKENS).shape == (2, 6, 64)


@pytest.mark.nnx_invariants
def test_decoding(nnx_wrap: Wrap) -> None:
    decoder = Decoder(Config(), rngs=nnx.Rngs(0))
    decoder.start_decoding(batch=2, length=6)
    assert nnx_wrap(decode_step)(decoder, TOKENS[:, 0]).shape == (2,)


@pytest.mark.nnx_invariants(transforms="jit,remat", sweep="singles")
def test_train_step(nnx_wrap: Wrap) -> None:
    """Its program holds a gradient, and costs the most: the least that is worth having."""
    decoder = Decoder(Config(), rngs=nnx.Rngs(0))
    loss = nnx_wrap(train_step)(decoder, make_optimizer(decoder), TOKENS)
    assert loss.shape == ()


@pytest.mark.nnx_invariants(transforms="jit", sweep="singles")
def test_probe(nnx_wrap: Wrap) -> None:
    """A failure that is known: known_failures.toml says why."""
    assert nnx_wrap(Probe(8, rngs=nnx.Rngs(0)))(jnp.ones((2, 8))).shape == (2, 8)
