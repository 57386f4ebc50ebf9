"""Parity: what a nesting returns and leaves is what the same calls return and leave without it, whatever layers are around the module."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import pytest
from checking import broken, flat, text
from counts import Counter, Counts
from flax import nnx
from healthy import HEALTHY, assign
from parity_calls import TREE, X, norm, parity

from pytest_nnxcheck import check, register_transform
from pytest_nnxcheck.core.notes import texts
from pytest_nnxcheck.transforms import layers


class Loss(nnx.Module):
    """Returns constants beside a value, as a layer without a loss of its own does."""

    def __call__(self, x):
        return x + 1, jnp.zeros(()), jnp.array(0, jnp.int8), jnp.array(True), 1.5


@pytest.mark.parametrize("nesting", ["remat", "remat[functional]", "jit > remat", "remat > scan", "un-nested"])
def test_constants_are_arrays_under_every_nesting(nesting):
    """`jax.checkpoint` of jax 0.11 hands them out as numbers of its own."""
    checked = parity(Loss(), X, nesting=nesting)
    assert checked.outcome.verdict == "held"
    types = [(type(leaf), str(leaf.dtype)) for leaf in checked.output]
    assert types == [(type(X), kind) for kind in ("float32", "float32", "int8", "bool", "float32")]


class Names(nnx.Module):
    """Returns a name that says whether the call is traced."""

    def __call__(self, x):
        return x, "traced" if isinstance(x, jax.core.Tracer) else "eager", "same"


def test_a_leaf_that_is_no_array_is_named():
    message = text(parity(Names(), X, nesting="jit"))
    assert "output[1] differs from that of the un-nested call" in message
    assert "output[1]   expected 'eager', got 'traced'" in message
    assert "output[2]" not in message


# --- layers around the user's module


def broadcast_scan(f, plan):
    """A layer as some write it: the state is broadcast, and what the body changes is dropped."""

    def layer(state, *inputs):
        return nnx.scan(lambda state, inputs: f(state, *inputs), in_axes=(None, 0), out_axes=0)(state, inputs)

    return layer


@pytest.mark.slow
def test_a_broadcast_scan_drops_the_updates_of_batch_norm_and_a_carry_keeps_them(monkeypatch):
    assert parity(norm(), X, nesting="scan").outcome.verdict == "held"
    monkeypatch.setattr(layers, "scan_argument", broadcast_scan)
    found = parity(norm(), X, nesting="jit > scan")
    assert broken(found) == ["parity"]
    assert "model.mean kept its old value: the update was dropped" in text(found)
    assert "dropped model.mean   BatchStat float32[8]   largest difference 0." in text(found)
    assert re.search(r" allowed\): expected -?0\.0\d+, got 0; 8 of 8 elements differ", text(found))
    assert "a layer that broadcasts the state (None) drops its updates" in text(found)
    assert "in_axes=(nnx.StateAxes({nnx.BatchStat: nnx.Carry, ...: None}), 0)" in text(found)
    assert parity(HEALTHY["batch_norm_eval"]().subject, X, nesting="jit > scan").outcome.verdict == "held"


@pytest.mark.slow
def test_a_loop_that_makes_one_call_where_it_is_two_is_found(monkeypatch):
    nesting = "while_loop[functional]"
    assert parity(norm(), X, nesting=nesting).outcome.verdict == "held"
    monkeypatch.setattr(layers, "while_loop_functional", lambda f, plan: f)
    found = parity(norm(), X, nesting=nesting)
    assert broken(found) == ["parity"], text(found)
    assert "model.mean" in text(found)


@pytest.mark.usefixtures("forgotten")
def test_an_output_that_differs_is_named_with_its_place_in_what_the_call_returns():
    @register_transform("adds_one")
    def adds_one(f):
        def layer(state, *inputs):
            first, *rest = f(state, *inputs)
            return (first.at[1, 2].add(1.0), *rest)

        return layer

    found = parity(lambda model, x: {"y": [model(x)]}, nnx.Linear(8, 8, rngs=nnx.Rngs(0)), X, nesting="adds_one")
    assert "output['y'][0] differs from that of the un-nested call" in text(found)
    assert "float32[3,8]   largest difference 1 (" in text(found)
    assert " allowed): " in text(found)
    assert "): expected " in text(found)
    assert "; 1 of 24 elements differ" in text(found)


# --- Python attributes


@pytest.mark.parametrize("nesting", ["un-nested", "jit", "remat", "eval_shape"])
def test_a_count_in_a_variable_holds_and_so_does_an_attribute_that_a_layer_hands_back(nesting):
    for plain in (False, True):
        assert parity(Counts(plain=plain), X, nesting=nesting).outcome.verdict == "held"


NOT_HANDED_OUT = "parity does not compare model.calls where a layer is functional"


@pytest.mark.parametrize(
    "nesting", ["jit[functional]", "remat[functional] > jit", "vmap[functional]", "scan[functional]"]
)
def test_a_python_attribute_that_the_call_sets_is_not_what_a_functional_layer_hands_out(nesting):
    found = parity(Counts(plain=True), X, nesting=nesting)
    assert found.outcome.verdict == "held", text(found)
    (note,) = texts(found.facts.notes)
    assert note.startswith(NOT_HANDED_OUT)
    assert found.outcome.notes == ()
    assert parity(Counts(plain=False), X, nesting=nesting).facts.notes == ()


class Remembers(nnx.Module):
    """Keeps its last mean as a bare array, which is a leaf of the state from flax 0.12 on."""

    def __init__(self):
        self.last = jnp.zeros(8)

    def __call__(self, x):
        self.last = x.mean(0)
        return x


@pytest.mark.parametrize("path, make", [("model.counter", lambda: Counts(plain=False)), ("model.last", Remembers)])
@pytest.mark.usefixtures("forgotten")
def test_a_leaf_that_a_functional_layer_drops_is_a_violation_all_the_same(path, make):
    if make is Remembers and not TREE:
        pytest.skip("bare arrays came with flax 0.12")
    assert parity(make(), X, nesting="jit[functional]").outcome.verdict == "held"

    @register_transform("on_a_copy", style="functional")
    def on_a_copy(f):
        return lambda state, *inputs: f(nnx.clone(state), *inputs)

    found = parity(make(), X, nesting="on_a_copy[functional]")
    assert broken(found) == ["parity"]
    assert f"{path} " in text(found).replace(":", " ")


@pytest.mark.skipif(not TREE, reason="flax 0.10 refuses a carry whose attributes change")
def test_a_loop_changes_a_python_attribute_once():
    found = parity(Counts(plain=True), X, nesting="scan")
    assert (
        "model.calls: expected 2, as after the same calls one by one (a loop makes one call in each step), got 1"
        in text(found)
    )


class Trainer:
    """A plain object that counts its calls, and scales by their number; or a Variable of its model does."""

    def __init__(self, plain):
        self.counts, self.plain, self.calls = Counts(plain=False), plain, 0

    def step(self, x):
        y = self.counts(x)
        self.calls += 1
        return y * (self.calls if self.plain else self.counts.counter[...])


@pytest.mark.parametrize("plain", [True, False])
def test_a_count_of_a_plain_object_is_the_same_for_both_of_what_is_compared(plain):
    """The un-nested call was held against one that counted further: what a loop does to the count was never looked at."""
    un_nested = parity(Trainer(plain).step, X)
    assert (un_nested.outcome.verdict, un_nested.outcome.notes) == ("held", ())
    looped = parity(Trainer(plain).step, X, nesting="scan")
    assert looped.outcome.verdict == ("violated" if plain else "held")
    assert ("output differs from that of the un-nested call" in text(looped)) == plain


class Stamps(Trainer):
    """It leaves the number of its call in the Variable."""

    def step(self, x):
        y = super().step(x)
        assign(self.counts.counter, jnp.asarray(self.calls, jnp.int32))
        return y


def test_a_number_that_a_plain_object_leaves_in_the_state_is_the_same_for_both():
    un_nested = parity(Stamps(plain=True).step, X)
    assert (un_nested.outcome.verdict, un_nested.outcome.notes) == ("held", ())


@pytest.mark.slow
@pytest.mark.skipif(not TREE, reason="tree mode came with flax 0.12")
def test_a_nesting_in_tree_mode_drops_what_the_same_in_graph_mode_keeps():
    few = {"invariants": "parity", "transforms": "jit", "styles": "argument", "sweep": "singles", "max_examples": 0}
    found = check(Counts(plain=True), X, modes="graph,tree", **few)
    assert [str(outcome.nesting) for outcome in found.broken] == ["tree: jit"]
    assert (
        "model.calls: expected 1, as after the same calls one by one (a loop makes one call in each step), got 0"
        in flat(str(found))
    )
    assert check(Counts(plain=False), X, modes="graph,tree", **few).ok


# --- random numbers


def splits(model, rngs, x):
    @nnx.split_rngs(splits=3)
    @nnx.vmap(in_axes=(0, 0))
    def noise(rngs, x):
        return x + jax.random.normal(rngs.params(), x.shape)

    return noise(rngs, model(x))


NESTINGS = [
    "un-nested",
    "jit > vmap > scan",
    "call_first",
    *(pytest.param(nesting, marks=pytest.mark.full) for nesting in ("vmap", "vmap[functional]", "scan[functional]", "while_loop > jit")),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("nesting", NESTINGS)
def test_random_numbers_give_no_false_alarm(nesting):
    drop = nnx.Dropout(0.5, rngs=nnx.Rngs(0))
    found = [
        parity(drop, X, nesting=nesting),
        parity(drop_with, nnx.Dropout(0.5), nnx.Rngs(3), X, nesting=nesting),
        parity(splits, nnx.Linear(8, 8, rngs=nnx.Rngs(0)), nnx.Rngs(3), X, nesting=nesting),
    ]
    assert [each.outcome.verdict for each in found] == ["held"] * 3, "\n".join(map(text, found))
    assert [each.outcome.notes for each in found] == [()] * 3


def drop_with(model, rngs, x):
    return model(x, rngs=rngs)


@pytest.mark.slow
def test_keys_whose_draws_differ_in_a_batch_are_excepted_and_said_so():
    class Noise(nnx.Module):
        def __init__(self):
            self.key = nnx.Variable(jax.random.key(0, impl="rbg"))
            self.counter = Counter(jnp.zeros((), jnp.int32))

        def __call__(self, x):
            key, new = jax.random.split(self.key[...])
            assign(self.key, new)
            assign(self.counter, self.counter[...] + 1)
            return x + jax.random.normal(key, x.shape)

    found = parity(Noise(), X, nesting="jit > vmap")
    assert found.outcome.verdict == "held", text(found)
    assert "parity of outputs not asserted under vmap: model.key is key<rbg>[], whose draws are others" in text(found)
    assert parity(Noise(), X, nesting="jit > scan").outcome.notes == ()
