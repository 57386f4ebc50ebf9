"""A jit inside the call that is made anew in each call, or handed a new function, is traced again in each: the invariant `recompilation` names it."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import pytest
from checking import broken, call, near, some, text
from flax import nnx
from healthy import WIDTH, node_list, numbers, rngs

from pytest_nnxcheck.compat import frames
from pytest_nnxcheck.invariants import recompilation

INPUT = numbers((3, WIDTH))
RUNS: list[None] = []
"""An entry for each time that Python runs `doubled`: what is compiled runs it no more."""


def doubled(x, times=2):
    RUNS.append(None)
    return x * times


by_jax = jax.jit(doubled)
by_value = jax.jit(doubled, static_argnums=1)
by_function = jax.jit(lambda x, f: f(x), static_argnums=1)
by_flax = nnx.jit(lambda model, x: doubled(model(x)))


class Layer(nnx.Module):
    """A layer that doubles what comes out by a jit; ``how`` it does so is a function of the module and the value."""

    def __init__(self, how) -> None:
        self.linear, self.how, self.kept = nnx.Linear(WIDTH, WIDTH, rngs=rngs()), how, None
        self.own = jax.jit(lambda x: -doubled(x))

    def __call__(self, x):
        return self.how(self, self.linear(x))


class Layers(nnx.Module):
    """Three of them one after the other."""

    def __init__(self, how) -> None:
        self.layers = node_list([Layer(how) for _ in range(3)])

    def __call__(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def keeps_its_own(layer, x):
    if layer.kept is None:
        layer.kept = jax.jit(doubled)
    return layer.kept(x)


def decorates(layer, x):
    @jax.jit
    def inner(x):
        return doubled(x)

    return inner(x)


ANEW = {
    "lambda": lambda layer, x: jax.jit(lambda x: -doubled(x))(x),
    "decorated": decorates,
    "partial": lambda layer, x: jax.jit(functools.partial(doubled, times=3))(x),
    "vmap": lambda layer, x: jax.jit(jax.vmap(lambda x: -doubled(x)))(x),
    "static lambda": lambda layer, x: by_function(x, lambda x: -doubled(x)),
    "static partial": lambda layer, x: by_function(x, functools.partial(doubled, times=3)),
    "of nnx": lambda layer, x: -nnx.jit(lambda layer, x: doubled(layer.linear(x)))(layer, x),
    "in a scan": lambda layer, x: jax.lax.scan(lambda x, _: (jax.jit(lambda x: -doubled(x))(x), None), x, length=2)[0],
    "mapped": lambda layer, x: jax.vmap(jax.jit(lambda x: -doubled(x)))(x),
    "of a branch": lambda layer, x: jax.lax.cond(x.sum() > 0, jax.jit(lambda x: -doubled(x)), lambda x: x, x),
    "differentiated": lambda layer, x: jax.grad(jax.jit(lambda x: -doubled(x).sum()))(x),
    "over a tree": lambda layer, x: jax.tree.map(jax.jit(lambda x: -doubled(x)), [x])[0],
}
ONCE = {
    "module level": lambda layer, x: by_jax(x),
    "two shapes": lambda layer, x: by_jax(x) + by_jax(x[0]),
    "static numbers": lambda layer, x: by_value(x, 2) + by_value(x, 3),
    "static function": lambda layer, x: by_function(x, doubled),
    "of nnx": lambda layer, x: by_flax(layer.linear, x),
    "kept": keeps_its_own,
    "of each layer": lambda layer, x: layer.own(x),
    "differentiated": lambda layer, x: jax.grad(lambda x: by_jax(by_jax(x)).sum())(x),
    "mapped": lambda layer, x: jax.vmap(by_jax)(x),
    "of a branch": lambda layer, x: jax.lax.cond(x.sum() > 0, by_jax, lambda x: x, x),
    "jits of jax itself": lambda layer, x: jax.vmap(lambda x: jnp.where(x > 0, jnp.clip(x, 0, 1), jnp.sort(x)))(x),
}


def runs_of_the_second_call(model) -> int:
    """How often Python runs what the jit traces when the call is made again, without any nesting."""
    model(INPUT)
    RUNS.clear()
    model(INPUT)
    return len(RUNS)


@pytest.mark.parametrize("name", some(ANEW, {"lambda", "static partial", "of nnx"}, pytest.mark.slow))
def test_a_jit_that_is_made_anew_is_named_with_its_lines(name):
    assert runs_of_the_second_call(Layers(ANEW[name])) > 0
    found = call(Layers(ANEW[name]), INPUT, nesting="jit", invariants="recompilation")
    assert broken(found) == ["recompilation"], text(found)
    (finding,) = found.outcome.violations[0].findings
    assert finding.times == 3
    assert f"each call traces {finding.path} again, for the same types" in text(found)
    assert f"traced {finding.path} ({near(__file__)}:" in text(found)
    assert f"3 times a call; its jit is called at {near(__file__)}:" in text(found)


@pytest.mark.parametrize("name", some(ONCE, {"two shapes", "of each layer", "of nnx"}, pytest.mark.slow))
def test_a_jit_that_finds_its_trace_again_is_none(name):
    model = Layers(ONCE[name])
    # The first call sets what is kept, for which an outer jit is traced again: that is another finding.
    assert runs_of_the_second_call(model) == 0
    found = call(model, INPUT, nesting="jit", invariants="recompilation")
    assert found.outcome.verdict == "held", text(found)


def clips(x):
    return jax.jit(functools.partial(jnp.clip, min=0))(x)


def test_a_function_of_a_library_is_named_by_the_line_that_calls_it():
    found = call(clips, INPUT, nesting="jit", invariants="recompilation")
    (row,) = [row for label, row in found.outcome.violations[0].details if label == "traced"]
    assert row.startswith("clip   once a call; its jit is called at ")


@pytest.mark.parametrize("nesting", ["jit > remat", "jit[functional]", "jit[jax_closure]", "jit > scan"])
def test_it_is_the_same_under_every_jit(nesting):
    assert broken(call(Layer(ANEW["lambda"]), INPUT, nesting=nesting, invariants="recompilation")) == ["recompilation"]
    assert broken(call(Layer(ONCE["module level"]), INPUT, nesting=nesting, invariants="recompilation")) == []


def test_another_shape_in_each_call_is_no_other_trace_of_the_same():
    lengths = iter(range(1, 1000))
    grows = jax.jit(lambda x: x * 2)
    found = call(lambda x: grows(jnp.ones(next(lengths))).sum() + x, INPUT, nesting="jit", invariants="recompilation")
    assert found.outcome.verdict == "held", text(found)


@pytest.mark.parametrize(
    "function, traces",
    [
        (lambda x: -jax.jit(lambda x: x * 2)(x), 1),
        (jax.grad(lambda x: -jax.jit(lambda x: x.sum() * 2)(x)), 1),
        (lambda x: -jax.vmap(jax.jit(lambda x: x * 2))(x), 1),
        (lambda x: jax.lax.scan(lambda x, _: (jax.jit(lambda x: x * 2)(x), None), x, length=2)[0], 1),
        (lambda x: jnp.piecewise(x, [x < 0], [lambda x: -x, lambda x: x]), 0),
        (lambda x: jax.lax.map(lambda x: x * 2, x), 0),
    ],
    ids=["jit", "differentiated", "mapped", "in a scan", "a jit of jax itself", "no jit"],
)
def test_each_jit_of_the_users_is_one_trace(function, traces):
    noted = []
    with frames.jits_traced(functools.partial(recompilation.note, noted)):
        jax.make_jaxpr(lambda x: function(x))(INPUT)  # noqa: PLW0108 - a trace of its own
    assert [called.rpartition(":")[0] for _, called in noted] == [near(__file__)] * traces


def test_a_state_that_changes_is_told_first():
    class Counts(Layer):
        def __call__(self, x):
            self.kept = (self.kept or 0) + 1
            return super().__call__(x)

    found = call(Counts(ANEW["lambda"]), INPUT, nesting="jit", invariants="recompilation")
    assert "a second call is traced again: model.kept has changed" in text(found)
    assert "its jit is called at" not in text(found)


def test_with_what_the_hint_says_it_holds():
    told = "make the jit once, outside of the call, at module level say, and hand"
    assert told in text(call(Layer(ANEW["lambda"]), INPUT, nesting="jit", invariants="recompilation"))
    assert told in text(call(Layer(ANEW["static lambda"]), INPUT, nesting="jit", invariants="recompilation"))
    for name in ("module level", "static function"):
        assert call(Layer(ONCE[name]), INPUT, nesting="jit", invariants="recompilation").outcome.verdict == "held"
