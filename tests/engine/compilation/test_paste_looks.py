"""The looks of a program to paste, called as functions: each finds what it looks for, and nothing in a healthy twin."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from pytest_nnxcheck.paste import looks


def test_what_is_found_ends_the_program_in_the_words_of_the_plugin():
    looks.broken("memory", [], "nothing")
    with pytest.raises(AssertionError, match="nnx invariant broken: memory\n  too much\n  by far"):
        looks.broken("memory", [1], "too much", "by far")


def test_a_value_is_another_one_where_it_is_far_enough_from_what_was_wanted():
    one = (jnp.ones(3), 2, "text", jnp.nan)
    assert not looks.differs(one, (jnp.ones(3) + 0.01, 2, "text", jnp.nan), 0.5)
    others = [(jnp.ones(3) + 1, 2, "text", jnp.nan), (jnp.ones(4), 2, "text", jnp.nan), (jnp.ones(3), 3, "text", 0.0)]
    assert all(looks.differs(one, other, 0.5) for other in others)
    assert looks.differs("text", "other", 0.5)
    keys = jax.random.key(0), jax.random.key(1)
    assert looks.differs(*keys, 0)
    assert not looks.differs(keys[0], keys[0], 0)


@pytest.mark.filterwarnings("ignore:Some donated buffers were not usable")
@pytest.mark.parametrize("function, lost", [(lambda x: x + 1, []), (lambda x: x.astype(jnp.int8), [0])])
def test_a_donated_array_that_no_output_takes_has_lost_its_buffer(function, lost):
    lowered = jax.jit(function, donate_argnums=0).lower(jnp.zeros(8))
    assert looks.lost_by_program(lowered.compile(), lowered) == lost


def test_arrays_in_one_buffer_have_the_same_pointers():
    one = jnp.ones(64)
    assert looks.pointers(one) == looks.pointers([one]) != set()
    assert not looks.pointers(one) & looks.pointers([jnp.ones(64)])


@pytest.mark.slow
def test_what_an_exception_holds_is_no_leak_and_the_exception_comes_out():
    def fails(x):
        inside = x + 1
        raise RuntimeError(inside.shape)

    with pytest.raises(RuntimeError):
        looks.run_for_tracers(lambda: jax.jit(fails)(jnp.ones(3)), {"float32[3]"}, "a leak")
