"""A layer that jax or flax refuses is left out, with the reason; an exception of the user's own code fails."""

from __future__ import annotations

import re

import bugs
import jax
import jax.numpy as jnp
import pytest
from checking import call
from flax import nnx
from healthy import assign, numbers
from jax.experimental import io_callback
from probes import value_of

from pytest_nnxcheck.compat import refusals


class Experts(nnx.Module):
    """A mixture of experts: the rows of a batch, sorted by the expert that each is for."""

    def __init__(self):
        self.kernels = nnx.Param(numbers((4, 8, 8)))
        self.router = nnx.Linear(8, 4, rngs=nnx.Rngs(0))

    def __call__(self, x):
        expert = self.router(x).argmax(-1)
        order = expert.argsort()
        rows = jax.lax.ragged_dot(x[order], self.kernels[...], jnp.bincount(expert, length=4).astype(jnp.int32))
        return rows[order.argsort()]


class Unfinished(nnx.Module):
    """A layer whose own code does without a vmap."""

    def __init__(self):
        self.linear = nnx.Linear(8, 8, rngs=nnx.Rngs(0))

    def __call__(self, x):
        if type(x).__name__ == "BatchTracer":
            raise NotImplementedError("no batch of batches")
        return self.linear(x)


@pytest.mark.parametrize(
    "nesting, verdict",
    [("jit", "held"), ("jit > scan", "held"), ("vmap", "rejected"), ("jit > vmap[functional]", "rejected")],
)
def test_what_jax_has_no_rule_for_is_left_out_with_its_words(nesting, verdict):
    outcome = call(Experts(), numbers((16, 8)), nesting=nesting).outcome
    assert outcome.verdict == verdict
    if verdict == "rejected":
        assert outcome.unfit
        assert re.match(r"jax [\d.]+ cannot do this: NotImplementedError: .*ragged_dot", outcome.reason)


def ordered(model, x):
    io_callback(lambda mean: None, None, x.mean(), ordered=True)
    return model(x)


def counts(model, x):
    calls[...] += x.mean()
    return model(x)


calls = jax.new_ref(jnp.zeros(())) if hasattr(jax, "new_ref") else None
needs_refs = pytest.mark.skipif(calls is None, reason="this jax has no mutable arrays")


@pytest.mark.parametrize("subject", [ordered, pytest.param(counts, marks=needs_refs)], ids=["ordered", "ref"])
@pytest.mark.parametrize("nesting", ["jit", "scan", "vmap", "jit > scan > vmap"])
def test_what_jax_refuses_to_map_in_other_words_is_left_out_too(subject, nesting):
    outcome = call(subject, nnx.Linear(8, 8, rngs=nnx.Rngs(0)), numbers((4, 8)), nesting=nesting).outcome
    assert outcome.verdict == ("rejected" if "vmap" in nesting else "held"), outcome
    assert outcome.unfit == ("vmap" in nesting)


def test_the_same_words_of_the_user_s_own_code_fail():
    def refuses(model, x):
        if type(x).__name__ == "BatchTracer":
            raise ValueError("Cannot `vmap` ordered IO callback.")
        return model(x)

    outcome = call(refuses, nnx.Linear(8, 8, rngs=nnx.Rngs(0)), numbers((4, 8)), nesting="vmap").outcome
    assert outcome.verdict == "failed"


@pytest.mark.parametrize("filtering", ["off", "auto"])
def test_what_the_user_s_code_has_no_rule_for_fails(filtering):
    """Whether jax takes its own frames out of tracebacks or not."""
    before = jax.config.jax_traceback_filtering
    jax.config.update("jax_traceback_filtering", filtering)
    try:
        outcomes = [
            call(subject, numbers(shape), nesting="jit > vmap").outcome
            for subject, shape in ((Unfinished(), (8, 8)), (Experts(), (16, 8)))
        ]
    finally:
        jax.config.update("jax_traceback_filtering", before)
    assert [outcome.verdict for outcome in outcomes] == ["failed", "rejected"]
    assert outcomes[0].reason == "NotImplementedError: no batch of batches"


class Taken(nnx.Module):
    """Takes its cache away in the first call."""

    keeps = False

    def __init__(self):
        self.linear = nnx.Linear(3, 3, rngs=nnx.Rngs(0))
        self.cache = nnx.Cache(jnp.ones(3))

    def __call__(self, x):
        y = self.linear(x)
        if not self.keeps and hasattr(self, "cache"):
            y = y + self.cache[...]
            del self.cache
        return y


class Kept(Taken):
    """The healthy twin."""

    keeps = True


