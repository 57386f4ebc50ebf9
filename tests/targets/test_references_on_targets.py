"""The compilers of targets judge a program over references as one over arrays that are donated."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from checking import has_references
from flax import nnx

from pytest_nnxcheck import check

X = jnp.ones((4, 256))


class Stack(nnx.Module):
    """Reads its layers by number, and counts its calls."""

    def __init__(self):
        self.kernel = nnx.Param(jnp.ones((8, 256, 256)) / 256)
        self.count = nnx.Variable(jnp.zeros(()))

    def __call__(self, x):
        self.count[...] += 1
        return jax.lax.fori_loop(0, 8, lambda i, x: x + jnp.tanh(x @ self.kernel[i]), x)


class KeepsBoth(Stack):
    """Needs its kernels as they were, beside those that it writes."""

    def __call__(self, x):
        before = self.kernel[...]
        self.kernel[...] = 2 * before
        return x @ before.sum(0) + super().__call__(x)


@has_references
@pytest.mark.parametrize("target", ["v5e", "h100"])
def test_every_reference_keeps_its_buffer_there_and_is_held_once(target):
    settings = {"nesting": "jit", "target": target}
    (held,) = check(nnx.with_vars(Stack(), ref=True), X, **settings).outcomes
    (on,) = held.evidence.targets
    assert (held.verdict, on.fits, on.copies, on.donated, on.lost) == ("held", True, 0, 2, ())
    assert on.peak < 1.5 * on.state
    (twice,) = check(nnx.with_vars(KeepsBoth(), ref=True), X, **settings).outcomes
    assert twice.evidence.targets[0].peak > on.peak
