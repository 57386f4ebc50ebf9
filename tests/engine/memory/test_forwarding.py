"""A program in which nothing is handed back unchanged computes what the plain one computes, and hands nothing through."""

from __future__ import annotations

import time
from dataclasses import replace

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pytest_nnxcheck.compat import staging
from pytest_nnxcheck.jaxprs import copies

LEAVES = 3


def in_scan(body):
    def wrapped(*leaves):
        return jax.lax.scan(lambda carry, _: (body(*carry), None), leaves, None, length=2)[0]

    return wrapped


def over_slices(body):
    """The leaves are taken slice by slice, and stacked anew."""

    def wrapped(*leaves):
        return jax.lax.scan(lambda total, rows: (total + rows[0].sum(), body(*rows)), jnp.int32(0), leaves)[1]

    return wrapped


def in_while(body):
    def wrapped(*leaves):
        return jax.lax.while_loop(lambda c: c[0] < 2, lambda c: (c[0] + 1, *body(*c[1:])), (0, *leaves))[1:]

    return wrapped


def in_cond(body):
    def wrapped(*leaves):
        return jax.lax.cond(leaves[0].sum() > 0, body, lambda *leaves: leaves, *leaves)

    return wrapped


def behind_barrier(body):
    return lambda *leaves: jax.lax.optimization_barrier(tuple(body(*leaves)))


WRAPPERS = (in_scan, over_slices, in_while, in_cond, jax.jit, jax.checkpoint, behind_barrier)


def applied(steps):
    """A function of all leaves, made of steps: each changes one leaf, exchanges two, or runs inner steps under a transform."""

    def program(*leaves):
        leaves = list(leaves)
        for kind, *rest in steps:
            if kind == "change":
                leaves[rest[0]] = leaves[rest[0]] * 3 + leaves[rest[1]]
            elif kind == "exchange":
                leaves[rest[0]], leaves[rest[1]] = leaves[rest[1]], leaves[rest[0]]
            else:
                leaves = list(rest[0](applied(rest[1]))(*leaves))
        return tuple(leaves)

    return program


number = st.integers(0, LEAVES - 1)
step = st.tuples(st.sampled_from(["change", "exchange"]), number, number)
programs = st.recursive(
    st.lists(step, max_size=2),
    lambda inner: st.lists(st.one_of(step, st.tuples(st.just("nest"), st.sampled_from(WRAPPERS), inner)), max_size=3),
    max_leaves=4,
)


@pytest.mark.slow
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(programs)
def test_the_forwarded_program_computes_the_same(steps):
    leaves = [jnp.arange(8, dtype=jnp.int32).reshape(4, 2) + 10 * number for number in range(LEAVES)]
    closed = jax.make_jaxpr(applied(steps))(*leaves)
    plain = copies.forwarded(closed)
    want, have = (jax.jit(jax.extend.core.jaxpr_as_fun(jaxpr))(*leaves) for jaxpr in (closed, plain))
    for one, other in zip(want, have, strict=True):
        np.testing.assert_array_equal(one, other)


def read(array, row, rows=1):
    return jax.lax.dynamic_slice(array, (row, jnp.uint32(0)), (rows, 3))


def write(array, part, row):
    return jax.lax.dynamic_update_slice(array, part, (row, jnp.uint32(0)))


def written(array, row):
    return write(array, jax.lax.tanh(read(array, row)), row)


