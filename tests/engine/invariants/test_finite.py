"""The invariant `finite`: no NaN and no infinity that the un-nested call lacks."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from checking import broken, call, text
from flax import nnx
from healthy import assign, numbers

from pytest_nnxcheck import register_transform

INPUT = numbers((2, 3))


class Divides(nnx.Module):
    """Divides by what is zero under a trace alone; ``state`` keeps the quotient, else it is returned."""

    def __init__(self, *, state: bool, healthy: bool = False) -> None:
        self.state, self.healthy = state, healthy
        self.last = nnx.BatchStat(jnp.zeros((2, 3)))

    def __call__(self, x):
        traced = isinstance(x, jax.core.Tracer) and not self.healthy
        quotient = x / jnp.where(jnp.arange(3) == 1, float(not traced), 1.0)
        if self.state:
            assign(self.last, quotient)
            return x
        return quotient


@pytest.mark.slow
@pytest.mark.parametrize("nesting", ["jit", "remat", "jit > vmap[functional] > remat", "jit > scan", "while_loop"])
@pytest.mark.parametrize("state, path", [(True, "model.last"), (False, "output")])
def test_what_becomes_infinite_is_named_with_the_count(state, path, nesting):
    found = call(Divides(state=state), INPUT, nesting=nesting, invariants="finite")
    assert broken(found) == ["finite"]
    finding = found.outcome.violations[0].findings[0]
    assert (finding.path, finding.wrong * 3) == (path, finding.elements)
    assert f"{path} is NaN or infinite, and finite in the un-nested call" in text(found)
    assert f"not finite {path}   {finding.type}   {finding.wrong} of {finding.elements} elements" in text(found)
    assert (
        call(Divides(state=state, healthy=True), INPUT, nesting=nesting, invariants="finite").outcome.verdict == "held"
    )


@pytest.mark.parametrize("nesting", ["un-nested", "jit", "scan[functional]", "jit > vmap"])
def test_what_is_not_finite_in_the_un_nested_call_is_the_users_own(nesting):
    def masks(x):
        return jnp.where(x > 0, x, -jnp.inf), jnp.full(3, jnp.nan)

    found = call(masks, INPUT, nesting=nesting, invariants="finite")
    assert found.outcome.verdict == "held", text(found)


def test_a_leaf_that_the_call_leaves_alone_may_be_nan():
    class Masks(nnx.Module):
        def __init__(self):
            self.mask = nnx.BatchStat(jnp.full(3, jnp.nan))

        def __call__(self, x):
            return jnp.where(jnp.isnan(self.mask[...]), x, 0.0)

    found = call(Masks(), INPUT, nesting="jit", invariants="finite")
    assert found.outcome.verdict == "held", text(found)


@pytest.mark.usefixtures("forgotten")
def test_a_layer_of_the_users_own_that_spoils_the_state():
    @register_transform("spoils")
    def spoils(f):
        def layer(state, *inputs):
            out = f(state, *inputs)
            assign(state.last, state.last[...] / 0)
            return out

        return layer

    found = call(Divides(state=True, healthy=True), INPUT, nesting="spoils", invariants="finite")
    assert broken(found) == ["finite"]
    assert "model.last   float32[2,3]   6 of 6 elements" in text(found)


def test_where_the_reference_raises_a_note_says_so():
    class Second(nnx.Module):
        def __init__(self):
            self.n = nnx.BatchStat(jnp.zeros((), jnp.int32))

        def __call__(self, x):
            if not isinstance(x, jax.core.Tracer) and self.n[...] > 0:
                raise ValueError("once")
            assign(self.n, self.n[...] + 1)
            return x

    found = call(Second(), INPUT, nesting="jit > while_loop", invariants="finite")
    assert "finite not asserted: the same calls raise un-nested, ValueError: once" in found.outcome.notes
