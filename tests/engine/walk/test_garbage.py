"""What only garbage keeps is no leak: the collector is held back inside a nesting, and a cache with weak keys has its entry until it runs."""

from __future__ import annotations

import weakref

import pytest
from checking import broken, call, full, slow, text
from flax import nnx
from healthy import numbers, rngs

from pytest_nnxcheck.walk.walk import without_garbage

CACHE: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()
KEPT: list = []


class Key:
    """In a cycle, as a key is that knows what it was made for: it goes when garbage is collected, and not before."""

    def __init__(self):
        self.own = self


class Memoizes(nnx.Module):
    """Computes once for a key, as the bijectors of TensorFlow Probability do; a key that is kept keeps what was computed."""

    def __init__(self, *, keeps):
        self.linear = nnx.Linear(4, 4, rngs=rngs())
        self.keeps = keeps

    def __call__(self, x):
        key = Key()
        if self.keeps:
            KEPT.append(key)
        CACHE[key] = self.linear(x)
        return CACHE[key] * 2


@pytest.fixture(autouse=True)
def empty():
    yield
    KEPT.clear()
    CACHE.clear()


@pytest.mark.parametrize(
    "nesting",
    ["jit", "eval_shape", *slow("vmap[functional]", "jit > scan > remat"), *full("remat", "scan", "while_loop")],
)
@pytest.mark.parametrize("keeps", [False, True])
def test_an_entry_whose_key_is_garbage_is_no_leak(nesting, keeps):
    found = call(Memoizes(keeps=keeps), numbers((2, 4)), nesting=nesting)
    assert broken(found) == (["tracers"] if keeps else []), text(found)
    assert found.outcome.verdict == ("violated" if keeps else "held")


def test_a_look_that_finds_nothing_is_the_only_one():
    looks = []
    assert without_garbage(lambda: looks.append(1) or []) == []
    assert len(looks) == 1
    assert without_garbage(lambda: looks.append(1) or looks) is looks
    assert len(looks) == 3
