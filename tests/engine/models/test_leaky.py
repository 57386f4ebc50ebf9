"""Leaks found: each place where a tracer hides, named by its path, with a healthy twin that holds."""

from __future__ import annotations

from types import SimpleNamespace

import jax
import pytest
from checking import Example, broken, call, flat, needs_kept_tracers, some, text
from flax import nnx
from healthy import numbers, rngs
from leaky import LEAKY, KeepsLastSetInInit, case

from pytest_nnxcheck import Layer, Nesting, check
from pytest_nnxcheck.core.facts import Observation
from pytest_nnxcheck.invariants.tracers import StateTouched, judge
from pytest_nnxcheck.subject.subject import bind
from pytest_nnxcheck.transforms.compose import Guards

HERE = sorted(name for name, twins in LEAKY.items() if twins.leaks)
REST = sorted(set(LEAKY) - set(HERE))
FEW = {"class_attribute", "raises_afterwards", "variable_metadata"}


@pytest.mark.parametrize("name", HERE)
def test_a_leak_is_found_and_named_and_undone_before_the_next_nesting(name):
    example, leaky = Example(), LEAKY[name].leaky()
    found, *later = [call(leaky.subject, *leaky.args, nesting="jit", example=example) for _ in range(3)]
    assert broken(found)[:1] == ["tracers"], text(found)
    assert LEAKY[name].path in text(found)
    assert "DynamicJaxprTracer" in text(found)
    # The frames of a kept exception hold the inputs too, and those come from the line of the transform.
    assert "leaky.py:" in text(found) or name == "caught_exception"
    assert [text(each) for each in later] == [text(found)] * 2


@pytest.mark.parametrize("name", some(sorted(LEAKY), FEW))
def test_the_healthy_twin_holds(name):
    twin = LEAKY[name].healthy()
    for nesting in ("jit > remat > scan > vmap > while_loop > eval_shape", "scan > jit[functional] > vmap[functional]"):
        report = check(twin.subject, *twin.args, nesting=nesting)
        assert report.ok, str(report)


@pytest.mark.parametrize("name", REST)
def test_where_flax_refuses_or_carries_the_value_nothing_is_said_of_tracers(name):
    leaky = LEAKY[name].leaky()
    found = call(leaky.subject, *leaky.args, nesting="jit")
    assert "tracers" not in broken(found)


@needs_kept_tracers
def test_a_call_that_flax_refuses_eagerly_and_that_leaks_under_jit():
    leaky = case(KeepsLastSetInInit)
    found = call(leaky.subject, *leaky.args)
    assert broken(found) == ["tracers"]
    assert str(found.outcome.nesting) == "jit"
    assert "model.last" in text(found)
    assert "raises un-nested already: ValueError: Cannot assign data value" in text(found)


class Recorder:
    def __init__(self):
        self.seen = []

    def __call__(self, y):
        self.seen.append(y)


LOG = []


def keep(y):
    LOG.append(y)


@pytest.mark.parametrize("shortcuts", ["on", pytest.param("off", marks=pytest.mark.full)])
@pytest.mark.parametrize(
    "make, path",
    [
        (lambda: [].append, "callback.__self__[0]"),
        (Recorder, "callback.seen[0]"),
        (lambda: LOG.append, "callback.__self__[0]"),
        (lambda: keep, "LOG[0]"),
        (lambda: lambda y: None, ""),
    ],
)
def test_what_a_callback_keeps_that_was_handed_in_is_found(make, path, shortcuts):
    def step(model, x, callback):
        callback(y := model(x))
        return y

    LOG.clear()
    settings = {"transforms": "jit,scan", "styles": "argument", "max_examples": 0, "shortcuts": shortcuts}
    report = check(step, nnx.Linear(4, 4, rngs=rngs()), numbers((2, 4)), make(), **settings)
    if not path:
        assert report.ok, str(report)
    else:
        assert f"tracers remain in {path}" in flat(str(report))


def test_what_eval_shape_puts_into_the_state_is_a_violation():
    """flax hands no state out of eval_shape, so only a guard's note can say this; here the probe is made to touch it."""
    model = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
    guards = Guards(bind(model, (jax.numpy.ones((1, 2)),), {}))
    layer = Layer("eval_shape")
    with guards.unchanged(layer, model):
        pass
    assert guards.mutated == []
    with guards.unchanged(layer, model):
        model.kernel = nnx.Param(model.kernel[...] + 1)
    assert guards.mutated == [(layer, "model.kernel")]
    seen = Observation(Nesting((layer,)), model, mutated=tuple(guards.mutated))
    assert [*judge(SimpleNamespace(observation=seen))] == [StateTouched("model.kernel", layer=layer)]
