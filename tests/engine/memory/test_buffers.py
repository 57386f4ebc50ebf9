"""What makes up the peak of a compiled program: totals, names, lines, and which buffers are copies of the state."""

from __future__ import annotations

import bugs
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checking import near, source
from compiling import P, X, memory_of, stacked_again
from flax import nnx
from jax import lax

STATE = 0


def state_copies(memory, parameters):
    """The buffers that are said to hold all of one of these parameters once more."""
    return tuple(
        buffer
        for buffer in memory.buffers
        if buffer.whole and len(buffer.parameters) == 1 and buffer.parameters[0] in parameters
    )


def functional(model, calls=1):
    """``run(state, x)`` that merges the model and calls it, and the state: flat parameter numbers are those of the leaves."""
    graphdef, state = nnx.split(model)

    def run(state, x):
        merged = nnx.merge(graphdef, state)
        for _ in range(calls):
            x = merged(x)
        return x

    return run, state


# Totals


@pytest.mark.parametrize("shape", [(64, 128), (1, 4096), (300, 128)])
def test_captured_constants_are_counted_exactly(shape):
    """With one row jax 0.12 writes the constant into a fusion, and no allocation counts it."""
    weights = np.random.default_rng(0).random(shape, np.float32)
    memory = memory_of(lambda x: jnp.asarray(weights) @ x, jnp.ones(shape[1]))
    passed = memory_of(lambda weights, x: weights @ x, weights, jnp.ones(shape[1]))
    assert memory.constants == weights.nbytes
    assert passed.constants == 0
    assert memory.peak == passed.peak
    assert [buffer.bytes for buffer in memory.buffers if buffer.kind == "constant"] == [weights.nbytes]


def test_peak_is_the_sum_without_what_is_aliased():
    memory = memory_of(lambda p, x: (p + x, x.sum()), P, X, donate=(0,))
    assert memory.named
    assert memory.aliased == P.nbytes
    assert memory.peak == memory.arguments + memory.outputs + memory.temporaries + memory.constants - P.nbytes


def scans(calls):
    run, state = functional(bugs.ScanOverRemat(nnx.Rngs(0)), calls)
    return run, state, *bugs.inputs_scan_over_remat()


