"""Watch mode and real jax: what it finds in models that leak, and that it finds nothing in those that do not."""

from __future__ import annotations

import contextlib
import gc
import weakref
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from checking import models, some
from flax import nnx
from healthy import FLAX, HEALTHY
from leaky import LEAKY

from pytest_nnxcheck.invariants.tracers import MadeInEndedTrace
from pytest_nnxcheck.watch import leftovers
from pytest_nnxcheck.watch.leftovers import Reported


def left(*roots: tuple[str, object], **how: Any) -> leftovers.Look:
    """What is left in the objects that the roots lead to."""
    return leftovers.look(roots, **how)


def jitted(case) -> None:
    """Call a case under a jit, as a test does; some leaky ones raise there."""
    with contextlib.suppress(jax.errors.JAXTypeError, ValueError):
        nnx.jit(lambda subject, *args: subject(*args))(case.subject, *case.args)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", some(LEAKY, {"class_attribute", "plain_list", "raises_afterwards", "variable_metadata"})
)
def test_a_model_that_leaks_under_jit_is_found_and_its_twin_is_not(name):
    twins = LEAKY[name]
    healthy = twins.healthy()
    jitted(healthy)
    assert left(("model", healthy.subject)).leftovers == ()
    leaky = twins.leaky()
    jitted(leaky)
    paths = [leftover.path for _, leftover in left(("model", leaky.subject)).leftovers]
    if twins.leaks or paths:
        assert any(twins.path in path for path in paths), paths
    twins.leaky()  # clears what lives outside of the module


@pytest.mark.parametrize("name", models())
def test_a_healthy_model_leaves_nothing_behind(name):
    case = HEALTHY[name]()
    case()
    jitted(case)
    seen = left(("model", case.subject), ("args", case.args), ("list", [case.subject]))
    assert (seen.leftovers, seen.complete) == ((), True)


def made_inside() -> list[nnx.Param]:
    kept: list[nnx.Param] = []

    @jax.jit
    def f(x):
        kept.extend([nnx.Param(x + 1), nnx.Param(1.0)])
        return x

    f(jnp.ones(3))
    return kept


def test_a_variable_of_an_ended_trace_is_found_with_and_without_a_tracer_in_it():
    (_, tracer), *others = left(("kept", made_inside())).leftovers
    leak = tracer.leak
    assert (leak.path, leak.holder, leak.kind, leak.type) == ("kept[0]", "Param", "DynamicJaxprTracer", "float32[3]")
    assert "test_leftovers.py:" in leak.line
    pinned = [MadeInEndedTrace("kept[1]", type="Param float")]
    assert [other for _, other in others] == (pinned if FLAX >= (0, 10, 7) else [])  # before, flax lets it be written


def test_what_a_variable_holds_is_no_plain_value():
    kept = []

    @jax.jit
    def f(x):
        kept.append(nnx.Variable({"total": x}))
        return x

    f(jnp.ones(3))
    (_, leftover), *_ = left(("kept", kept)).leftovers
    assert (leftover.path, leftover.leak.holder, leftover.leak.place) == ("kept[0]['total']", "dict", "variable")


def test_what_a_transform_hands_out_is_no_variable_of_an_ended_trace():
    made = nnx.jit(lambda: nnx.Linear(2, 2, rngs=nnx.Rngs(0)))()
    abstract = nnx.eval_shape(lambda: nnx.Linear(2, 2, rngs=nnx.Rngs(0)))
    assert left(("made", made), ("abstract", abstract)).leftovers == ()


def test_a_tracer_that_only_the_test_keeps_is_its_own_business():
    kept = []
    model = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
    nnx.jit(lambda model, x: kept.append(x))(model, jnp.ones((1, 2)))
    assert left(("model", model), ("kept", kept)).leftovers == ()


@pytest.mark.slow
def test_nothing_of_a_test_is_kept_alive():
    reported = Reported()
    after = left(("kept", made_inside()))
    tracer = weakref.ref(after.leftovers[0][0])
    assert reported.new(after)[0].path == "kept[0]"
    del after
    gc.collect()
    assert tracer() is None


@pytest.mark.parametrize("was_reported", [False, True])
def test_garbage_is_collected_for_what_is_new_only(monkeypatch, was_reported):
    kept, reported, collections = made_inside(), Reported(), []
    if was_reported:
        reported.new(left(("kept", kept)))
    monkeypatch.setattr(gc, "collect", collections.append)
    assert left(("kept", kept), reported=reported).leftovers
    assert collections == ([] if was_reported else [2])


def test_what_is_left_out_is_not_opened():
    kept = made_inside()
    assert left(("kept", [kept])).leftovers != ()
    assert left(("kept", [kept]), left_out=(kept,)).leftovers == ()


def test_data_without_end_is_looked_at_in_part():
    assert not left(("data", [[number] for number in range(30_000)])).complete
