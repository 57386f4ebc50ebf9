"""Subjects without values, of any size: compiled and never run, with the verdicts and the peaks of the real ones."""

from __future__ import annotations

import resource

import jax
import jax.numpy as jnp
import pytest
from bugs import ScanOverRemat, call_twice, inputs_scan_over_remat
from checking import Example, broken, call, models, text
from flax import nnx
from healthy import FLAX, HEALTHY, assign, numbers
from leaky import LEAKY

from pytest_nnxcheck import CheckError, check

COMPILED = ["jit > scan", "jit[functional] > vmap[functional] > remat", "jit > call_first"]
TRACED = ["while_loop > remat", "eval_shape > scan", "vmap[functional] > remat[functional] > jit"]


def abstract(tree):
    """The tree with every array in it a `jax.ShapeDtypeStruct`."""
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), tree)


@pytest.mark.slow
@pytest.mark.parametrize("name", models({"batch_norm_train", "dropout", "scan_over_layers"}))
def test_a_healthy_model_has_the_same_verdicts_and_peaks_without_values(name):
    real, twin = Example(), Example()
    for nesting in COMPILED + TRACED:
        case, bare = HEALTHY[name](), HEALTHY[name]()  # two: a nesting that is traced leaves no values in its module
        found = call(case.subject, *case.args, nesting=nesting, example=real)
        same = call(bare.subject, *abstract(bare.args), nesting=nesting, example=twin)
        assert (same.outcome.verdict, same.outcome.peak) == ("held", found.outcome.peak), text(same)
        assert abstract(found.output) == same.output


@pytest.mark.parametrize("name", ["class_attribute", "closure_cell", "raises_afterwards"])
def test_a_leak_is_found_without_values(name):
    leaky = LEAKY[name].leaky()
    found = call(leaky.subject, *abstract(leaky.args), nesting="jit")
    assert broken(found)[:1] == ["tracers"], text(found)
    assert LEAKY[name].path in text(found)


class Block(nnx.Module):
    def __init__(self, width, rngs):
        self.linear = nnx.Linear(width, width, rngs=rngs)
        self.norm = nnx.BatchNorm(width, rngs=rngs)
        self.drop = nnx.Dropout(0.1, rngs=rngs)

    def __call__(self, x):
        return x + self.drop(self.norm(self.linear(x)))


@pytest.mark.slow
@pytest.mark.parametrize("effort", [{"effort": "quick"}, pytest.param({"max_examples": 5}, marks=pytest.mark.full)])
def test_a_module_of_200_gigabytes_is_checked_and_nothing_is_allocated(effort):
    width = 220_000
    block = nnx.eval_shape(lambda: Block(width, nnx.Rngs(0)))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    report = check(block, jax.ShapeDtypeStruct((1, width), jnp.float32), styles="argument,functional", **effort)
    assert report.ok, str(report)
    peaks = {str(outcome.nesting): outcome.peak for outcome in report.outcomes}
    assert peaks["jit[functional]"] == pytest.approx(4 * width * width, rel=0.01)
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024 < 2**30


@pytest.mark.slow
def test_abstract_inputs_alone_leave_a_real_module_as_it_was():
    block = Block(8, nnx.Rngs(0))
    found = call(block, jax.ShapeDtypeStruct((3, 8), jnp.float32), nesting="jit")
    assert found.outcome.verdict == "held"
    assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(nnx.state(block)))
    assert not block.norm.mean[...].any()


class Net(nnx.Module):
    def __init__(self, head):
        self.linear, self.head = nnx.Linear(4, 4, rngs=nnx.Rngs(0)), head

    def __call__(self, x):
        return self.head(self.linear(x))


def head():
    return nnx.Linear(4, 2, rngs=nnx.Rngs(0))


@pytest.mark.slow
def test_a_module_of_which_a_part_has_no_values_is_a_note():
    note = "model.head.bias, model.head.kernel has no values, though the rest of Net has: the call is traced, and never run"
    forgotten = check(Net(nnx.eval_shape(head)), numbers((3, 4)), nesting="jit")
    assert forgotten.ok
    assert forgotten.notes == (note,)
    for whole in (Net(head()), nnx.eval_shape(lambda: Net(head()))):
        assert check(whole, numbers((3, 4)), nesting="jit").notes == ()


class Table:
    """A plain object with an array that a constructor made."""

    def __init__(self):
        self.rows = jnp.ones((4,))


class WithTable(nnx.Module):
    def __init__(self, *, reads, keeps=False):
        self.linear, self.table = nnx.Linear(4, 2, rngs=nnx.Rngs(0)), Table()
        self.reads, self.keeps = reads, keeps

    def __call__(self, x):
        y = self.linear(x * self.table.rows if self.reads else x)
        if self.keeps:
            self.table.last = y
        return y


