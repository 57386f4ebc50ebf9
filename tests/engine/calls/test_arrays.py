"""Copies and stacks of arrays: made by NumPy where that loses nothing, and the same in every respect."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from pytest_nnxcheck.compat import arrays

ARRAYS = {
    "free": lambda: jnp.arange(6.0).reshape(2, 3),
    "committed": lambda: jax.device_put(jnp.arange(6.0).reshape(2, 3), jax.devices()[0]),
    "key": lambda: jax.random.split(jax.random.key(0), 2),
}


@pytest.mark.parametrize("kind", ARRAYS)
@pytest.mark.parametrize("make", [arrays.copied, lambda array: arrays.stacked(array, 2), arrays.first])
def test_what_is_made_of_an_array_is_bound_to_a_device_as_that_is_and_shares_no_buffer(make, kind):
    array = ARRAYS[kind]()
    made = make(array)
    assert (made.dtype, made.devices()) == (array.dtype, array.devices())
    if hasattr(array, "committed"):  # older jax has no public word for it, and copies arrays by a program
        assert made.committed == array.committed
    if kind != "key":
        assert made.unsafe_buffer_pointer() != array.unsafe_buffer_pointer()
