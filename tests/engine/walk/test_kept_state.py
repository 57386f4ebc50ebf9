"""An `nnx.State` in a plain container of a module leaks, as its arrays do; what holds it can be data."""

from __future__ import annotations

from typing import Any

import jax
import pytest
from checking import TAKES_REFERENCES, flat, hint
from flax import nnx
from healthy import BATCH, FLAX, WIDTH, assign, numbers, rngs

from pytest_nnxcheck import check


class KeepsState(nnx.Module):
    """Keeps the state of a part of it in a container of its own."""

    def __init__(self, container: Any) -> None:
        self.linear = nnx.Linear(WIDTH, WIDTH, rngs=rngs())
        self.container = container

    def __call__(self, x: Any) -> Any:
        self.container["last"] = nnx.state(self.linear)
        return self.linear(x)


class Accumulates:
    """A trainer that is no module, and keeps the gradients of each step, or puts them into what its module has for them."""

    def __init__(self, *, in_module: bool) -> None:
        self.model = nnx.Linear(WIDTH, WIDTH, rngs=rngs())
        self.model.sum = nnx.Variable(numbers((WIDTH, WIDTH)))
        self.gradients: list[Any] = []
        self.in_module = in_module

    def step(self, x: Any) -> None:
        gradients = nnx.grad(lambda model: (model(x) ** 2).mean())(self.model)
        if self.in_module:
            assign(self.model.sum, self.model.sum[...] + jax.tree.leaves(gradients)[1])
        else:
            self.gradients.append(gradients)


def test_a_state_that_is_kept_outside_of_the_module_is_told_so():
    found = check(Accumulates(in_module=False).step, numbers(BATCH), nesting="jit")
    assert "self.gradients[0]['bias']" in flat(str(found))
    assert found.violations[0].hint == hint("outlives", holder="what is no part of the module")
    assert check(Accumulates(in_module=True).step, numbers(BATCH), nesting="jit").ok


@pytest.mark.skipif(TAKES_REFERENCES, reason="here these metadata mean a reference")
def test_metadata_of_the_users_own_make_no_reference():
    class Sums(nnx.Module):
        def __init__(self, **metadata):
            self.sum = nnx.Variable(numbers(BATCH), **metadata)

        def __call__(self, x):
            assign(self.sum, self.sum.value + x)
            return x

    for metadata in ({}, {"ref": True}):
        found = check(Sums(**metadata), numbers(BATCH), nesting="jit[jax_closure]")
        assert "tracers remain in model.sum" in flat(str(found)), str(found)
        assert "reference" not in flat(str(found))


class Tries(nnx.Module):
    """Keeps an exception, with the frames of its traceback, or what it says."""

    def __init__(self, keeps: Any) -> None:
        self.linear, self.keeps = nnx.Linear(WIDTH, WIDTH, rngs=rngs()), keeps

    def __call__(self, x: Any) -> Any:
        y = self.linear(x)
        try:
            float(y.mean())
        except TypeError as error:
            errors.append(self.keeps(error))
        return y


errors: list[Any] = []


def test_an_exception_that_is_kept_is_told_so():
    found = check(Tries(lambda error: error), numbers(BATCH), nesting="jit")
    assert found.violations[0].hint == hint("outlives", holder="an exception, whose traceback has the frame")
    assert check(Tries(str), numbers(BATCH), nesting="jit").ok


@pytest.mark.slow
@pytest.mark.skipif(FLAX < (0, 12), reason="nnx.data came with flax 0.12")
@pytest.mark.parametrize("empty", [dict, lambda: nnx.State({})])
def test_what_holds_a_state_is_declared_as_data(empty):
    found = check(KeepsState(empty()), numbers(BATCH), nesting="jit")
    said = "in nnx.data(...), where it is set first, what holds the nnx.State: model.container['last']"
    assert said in flat(str(found))
    assert check(KeepsState(nnx.data(empty())), numbers(BATCH), nesting="jit").ok
