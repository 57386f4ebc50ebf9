"""Calls of which parity is asserted, and the modules that most of its tests call."""

from __future__ import annotations

import jax.numpy as jnp
from checking import call
from flax import nnx
from healthy import FLAX, assign, numbers

X = numbers((3, 8))
XS = numbers((2, 3, 8))
TREE = FLAX >= (0, 12)


def norm():
    return nnx.BatchNorm(8, use_running_average=False, rngs=nnx.Rngs(0))


def parity(subject, *args, nesting="un-nested", **settings):
    return call(subject, *args, nesting=nesting, invariants="parity", **settings)


class Counter(nnx.Variable):
    """Counts calls."""


class Counts(nnx.Module):
    """Counts its calls in a Variable, or in a plain Python attribute."""

    def __init__(self, *, plain):
        self.linear = nnx.Linear(8, 8, rngs=nnx.Rngs(0))
        self.plain = plain
        self.calls = 0
        self.counter = Counter(jnp.zeros((), jnp.int32))

    def __call__(self, x):
        if self.plain:
            self.calls += 1
        else:
            assign(self.counter, self.counter[...] + 1)
        return self.linear(x)
