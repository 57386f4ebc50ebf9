"""Plain tests, as they were before: watch mode looks after each for what it leaves in a model."""

from __future__ import annotations

import jax.numpy as jnp
from flax import nnx

from pocketlm import Config, Decoder, generate, make_optimizer, train_step

TOKENS = jnp.arange(12).reshape(2, 6)


def test_it_learns_a_sequence_by_heart() -> None:
    decoder = Decoder(Config(dropout=0.0), rngs=nnx.Rngs(0))
    optimizer = make_optimizer(decoder, rate=1e-2)
    step = nnx.jit(train_step)
    losses = [float(step(decoder, optimizer, TOKENS)) for _ in range(10)]
    assert losses[-1] < losses[0] / 2


def test_it_continues_a_prompt() -> None:
    decoder = Decoder(Config(), rngs=nnx.Rngs(0))
    assert generate(decoder, TOKENS[:, 0], length=5).shape == (2, 5)
