"""A mixed suite as a user has it: models that hold, and models that break each in one way. Run by `steady.py`, time and again.

A test's name says how it must end: ``test_holds*``, ``test_breaks_INVARIANT*`` or ``test_raises*``. Kernels are constants, since random ones
take most of the time of a run; what the tests leave behind in globals and caches is meant, since later tests must not see it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx
from hypothesis import given
from hypothesis import strategies as st

pytestmark = pytest.mark.nnx_invariants(effort="quick")
Wrap = Callable[[Any], Callable[..., Any]]

ROWS = (2, 4)
KEPT: list[jax.Array] = []
LAST: dict[str, jax.Array] = {}
TABLE = jnp.ones((256, 256))


def linear(inputs: int = 4, outputs: int = 4) -> nnx.Linear:
    ones = nnx.initializers.ones_init()
    return nnx.Linear(inputs, outputs, kernel_init=ones, rngs=nnx.Rngs(0))


class Layer(nnx.Module):
    """A module with one layer."""

    def __init__(self) -> None:
        self.linear = linear()


# --- models that hold


class TwoLayers(nnx.Module):
    def __init__(self) -> None:
        self.first, self.second = linear(4, 8), linear(8, 4)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.second(nnx.relu(self.first(x)))


class Drops(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.dropout = nnx.Dropout(0.5, rngs=nnx.Rngs(1))

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.dropout(self.linear(x))


class Sows(Layer):
    def __call__(self, x: jax.Array) -> jax.Array:
        y = self.linear(x)
        self.sow(nnx.Intermediate, "activation", y)
        return y


class Counts(nnx.Module):
    def __init__(self) -> None:
        self.calls = nnx.Variable(jnp.zeros((), jnp.int32))

    def __call__(self, x: jax.Array) -> jax.Array:
        self.calls[...] = self.calls[...] + 1
        return x * 2


class JoinsWeights(nnx.Module):
    """Its kernel three times over is a temporary value, about which there is advice and no violation."""

    def __init__(self) -> None:
        self.linear = linear(256, 256)

    def __call__(self, x: jax.Array) -> jax.Array:
        return x @ jnp.concatenate([self.linear.kernel[...]] * 3, 1)


HOLDS = {
    "two_layers": TwoLayers,
    "dropout": Drops,
    "batch_norm": lambda: nnx.BatchNorm(4, rngs=nnx.Rngs(0)),
    "sown": Sows,
    "counter": Counts,
}


@pytest.mark.parametrize("model", HOLDS)
def test_holds(nnx_wrap: Wrap, model: str) -> None:
    assert nnx_wrap(HOLDS[model]())(jnp.ones(ROWS)).shape == ROWS


@pytest.mark.parametrize("width", [3, 5])
def test_holds_width(nnx_wrap: Wrap, width: int) -> None:
    assert nnx_wrap(linear(4, width))(jnp.ones(ROWS)).shape == (2, width)


@pytest.mark.nnx_invariants(styles="argument", invariants="tracers,memory,donation,parity")
def test_holds_training_step(nnx_wrap: Wrap) -> None:
    def step(model: Any, optimizer: Any, x: jax.Array) -> jax.Array:
        loss, gradients = nnx.value_and_grad(lambda model: (model(x) ** 2).mean())(model)
        optimizer.update(model, gradients)
        return loss

    model = linear()
    optimizer = nnx.Optimizer(model, optax.sgd(1e-3), wrt=nnx.Param)
    assert nnx_wrap(step)(model, optimizer, jnp.ones(ROWS)).shape == ()


@given(value=st.integers(1, 3))
def test_holds_what_hypothesis_gives(nnx_wrap: Wrap, value: int) -> None:
    assert nnx_wrap(linear())(jnp.full(ROWS, value, jnp.float32)).shape == ROWS


def test_holds_joined_weights(nnx_wrap: Wrap) -> None:
    assert nnx_wrap(JoinsWeights())(jnp.ones((2, 256))).shape == (2, 768)


# --- models that break


class KeepsInList(Layer):
    def __call__(self, x: jax.Array) -> jax.Array:
        y = self.linear(x)
        KEPT.append(y)
        return y


class KeepsInDict(Layer):
    def __call__(self, x: jax.Array) -> jax.Array:
        LAST["y"] = self.linear(x)
        return LAST["y"]


class KeepsInAttribute(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.debug: dict[str, jax.Array] = {}

    def __call__(self, x: jax.Array) -> jax.Array:
        self.debug["mean"] = x.mean()
        return self.linear(x)


@functools.cache
def mask(size: int) -> jax.Array:
    return jnp.tril(jnp.ones((size, size)))


class Masks(Layer):
    def __call__(self, x: jax.Array) -> jax.Array:
        return mask(x.shape[0]) @ self.linear(x)


class LooksUp(nnx.Module):
    """The table is a constant of its program, outside of the state."""

    def __init__(self) -> None:
        self.linear = linear(256, 4)

    def __call__(self, rows: jax.Array) -> jax.Array:
        return self.linear(TABLE[rows])


class LosesDtype(nnx.Module):
    def __init__(self) -> None:
        self.scale = nnx.Variable(jnp.ones((64, 64), jnp.bfloat16))

    def __call__(self, x: jax.Array) -> jax.Array:
        self.scale.set_value(self.scale[...].astype(jnp.float32) * 2)
        return x


class Drifts(Layer):
    """A Python number that each trace counts once, and each call."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = 1.0

    def __call__(self, x: jax.Array) -> jax.Array:
        self.scale *= 2
        return self.linear(x) * self.scale


class Branches(Layer):
    def __call__(self, x: jax.Array) -> jax.Array:
        y = self.linear(x)
        return y if float(y.sum()) > 0 else x


LEAVES = {
    "list": KeepsInList,
    "list_of_another_test": KeepsInList,
    "dict": KeepsInDict,
    "attribute": KeepsInAttribute,
    "cached_function": Masks,
}


@pytest.mark.parametrize("where", LEAVES)
def test_breaks_tracers(nnx_wrap: Wrap, where: str) -> None:
    assert nnx_wrap(LEAVES[where]())(jnp.ones(ROWS)).shape == ROWS


def test_breaks_memory_constant(nnx_wrap: Wrap) -> None:
    assert nnx_wrap(LooksUp())(jnp.array([1, 2])).shape == ROWS


def test_breaks_donation_dtype(nnx_wrap: Wrap) -> None:
    assert nnx_wrap(LosesDtype())(jnp.ones(ROWS)).shape == ROWS


@pytest.mark.nnx_invariants(invariants="tracers,memory,donation,parity")
def test_breaks_parity_python_number(nnx_wrap: Wrap) -> None:
    assert nnx_wrap(Drifts())(jnp.ones(ROWS)).shape == ROWS


def test_raises_branch(nnx_wrap: Wrap) -> None:
    assert nnx_wrap(Branches())(jnp.ones(ROWS)).shape == ROWS
