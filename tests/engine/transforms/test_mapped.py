"""What ``vmap`` maps: the inputs and all that the call writes, also where it restores it; attributes that it sets come back."""

from __future__ import annotations

import jax.numpy as jnp
import pytest
from checking import call, text
from flax import nnx
from healthy import FLAX, assign, numbers

from pytest_nnxcheck import check
from pytest_nnxcheck.engine.trials import restored_leaves
from pytest_nnxcheck.subject.subject import bind

X = numbers((3, 8))
in_place = pytest.mark.skipif(FLAX < (0, 10, 7), reason="earlier flax has no `variable[...] = value`")


class SpectralNorm(nnx.Module):
    """Writes the normalized kernel for the call of its layer, and restores it, as published ones do; moves its power iteration."""

    def __init__(self):
        self.layer = nnx.Linear(8, 6, rngs=nnx.Rngs(0))
        self.u = nnx.BatchStat(jnp.ones(6) / 6**0.5)

    def __call__(self, x):
        kernel = self.layer.kernel[...]
        u = kernel.T @ (kernel @ self.u[...])
        size = jnp.linalg.norm(u)
        assign(self.u, u / size)
        assign(self.layer.kernel, kernel / size)
        y = self.layer(x)
        assign(self.layer.kernel, kernel)
        return y


class InPlace(SpectralNorm):
    """The same through ``kernel[...] = ``, which updates the value that is there."""

    def __call__(self, x):
        kernel = self.layer.kernel[...]
        u = kernel.T @ (kernel @ self.u[...])
        size = jnp.linalg.norm(u)
        self.u[...] = u / size
        self.layer.kernel[...] = kernel / size
        y = self.layer(x)
        self.layer.kernel[...] = kernel
        return y


class Initialized(nnx.Module):
    """Sets an attribute in its first call."""

    def __init__(self):
        self.linear = nnx.Linear(8, 8, rngs=nnx.Rngs(0))
        self.ready = False

    def __call__(self, x):
        self.ready = True
        return self.linear(x)


@pytest.mark.slow
@pytest.mark.parametrize("make", [SpectralNorm, pytest.param(InPlace, marks=in_place)])
@pytest.mark.parametrize("nesting", ["vmap", "jit > vmap > while_loop", "vmap[functional]"])
def test_what_is_written_and_restored_may_be_mapped(make, nesting):
    module = make()
    before = module.layer.kernel[...]
    found = call(module, X, nesting=nesting, shortcuts="off")
    assert found.outcome.verdict == "held", text(found)
    assert (module.layer.kernel[...] == before).all()


@pytest.mark.slow
@in_place
def test_only_what_cannot_be_broadcast_is_mapped():
    module = InPlace()
    assert restored_leaves(bind(module, (X,), {}), frozenset({("u",)})) <= {("layer", "kernel")}
    norm = nnx.BatchNorm(8, rngs=nnx.Rngs(0))
    assert restored_leaves(bind(norm, (X,), {}), frozenset({("mean",), ("var",)})) == frozenset()


@pytest.mark.slow
@in_place
def test_what_must_be_mapped_is_expected_for_each_element():
    report = check(InPlace(), X, styles="argument", transforms="jit,vmap", memory_budget="1.2x")
    assert report.ok, str(report)


def test_a_call_that_cannot_be_mapped_says_what_was():
    def alone(model, x):
        if "Batch" in type(x).__name__:
            raise TypeError("one at a time")
        assign(model.bias, model.bias[...] + 1)
        return model(x)

    found = call(alone, nnx.Linear(8, 4, rngs=nnx.Rngs(0)), X, nesting="vmap")
    assert found.outcome.verdict == "failed"
    assert "vmap maps model.bias, x, and broadcasts the rest" in found.outcome.notes
    assert not call(alone, nnx.Linear(8, 4, rngs=nnx.Rngs(0)), X, nesting="scan > vmap[functional]").outcome.notes


def test_an_attribute_that_the_call_sets_comes_back():
    module = Initialized()
    plain = Initialized()
    nnx.vmap(lambda module, x: module(x), in_axes=(None, 0))(plain, X)
    found = call(module, X, nesting="vmap", invariants="parity")
    assert found.outcome.verdict == "held", text(found)
    assert module.ready is plain.ready is True
