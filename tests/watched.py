"""The beginning of suites that are watched: a model that keeps a tracer, and one call that leaves it there."""

from __future__ import annotations

HEAD = """
import jax
import jax.numpy as jnp
import pytest
from flax import nnx

class Box:
    pass

class Net(nnx.Module):
    def __init__(self):
        self.linear = nnx.Linear(2, 2, kernel_init=nnx.initializers.ones_init(), rngs=nnx.Rngs(0))
        self.box = Box()

    def __call__(self, x, keep=True):
        y = self.linear(x)
        if keep:
            self.box.last = y
        return y

X = jnp.ones((1, 2))

def poison(model):
    nnx.jit(lambda x: model(x))(X)

def use(model):
    nnx.jit(lambda model, x: model(x, keep=False))(model, X)

"""
