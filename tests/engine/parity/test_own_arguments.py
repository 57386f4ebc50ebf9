"""A body with arguments of its own: what its calls do is found out for each set of arguments, however a call gets at them."""

from __future__ import annotations

import functools

import jax.numpy as jnp
import pytest
from checking import nnx_wrap
from flax import nnx
from healthy import numbers
from parity_calls import Body, X, made_in, norm, ticks

from pytest_nnxcheck import Nesting
from pytest_nnxcheck.core.settings import merge, parse_given
from pytest_nnxcheck.runner.run import Run


class Scale:
    """A configuration of the whole suite, which tests set."""

    by = 1.0
    rows = 1


def scales(model, x):
    return model(x) * Scale.by


def needs_memory(model, x):
    wide = jnp.sin(jnp.outer(jnp.arange(Scale.rows) * x.sum(), jnp.arange(512.0)))
    return model(x) + jnp.sort(wide, 0).sum()


def body(function, name, value):
    setattr(Scale, name, value)
    nnx_wrap(function)(nnx.Linear(4, 4, rngs=nnx.Rngs(0)), numbers((2, 4)))


@pytest.mark.parametrize(
    "invariant, function, name, values",
    [
        pytest.param("parity", scales, "by", (1.0, 2.0), id="parity"),
        pytest.param("memory", needs_memory, "rows", (1, 2000), id="memory", marks=pytest.mark.slow),
    ],
)
def test_each_is_held_against_calls_with_its_own_arguments(invariant, function, name, values):
    run = Run(merge(parse_given({"invariants": invariant}, str)), remember=False)
    for value in values:
        run.example(Nesting.parse("jit"), functools.partial(body, function, name, value))
    assert [outcome.verdict for outcome in run.outcomes.values()] == ["held"]


def test_calls_with_the_arguments_of_one_body_are_made_once():
    run = Run(merge(parse_given({"invariants": "parity"}, str)), remember=False)
    same = functools.partial(body, scales, "by", 1.0)
    kept = []
    for nesting in ("jit", "jit > remat"):
        run.example(Nesting.parse(nesting), same)
        kept.append([*(known.profile for known in run.memo.known.values()), *run.memo.evaluated.values()])
    assert len(kept[0]) == 2
    assert [id(each) for each in kept[0]] == [id(each) for each in kept[1]]


# --- what a function captured is in the key of its calls


def times(factor, inner):
    return lambda x: inner(x) * factor


class Factor:
    """A plain object whose method a function may capture."""

    def __init__(self, by) -> None:
        self.by = by

    def scaled(self, x):
        return x * self.by


def with_attribute(by):
    def scaled(x):
        return x * scaled.by

    scaled.by = by
    return scaled


@pytest.mark.parametrize(
    "make, made",
    [
        (lambda by: times(2.0, times(by, abs)), [1, 0, 1]),
        (with_attribute, [1, 0, 1]),
        pytest.param(lambda by: Factor(by).scaled, [1, 1, 1], marks=pytest.mark.slow),
    ],
    ids=["closures", "attribute", "a method, which cannot be told"],
)
def test_functions_of_the_same_code_are_told_by_what_each_captured(make, made):
    body = Body()

    def call_of(inner):
        return lambda model, x: ticks(x) or inner(model(x))

    calls = [call_of(make(by)) for by in (2.0, 2.0, 3.0)]
    assert [made_in(lambda each=each: body(each, norm(), X, nesting="jit")) for each in calls] == made
