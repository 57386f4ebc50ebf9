"""Models that a second call with the same types traces again, each with what changed in between, and their healthy twins."""

from __future__ import annotations

import jax.numpy as jnp
from counts import Counts
from flax import nnx
from healthy import WIDTH, assign, numbers
from probes import value_of

INPUT = numbers((3, WIDTH))


class Weighs(nnx.Module):
    """A running mean that is made of a number of Python's, or of an array; or one that a step promotes."""

    def __init__(self, start) -> None:
        self.mean = nnx.BatchStat(start)

    def __call__(self, x):
        assign(self.mean, 0.9 * self.mean[...] + x.mean())
        return x - self.mean[...]


class Starts(nnx.Module):
    """Makes its cache in the first call, with which the second one has more state than the first."""

    def __call__(self, x):
        if hasattr(self, "cache"):
            assign(self.cache, x)
        else:
            self.cache = nnx.Cache(x)
        return x * 1


class Halves(nnx.Module):
    """A count of halves that starts as an integer, or as nothing."""

    def __init__(self, start) -> None:
        self.count = nnx.BatchStat(start)

    def __call__(self, x):
        before = value_of(self.count)
        assign(self.count, jnp.asarray(0.5 if before is None else before + 0.5, jnp.float32))
        return x * 1


class Remembers(nnx.Module):
    """Keeps a function of its own, a new one in each call."""

    def __init__(self) -> None:
        self.scale = nnx.Param(jnp.ones(WIDTH))
        self.last = len

    def __call__(self, x):
        self.last = lambda y: y
        return x * self.scale[...]


WEAK, STRONG = jnp.asarray(1.0), jnp.asarray(1.0, jnp.float32)
HALF = jnp.asarray(1.0, jnp.bfloat16)
MODELS = {
    "counter": (lambda: Counts(plain=True), "model.calls   0 before the call, 1 after it"),
    "variable": (lambda: Counts(plain=False), ""),
    "weak": (lambda: Weighs(WEAK), "model.mean   float32[], weakly typed before the call, float32[] after it"),
    "number": (lambda: Weighs(1.0), "model.mean   float, weakly typed before the call, float32[] after it"),
    "strong": (lambda: Weighs(STRONG), ""),
    "promoted": (lambda: Weighs(HALF), "model.mean   bfloat16[] before the call, float32[] after it"),
    "integer": (lambda: Halves(jnp.zeros((), jnp.int32)), "model.count   int32[] before the call, float32[] after it"),
    "nothing": (lambda: Halves(None), "model.count   NoneType before the call, float32[] after it"),
    "function": (Remembers, "model.last   a builtin_function_or_method before the call, a function after it"),
}
