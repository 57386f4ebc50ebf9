"""A layer that keeps what went through it, to be looked at."""

from __future__ import annotations

import jax
from flax import nnx


class Probe(nnx.Module):
    """A linear layer that remembers the mean of its last output."""

    def __init__(self, width: int, *, rngs: nnx.Rngs) -> None:
        self.linear = nnx.Linear(width, width, rngs=rngs)
        self.seen: dict[str, jax.Array] = {}

    def __call__(self, x: jax.Array) -> jax.Array:
        y: jax.Array = self.linear(x)
        self.seen["mean"] = y.mean()
        return y
