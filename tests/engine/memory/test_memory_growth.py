"""What a further step adds to a peak, against programs of plain jax of other lengths."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from checking import broken, call, text
from flax import nnx
from healthy import numbers
from jax import lax
from memory_evidence import rows, told

from pytest_nnxcheck.compat import compile_cache, staging
from pytest_nnxcheck.xla import buffers


def call_of(x):
    return jnp.tanh(x @ x.T) @ x


X = numbers((32, 96))


def plain(how, length):
    """The peak of a program of plain jax with so many steps, or elements."""
    xs = jnp.stack([X] * length)
    programs = {
        "scan": lambda xs: lax.scan(lambda carry, x: (carry, call_of(x)), None, xs)[1],
        "vmap": jax.vmap(call_of),
        "fori_loop": lambda x: lax.fori_loop(0, length, lambda _, carry: (carry[0], call_of(carry[0])), (x, x))[1],
    }
    programs["while_loop"] = programs["fori_loop"]
    with compile_cache.judged_compiles():
        compiled = jax.jit(programs[how]).lower(X if "loop" in how else xs).compile(staging.compiler_options())
    return buffers.read(compiled).peak


@pytest.mark.slow
@pytest.mark.parametrize("how", ["scan", "vmap", "while_loop", "fori_loop"])
def test_what_a_step_adds_is_what_it_adds_at_other_lengths(how, example):
    found = call(call_of, X, nesting=f"jit[functional] > {how}", memory_budget="0.01x", example=example)
    growth = told(found).growth
    assert growth is not None, text(found)
    assert growth.per_step.peak * 8 == plain(how, 16) - plain(how, 8)
    assert (growth.layer, growth.steps) == (how, 2)
    assert len(rows(found, "growth")) == 1


def test_a_step_that_grows_the_state_of_a_mapped_axis_counts_it():
    found = call(nnx.BatchNorm(128, rngs=nnx.Rngs(0)), numbers((16, 128)), nesting="jit > vmap", memory_budget="0.01x")
    assert told(found).growth.per_step.arguments == 16 * 128 * 4
    assert told(found).growth.per_step.temporaries >= 2 * 128 * 4


@pytest.mark.parametrize("nesting", ["jit", "jit > remat", "jit > scan > vmap"])
def test_without_one_loop_there_is_no_growth(nesting):
    found = call(call_of, X, nesting=nesting, memory_budget="0.1x")
    assert broken(found) == ["memory"]
    assert told(found).growth is None


def test_the_growth_is_measured_without_running_the_call():
    ran = []

    def counts(x):
        jax.debug.callback(lambda: ran.append(1))
        return x * 2

    found = call(counts, X, nesting="jit > scan", memory_budget="0.01x")
    jax.effects_barrier()
    assert told(found).growth is not None
    # Two steps of the nesting, one call of the un-nested jit.
    assert len(ran) <= 3
