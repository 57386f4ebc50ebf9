"""The verdict on a marked test is the same after another test, before it, and alone: a cache that the other test fills decides nothing."""

from __future__ import annotations

import pytest

HEAD = """
import functools

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx


class Model(nnx.Module):
    def __init__(self, table):
        self.linear, self.table = nnx.Linear(4, 4, rngs=nnx.Rngs(0)), table

    def __call__(self, x):
        return self.linear(x) + self.table(4)
"""

TESTS = """
def test_eager():
    for table in (table_of_jax, table_of_numpy):
        assert Model(table)(jnp.ones((2, 4))).shape == (2, 4)


marked = pytest.mark.nnx_invariants(effort="quick", transforms="jit", styles="argument")


@marked
def test_leaky(nnx_wrap):
    assert nnx_wrap(Model(table_of_jax))(jnp.ones((2, 4))).shape == (2, 4)


@marked
def test_healthy(nnx_wrap):
    assert nnx_wrap(Model(table_of_numpy))(jnp.ones((2, 4))).shape == (2, 4)
"""

CACHES = {
    "cache": """
@functools.cache
def table_of_jax(length):
    return jnp.arange(float(length))


@functools.cache
def table_of_numpy(length):
    return np.arange(float(length), dtype=np.float32)
""",
    "cached property": """
class Tables:
    @functools.cached_property
    def of_jax(self):
        return jnp.arange(4.0)

    @functools.cached_property
    def of_numpy(self):
        return np.arange(4.0, dtype=np.float32)


TABLES = Tables()


def table_of_jax(length):
    return TABLES.of_jax


def table_of_numpy(length):
    return TABLES.of_numpy
""",
    "dict": """
TABLES = {}


def table_of_jax(length):
    if ("jax", length) not in TABLES:
        TABLES["jax", length] = jnp.arange(float(length))
    return TABLES["jax", length]


def table_of_numpy(length):
    if ("numpy", length) not in TABLES:
        TABLES["numpy", length] = np.arange(float(length), dtype=np.float32)
    return TABLES["numpy", length]
""",
}

KEPT = {"cache": "model.table.cache[4]", "cached property": "TABLES.of_jax", "dict": "TABLES[('jax', 4)]"}
"""The path of the tracer that each cache keeps."""

ORDERS = {
    "after": ["test_eager", "test_leaky", "test_healthy"],
    "before": ["test_healthy", "test_leaky", "test_eager"],
    "leaky alone": ["test_leaky"],
    "healthy alone": ["test_healthy"],
}


@pytest.mark.parametrize(
    "cache, order",
    [
        *(("cache", order) for order in ("after", "before")),
        ("dict", "after"),
        *(pytest.param("cache", order, marks=pytest.mark.slow) for order in list(ORDERS)[2:]),
        ("cached property", "after"),
        *(pytest.param("cached property", order, marks=pytest.mark.slow) for order in list(ORDERS)[1:]),
        *(pytest.param("dict", order, marks=pytest.mark.slow) for order in list(ORDERS)[1:]),
    ],
)
def test_a_verdict_does_not_depend_on_the_tests_before_it(pytester, inner_args, cache, order):
    tests = ORDERS[order]
    pytester.makepyfile(test_model=HEAD + CACHES[cache] + TESTS)
    chosen = [f"test_model.py::{test}" for test in tests]
    result = pytester.runpytest_inprocess(*inner_args, "-v", "-p", "no:randomly", "-p", "no:cacheprovider", *chosen)
    ends = {test: "FAILED" if test == "test_leaky" else "PASSED" for test in tests}
    result.stdout.fnmatch_lines([f"test_model.py::{test} {end}*" for test, end in ends.items()])
    if "test_leaky" in tests:
        assert f"FAILED test_model.py::test_leaky - nnx tracers: {KEPT[cache]}" in result.stdout.str()
