"""Calls of which parity is asserted, and the modules that most of its tests call."""

from __future__ import annotations

from checking import call
from flax import nnx
from healthy import FLAX, numbers

X = numbers((3, 8))
XS = numbers((2, 3, 8))
TREE = FLAX >= (0, 12)


def norm():
    return nnx.BatchNorm(8, use_running_average=False, rngs=nnx.Rngs(0))


def parity(subject, *args, nesting="un-nested", **settings):
    return call(subject, *args, nesting=nesting, invariants="parity", **settings)
