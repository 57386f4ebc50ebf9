"""Facts of a jaxpr that advice is made of: leaves that are held twice, stacks that nobody reads, leaves in another dtype."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from pytest_nnxcheck.compat import primitives, staging
from pytest_nnxcheck.jaxprs.waste import waste

W = jnp.ones((8, 64, 64))


def facts_of(call, *args):
    """All facts; the first output takes the place of the first input."""
    return waste(staging.open_jaxpr(jax.make_jaxpr(call)(*args)), {0: 0})


def held_twice(call, *args):
    """Operations and leaves."""
    return [(fact.operation, *fact.leaves) for fact in facts_of(call, *args).twice]


BARRIER = jax.lax.optimization_barrier
LOOP = jax.lax.fori_loop
ROWS = {
    "nothing but a write": (None, lambda w, x: (w.at[3].set(x), x)),
    "what is written is read": (None, lambda w, x: (w.at[3].set(w[3] + w[4] + x), x)),
    "the new value is read": (None, lambda w, x: ((new := w.at[3].set(x)), new.sum())),
    "handed back": (None, lambda w, x: (BARRIER(w), w.sum())),
    "handed to a barrier, and to nothing else": (None, lambda w, x: (w.at[3].set(x), (x, BARRIER(w))[0])),
    "handed through a remat, and then written": (
        None,
        lambda w, x: ((both := jax.checkpoint(lambda w: (w, w.sum()))(w))[0].at[3].set(x), both[1]),
    ),
    "made anew, and read in no order": (None, lambda w, x: (jnp.tanh(w), w @ x)),
    "made anew": ("old and new at once", lambda w, x: ((new := jnp.tanh(w)), (new - w).sum())),
    "made anew, read by what the new one gave": (
        "old and new at once",
        lambda w, x: ((new := jnp.tanh(w)), w @ (new @ x)),
    ),
    "read": ("read, then written", lambda w, x: (w.at[3].set(x), w[5])),
    "added to": ("read, then written", lambda w, x: (w.at[3].add(x), w[5])),
    "read before the second write": ("read, then written", lambda w, x: (w.at[0].set(x).at[1].set(w[2]), x)),
    "read, in order": (None, lambda w, x: ((both := BARRIER((w, w[5])))[0].at[3].set(x), both[1])),
    "read after a barrier of the leaf alone": (
        "read, then written",
        lambda w, x: ((w := BARRIER(w)).at[3].set(x), w[5]),
    ),
    "read after the write, too": (
        "old and new at once",
        lambda w, x: ((new := w.at[3].set(x)), w[5], w @ jnp.tanh(new @ x)),
    ),
    "in a jit": ("read, then written", lambda w, x: jax.jit(lambda w: (w.at[3].set(x), w[5]))(w)),
    "of which one is in a jit": ("read, then written", lambda w, x: (jax.jit(lambda w: w.at[3].set(x))(w), w[5])),
    "in a remat": ("read, then written", lambda w, x: jax.checkpoint(lambda w: (w.at[3].set(x), w[5]))(w)),
    "in a scan": (
        "read, then written",
        lambda w, x: jax.lax.scan(lambda w, x: (w.at[3].set(x), w[5]), w, jnp.stack([x, x])),
    ),
    "in a loop": (
        "read, then written",
        lambda w, x: LOOP(0, 4, lambda k, both: (both[0].at[k].set(x), both[0][k + 1]), (w, x)),
    ),
    "in a loop, in order": (
        None,
        lambda w, x: LOOP(0, 4, lambda k, both: ((w := both[0]).at[k].set(w[k] + x), both[1]), (w, x)),
    ),
    "made anew in a loop": (
        "old and new at once",
        lambda w, x: LOOP(0, 4, lambda k, both: ((new := jnp.tanh(both[0])), (new - both[0])[k]), (w, x)),
    ),
    "in a while loop": (
        "read, then written",
        lambda w, x: jax.lax.while_loop(
            lambda both: both[1].sum() < x.sum(), lambda both: (both[0].at[3].set(x), both[0][5]), (w, x)
        ),
    ),
    "of another leaf": (None, lambda w, x: (x[None].at[0].set(w[3]), w[5])),
}


@pytest.mark.parametrize("name", ROWS)
def test_the_old_value_is_needed_beside_the_new_one_where_the_data_say_so(name):
    operation, call = ROWS[name]
    assert held_twice(call, jnp.ones((8, 8)), jnp.ones(8)) == ([(operation, 0)] if operation else [])


def stacked_anew(body, steps=3):
    call = jax.jit(lambda stack, x: jax.lax.scan(body, x, stack)[::-1])
    return held_twice(call, jnp.ones((steps, 5)), jnp.ones(())) == [("stacked anew", 0)]


def test_a_stack_of_which_each_step_writes_a_part_is_stacked_anew_and_no_other():
    update = jax.jit(lambda old, h: old.at[0].set(h))
    assert stacked_anew(lambda h, old: (h, old.at[0].set(h)))
    assert stacked_anew(lambda h, old: (h, update(old, h)))
    assert stacked_anew(lambda h, old: (h, BARRIER(old).at[0].set(h)))
    assert stacked_anew(lambda h, old: (h, update(update(old, h), h).at[1].add(h)))
    assert not stacked_anew(lambda h, old: (h, old.at[0].set(h)), steps=1)
    assert not stacked_anew(lambda h, old: (h, old * 0.9)), "other values as a whole, as the mean of a norm"
    assert not stacked_anew(lambda h, old: (h, jnp.zeros(5).at[0].set(old[1]))), "a new array"
    assert not stacked_anew(lambda h, old: (h + old.sum(), BARRIER(old))), "handed on"


def test_what_is_joined_has_all_of_each_leaf_and_nothing_else():
    v = jnp.ones((2, 64, 64))
    assert held_twice(lambda w, v: jnp.concatenate([w, v]) + 1, W, v) == [("joined", 0, 1)]
    assert held_twice(lambda w, v: jnp.stack([v, w[:2], w[2:4], w[4:6], w[6:]]) + 1, W, v) == [("joined", 0, 1)]
    assert held_twice(lambda w, v: jnp.concatenate([w[4:], w[:4]]) + 1, W, v) == [("cut and joined again", 0)]
    assert held_twice(lambda w, v: jnp.concatenate([w.at[1].set(1)[4:], w[:4]]) + 1, W, v) == [
        ("cut and joined again", 0)
    ]
    assert held_twice(lambda w, v: jnp.concatenate([w[4:], v]) + 1, W, v) == []
    assert held_twice(lambda w, v: jnp.concatenate([w[2:], v * 2]) + 1, W, v) == []
    assert held_twice(lambda w, v: jnp.concatenate([jnp.broadcast_to(w[0], v.shape), w[2:]]) + 1, W, v) == []


def test_every_step_that_is_read_makes_a_stack_no_waste():
    def steps(x, read):
        return read(jax.lax.scan(lambda h, _: (h * 2, h), x, None, length=5)[1])

    x = jnp.ones(3)
    assert [stack.read for stack in facts_of(lambda x: steps(x, lambda every: every[-1]), x).stacks] == [True]
    assert [stack.read for stack in facts_of(lambda x: steps(x, lambda every: x), x).stacks] == [False]
    assert facts_of(lambda x: steps(x, lambda every: every.sum(0)), x).stacks == ()
    assert facts_of(lambda x: steps(x, lambda every: every), x).stacks == ()


def test_part_of_a_leaf_and_what_was_computed_are_no_recast():
    w = jnp.ones((4, 4), jnp.bfloat16)
    assert len(facts_of(lambda w: w.astype(jnp.float32), w).recasts) == 1
    assert facts_of(lambda w: w[0].astype(jnp.float32), w).recasts == ()
    assert facts_of(lambda w: (w + 1).astype(jnp.float32), w).recasts == ()
    for dtype in (jnp.int16, jnp.float8_e4m3fn):
        assert facts_of(lambda w: w.astype(jnp.float32), w.astype(dtype)).recasts == (), "quantized on purpose"
    assert primitives.REMATS <= primitives.CALLS, "looked into"
