"""A generator that the call advances keeps what the first trace made, and its frame cannot be put back: that is told, and no exception of what follows."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import jax
import pytest
from checking import Example, call, flat, hint, text
from flax import nnx
from healthy import BATCH, WIDTH, numbers, rngs

from pytest_nnxcheck import CheckError, check
from pytest_nnxcheck.engine.example import Memo


def key_stream() -> Iterator[Any]:
    key = jax.random.key(0)
    while True:
        key, drawn = jax.random.split(key)
        yield drawn


class Stream:
    """A plain object: jax warns of a generator that a module itself holds."""

    def __init__(self) -> None:
        self.source = key_stream()


class Noisy(nnx.Module):
    """Adds noise, from a key that its generator gives."""

    def __init__(self) -> None:
        self.linear = nnx.Linear(WIDTH, WIDTH, rngs=rngs())
        self.keys = Stream()

    def key(self) -> Any:
        return next(self.keys.source)

    def __call__(self, x: jax.Array, key: Any = None) -> jax.Array:
        return self.linear(x) + jax.random.normal(self.key() if key is None else key, x.shape)


class NoisyRngs(Noisy):
    """Draws its keys from its own streams."""

    def __init__(self) -> None:
        super().__init__()
        self.rngs = rngs()

    def key(self) -> Any:
        return self.rngs.params()


PATH = f"key (line {key_stream.__code__.co_firstlineno + 4} of key_stream, kept by model.keys.source)"


@pytest.mark.slow
@pytest.mark.parametrize("nesting", ["un-nested", "jit", "scan[functional]"])
def test_a_generator_that_the_call_advances_is_a_leak_under_every_nesting(nesting):
    found = call(Noisy(), numbers(BATCH), nesting=nesting)
    assert found.outcome.verdict == "violated"
    assert str(found.outcome.nesting) == nesting.replace("un-nested", "jit")
    assert re.search(rf"leaked {re.escape(PATH)}   \w+Tracer key<fry>\[\] in generator", text(found))
    assert found.outcome.violations[0].hint == hint("generator", path=PATH)


@pytest.mark.slow
def test_what_cannot_be_put_back_is_told_of_every_later_nesting_of_the_test():
    model, memo = Noisy(), Memo()
    for nesting in ("un-nested", "scan", "jit"):
        with Example(memo) as example:
            found = call(model, numbers(BATCH), nesting=nesting, example=example)
        assert found.outcome.verdict == "violated"
        # The call itself leaked them, though they are there before each later one.
        assert f"leaked by {nesting.replace('un-nested', 'jit')}" in text(found)


def test_a_run_ends_with_the_leak_and_a_program():
    found = check(Noisy(), numbers(BATCH), max_examples=0)
    assert f"tracers remain in {PATH}" in flat(str(found))
    assert "leaked by   jit\n" in str(found)
    assert PATH in found.program()


def test_without_the_invariant_the_call_is_not_checked():
    with pytest.raises(
        CheckError, match="holds tracers that the plugin cannot remove, in key .*: add tracers to the invariants"
    ):
        call(Noisy(), numbers(BATCH), nesting="jit", invariants="memory")


def sums_of_powers(model: Any, x: jax.Array) -> jax.Array:
    """A generator that ends with the call."""

    def powers(x: jax.Array) -> Iterator[jax.Array]:
        while True:
            yield (x := x * x)

    first, second = (y for y, _ in zip(powers(model(x)), range(2), strict=False))
    return first + second


@pytest.mark.slow
@pytest.mark.parametrize("nesting", ["un-nested", "jit", "scan"])
def test_keys_of_rngs_or_of_an_argument_hold(nesting):
    for subject, *args in (
        (NoisyRngs(), numbers(BATCH)),
        (Noisy(), numbers(BATCH), jax.random.key(0)),
        (sums_of_powers, nnx.Linear(WIDTH, WIDTH, rngs=rngs()), numbers(BATCH)),
    ):
        assert call(subject, *args, nesting=nesting).outcome.verdict == "held"
