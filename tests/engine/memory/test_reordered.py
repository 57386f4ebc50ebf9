"""Advice on stacked parameters that are put in another order before the loop that takes them, all at once."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from checking import some
from flax import nnx

from pytest_nnxcheck import check, compat
from pytest_nnxcheck.core.evidence import Held, HeldTwice
from pytest_nnxcheck.invariants.advice import Sizes, advice
from pytest_nnxcheck.subject.waste import Waste, waste

JIT = {"nesting": "jit"}
X = jnp.ones((4, 64))


def scanned(w, x, **how):
    return jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, w, **how)[0]


def two_at_a_time(w, x):
    return jax.lax.scan(lambda h, w: (jnp.tanh(jnp.tanh(h @ w[0]) @ w[1]), None), x, w)[0]


ORDER = (1, 0, 3, 2, 5, 4, 7, 6)
CALLS = {
    "reversed": lambda w, x: scanned(w[::-1], x),
    "transposed": lambda w, x: scanned(w.swapaxes(1, 2), x),
    "permuted": lambda w, x: scanned(w[jnp.array(ORDER)], x),
    "interleaved": lambda w, x: two_at_a_time(w.reshape(2, 4, 64, 64).swapaxes(0, 1), x),
}
CURED = {
    "reversed": lambda w, x: scanned(w, x, reverse=True),
    "transposed": lambda w, x: jax.lax.scan(lambda h, w: (jnp.tanh(h @ w.T), None), x, w)[0],
    "permuted": lambda w, x: jax.lax.scan(lambda h, k: (jnp.tanh(h @ w[k]), None), x, jnp.array(ORDER))[0],
    "interleaved": lambda w, x: jax.lax.scan(
        lambda h, k: (jnp.tanh(jnp.tanh(h @ w[k]) @ w[k + 4]), None), x, jnp.arange(4)
    )[0],
}


class Stacked(nnx.Module):
    def __init__(self, call):
        self.w, self.call = nnx.Param(jnp.ones((8, 64, 64))), call

    def __call__(self, x):
        return self.call(self.w[...], x)


@pytest.mark.parametrize("name", some(CALLS, {"reversed", "transposed"}))
def test_a_stack_in_another_order_is_told_and_its_cure_is_not(name):
    report = check(Stacked(CALLS[name]), X, **JIT)
    assert report.ok
    (piece,) = report.advice
    assert piece.startswith("128.0 KiB float32[")
    cure = "run the loop with reverse=True" if name == "reversed" else "put a step's part in order inside the loop"
    assert f"all of model.w once more in another order; {cure}" in piece
    assert piece.endswith(f"({__file__}:{CALLS[name].__code__.co_firstlineno})")
    assert check(Stacked(CURED[name]), X, **JIT).advice == ()


def facts(call):
    jaxpr = compat.open_jaxpr(jax.make_jaxpr(call)(jnp.ones((8, 64, 64)), X))
    return [(piece.leaf, piece.type, piece.reversed) for piece in waste(jaxpr).reordered]


@pytest.mark.parametrize("name", CALLS)
def test_what_a_loop_takes_in_another_order_is_a_fact_of_the_call(name):
    shape = "2,64,64" if name == "interleaved" else "64,64"
    steps = 4 if name == "interleaved" else 8
    assert facts(CALLS[name]) == [(0, f"float32[{steps},{shape}]", name == "reversed")]
    assert facts(CURED[name]) == []


def test_what_no_loop_takes_or_is_less_or_as_it_was_is_none():
    assert facts(lambda w, x: x @ w[::-1][0]) == []
    assert facts(lambda w, x: scanned(w[:4][::-1], x)) == []
    assert facts(lambda w, x: two_at_a_time(w.reshape(4, 2, 64, 64), x)) == []
    assert facts(lambda w, x: scanned(w, x.T.reshape(4, 64))) == [(1, "float32[4,64]", False)]


def test_large_leaves_of_the_state_count_where_their_buffer_is_at_the_peak():
    live = [Held(200_000, "float32[50000]", "temporary", "rev", ("m.py:9",))]
    sizes = Sizes(state=1_000_000, inputs=1000, outputs=1000)

    def pieces(leaf=0, size=250_000, kind="float32[50000]"):
        spent = Waste(reordered=(Reordered(leaf, "m.py:2", kind, size),))
        return [piece.name for piece in advice(2_001_000, live, spent, ["model.w"], ["x"], sizes)]

    assert pieces() == ["model.w"]
    assert pieces(leaf=1) == pieces(size=249_999) == pieces(kind="float32[7]") == []
