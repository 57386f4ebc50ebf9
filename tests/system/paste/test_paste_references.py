"""Programs whose state is in references show what the check found, and hold where it held."""

from __future__ import annotations

import pytest
from pasted_programs import run_programs

from pytest_nnxcheck.compat import flax_modes

pytestmark = pytest.mark.skipif(not flax_modes.takes_refs(), reason="this jax and flax take no models in references")
SUITE = """
import jax.numpy as jnp
import pytest
from flax import nnx

X = jnp.ones((2, 4))


class Counts(nnx.Module):
    def __init__(self):
        self.count = nnx.Variable(jnp.zeros((2, 4)), ref=True)
        self.log = nnx.static([])


def replaces(model, x):
    model.count = nnx.Variable(model.count[...] + x, ref=True)
    return 2 * x


def keeps(model, x):
    model.count[...] += x
    model.log.append(x)
    return 2 * x


def counts(model, x):
    model.count[...] += x
    return 2 * x


@pytest.mark.nnx_invariants(transforms="jit", max_examples=0)
def test_donation(nnx_wrap):
    nnx_wrap(replaces)(Counts(), X)


@pytest.mark.nnx_invariants(transforms="jit", max_examples=0)
def test_tracers(nnx_wrap):
    nnx_wrap(keeps)(Counts(), X)


@pytest.mark.nnx_invariants(transforms="remat", max_examples=0, invariants="parity", modes="graph")
def test_parity(nnx_wrap):
    nnx_wrap(counts)(Counts(), X)


@pytest.mark.nnx_invariants(transforms="jit,vmap", max_examples=0, modes="ref", memory_budget="1B")
def test_memory(nnx_wrap):
    norm = nnx.BatchNorm(4, rngs=nnx.Rngs(0))
    norm.nothing, norm.tree = nnx.Variable(None), nnx.Variable({"a": jnp.zeros(2)})
    nnx_wrap(norm)(X)


@pytest.mark.nnx_invariants(transforms="jit", max_examples=0, invariants="parity", modes="tree")
def test_replaced(nnx_wrap):
    nnx_wrap(replaces)(Counts(), X)
"""


def test_each_program_breaks_as_its_test_did(inner, pytester):
    inner(SUITE, "--nnx-styles=argument").assert_outcomes(failed=5)
    programs = sorted(pytester.path.glob(".pytest_cache/d/nnxcheck/*/*.py"))
    said = {path.parent.name: text.partition("\n")[0] for path, (_, text) in run_programs(programs).items()}
    assert len(said) == 5
    of_test = {
        "donation": "donation",
        "tracers": "tracers",
        "parity": "parity",
        "memory": "memory",
        "replaced": "parity",
    }
    for test, invariant in of_test.items():
        (text,) = (text for name, text in said.items() if f"test_{test}" in name)
        assert text == f"nnx invariant broken: {invariant}"