PUT_BACK = {
    "slice": lambda array, row: write(array, read(array, row), row),
    "slice_read_in_a_jit": lambda array, row: write(array, jax.jit(read)(array, row), row),
    "slice_with_an_axis_less_and_one_more": lambda array, row: write(array, read(array, row).squeeze(0)[None], row),
    "slice_twice": lambda array, row: write(write(array, read(array, row), row), read(array, row), row),
}
CHANGED = {
    "moved": lambda array, row: write(array, read(array, row), row + 1),
    "changed": written,
    # The second call makes its variables where those of the first call lay.
    "changed_in_a_jit_that_is_called_again": lambda array, row: [jax.jit(written)(array, row) for _ in range(2)][-1],
    "another_array": lambda array, row: write(array, read(array * 2, row), row),
    "row_written_in_between": lambda array, row: write(written(array, row), read(array, row), row),
    "transposed": lambda array, row: write(
        array, jax.lax.reshape(read(array, row, rows=3), (3, 3), dimensions=(1, 0)), row
    ),
    "repeated": lambda array, row: write(array, jnp.broadcast_to(read(array, row)[:, :1], (1, 3)), row),
}


@pytest.mark.parametrize("case", [*PUT_BACK, *CHANGED])
def test_an_array_that_gets_its_own_slice_back_is_the_array_and_any_other_is_not(case):
    array, row = jnp.arange(12.0).reshape(4, 3), jnp.uint32(0)
    closed = jax.make_jaxpr((PUT_BACK | CHANGED)[case])(array, row)
    plain = copies.forwarded(closed)
    want, have = (jax.extend.core.jaxpr_as_fun(jaxpr)(array, row) for jaxpr in (closed, plain))
    np.testing.assert_array_equal(want, have)
    opened = staging.open_jaxpr(plain)
    assert (opened.outvars[0] is opened.invars[0]) == (case in PUT_BACK)


@pytest.mark.parametrize("wrapper", [in_scan, over_slices, in_while, in_cond, jax.jit, jax.checkpoint])
def test_a_leaf_that_is_handed_through_comes_from_where_it_came_from(wrapper):
    leaves = [jnp.ones((4, 2), jnp.int32)] * LEAVES
    # jax itself leaves out what a body hands on as it is, and not what a remat in it does.
    closed = jax.make_jaxpr(wrapper(jax.checkpoint(applied([("change", 1, 0)]))))(*leaves)
    jaxpr = staging.open_jaxpr(copies.forwarded(closed))
    assert [var is jaxpr.invars[number] for number, var in enumerate(jaxpr.outvars)] == [True, False, True]
    # A call is inlined: what it hands through costs nothing.
    assert copies.handed_bytes(closed) == (0 if wrapper in (jax.jit, jax.checkpoint) else 2 * 4 * 2 * 4)


def test_the_order_of_a_barrier_stays():
    leaves = [jnp.ones((4, 2), jnp.int32)] * LEAVES
    jaxpr = staging.open_jaxpr(copies.forwarded(jax.make_jaxpr(behind_barrier(applied([])))(*leaves)))
    assert [eqn.primitive.name for eqn in jaxpr.eqns] == ["optimization_barrier"]
    inside = staging.open_jaxpr(copies.forwarded(jax.make_jaxpr(jax.jit(behind_barrier(applied([]))))(*leaves)))
    assert [var in inside.invars for var in inside.outvars] == [False] * LEAVES


@pytest.mark.slow
def test_a_long_program_is_forwarded_in_no_time():
    """Each of its variables is looked at once, and not compared with all others."""

    def program(array, part):
        for _ in range(5000):
            part = jax.lax.add(jax.lax.sin(part), part)
        return write(array, part, jnp.uint32(0))

    closed = jax.make_jaxpr(program)(jnp.ones((4, 3)), jnp.ones((1, 3)))
    before = time.process_time()
    assert len(staging.open_jaxpr(copies.forwarded(closed)).eqns) == 10_001
    assert time.process_time() - before < 3  # 0.05 s; a comparison with all others took 7 s


def test_inputs_that_come_out_more_than_once_are_counted():
    closed = jax.make_jaxpr(lambda w, x: (w, x + 1, w, w))(jnp.ones(2), jnp.ones(2))
    program = copies.TracedProgram(closed, [], donated=(0, 1), outputs=range(2, 4), returned={2: 8, 3: 8})
    assert program.returned_bytes() == 16
    assert replace(program, donated=()).returned_bytes() == 0
