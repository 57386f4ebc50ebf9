"""The largest size that fits a target."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from pytest_nnxcheck import CheckError, largest
from pytest_nnxcheck.core.chips import GIB

ROWS, WIDTH = 1024, 1024
UNIT = 2 * 4 * ROWS * WIDTH
"""The bytes of one unit of the batch: what goes in and what comes out."""


def batch(size):
    model = nnx.eval_shape(lambda: nnx.Linear(WIDTH, WIDTH, rngs=nnx.Rngs(0)))
    return model, jax.ShapeDtypeStruct((size * ROWS, WIDTH), jnp.float32)


def test_the_largest_batch_is_found_by_doubling_and_halving():
    found = largest(batch, target="v5e", low=256)
    smallest_that_does_not = min(size for size, on in found.tried.items() if not on.fits)
    assert found.tried[found.size].fits
    assert all(on.fits for size, on in found.tried.items() if size <= found.size)
    assert found.size < smallest_that_does_not <= found.size * 17 / 16 + 1
    assert 0.9 <= found.size * UNIT / (15.75 * GIB) <= 1
    assert [*found.tried][:4] == [256, 512, 1024, 2048]
    assert re.match(rf"{found.size} fits, of \d+ sizes tried: 256 fits v5e: ", str(found))


def test_the_bounds_are_kept():
    up_to = largest(batch, target="v5e", low=100, high=150)
    assert (up_to.size, [*up_to.tried]) == (150, [100, 150])
    none = largest(batch, target="v5e", low=4096)
    assert (none.size, [*none.tried]) == (0, [4096])


@pytest.mark.parametrize("low, high", [(0, 8), (9, 8)])
def test_bounds_that_are_no_sizes_say_what_to_write(low, high):
    with pytest.raises(CheckError, match="write 1 <= low <= high"):
        largest(batch, target="v5e", low=low, high=high)


def test_a_program_that_cannot_be_judged_is_no_size():
    def calls_back(size):
        returns = jax.ShapeDtypeStruct((size * ROWS, WIDTH), jnp.float32)
        return lambda model, x: jax.pure_callback(lambda x: x, returns, model(x)), *batch(size)

    with pytest.raises(CheckError, match=r"largest\(\.\.\., target='v5e'\): the program calls Python code"):
        largest(calls_back, target="v5e")
    with pytest.raises(CheckError, match="ZeroDivisionError"):
        largest(lambda size: (lambda x: x / (1 // 0), jnp.ones(size)), target="v5e")
