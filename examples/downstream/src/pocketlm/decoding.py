"""One token after the other."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from pocketlm.model import Decoder


def decode_step(decoder: Decoder, token: jax.Array) -> jax.Array:
    """Ids (batch,) to the likeliest next ids (batch,)."""
    return decoder.decode(token).argmax(-1)


def generate(decoder: Decoder, token: jax.Array, length: int) -> jax.Array:
    """The likeliest continuation of the first ids (batch,): ids (batch, length)."""
    decoder.start_decoding(token.shape[0], length)
    step = nnx.jit(decode_step)
    tokens = []
    for _ in range(length):
        token = step(decoder, token)
        tokens.append(token)
    return jnp.stack(tokens, axis=1)
