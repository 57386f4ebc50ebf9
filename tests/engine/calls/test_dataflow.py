"""What a jaxpr hands through: rewritten with its own value is unchanged, computed is changed."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pytest_nnxcheck.compat import staging
from pytest_nnxcheck.jaxprs import flow

W = jnp.ones((3, 3))


def sources(f, *args):
    return flow.sources(staging.open_jaxpr(jax.make_jaxpr(f)(*args)))


def in_scan(body):
    return lambda w, x: jax.lax.scan(lambda carry, _: (body(*carry), None), (w, x), None, length=2)[0]


def in_while(body):
    return lambda w, x: jax.lax.while_loop(lambda c: c[0] < 2, lambda c: (c[0] + 1, *body(*c[1:])), (0, w, x))[1:]


def in_cond(body):
    return lambda w, x: jax.lax.cond(x[0, 0] > 0, body, lambda w, x: (w, x), w, x)


WRAPPERS = {
    "plain": lambda f: f,
    "jit": jax.jit,
    "remat": jax.checkpoint,
    "scan": in_scan,
    "while": in_while,
    "cond": in_cond,
}


@pytest.mark.parametrize("outer", WRAPPERS)
@pytest.mark.parametrize("inner", WRAPPERS)
def test_an_input_is_followed_through_equations(outer, inner):
    wrapped = WRAPPERS[outer](WRAPPERS[inner](lambda w, x: (w, x @ w)))
    assert sources(wrapped, W, W) == (0, None)


def test_slices_that_are_stacked_again_are_the_whole():
    def scanned(stacked, x):
        return jax.lax.scan(lambda x, w: (x @ w, w), x, stacked)

    assert sources(scanned, jnp.ones((4, 3, 3)), W) == (None, 0)


def test_captured_constants_are_counted_once_and_inside_jits():
    table = np.ones((50, 2), np.float32)
    closed = jax.make_jaxpr(jax.jit(lambda x: x + table.sum() + jnp.asarray(table)[0, 0]))(W)
    assert [const.shape for const in flow.constants(closed)] == [(50, 2)]


def test_a_remat_in_a_scan_is_seen():
    block = jax.checkpoint(jnp.tanh)
    scanned = jax.make_jaxpr(lambda x: jax.lax.scan(lambda x, _: (block(x), None), x, None, length=2)[0])
    assert flow.remat_in_scan(scanned(W))
    assert not flow.remat_in_scan(jax.make_jaxpr(block)(W))


def product(precision=None, dtype=jnp.float32):
    x = jnp.ones((3, 3), dtype)
    return jax.make_jaxpr(jax.jit(lambda x: jnp.dot(x, x, precision=precision)))(x)


def convolution(precision=None):
    image = jnp.ones((1, 1, 3, 3))
    return jax.make_jaxpr(lambda x: jax.lax.conv(x, image, (1, 1), "SAME", precision=precision))(image)


@pytest.mark.parametrize("backend, eps", [("cpu", 2**-23), ("gpu", 2**-10), ("tpu", 2**-7)])
def test_a_chip_rounds_the_operands_of_products(backend, eps, monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    for made in (product, convolution):
        assert flow.lowest_precision(made()) == flow.lowest_precision(made(jax.lax.Precision.HIGH)) == eps
        assert flow.lowest_precision(made(jax.lax.Precision.HIGHEST)) == 2**-23
    assert flow.lowest_precision(jax.make_jaxpr(lambda x: x + x)(W)) == 2**-23
    assert flow.lowest_precision(product(dtype=jnp.complex64)) == (0 if backend == "cpu" else eps)


@pytest.mark.skipif(not hasattr(jax, "memory"), reason="this jax has no names of memories")
def test_what_one_call_puts_into_two_memories_moves_to_the_chip_in_part():
    places = (jax.memory.Space.Device, jax.memory.Space.Host)
    closed = jax.make_jaxpr(lambda *arrays: jax.device_put(arrays, places))(jnp.ones(4), jnp.ones(8))
    assert flow.moved_to_chip(closed) == (16,)


ALGORITHMS = {
    "TF32_TF32_F32": (2**-23, 2**-10),
    "TF32_TF32_F32_X3": (2**-23, 2**-23),
    "BF16_BF16_F32": (2**-23, 2**-7),
    "BF16_BF16_F32_X3": (2**-23, 2**-7),
    "F16_F16_F32": (2**-10, 2**-10),
    "F32_F32_F32": (2**-23, 2**-23),
}
"""The roundings of algorithms on a CPU and on chips."""


@pytest.mark.skipif(not hasattr(jax.lax, "DotAlgorithmPreset"), reason="this jax names no algorithms of products")
@pytest.mark.parametrize("name, roundings", ALGORITHMS.items())
@pytest.mark.parametrize("backend", ["cpu", "gpu", "tpu"])
def test_an_algorithm_of_a_product_rounds_in_its_own_way(name, roundings, backend, monkeypatch):
    if not hasattr(jax.lax.DotAlgorithmPreset, name):
        pytest.skip("this jax has no such algorithm")
    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    algorithm = jax.lax.DotAlgorithmPreset[name]
    assert flow.lowest_precision(product(algorithm)) == roundings[backend != "cpu"]
    # jax lowers a convolution without it.
    assert flow.lowest_precision(convolution(algorithm)) == flow.lowest_precision(convolution())


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_a_swap_is_no_identity_and_a_loop_or_a_branch_mixes_all_it_is_given(wrapper):
    mixes = wrapper not in ("plain", "jit", "remat")
    assert sources(WRAPPERS[wrapper](lambda w, x: (x, w)), W, W) == ((None, None) if mixes else (1, 0))
    jaxpr = staging.open_jaxpr(jax.make_jaxpr(WRAPPERS[wrapper](lambda w, x: (w + 1, x @ w)))(W, W))
    assert flow.origins(jaxpr) == ((0b11, 0b11) if mixes else (0b01, 0b11))
