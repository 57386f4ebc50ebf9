"""jax-ml/jax#926 at its real size: ten convolutions of an input of 2 GiB. Nothing is allocated.

Run it with ``pytest examples/real_size/jax_926.py``: the program holds 4.0 times its input, 2.0 times where the input is
donated. The budget lies between the two, so that one test fails, by design, on every version.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

INPUT = jax.ShapeDtypeStruct((2**19, 32, 32, 1), jnp.float32)
Wrap = Callable[[Any], Callable[..., Any]]
pytestmark = pytest.mark.nnx_invariants(memory_budget="5GiB", transforms="jit", sweep="singles", max_examples=0)


def ten_convolutions(x: jax.Array) -> jax.Array:
    kernel = jnp.ones((3, 3, 1, 1))
    for _ in range(10):
        x = jax.lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
    return x


@pytest.mark.nnx_invariants(donate="none")
def test_kept(nnx_wrap: Wrap) -> None:
    assert nnx_wrap(ten_convolutions)(INPUT).shape == INPUT.shape


@pytest.mark.nnx_invariants(donate="all")
def test_donated(nnx_wrap: Wrap) -> None:
    assert nnx_wrap(ten_convolutions)(INPUT).shape == INPUT.shape
