"""A module that counts its calls: where a transform hands it out, or where it does not."""

from __future__ import annotations

import jax.numpy as jnp
from flax import nnx
from healthy import WIDTH, assign, rngs


class Counter(nnx.Variable):
    """Counts calls."""


class Counts(nnx.Module):
    """Counts its calls in a Variable, or in a plain Python attribute."""

    def __init__(self, *, plain, width=WIDTH):
        self.linear, self.plain = nnx.Linear(width, width, rngs=rngs()), plain
        self.calls, self.counter = 0, Counter(jnp.zeros((), jnp.int32))

    def __call__(self, x):
        if self.plain:
            self.calls += 1
        else:
            assign(self.counter, self.counter[...] + 1)
        return self.linear(x)