@pytest.mark.slow
def test_an_array_that_a_constructor_keeps_elsewhere_matters_where_the_call_reads_it():
    inputs = jax.ShapeDtypeStruct((3, 4), jnp.float32)
    unread, read, leaky = (
        nnx.eval_shape(lambda more=more: WithTable(**more))
        for more in ({"reads": False}, {"reads": True}, {"reads": False, "keeps": True})
    )
    healthy = check(unread, inputs, nesting="jit")
    assert healthy.ok
    assert any(note.startswith("model.table.rows has a tracer of nnx.eval_shape") for note in healthy.notes)
    (kept,) = check(leaky, inputs, nesting="jit").outcomes[0].violations
    assert kept.invariant == "tracers"
    assert "model.table.last" in kept.summary
    with pytest.raises(CheckError, match="outside of any Variable, where nnx.eval_shape left a tracer"):
        check(read, inputs, nesting="jit")


class WithCache(nnx.Module):
    """A model whose cache is a dict of arrays in one Variable."""

    def __init__(self, model, cache):
        self.model, self.cache = model, nnx.Cache(cache)

    def __call__(self, x):
        cache = self.cache.get_value() if hasattr(self.cache, "get_value") else self.cache.value
        return self.model(x) + cache["sum"]


@pytest.mark.slow
def test_a_dict_of_shapes_in_a_variable_has_no_values_either():
    shape = jax.ShapeDtypeStruct((3, 2), jnp.float32)
    whole = WithCache(nnx.eval_shape(head), {"sum": shape})
    assert check(whole, numbers((3, 4)), nesting="jit").notes == ()
    forgotten = WithCache(head(), {"sum": shape})
    (note,) = check(forgotten, numbers((3, 4)), nesting="jit").notes
    assert note.startswith("model.cache has no values, though the rest of WithCache has")


def test_an_abstract_module_goes_on_with_the_types_of_its_new_state():
    model = nnx.eval_shape(lambda: nnx.Linear(4, 4, param_dtype=jnp.bfloat16, rngs=nnx.Rngs(0)))

    def step(model, rate):
        assign(model.kernel, model.kernel[...] * rate)

    found = call(step, model, jax.ShapeDtypeStruct((), jnp.float32), invariants="tracers", nesting="jit")
    assert found.outcome.verdict == "held"
    (kernel,) = (leaf for leaf in jax.tree.leaves(nnx.state(model)) if leaf.shape == (4, 4))
    assert kernel == jax.ShapeDtypeStruct((4, 4), jnp.float32)


# --- memory and donation


def test_a_copy_of_the_state_is_found():
    (x,) = inputs_scan_over_remat()
    model = nnx.eval_shape(lambda: ScanOverRemat(nnx.Rngs(0)))
    found = call(call_twice, model, abstract(x), nesting="jit")
    assert broken(found) == ["memory"]
    assert "copy of model.layers.kernel" in text(found)


@pytest.mark.slow
def test_a_donated_leaf_that_changes_its_dtype_is_named():
    def step(model, rate):
        assign(model.kernel, model.kernel[...] * rate)

    def kind(model, rate):
        assign(model.kernel, model.kernel[...] * rate.astype(model.kernel[...].dtype))

    rate = jax.ShapeDtypeStruct((), jnp.float32)
    for nesting in ("jit", "jit[functional]", "jit > remat"):
        make = lambda: nnx.eval_shape(lambda: nnx.Linear(4, 4, param_dtype=jnp.bfloat16, rngs=nnx.Rngs(0)))  # noqa: E731
        found = call(step, make(), rate, nesting=nesting)
        assert broken(found) == ["donation"]
        assert "model.kernel   bfloat16[4,4]   its dtype changed: it became float32[4,4]" in text(found)
        assert call(kind, make(), rate, nesting=nesting).outcome.verdict == "held"


@pytest.mark.skipif(FLAX >= (0, 10, 7), reason="newer flax refuses what leaks on flax 0.10.2 (google/flax#4520)")
def test_a_closure_over_state_that_changes_leaks_without_values_too():
    model = nnx.eval_shape(lambda: nnx.BatchNorm(4, rngs=nnx.Rngs(0)))
    for nesting in ("scan[closure]", "jit > scan[closure]", "eval_shape[closure]"):
        found = call(model, jax.ShapeDtypeStruct((2, 4), jnp.float32), nesting=nesting)
        assert broken(found) == ["tracers"], (nesting, text(found))
        assert "model.mean" in text(found)
        assert nesting.rpartition("> ")[2] in text(found)
