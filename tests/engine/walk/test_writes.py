"""Writes that do not arrive: to Variables that were made in a trace that has ended, and those that a call gives up in silence."""

from __future__ import annotations

import contextlib

import flax
import jax
import jax.numpy as jnp
import pytest
from checking import broken, call, text
from flax import nnx
from healthy import FLAX, assign, numbers

from pytest_nnxcheck import check
from pytest_nnxcheck.compat import graph

X = numbers((3, 4))
ERROR = flax.errors.TraceContextError


class Built(nnx.Module):
    """Counts its calls in a layer that was built elsewhere."""

    def __init__(self, layer):
        self.layer = layer

    def __call__(self, x):
        return self.layer(x)


def smuggled(how):
    """A layer that was made inside of a transform, and kept; its arrays were replaced by concrete ones, past flax's check."""
    kept = []
    how(lambda: kept.append(nnx.BatchNorm(4, rngs=nnx.Rngs(0))))()
    fresh = dict(graph.raw_leaves(nnx.BatchNorm(4, rngs=nnx.Rngs(0))))
    for path, variable in graph.variables(kept[0]):
        graph.set_variable_value(variable, fresh[path])
    return Built(kept[0])


def shaped(f):
    return lambda: jax.eval_shape(lambda: f() or jnp.zeros(()))


def jitted(f):
    return jax.jit(lambda: f() or jnp.zeros(()))


refuses = pytest.mark.skipif(
    FLAX < (0, 10, 7), reason="earlier flax takes a trace that has ended for the one that runs"
)


@refuses
@pytest.mark.parametrize("how", [shaped, jitted])
@pytest.mark.parametrize("nesting", ["un-nested", "jit", "scan"])
def test_a_variable_that_was_made_in_a_trace_is_named(how, nesting):
    module = smuggled(how)
    with pytest.raises(ERROR):
        assign(module.layer.mean, jnp.ones(4))
    found = call(module, X, nesting=nesting)
    assert broken(found) == ["tracers"], text(found)
    assert "layer.mean" in text(found)
    assert "was made in a trace that has ended: flax refuses every write to it" in text(found)
    assert "build it outside of the transform" in text(found)


@refuses
def test_a_check_says_so_at_once():
    report = check(smuggled(shaped), X)
    assert [str(outcome.nesting) for outcome in report.outcomes] == ["un-nested"]
    assert not report.ok


@pytest.mark.parametrize("nesting", ["un-nested", "jit", "scan"])
def test_one_that_a_transform_handed_out_is_as_good_as_new(nesting):
    made = nnx.jit(lambda: nnx.BatchNorm(4, rngs=nnx.Rngs(0)))()
    assert call(Built(made), X, nesting=nesting).outcome.verdict == "held"
    assert call(Built(nnx.BatchNorm(4, rngs=nnx.Rngs(0))), X, nesting=nesting).outcome.verdict == "held"


class GivesUp(nnx.Module):
    """A power iteration that gives its write up where flax refuses it, as a published one does."""

    def __init__(self):
        self.u = nnx.BatchStat(jnp.ones(4))

    def __call__(self, x):
        with contextlib.suppress(ERROR):
            assign(self.u, jnp.asarray(self.u) * 2)
        return x * 2


class Writes(GivesUp):
    def __call__(self, x):
        assign(self.u, jnp.asarray(self.u) * 2)
        return x * 2


NOTE = "model.u did not move under {}: the un-nested call changes it"


@pytest.mark.skipif(FLAX < (0, 10, 7), reason="earlier flax takes the write of a captured module")
@pytest.mark.parametrize("nesting", ["jit[closure]", "scan[closure]", "remat[closure]"])
def test_a_write_that_is_given_up_is_a_note(nesting):
    found = call(GivesUp(), X, nesting=nesting)
    assert found.outcome.verdict == "held", text(found)
    assert NOTE.format(nesting) in found.outcome.notes


@pytest.mark.parametrize("nesting", ["jit", "jit[functional]", "scan", "vmap"])
@pytest.mark.parametrize("shortcuts", ["on", "off"])
@pytest.mark.parametrize("make", [GivesUp, Writes])
def test_where_it_moves_there_is_none(make, nesting, shortcuts):
    found = call(make(), X, nesting=nesting, shortcuts=shortcuts)
    assert found.outcome.verdict == "held", text(found)
    assert not found.outcome.notes
