"""Parity inside the user's own call: a transform in it that drops updates is named, with its line and the way out."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from checking import broken, hint, text
from flax import nnx
from healthy import HEALTHY, assign
from parity_calls import TREE, XS, X, norm, parity

from pytest_nnxcheck import ParityLost, assert_invariants, check


def broadcasts(model, xs):
    return nnx.scan(lambda model, x: model(x), in_axes=(None, 0), out_axes=0)(model, xs)


def carries(model, xs):
    axes = nnx.StateAxes({nnx.BatchStat: nnx.Carry, ...: None})  # what the hint says
    return nnx.scan(lambda model, x: model(x), in_axes=(axes, 0), out_axes=0)(model, xs)


def carries_all(model, xs):
    axes = (nnx.Carry, 0)
    return nnx.scan(lambda model, x: (model, model(x)), in_axes=axes, out_axes=axes)(model, xs)[1]


@pytest.mark.parametrize("run", [carries, carries_all])
def test_with_what_the_hint_says_the_call_holds(run):
    found = parity(run, norm(), XS)
    assert found.outcome.verdict == "held", text(found)
    assert found.outcome.notes == ()


def test_a_copy_of_the_users_own_that_is_updated_is_no_drop():
    def run(model, x):
        return nnx.jit(lambda model, x: model(x))(nnx.clone(model), x)

    assert parity(run, norm(), X).outcome.verdict == "held"


def test_state_that_the_call_hands_back_by_itself_is_no_drop():
    def run(model, xs):
        def body(model, x):
            return model(x), (model.mean[...], model.var[...])

        ys, (means, variances) = nnx.scan(body, in_axes=(None, 0), out_axes=0)(model, xs)
        assign(model.mean, means[-1])
        assign(model.var, variances[-1])
        return ys

    found = parity(run, norm(), XS)
    assert found.outcome.verdict == "held", text(found)


JITTED = jax.jit(lambda m, x: m(x))


@pytest.mark.skipif(not TREE, reason="modules are pytrees from flax 0.12 on; before, jax refuses them")
@pytest.mark.parametrize(
    "transform",
    [
        JITTED,
        lambda m, x: jax.lax.cond(True, lambda m, x: m(x), lambda m, x: x, m, x),
        pytest.param(lambda m, x: jax.lax.switch(0, [lambda m, x: m(x), lambda m, x: x], m, x), marks=pytest.mark.slow),
    ],
    ids=["jit", "cond", "switch"],
)
def test_a_transform_of_jax_that_updates_a_copy_is_found(transform):
    found = parity(transform, norm(), X)
    assert broken(found) == ["parity"]
    assert "m.mean kept its old value: a transform inside the call updated a copy of it" in text(found)
    assert "write nnx.jit(f)(model, x) instead of jax.jit" in text(found)
    assert parity(transform, HEALTHY["batch_norm_eval"]().subject, X).outcome.verdict == "held"


@pytest.mark.skipif(not TREE, reason="modules are pytrees from flax 0.12 on; before, jax refuses them")
@pytest.mark.parametrize(
    "transform",
    [
        lambda m, x: jax.vmap(lambda m, x: m(x), in_axes=(None, 0))(m, x[None]),
        lambda m, x: jax.grad(lambda m: m(x).sum())(m),
        lambda m, x: broadcasts(m, x[None]),
    ],
    ids=["vmap", "grad", "nnx.scan"],
)
def test_one_that_copies_without_jit_as_well_is_not_seen(transform):
    """What docs/parity.md says of the rule: both runs drop the update."""
    assert parity(transform, norm(), X).outcome.verdict == "held"


@pytest.mark.slow
@pytest.mark.skipif(not TREE, reason="modules are pytrees from flax 0.12 on; before, jax refuses them")
def test_an_update_that_a_jit_drops_in_part_is_no_rounding():
    """Of two updates the second one arrives."""

    def evaluate(jit):
        loss = jit(lambda model, x: (model(x) ** 2).mean())
        return lambda model, x: (loss(model, x), model(3 * x))

    found = parity(evaluate(jax.jit), norm(), X)
    assert broken(found) == ["parity"]
    assert "model.mean differs from what the same call leaves without its jits" in text(found)
    assert hint("copy") in text(found)
    assert parity(evaluate(nnx.jit), norm(), X).outcome.verdict == "held"


@pytest.mark.skipif(not TREE, reason="modules are pytrees from flax 0.12 on; before, jax refuses them")
def test_a_module_that_a_transform_of_jax_returns_is_no_drop():
    def returned(model, x):
        return jax.jit(lambda model, x: (model, model(x)))(model, x)

    def updated(model, xs):
        new, ys = jax.lax.scan(lambda model, x: (model, model(x)), model, xs)
        nnx.update(model, nnx.state(new))
        return ys

    assert parity(returned, norm(), X).outcome.verdict == "held"
    assert parity(updated, norm(), XS).outcome.verdict == "held"


def test_a_call_that_cannot_run_without_jit_says_so():
    def run(model, x):
        if jax.config.jax_disable_jit:
            raise RuntimeError("needs jit")
        return model(x)

    found = parity(run, norm(), X)
    assert found.outcome.verdict == "held"
    assert "parity inside the call not asserted: with jax.disable_jit it raises RuntimeError: needs jit" in text(found)


def test_a_loop_of_too_many_steps_is_not_made_without_jit():
    found = parity(lambda model, xs: jax.lax.map(lambda x: jnp.sin(x) * 2.0, xs), norm(), jnp.ones((100_000, 1)))
    assert found.outcome.verdict == "held"
    (note,) = found.facts.notes
    assert (note.kind, note.count > 200_000) == ("many equations", True)


# --- what the user sees


@pytest.mark.skipif(not TREE, reason="modules are pytrees from flax 0.12 on; before, jax refuses them")
def test_parity_is_asserted_only_where_it_is_named():
    few = {"sweep": "probes", "max_examples": 0, "styles": "argument"}
    assert check(JITTED, norm(), X, invariants="tracers,memory,donation", **few).ok
    report = check(JITTED, norm(), X, invariants="parity", **few)
    assert str(report).startswith("nnx invariant broken: parity")
    with pytest.raises(ParityLost, match="updated a copy of it"):
        assert_invariants(JITTED, norm(), X, invariants="parity", **few)
