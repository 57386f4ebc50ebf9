"""Facts of a jaxpr that advice is made of: leaves that are held twice, stacks that nobody reads, leaves in another dtype."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from checking import line
from flax import nnx

from pytest_nnxcheck import check
from pytest_nnxcheck.compat import staging
from pytest_nnxcheck.jaxprs.waste import HeldTwice, waste


def facts_of(call, *args):
    """All leaves that are held twice; the first output takes the place of the first input."""
    facts = waste(staging.open_jaxpr(jax.make_jaxpr(call)(*args)), {0: 0})
    return [fact for fact in facts if isinstance(fact, HeldTwice)]


def held_twice(call, *args):
    """Operations and leaves."""
    return [(fact.operation, *fact.leaves) for fact in facts_of(call, *args)]


BARRIER = jax.lax.optimization_barrier
LOOP = jax.lax.fori_loop
ROWS = {
    "nothing but a write": (None, lambda w, x: (w.at[3].set(x), x)),
    "what is written is read": (None, lambda w, x: (w.at[3].set(w[3] + w[4] + x), x)),
    "the new value is read": (None, lambda w, x: ((new := w.at[3].set(x)), new.sum())),
    "handed back": (None, lambda w, x: (BARRIER(w), w.sum())),
    "handed to a barrier, and to nothing else": (None, lambda w, x: (w.at[3].set(x), (x, BARRIER(w))[0])),
    "handed through a remat, and then written": ("read, then written", lambda w, x: ((both := jax.checkpoint(lambda w: (w, w.sum()))(w))[0].at[3].set(x), both[1])),
    "made anew, and read in no order": (None, lambda w, x: (jnp.tanh(w), w @ x)),
    "made anew": ("old and new at once", lambda w, x: ((new := jnp.tanh(w)), (new - w).sum())),
    "made anew, read by what the new one gave": ("old and new at once", lambda w, x: ((new := jnp.tanh(w)), w @ (new @ x))),
    "read": ("read, then written", lambda w, x: (w.at[3].set(x), w[5])),
    "added to": ("read, then written", lambda w, x: (w.at[3].add(x), w[5])),
    "read before the second write": ("read, then written", lambda w, x: (w.at[0].set(x).at[1].set(w[2]), x)),
    "read, in order": (None, lambda w, x: ((both := BARRIER((w, w[5])))[0].at[3].set(x), both[1])),
    "read after a barrier of the leaf alone": ("read, then written", lambda w, x: ((w := BARRIER(w)).at[3].set(x), w[5])),
    "read after the write, too": ("old and new at once", lambda w, x: ((new := w.at[3].set(x)), w[5], w @ jnp.tanh(new @ x))),
    "in a jit": ("read, then written", lambda w, x: jax.jit(lambda w: (w.at[3].set(x), w[5]))(w)),
    "of which one is in a jit": ("read, then written", lambda w, x: (jax.jit(lambda w: w.at[3].set(x))(w), w[5])),
    "in a remat": ("read, then written", lambda w, x: jax.checkpoint(lambda w: (w.at[3].set(x), w[5]))(w)),
    "in a scan": ("read, then written", lambda w, x: jax.lax.scan(lambda w, x: (w.at[3].set(x), w[5]), w, jnp.stack([x, x]))),
    "in a loop": ("read, then written", lambda w, x: LOOP(0, 4, lambda k, both: (both[0].at[k].set(x), both[0][k + 1]), (w, x))),
    "in a loop, in order": (None, lambda w, x: LOOP(0, 4, lambda k, both: ((w := both[0]).at[k].set(w[k] + x), both[1]), (w, x))),
    "made anew in a loop": ("old and new at once", lambda w, x: LOOP(0, 4, lambda k, both: ((new := jnp.tanh(both[0])), (new - both[0])[k]), (w, x))),
    "in a while loop": ("read, then written", lambda w, x: jax.lax.while_loop(lambda both: both[1].sum() < x.sum(), lambda both: (both[0].at[3].set(x), both[0][5]), (w, x))),
    "of another leaf": (None, lambda w, x: (x[None].at[0].set(w[3]), w[5])),
}  # fmt: skip


@pytest.mark.parametrize("name", ROWS)
def test_the_old_value_is_needed_beside_the_new_one_where_the_data_say_so(name):
    operation, call = ROWS[name]
    assert held_twice(call, jnp.ones((8, 8)), jnp.ones(8)) == ([(operation, 0)] if operation else [])


def test_the_line_is_that_of_what_needs_both():
    def reads(w, x):
        new, early = w.at[3].set(x), w[5]
        return new, early, w @ jnp.tanh(new @ x)

    (fact,) = facts_of(reads, jnp.ones((8, 8)), jnp.ones(8))
    assert fact.line == line(reads, "return new")


def casts(call, *args):
    """Operations that give all of an input in another dtype, and their types."""
    return [(fact.operation, *fact.types) for fact in waste(staging.open_jaxpr(jax.make_jaxpr(call)(*args)), {})]


def quantize(w):
    wide = w.astype(jnp.float32)
    scale = jnp.abs(wide).max() / 127
    return jnp.round(wide / scale).astype(jnp.int8), scale


def test_what_is_widened_to_quantize_it_is_no_waste():
    w = jnp.ones((4, 4), jnp.bfloat16)
    assert casts(quantize, w) == [("widened", "float32[4,4]")], "beside the leaf, which stays"
    assert held_twice(quantize, w) == [], "in its place"
    assert held_twice(lambda w: w.astype(jnp.float32) * 2, w) == [("widened", 0)]


def test_a_leaf_in_another_dtype_counts_where_it_is_wider_or_a_loop_needs_it():
    w = jnp.ones((4, 4), jnp.bfloat16)
    assert casts(lambda w: w.astype(jnp.float32), w) == [("widened", "float32[4,4]")]
    narrows = w.astype(jnp.float32)
    assert casts(lambda w: w.astype(jnp.bfloat16), narrows) == [], "mixed precision"
    assert casts(
        lambda w: LOOP(0, 4, lambda _, x: x @ w.astype(jnp.bfloat16), jnp.ones((4, 4), jnp.bfloat16)), narrows
    ) == [("cast for a loop", "bfloat16[4,4]")]
    assert (
        casts(lambda w: LOOP(0, 4, lambda k, x: x * w[k].astype(jnp.bfloat16), w[0].astype(jnp.bfloat16)), narrows)
        == []
    )


def loops_over(w):
    return jax.lax.scan(lambda h, w: (h + w, None), jnp.zeros(4, w.dtype), w)[0]


INNER = {
    "cast in one jit, taken by a loop in another": ("cast for a loop", lambda w: jax.jit(loops_over)(jax.jit(lambda w: w.astype(jnp.bfloat16))(w))),
    "reversed in a jit in a jit": ("reordered", lambda w: loops_over(jax.jit(jax.jit(lambda w: w[::-1]))(w))),
    "transposed in a remat": ("reordered", lambda w: loops_over(jax.checkpoint(lambda w: w.T)(w))),
    "two calls of one function, of which the second is the leaf": ("reordered", lambda w: (f := jax.jit(lambda w: w[::-1]), loops_over(f(w * 2) + 1), loops_over(f(w)))[1:]),
    "reversed and computed on": (None, lambda w: loops_over(jax.jit(lambda w: w[::-1] * 2)(w))),
}  # fmt: skip


@pytest.mark.parametrize("name", INNER)
def test_a_leaf_is_followed_through_inner_calls(name):
    operation, call = INNER[name]
    facts = waste(staging.open_jaxpr(jax.make_jaxpr(call)(jnp.ones((4, 4)))), {})
    assert [fact.operation for fact in facts] == ([operation] if operation else [])


class Recurrent(nnx.Module):
    """Over a batch of sequences, which flax or the call brings into the order of its steps."""

    def __init__(self, transposed):
        self.rnn, self.transposed = nnx.RNN(nnx.GRUCell(64, 64, rngs=nnx.Rngs(0))), transposed

    def __call__(self, x):
        return self.rnn(x.swapaxes(0, 1), time_major=True) if self.transposed else self.rnn(x)


@pytest.mark.slow
def test_what_flax_reorders_for_its_own_loop_is_nobodys_to_write_otherwise():
    x = jnp.ones((4, 512, 64))
    (piece,) = check(Recurrent(transposed=True), x, nesting="jit").advice
    assert "all of x once more, in another order for a loop" in piece
    assert check(Recurrent(transposed=False), x, nesting="jit").advice == ()


def test_part_of_a_leaf_and_what_was_computed_are_no_cast():
    w = jnp.ones((4, 4), jnp.bfloat16)
    assert casts(lambda w: w[0].astype(jnp.float32), w) == []
    assert casts(lambda w: (w + 1).astype(jnp.float32), w) == []
    for dtype in (jnp.int16, jnp.float8_e4m3fn):
        assert casts(lambda w: w.astype(jnp.float32), w.astype(dtype)) == [], "quantized on purpose"
    assert staging.REMATS <= staging.CALLS, "looked into"
