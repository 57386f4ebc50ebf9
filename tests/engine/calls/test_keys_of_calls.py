"""Facts of a call are found once, although the body of a test makes its optimizer and its configuration anew for every nesting."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from checking import call
from flax import nnx
from wild_training import apply_gradients, make_optimizer

from pytest_nnxcheck.engine.example import Example, Memo
from pytest_nnxcheck.walk.fingerprint import MOST, Known, Unknown, exact, fingerprint


class Config:
    """A configuration without an ``==`` of its own."""

    def __init__(self, rate: float = 1e-3) -> None:
        self.rate = rate
        self.widths = [8, 8]
        self.names = {"first": "kernel"}


class Slots:
    __slots__ = ("rate",)

    def __init__(self, rate: float = 1e-3) -> None:
        self.rate = rate


def schedule(rate: float) -> Callable[[Any], Any]:
    return optax.warmup_cosine_decay_schedule(0.0, rate, 10, 100)


def scaled_by(array: Any) -> Callable[[Any], Any]:
    return lambda x: x * array


MADE: dict[str, Callable[[float], Any]] = {
    "adamw": optax.adamw,
    "moments in bfloat16": lambda rate: optax.adam(rate, mu_dtype=jnp.bfloat16),
    "schedule": lambda rate: optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule(rate))),
    "injected": lambda rate: optax.inject_hyperparams(optax.adam)(learning_rate=rate),
    "several": lambda rate: optax.multi_transform({"a": optax.adam(rate), "b": optax.sgd(1e-2)}, {"x": "a", "y": "b"}),
    "methods of an object": lambda rate: optax.MultiSteps(optax.adam(rate), 2).gradient_transformation(),
    "partial": lambda rate: functools.partial(jnp.full, (2,), rate),
    "configuration": Config,
    "slots": Slots,
    "array in a closure": lambda rate: scaled_by(np.full(3, rate)),
}


@pytest.mark.parametrize("make", MADE.values(), ids=MADE)
def test_what_is_made_alike_is_alike_and_what_differs_differs(make: Callable[[float], Any]) -> None:
    first = exact(make(1e-3), in_graph=True)

    assert first == exact(make(1e-3), in_graph=True)
    assert hash(first) == hash(exact(make(1e-3), in_graph=True))
    assert first != exact(make(1e-2), in_graph=True)


def test_an_object_that_compares_itself_is_asked() -> None:
    class Named:
        def __init__(self, name: str, note: str) -> None:
            self.name, self.note = name, note

        def __eq__(self, other: object) -> bool:
            return isinstance(other, Named) and self.name == other.name

        def __hash__(self) -> int:
            return hash(self.name)

    assert exact(Named("a", "one"), in_graph=True) == exact(Named("a", "other"), in_graph=True)
    assert exact(Named("a", "one"), in_graph=True) != exact(Named("b", "one"), in_graph=True)


@pytest.mark.parametrize("held", [list(range(MOST + 1)), np.zeros(2**27, np.uint8)], ids=["items", "bytes"])
def test_a_data_set_is_not_read_before_every_nesting(held: Any) -> None:
    with pytest.raises(Unknown):
        exact(held, in_graph=True)


def test_an_object_of_a_library_keeps_more_than_its_attributes() -> None:
    def twice(x: jax.Array) -> jax.Array:
        return 2 * x

    assert exact(jax.jit(twice), in_graph=True) != exact(jax.jit(twice, donate_argnums=0), in_graph=True)


class Model(nnx.Module):
    def __init__(self, config: Any) -> None:
        self.config = config
        self.linear = nnx.Linear(4, 4, rngs=nnx.Rngs(0))

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.linear(x) * self.config.rate


TRACED = itertools.count()
"""A counter that the check does not put back."""


def step(model: Model, optimizer: Any, x: jax.Array) -> jax.Array:
    next(TRACED)
    loss, grads = nnx.value_and_grad(lambda model: (model(x) ** 2).mean())(model)
    apply_gradients(optimizer, model, grads)
    return loss


def traces_of_two_nestings(rates: tuple[float, float]) -> list[int]:
    """The traces of a step under one nesting and then another, whose objects are made anew for each."""
    memo, counts = Memo(), list[int]()
    for nesting, rate in zip(("jit > vmap", "jit > remat"), rates, strict=True):
        model = Model(Config(rate))
        before = next(TRACED)
        with Example(memo) as example:
            call(
                step,
                model,
                make_optimizer(model, optax.adamw(rate)),
                jnp.ones((2, 4)),
                nesting=nesting,
                example=example,
            )
        counts.append(next(TRACED) - before - 1)
    return counts


def test_a_step_that_builds_its_optimizer_in_the_body_is_profiled_once() -> None:
    alike, other = traces_of_two_nestings((1e-3, 1e-3)), traces_of_two_nestings((1e-3, 1e-2))

    assert alike[1] < other[1]


class Layer:
    """Leads to all layers, as those of a functional model of keras do."""

    def __init__(self, layers: list[Any]) -> None:
        self.before = self.after = layers
        layers.append(self)


class Counted:
    """Looks like an array, and counts who asks for its shape."""

    dtype, looks = "float32", 0

    @property
    def shape(self) -> tuple[int, ...]:
        self.looks += 1
        return (2,)


def test_an_object_to_which_many_others_lead_is_looked_at_once_for_each_depth() -> None:
    held = Counted()
    layers: list[Any] = [held]
    for _ in range(3):
        Layer(layers)
    known = Known()
    assert fingerprint(layers, known=known) == fingerprint(layers, known=known)
    assert held.looks == 2  # within the list, and within the lists of its layers