@pytest.mark.parametrize("nesting", ["jit > cond", "jit > switch", "cond", "while_loop"])
def test_a_call_that_takes_a_leaf_away_is_left_out_of_a_branch_as_of_a_loop(nesting):
    outcome = call(Taken(), numbers((2, 3)), nesting=nesting).outcome
    assert (outcome.verdict, outcome.unfit) == ("rejected", True), outcome
    assert outcome.reason.endswith("and the call takes model.cache out of it")
    assert call(Kept(), numbers((2, 3)), nesting=nesting).outcome.verdict == "held"


class Inner(nnx.Module):
    def __init__(self):
        self.scale = nnx.Param(jnp.ones(()))


class Alias(nnx.Module):
    """Gives a module that it has a second name."""

    def __init__(self):
        self.first = Inner()

    def __call__(self, x):
        self.second = self.first
        return x * value_of(self.first.scale)


class Named(Alias):
    """The healthy twin: both names from the start."""

    def __init__(self):
        self.second = self.first = Inner()


def test_a_second_name_for_a_module_is_left_out_of_a_loop_with_flax_s_words():
    outcome = call(Alias(), jnp.ones(()), nesting="while_loop").outcome
    assert (outcome.verdict, outcome.unfit) == ("rejected", True), outcome
    assert outcome.reason.startswith("flax ")
    assert " cannot do this: ValueError: " in outcome.reason
    assert "pytest_nnxcheck" not in outcome.reason
    assert call(Named(), jnp.ones(()), nesting="while_loop").outcome.verdict == "held"


class Grows(nnx.Module):
    """A cache that grows with each call."""

    def __init__(self):
        self.seen = nnx.Cache(jnp.zeros((0, 3)))

    def __call__(self, x):
        assign(self.seen, jnp.concatenate([self.seen[...], x]))
        return self.seen[...].sum(0)


def test_a_call_may_be_made_twice_though_no_loop_can_carry_its_state():
    assert call(Grows(), numbers((2, 3)), nesting="call_first").outcome.verdict == "held"
    outcome = call(Grows(), numbers((2, 3)), nesting="scan").outcome
    assert (
        outcome.reason
        == "scan carries the state, and a carry keeps its types: the call makes model.seen, which is float32[0,3], a float32[2,3]"
    )


class Halves(nnx.Module):
    """Keeps half of its rows, so that a second call does not fit them."""

    def __init__(self):
        self.rows = nnx.Param(jnp.ones((4, 4)))

    def __call__(self, x):
        y = x @ self.rows[...]
        assign(self.rows, self.rows[...][:2])
        return y


def test_a_call_that_cannot_be_made_twice_says_what_the_first_one_makes():
    outcome = call(Halves(), numbers((3, 4)), nesting="call_first").outcome
    makes = "the first makes model.rows, which is float32[4,4], a float32[2,4]"
    assert (outcome.verdict, outcome.reason) == ("rejected", f"call_first makes the call twice, and {makes}")


class Drops(nnx.Module):
    def __init__(self):
        self.linear = nnx.Linear(3, 3, rngs=nnx.Rngs(0))
        self.drop = nnx.Dropout(0.5, rngs=nnx.Rngs(1))

    def __call__(self, x):
        return self.drop(self.linear(x))


def test_random_numbers_in_a_branch_in_a_differentiated_loop():
    outcome = call(Drops(), numbers((2, 3)), nesting="grad > scan[functional] > cond").outcome
    assert outcome.verdict == ("held" if jax.__version_info__ >= (0, 10) else "rejected"), outcome
    assert outcome.verdict == "held" or outcome.reason.endswith("cannot differentiate a branch in a loop for this call")


def test_a_second_call_that_misses_what_the_first_took_away_is_the_users_exception():
    """The code of the call raises, and no frame of jax does."""
    checked = call(bugs.step_drops_one, bugs.Pair(100), nesting="jit > call_first")
    assert (checked.outcome.verdict, checked.outcome.error) == ("failed", "AttributeError")


@pytest.mark.parametrize(
    "error, names, told",
    [
        (AssertionError(), ["jit", "grad", "scan", "cond"], True),
        (AssertionError(), ["grad", "fori_loop", "vmap", "switch"], True),
        (AssertionError(), ["scan", "grad", "cond"], False),
        (AssertionError("of the user"), ["grad", "scan", "cond"], False),
        (ValueError(), ["grad", "scan", "cond"], False),
    ],
)
def test_a_fault_of_jax_is_told_from_one_of_the_user(error, names, told):
    assert refusals.branch_in_a_loop(error, names) == told
