"""Parity inside the user's own call: a transform in it that drops updates is named, with its line and the way out."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from checking import broken, call, text
from flax import nnx
from healthy import HEALTHY, assign, node_dict, numbers, rngs
from parity_calls import TREE, XS, X, norm, parity

from pytest_nnxcheck import ParityLost, assert_invariants, check
from pytest_nnxcheck.reporting import hints


def broadcasts(model, xs):
    return nnx.scan(lambda model, x: model(x), in_axes=(None, 0), out_axes=0)(model, xs)


@nnx.jit
def jitted_broadcasts(model, xs):
    return broadcasts(model, xs)


def carries(model, xs):
    axes = nnx.StateAxes({nnx.BatchStat: nnx.Carry, ...: None})  # what the hint says
    return nnx.scan(lambda model, x: model(x), in_axes=(axes, 0), out_axes=0)(model, xs)


def carries_all(model, xs):
    axes = (nnx.Carry, 0)
    return nnx.scan(lambda model, x: (model, model(x)), in_axes=axes, out_axes=axes)(model, xs)[1]


def differentiates(model, xs):
    return nnx.grad(lambda model, xs: broadcasts(model, xs).sum())(model, xs)


@pytest.mark.slow
@pytest.mark.parametrize("run", [broadcasts, jitted_broadcasts, differentiates])
def test_a_broadcast_scan_inside_the_call_drops_updates(run):
    run(norm(), XS)  # traced before: a body that is not traced again must still be seen
    found = parity(run, norm(), XS)
    line = broadcasts.__code__.co_firstlineno + 1
    assert broken(found) == ["parity"]
    head = f"model.mean is updated in the body of nnx.scan at {__file__}:{line}, which broadcasts it (in_axes None)"
    assert f"{head}: the update is dropped" in text(found)
    assert "in_axes=(nnx.StateAxes({nnx.BatchStat: nnx.Carry, ...: None}), 0)" in text(found)
    assert f"dropped model.var   BatchStat in the body of nnx.scan at {__file__}:{line}" in text(found)


@pytest.mark.parametrize("run", [carries, carries_all])
def test_with_what_the_hint_says_the_call_holds(run):
    found = parity(run, norm(), XS)
    assert found.outcome.verdict == "held", text(found)
    assert found.outcome.notes == ()


def test_the_path_of_a_drop_is_that_of_the_whole_model():
    class Model(nnx.Module):
        def __init__(self):
            self.blocks = node_dict({"bn": norm()})

        def __call__(self, xs):
            return broadcasts(self.blocks["bn"], xs)

    assert ".mean is updated in the body" in text(found := parity(Model(), XS))
    assert "dropped model.blocks" in text(found)


def test_a_drop_is_named_among_modules_of_one_type():
    class Model(nnx.Module):
        def __init__(self):
            self.one, self.two = norm(), norm()

        def __call__(self, xs):
            return broadcasts(self.two, xs)

    assert "model.two.mean is updated in the body of nnx.scan" in text(found := parity(Model(), XS))
    assert "model.one" not in text(found)


@pytest.mark.slow
def test_a_broadcast_of_state_that_does_not_change_holds():
    assert parity(broadcasts, nnx.LayerNorm(8, rngs=nnx.Rngs(0)), XS).outcome.verdict == "held"


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


@pytest.mark.slow
@pytest.mark.skipif(not TREE, reason="modules are pytrees from flax 0.12 on; before, jax refuses them")
@pytest.mark.parametrize(
    "transform, place, hint",
    [
        (jax.jit(lambda m, x: m(x)), "", "write nnx.jit(f)(model, x) instead of jax.jit"),
        (lambda m, x: jax.lax.scan(lambda m, x: (m, m(x)), m, x[None])[1], "jax.lax.scan", "use nnx.scan"),
        pytest.param(
            lambda m, x: jax.lax.cond(True, lambda m, x: m(x), lambda m, x: x, m, x),
            "jax.lax.cond",
            "use nnx.cond",
            marks=pytest.mark.full,
        ),
        (lambda m, x: jax.lax.switch(0, [lambda m, x: m(x), lambda m, x: x], m, x), "jax.lax.switch", "use nnx.switch"),
        (lambda m, x: jax.grad(lambda m: m(x).sum())(m), "jax.grad", "use nnx.grad"),
        (lambda m, x: jax.vmap(lambda m, x: m(x), in_axes=(None, 0))(m, x[None]), "jax.vmap", "write nnx.vmap: what"),
    ],
)
def test_a_transform_of_jax_updates_a_copy(transform, place, hint):
    found = parity(transform, norm(), X)
    assert broken(found) == ["parity"]
    told = f"m.mean is updated in the body of {place} at {__file__}:" if place else "m.mean kept its old value"
    assert told in text(found)
    assert hint in text(found)
    assert parity(transform, HEALTHY["batch_norm_eval"]().subject, X).outcome.verdict == "held"


@pytest.mark.skipif(not TREE, reason="modules are pytrees from flax 0.12 on; before, jax refuses them")
def test_an_update_that_a_jit_drops_in_part_is_no_rounding():
    """Of two updates the second one arrives."""

    def evaluate(jit):
        loss = jit(lambda model, x: (model(x) ** 2).mean())
        return lambda model, x: (loss(model, x), model(3 * x))

    found = parity(evaluate(jax.jit), norm(), X)
    assert broken(found) == ["parity"]
    assert "model.mean differs from what the same call leaves without its jits: an update was dropped" in text(found)
    assert hints.hint("jax transform, jit") in text(found)
    assert parity(evaluate(nnx.jit), norm(), X).outcome.verdict == "held"


def noisy(f):
    """A call of dropout and its statistics, for each of a batch."""

    def run(model, xs):
        return f(lambda model, x: model.norm(model.dropout(x)))(model, xs)

    return run


class Noisy(nnx.Module):
    def __init__(self, size):
        self.dropout = nnx.Dropout(0.5, rngs=rngs())
        self.norm = nnx.vmap(lambda _: norm())(jnp.arange(size)) if size else norm()


@pytest.mark.slow
@pytest.mark.skipif(not TREE, reason="modules are pytrees from flax 0.12 on; before, jax refuses them")
def test_with_an_axis_of_its_own_what_a_vmap_writes_comes_back():
    dropped = parity(noisy(lambda f: jax.vmap(f, in_axes=(None, 0))), Noisy(0), XS)
    assert broken(dropped) == ["parity"]
    assert hints.hint("jax transform, vmap") in text(dropped)
    axes = nnx.StateAxes({nnx.Any(nnx.RngState, nnx.PathContains("norm")): 0, ...: None})
    splits = len(XS)

    def mapped(f):
        return nnx.split_rngs(splits=splits)(nnx.vmap(f, in_axes=(axes, 0)))

    healed = parity(noisy(mapped), Noisy(splits), XS)
    assert healed.outcome.verdict == "held", text(healed)


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


def test_a_loop_of_too_many_steps_says_so(monkeypatch):
    monkeypatch.setattr("pytest_nnxcheck.engine.dropped_updates.MOST_EVENTS", 500)
    found = parity(lambda model, xs: jax.lax.map(lambda x: x * 2.0, xs), norm(), numbers((200, 8)))
    assert found.outcome.verdict == "held"
    assert "parity inside the call not asserted: with jax.disable_jit it raises TooLong: more than 500" in text(found)


# --- what the user sees


def test_parity_is_asserted_only_where_it_is_named():
    assert (
        "parity"
        not in check(broadcasts, norm(), XS, sweep="probes", max_examples=0, styles="argument").settings.invariants
    )
    assert call(broadcasts, norm(), XS).outcome.verdict == "held"


def test_a_report_names_the_un_nested_call():
    report = check(broadcasts, norm(), XS, invariants="parity", sweep="probes", max_examples=0, styles="argument")
    assert str(report).startswith("nnx invariant broken: parity")
    with pytest.raises(ParityLost, match="is updated in the body of nnx.scan"):
        assert_invariants(
            broadcasts, norm(), XS, invariants="parity", sweep="probes", max_examples=0, styles="argument"
        )


@pytest.mark.slow
def test_parity_may_be_an_expected_failure():
    known = {"parity": "the statistics are frozen on purpose"}
    few = {"invariants": "parity", "styles": "argument", "transforms": "jit", "sweep": "singles", "max_examples": 0}
    assert not check(broadcasts, norm(), XS, **few).ok
    assert check(broadcasts, norm(), XS, expected_failures=known, **few).ok


@pytest.mark.slow
def test_on_the_command_line(pytester, inner_args):
    pytester.makepyfile(
        """
        import jax.numpy as jnp
        import pytest
        from flax import nnx

        @pytest.mark.nnx_invariants(sweep="probes", max_examples=0, styles="argument")
        def test_broadcast(nnx_wrap):
            def run(model, xs):
                return nnx.scan(lambda model, x: model(x), in_axes=(None, 0), out_axes=0)(model, xs)

            nnx_wrap(run)(nnx.BatchNorm(4, use_running_average=False, rngs=nnx.Rngs(0)), jnp.ones((2, 3, 4)))
        """
    )
    pytester.runpytest_inprocess(*inner_args).assert_outcomes(passed=1)
    result = pytester.runpytest_inprocess(*inner_args, "--nnx-invariants", "parity")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        [
            "E * nnx invariant broken: parity*",
            "E * nesting * un-nested *",
            "E * parity * model.mean is updated in the body of nnx.scan at *test_on_the_command_line.py:*",
            "E * dropped * model.mean   BatchStat in the body of nnx.scan at *",
            "E * hint * carry it: in_axes=(nnx.StateAxes({nnx.BatchStat: nnx.Carry, ...: None}), 0)*",
        ]
    )
