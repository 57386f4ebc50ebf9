"""Advice where the wrapped function is itself a jit that changes the state it is given and donates it not (google/flax#5026)."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import optax
import pytest
from checking import near, some
from flax import nnx
from healthy import assign, rngs
from wild_training import apply_gradients, make_optimizer

from pytest_nnxcheck import check

WIDTH = 256
X = jnp.ones((2, WIDTH))
JIT = {"nesting": "jit"}


def linear():
    return nnx.Linear(WIDTH, WIDTH, use_bias=False, rngs=rngs())


def trained():
    model = linear()
    return model, make_optimizer(model, optax.adam(1e-3), nnx.Param)


def train_step(model, optimizer, x):
    loss, gradients = nnx.value_and_grad(lambda model: (model(x) ** 2).mean())(model)
    apply_gradients(optimizer, model, gradients)
    return loss


def line_of(function) -> str:
    return f"{near(__file__)}:{function.__code__.co_firstlineno}"


def advised(*call, **options) -> list[str]:
    report = check(*call, **JIT, **options)
    assert report.ok
    return list(report.advice)


def told(size, function, whose, cure, jit="nnx.jit") -> str:
    why = f"{function.__name__} is a jit that changes {whose}, and does not donate that: old and new lie side by side"
    return f"{size}: {why}; write {cure} in its {jit} ({line_of(function)})"


@pytest.mark.parametrize(
    "donates, size, whose",
    [
        ({}, "768.0 KiB", "model and optimizer"),
        ({"donate_argnums": 0}, "512.0 KiB", "optimizer"),
        ({"donate_argnames": "optimizer"}, "256.0 KiB", "model"),
    ],
)
def test_what_a_step_changes_and_does_not_donate_is_named_with_its_bytes(donates, size, whose):
    (piece,) = advised(nnx.jit(train_step, **donates), *trained(), X)
    assert piece == told(size, train_step, whose, "donate_argnums=(0, 1)")


def forward(model, x):
    return model(x)


HEALTHY = {
    "donates": lambda: (nnx.jit(train_step, donate_argnums=(0, 1)), *trained(), X),
    "donates by name": lambda: (nnx.jit(train_step, donate_argnames=("model", "optimizer")), *trained(), X),
    "forward pass": lambda: (nnx.jit(forward), linear(), X),
    "no jit": lambda: (train_step, *trained(), X),
    "a jit inside": lambda: (lambda *args: nnx.jit(train_step)(*args) * 2, *trained(), X),
    "statistics alone": lambda: (nnx.jit(forward), nnx.Sequential(linear(), nnx.BatchNorm(WIDTH, rngs=rngs())), X),
}


@pytest.mark.parametrize("name", some(HEALTHY, {"donates", "forward pass", "a jit inside"}, pytest.mark.slow))
def test_a_step_that_donates_and_a_jit_that_changes_little_get_none(name):
    assert advised(*HEALTHY[name]()) == []


class Counter(nnx.Module):
    """Adds to its table: by a method that is jitted."""

    def __init__(self) -> None:
        self.table = nnx.Variable(jnp.zeros((WIDTH, WIDTH)))

    @nnx.jit
    def add(self, x):
        assign(self.table, self.table[...] + x.sum())

    @functools.partial(nnx.jit, donate_argnums=0)
    def donates(self, x):
        assign(self.table, self.table[...] + x.sum())

    @nnx.jit
    def __call__(self, x):
        assign(self.table, self.table[...] + x.sum())


@pytest.mark.parametrize("how", ["add", "__call__"])
def test_a_jitted_method_changes_its_module(how):
    model = Counter()
    (piece,) = advised(model if how == "__call__" else getattr(model, how), X)
    assert piece.startswith(f"256.0 KiB: {how} is a jit that changes ")
    assert f"write donate_argnums=0 in its nnx.jit ({near(__file__)}:" in piece
    assert advised(model.donates, X) == []


def functional(graphdef, state, x):
    model = nnx.merge(graphdef, state)
    y = model(x)
    nnx.update(model, jax.tree.map(lambda leaf: leaf * 2, nnx.state(model)))
    return y, nnx.state(model)


def reads(graphdef, state, x):
    return nnx.merge(graphdef, state)(x), state


def augments(weights, batch):
    return {"x": batch["x"] @ weights}


def test_a_jit_of_jax_that_returns_the_new_state_beside_its_result():
    graphdef, state = nnx.split(linear())
    static = functools.partial(jax.jit, static_argnums=0)
    (piece,) = advised(static(functional), graphdef, state, X)
    assert piece == told("256.0 KiB", functional, "state", "donate_argnums=1", jit="jax.jit")
    assert advised(static(functional, donate_argnums=1), graphdef, state, X) == []
    assert advised(static(reads), graphdef, state, X) == []
    square = jnp.ones((WIDTH, WIDTH))
    assert advised(jax.jit(augments), square, {"x": square, "labels": jnp.ones(3)}) == []
