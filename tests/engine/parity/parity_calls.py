"""Calls of which parity is asserted, and the modules that most of its tests call."""

from __future__ import annotations

import itertools

import jax
from checking import Example, call
from flax import nnx
from healthy import FLAX, numbers

from pytest_nnxcheck.engine.example import Memo

X = numbers((3, 8))
XS = numbers((2, 3, 8))
TREE = FLAX >= (0, 12)


def norm():
    return nnx.BatchNorm(8, use_running_average=False, rngs=nnx.Rngs(0))


def parity(subject, *args, nesting="un-nested", **settings):
    return call(subject, *args, nesting=nesting, invariants="parity", **settings)


class Body:
    """The body of one test, which makes a call: each time it runs, the test remembers what the calls before have shown."""

    def __init__(self):
        self.memo = Memo()

    def __call__(self, subject, *args, **settings):
        with Example(self.memo) as example:
            return parity(subject, *args, example=example, **settings)


def traced(x):
    return isinstance(x, jax.core.Tracer)


TICKS = itertools.count()
"""An iterator, since a list would be put back after each call."""


def ticks(x):
    """Note a call that is made and not traced."""
    if not traced(x):
        next(TICKS)


def made_in(run):
    """The number of calls that were made one by one in a run, which holds."""
    before = next(TICKS)
    assert run().outcome.verdict == "held"
    return next(TICKS) - before - 1
