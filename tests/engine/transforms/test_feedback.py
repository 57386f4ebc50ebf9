"""Loops that feed what a step returns to the next: opt-in, with the state and the outputs of the same steps made by hand."""

from __future__ import annotations

from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checking import ITERATING, broken, call, text
from flax import nnx
from healthy import assign, numbers

from pytest_nnxcheck import check
from pytest_nnxcheck.core.nesting import Layer, Misfit, Nesting, impossible
from pytest_nnxcheck.reporting import notes

LAYERS = [str(Layer(transform, style)) for transform in ITERATING for style in ("argument", "functional")]
CAPTURING = [str(Layer(transform, style)) for transform in ITERATING for style in ("closure", "jax_closure")]
FEW = {"transforms": ("jit", *ITERATING), "sweep": "singles", "max_examples": 0}
X = numbers((3, 8))


class Block(nnx.Module):
    """A residual block with statistics, in the precision of its ``dtype``; its scale is a parameter in float32."""

    def __init__(self, *, casts: bool = True):
        self.norm = nnx.BatchNorm(8, rngs=nnx.Rngs(0))
        self.linear = nnx.Linear(8, 8, rngs=nnx.Rngs(1))
        self.casts = casts

    def __call__(self, x):
        y = x + self.linear(self.norm(x))
        return y.astype(x.dtype) if self.casts else y


@pytest.mark.parametrize("layer", LAYERS)
def test_a_block_is_iterated_and_the_body_sees_the_output_of_the_first_step(layer, example):
    by_hand, nested = Block(), Block()
    first = by_hand(X)
    by_hand(first)
    found = call(nested, X, nesting=f"jit > {layer}", example=example)
    assert found.outcome.verdict == "held", text(found)
    np.testing.assert_allclose(found.output, first, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(nested.norm.mean[...], by_hand.norm.mean[...], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("nesting", [*LAYERS, "jit > vmap > iterate_scan", "jit > iterate_while_loop > scan"])
def test_parity_holds(nesting, example):
    found = call(Block(), X, nesting=nesting, invariants="parity", example=example)
    assert found.outcome.verdict == "held", text(found)


@pytest.mark.parametrize("layer", CAPTURING)
def test_a_module_without_updates_may_be_captured(layer, example):
    linear = nnx.Linear(8, 8, rngs=nnx.Rngs(0))
    found = call(linear, X, nesting=f"jit > {layer}", invariants="tracers,memory,donation,parity", example=example)
    assert found.outcome.verdict == "held", text(found)


def test_a_block_that_promotes_is_told_by_input_output_and_line():
    found = check(Block(casts=False), X.astype(jnp.bfloat16), **FEW, nesting="jit > iterate_scan")
    told = str(found)
    assert found.verdict == "failed"
    assert "iterate_scan feeds the output back: x is bfloat16[3,8], output is float32[3,8]" in told
    line = Block.__call__.__code__.co_firstlineno + 1
    assert f"cast the new value back to bfloat16 before it is stored or returned ({__file__}:{line})" in told


def test_a_block_that_casts_back_holds():
    assert check(Block(), X.astype(jnp.bfloat16), **FEW, styles="argument,functional").verdict == "held"


class Cell(nnx.Module):
    """A decoding step: the hidden state and the cache go in and come out."""

    def __init__(self):
        self.linear = nnx.Linear(8, 8, rngs=nnx.Rngs(0))

    def __call__(self, hidden, cache, position):
        keys = jax.lax.dynamic_update_slice(cache["keys"], hidden[:, None], (0, position, 0))
        return nnx.tanh(self.linear(hidden + keys.mean(1))), {"keys": keys}


@pytest.mark.parametrize("layer", LAYERS)
def test_a_donated_cache_that_is_fed_back_is_no_loss(layer, example):
    cache = {"keys": jnp.zeros((3, 5, 8))}
    found = call(Cell(), X, cache, jnp.int32(0), nesting=f"jit > {layer}", donate="state,cache", example=example)
    assert found.outcome.verdict == "held", text(found)


class Remembers(Block):
    """Leaky: keeps its outputs in a list of the class."""

    kept: ClassVar[list] = []

    def __call__(self, x):
        y = super().__call__(x)
        self.kept.append(y)
        return y


class Stores(Block):
    """Its healthy twin: keeps it in a Variable."""

    def __init__(self):
        super().__init__()
        self.last = nnx.BatchStat(jnp.zeros((3, 8)))

    def __call__(self, x):
        y = super().__call__(x)
        assign(self.last, y)
        return y


@pytest.mark.slow
@pytest.mark.parametrize("layer", LAYERS)
def test_a_leak_is_found_and_its_twin_holds(layer, example):
    assert broken(call(Remembers(), X, nesting=layer, example=example)) == ["tracers"]
    twin = call(Stores(), X, nesting=layer, example=example)
    assert twin.outcome.verdict == "held", text(twin)


def shorter(model, x):
    return model(x)[:2]


def two(model, x):
    return model(x), x.sum()


@pytest.mark.parametrize(
    "subject, reason",
    [
        (shorter, "iterate_scan feeds the output back, and output is float32[2,8], where x is float32[3,8]"),
        (two, "iterate_scan feeds the output back, and the call returns 2 arrays, and takes 1"),
        (lambda model, x: None, "iterate_scan feeds the output back, and the call returns no array"),
    ],
)
def test_what_cannot_be_fed_back_is_left_out_with_the_reason(subject, reason):
    linear = nnx.Linear(8, 8, rngs=nnx.Rngs(0))
    outcome = call(subject, linear, X, nesting="jit > iterate_scan").outcome
    assert (outcome.verdict, outcome.unfit, outcome.reason) == ("rejected", True, reason)
    assert check(subject, linear, X, **FEW).verdict == "held"


@pytest.mark.parametrize("output", [lambda x: x, lambda x: x.astype(jnp.int32), lambda x: x[None]])
def test_a_call_without_inputs_has_nothing_to_feed_back_into(output):
    def total(model):
        return output(model.kernel[...].sum())

    outcome = call(total, nnx.Linear(8, 8, rngs=nnx.Rngs(0)), nesting="iterate_scan").outcome
    reason = "iterate_scan feeds the output back, and the call returns 1 arrays, and takes 0"
    assert (outcome.verdict, outcome.reason) == ("rejected", reason)


@pytest.mark.parametrize("inner", ["call_first", "grad", "scan > iterate_scan"])
def test_nothing_that_returns_more_is_put_inside(inner):
    misfit = impossible(Nesting.parse(f"jit > iterate_while_loop > {inner}"))
    assert misfit == Misfit("returns more", "iterate_while_loop", inner.rpartition(" ")[2])
    assert notes.of_misfit(misfit).startswith("iterate_while_loop feeds back what the call returns, and ")
    assert not impossible(Nesting.parse("jit > grad > iterate_scan"))
    assert impossible(Nesting.parse("grad > iterate_while_loop")) == Misfit("backwards")


@pytest.mark.slow
def test_the_peak_of_many_steps_counts_what_every_step_returns(example):
    def block(model, x):
        return x + model(x)

    linear, x = nnx.Linear(256, 256, rngs=nnx.Rngs(0)), jnp.ones((2048, 256))
    for layer in LAYERS:
        outcome = call(block, linear, x, nesting=f"jit > {layer}", memory_budget="1.1x", example=example).outcome
        assert outcome.verdict == "held", (layer, outcome.peak, outcome.budget)