PROGRAMS = {
    "one scan": lambda: scans(1),
    "three scans": lambda: scans(3),
    "convolutions": lambda: (bugs.ten_convolutions, *bugs.inputs_926()),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_buffers_cover_the_totals(name):
    memory = memory_of(*PROGRAMS[name]())
    of = {kind: sum(b.bytes for b in memory.buffers if b.kind == kind) for kind in ("argument", "output", "temporary")}
    assert of["argument"] == memory.arguments
    assert 0.97 * memory.outputs <= of["output"] <= memory.outputs
    assert 0.97 * memory.temporaries <= of["temporary"] <= memory.temporaries
    assert list(memory.buffers) == sorted(memory.buffers, key=lambda buffer: -buffer.bytes)


# Names and lines


def two_products(p, x):
    q = p @ p.T
    return q @ (p + x)


def test_a_buffer_has_the_shape_and_the_line_of_the_user():
    memory = memory_of(two_products, P, X)
    lines = [f"{near(__file__)}:{two_products.__code__.co_firstlineno + n}" for n in (1, 2)]
    found = [(b.shape, b.kind, source(b)) for b in memory.buffers if b.shape in {"float32[64,64]", "float32[64,128]"}]
    assert ("float32[64,64]", "temporary", lines[0]) in found
    assert ("float32[64,128]", "output", lines[1]) in found
    assert ("float32[64,128]", "argument", "") in found
    assert [buffer.parameters for buffer in memory.buffers if buffer.kind == "argument"] == [(0,), (1,)]


# Copies of the state


def in_a_loop(p, x):
    """The state is carried through a loop that leaves it alone."""

    def body(carry):
        step, p, x = carry
        return step + 1, p, jnp.tanh(p.T @ (p @ x))

    return lax.while_loop(lambda carry: carry[0] < 3, body, (0, p, x))[1:]


COPIES = {
    "returned": lambda p, x: (p, x + 1),
    "behind a barrier": lambda p, x: (lax.optimization_barrier(p), x + 1),
    "carried by a loop and returned": in_a_loop,
    "reshaped": lambda p, x: (p.reshape(128, 64), x + 1),
    "in both branches": lambda p, x: lax.cond(x[0] > 0, lambda p: p, lambda p: p, p),
    "stacked again by a scan": stacked_again,
}


@pytest.mark.parametrize("name", COPIES)
def test_whole_copies_of_a_parameter_are_found(name):
    memory = memory_of(COPIES[name], P, X)
    (copy,) = state_copies(memory, {STATE})
    assert (copy.bytes, copy.parameters, copy.kind) == (P.nbytes, (STATE,), "output")
    assert state_copies(memory, {1, 2, 3}) == ()


@pytest.mark.parametrize("name", ["returned", "behind a barrier", "carried by a loop and returned"])
def test_a_donated_parameter_that_is_returned_is_no_copy(name):
    memory = memory_of(COPIES[name], P, X, donate=(0,))
    assert memory.named
    assert memory.aliased == P.nbytes
    assert state_copies(memory, {STATE}) == ()


def scanned(step):
    """The sum of a state that a scan carries and changes: the copy it starts from is what the changes are written to."""

    def program(p, x):
        return lax.scan(lambda p, i: (step(p, x, i), None), p, jnp.arange(3))[0].sum()

    return program


def factored(p, x):
    """LAPACK wants columns first: XLA turns the matrix by an instruction that it calls a copy."""
    return lax.linalg.qr(p, full_matrices=False)[1]


def one_row_over_and_over(p, x):
    return jnp.broadcast_to(lax.dynamic_index_in_dim(p, x[0].astype(int)), p.shape)


NO_COPIES = {
    "factored": factored,
    "one row over and over": one_row_over_and_over,
    "transposed": lambda p, x: p.T,
    "transposed and flattened": lambda p, x: p.T.reshape(64, 128),
    "reversed": lambda p, x: p[::-1],
    "converted": lambda p, x: p.astype(jnp.bfloat16),
    "converted and back": lambda p, x: p.astype(jnp.bfloat16).astype(jnp.float32),
    "scaled": lambda p, x: p * 2,
    "a row written": lambda p, x: p.at[3].set(x),
    "one branch changes it": lambda p, x: lax.cond(x[0] > 0, lambda p: p, lambda p: p * 2, p),
    "doubled along an axis": lambda p, x: jnp.stack([p, p]),
    "mapped": lambda p, x: jax.vmap(lambda i: (p, x * i))(jnp.arange(2.0)),
    "half of it": lambda p, x: p[:32],
    "read by a loop": lambda p, x: in_a_loop(p, x)[1],
    "updated in a scan": scanned(lambda p, x, i: p - jnp.sin(p * i)),
    "a row updated in a scan": scanned(lambda p, x, i: lax.dynamic_update_slice(p, p.sum(0)[None] * x, (i, 0))),
}


@pytest.mark.parametrize("name", NO_COPIES)
def test_what_is_computed_from_a_parameter_is_no_copy(name):
    memory = memory_of(NO_COPIES[name], P, X)
    assert memory.named
    assert state_copies(memory, {STATE}) == ()


JOINED = {
    "behind one another": lambda p, q, x: x @ jnp.concatenate([p, q], -1),
    "flattened": lambda p, q, x: jax.nn.relu(jnp.concatenate([p.ravel(), q.ravel()]) @ jnp.ones((16384, 3))) + x[0, :3],
    "stacked for a scan": lambda p, q, x: lax.scan(lambda x, w: (jnp.tanh(x @ w) @ w.T, None), x, jnp.stack([p, q]))[0],
}


@pytest.mark.parametrize("name", JOINED)
def test_parameters_that_are_joined_into_one_array_are_named(name):
    """Kept alive by a barrier: XLA would otherwise compute what needs no array at all."""
    memory = memory_of(lambda p, q, x: lax.optimization_barrier(JOINED[name](p, q, x)), P, P + 1, jnp.ones((3, 64)))
    (copy,) = [buffer for buffer in memory.buffers if len(buffer.parameters) > 1]
    assert (copy.bytes, copy.parameters, copy.whole) == (2 * P.nbytes, (0, 1), True)
    assert (copy.kind, "concatenate" in copy.through) == ("temporary", True)
    assert copy not in state_copies(memory, {0, 1}), "some join them on purpose"


NOT_JOINED = {
    "each by itself": lambda p, q, x: jnp.concatenate([x @ p, x @ q], -1),
    "one is computed": lambda p, q, x: x @ jnp.concatenate([p, q * 2], -1),
    "one beside itself": lambda p, q, x: x @ jnp.concatenate([p, p], -1),
    "one or the other": lambda p, q, x: x @ lax.cond(x[0, 0] > 0, lambda: p, lambda: q),
    "one rolled": lambda p, q, x: x @ jnp.roll(p, x[0, 0].astype(int), 0),
    "half of each": lambda p, q, x: x @ jnp.concatenate([p[:, :64], q[:, 64:]], -1),
}


@pytest.mark.parametrize("name", NOT_JOINED)
def test_what_is_not_all_of_several_parameters_is_not_told_as_them(name):
    memory = memory_of(NOT_JOINED[name], P, P + 1, jnp.ones((3, 64)))
    assert memory.named
    assert not any(len(buffer.parameters) > 1 or "concatenate" in buffer.through for buffer in memory.buffers)


def test_two_parameters_that_change_places_are_no_copies():
    memory = memory_of(lambda p, q: lax.fori_loop(0, 3, lambda i, pair: (pair[1], pair[0]), (p, q)), P, P + 1)
    assert memory.temporaries >= 2 * P.nbytes
    assert state_copies(memory, {0, 1}) == ()


def test_a_part_of_a_parameter_is_named_and_is_not_whole():
    run, state = functional(bugs.ScanOverRemat(nnx.Rngs(0), how="functional"))
    memory = memory_of(run, state, *bugs.inputs_scan_over_remat())
    (part,) = [buffer for buffer in memory.buffers if buffer.shape == "float32[128,128]"]
    assert (part.parameters, part.whole) == ((0,), False)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "int8", "uint32", "bool", "complex64", "float8_e4m3fn"])
def test_dtypes_are_named_as_in_jax(dtype):
    memory = memory_of(lambda x: x, jnp.zeros((3, 5), dtype))
    assert memory.buffers[0].shape == f"{dtype}[3,5]"
