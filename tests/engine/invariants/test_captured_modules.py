"""Modules that the call itself captured, and what a loss captured beside its model: named, handed on as the hint says, left intact."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from checking import call, near, text
from flax import nnx
from healthy import BATCH, FLAX, WIDTH, assign, numbers, rngs

from pytest_nnxcheck import check
from pytest_nnxcheck.core.notes import CapturedNode, captured_by

refused = pytest.mark.skipif(
    FLAX < (0, 10, 7), reason="flax before 0.10.7 lets a captured module be written, which leaves tracers"
)
HINT = "hand the module to the call as an argument: wrap f, and call it as f("


class JitsItself(nnx.Module):
    """A module whose own ``__call__`` is jitted: flax takes ``self`` apart for the time of the call."""

    def __init__(self) -> None:
        self.norm = nnx.BatchNorm(WIDTH, rngs=rngs())

    @nnx.jit
    def __call__(self, x: jax.Array) -> jax.Array:
        return self.norm(x)


NORM = nnx.BatchNorm(WIDTH, rngs=rngs())


def reads_a_global(x: jax.Array) -> jax.Array:
    return NORM(x)


def capturing(module: nnx.Module) -> Any:
    def function(x: jax.Array) -> Any:
        return module(x)

    return function


@pytest.mark.parametrize(
    "function, named",
    [
        (capturing(nnx.BatchNorm(WIDTH, rngs=rngs())), "module (BatchNorm)"),
        (capturing(JitsItself()), "module (JitsItself)"),
        (reads_a_global, "NORM (BatchNorm)"),
    ],
    ids=["closure", "jits itself", "global"],
)
@refused
def test_a_module_that_the_call_captured_is_named(function, named):
    told = text(call(function, numbers(BATCH), nesting="jit"))
    assert f"the call, {near(__file__)}:{function.__code__.co_firstlineno}, captured {named}; {HINT}" in told


class Holder(nnx.Module):
    """Has an attribute of the name of the global."""

    def __init__(self) -> None:
        self.NORM = nnx.BatchNorm(WIDTH, rngs=rngs())


@pytest.mark.slow
@refused
def test_an_attribute_of_the_name_of_a_global_is_none():
    holder = Holder()
    told = text(call(lambda x: holder.NORM(x) * 1, numbers(BATCH), nesting="jit"))
    assert f"captured holder (Holder); {HINT}" in told


def test_what_a_jit_of_its_own_keeps_elsewhere_is_not_blamed_on_a_captured_module():
    kept: list[jax.Array] = []
    module = nnx.Linear(WIDTH, WIDTH, rngs=rngs())

    def jitted(x: jax.Array) -> jax.Array:
        kept.append(x * 2)
        return x * 2

    found = call(lambda x: module(jax.jit(jitted)(x)), numbers(BATCH), nesting="un-nested")
    assert found.outcome.verdict == "violated"
    assert "the call, " not in text(found)


@pytest.mark.slow
@pytest.mark.parametrize("module", [JitsItself, lambda: nnx.BatchNorm(WIDTH, rngs=rngs())], ids=["jits itself", "norm"])
def test_handed_on_as_an_argument_it_holds(module):
    assert check(lambda module, x: module(x), module(), numbers(BATCH), effort="quick", styles="argument").ok


@pytest.mark.parametrize("nesting", ["jit", "scan[functional]"])
def test_a_captured_module_is_whole_after_one_nesting_that_failed(nesting):
    """What a fixture of the session hands out is for the next test too."""
    module = JitsItself()
    before = jax.tree.structure(nnx.state(module))
    assert call(capturing(module), numbers(BATCH), nesting=nesting).outcome.verdict in ("violated", "failed")
    assert jax.tree.structure(nnx.state(module)) == before
    assert module(numbers(BATCH)).shape == BATCH


@refused
@pytest.mark.parametrize(
    "asks",
    [
        lambda module, x: jax.make_jaxpr(lambda x: module(x) * 1)(x) and x,
        lambda module, x: jax.lax.custom_root(lambda y: y - module(x), x, lambda f, y: y - f(y), lambda g, y: y),
    ],
    ids=["make_jaxpr", "custom_root"],
)
def test_a_function_of_jax_that_jits_for_itself_is_no_jit_of_the_user_s(asks):
    told = text(call(asks, nnx.BatchNorm(WIDTH, rngs=rngs()), numbers(BATCH)))
    assert "Cannot mutate" in told
    assert captured_by("jit") not in told


class Counter:
    """A plain object that counts in a function which a transform made of one that captured it."""

    def __init__(self, transform: Any) -> None:
        self.count, self.total = nnx.BatchStat(jnp.float32(0)), nnx.BatchStat(jnp.float32(0))

        def update(x: jax.Array) -> jax.Array:
            assign(self.count, self.count[...] + 1)
            assign(self.total, self.total[...] + x.sum())
            return x.sum()

        self.line = update.__code__.co_firstlineno
        self.update = transform(update)

    def step(self, x: jax.Array) -> Any:
        return self.update(x)


def scanned(f: Any) -> Any:
    return lambda x: jax.lax.scan(lambda carry, x: (carry, f(x)), 0, x)


def chosen(f: Any) -> Any:
    return lambda x: jax.lax.cond(x.sum() > 0, f, lambda x: x.sum(), x)


def sums_by_a_global(x: jax.Array) -> jax.Array:
    return NORM(x).sum()


MAKERS = {
    "jit": jax.jit,
    "checkpoint": jax.checkpoint,
    "vmap": jax.vmap,
    "grad": jax.grad,
    "value_and_grad": jax.value_and_grad,
}
MADE = [*MAKERS.items()]
USED = [("scan", scanned), ("cond", chosen)]
COUNTED = "captured self.count (BatchStat), self.total (BatchStat)"


@pytest.mark.parametrize("name, transform", MADE)
def test_what_the_transform_around_the_call_captured_is_named(name, transform):
    counter = Counter(transform)
    told = text(call(counter.update, numbers(BATCH)))
    nodes = [CapturedNode(f"self.{attribute}", "BatchStat", FLAX >= (0, 10, 7)) for attribute in ("count", "total")]
    advice = captured_by(name, nodes)
    assert f"{name} at {near(__file__)}:{counter.line} {COUNTED}; {advice}" in told


@pytest.mark.parametrize("name, transform", [*MADE, *USED])
def test_what_a_transform_captured_before_the_call_is_named(name, transform):
    counter = Counter(transform)
    told = text(call(counter.step, numbers(BATCH)))
    assert f"{name} at {near(__file__)}:" in told
    assert COUNTED in told


@pytest.mark.skipif(FLAX < (0, 10, 7), reason="no transform of flax 0.10.2 takes a Variable that no module holds")
def test_the_variables_that_are_to_be_handed_in_are_named():
    told = text(call(Counter(jax.jit).update, numbers(BATCH)))
    assert "nnx.jit(f)(count, total, x)" in told

    @nnx.jit
    def cured(count: Any, total: Any, x: jax.Array) -> jax.Array:
        assign(count, count[...] + 1)
        assign(total, total[...] + x.sum())
        return x.sum()

    counter = Counter(jax.jit)
    assert call(cured, counter.count, counter.total, numbers(BATCH), nesting="un-nested").outcome.verdict == "held"


@pytest.mark.slow
@pytest.mark.parametrize("name, transform", [*MADE, *USED])
def test_a_global_that_a_transformed_function_reads_is_named(name, transform):
    told = text(call(transform(sums_by_a_global), numbers(BATCH)))
    assert f"{name} at {near(__file__)}:" in told
    assert "captured NORM (BatchNorm)" in told


def test_a_module_that_is_only_read_is_no_cause_of_a_leak():
    kept: list[jax.Array] = []
    module = nnx.Linear(WIDTH, WIDTH, rngs=rngs())

    @jax.jit
    def jitted(x: jax.Array) -> jax.Array:
        kept.append(x * 2)
        return module(x)

    found = call(jitted, numbers(BATCH), nesting="un-nested")
    assert found.outcome.verdict == "violated"
    assert " captured " not in text(found)


def bound(norm, x):
    return jax.jit(functools.partial(lambda model, x: model(x) * 1, norm))(x)


def bound_method(norm, x):
    return jax.jit(functools.partial(NORM.__class__.__call__, norm))(x)


def with_a_flag(norm, x):
    return jax.jit(functools.partial(norm, use_running_average=False))(x)


@pytest.mark.parametrize("function, name", [(bound, "model"), (bound_method, "self"), (with_a_flag, "func")])
def test_a_module_that_a_partial_binds_or_calls_is_named(function, name):
    told = text(call(function, nnx.BatchNorm(WIDTH, rngs=rngs()), numbers(BATCH), nesting="un-nested"))
    assert f"jit at {near(__file__)}:{function.__code__.co_firstlineno + 1} captured {name} (BatchNorm)" in told


@pytest.mark.slow
@pytest.mark.skipif(FLAX < (0, 12), reason="modules are pytrees from flax 0.12 on; before, jax refuses them")
def test_what_jax_itself_holds_in_a_gradient_is_no_capture():
    """The module is an argument; to jax, which differentiates by another one, it is a constant."""

    def graded(norm, x):
        return jax.grad(lambda norm, x: (norm(x) ** 2).mean(), argnums=1)(norm, x)

    told = text(call(graded, nnx.BatchNorm(WIDTH, rngs=rngs()), numbers(BATCH), nesting="un-nested"))
    assert "captured" not in told


# --- a tracer in another object, which a module that is handed on leaves as well


class Log:
    largest = 0.0


KEPT: list[Any] = []


class Logs(nnx.Module):
    def __init__(self, place: str, transform: str, *, passed: bool) -> None:
        self.linear, self.log = nnx.Linear(WIDTH, WIDTH, rngs=rngs()), Log()
        self.place, self.transform, self.passed = place, transform, passed

    def body(self, x: jax.Array) -> jax.Array:
        if self.place == "object":
            self.log.largest = jnp.abs(x).max()
        else:
            KEPT.append(jnp.abs(x).max())
        return self.linear(x)

    def __call__(self, x: jax.Array) -> jax.Array:
        if self.passed:
            return {"jit": nnx.jit, "remat": nnx.remat}[self.transform](Logs.body)(self, x)
        return {"jit": jax.jit, "remat": jax.checkpoint}[self.transform](lambda x: self.body(2 * x))(x)


@pytest.mark.parametrize("passed", [False, True])
@pytest.mark.parametrize("place, transform", [("object", "jit"), ("global", "remat")])
def test_a_captured_module_is_no_cause_of_a_tracer_in_another_object(place, transform, passed):
    found = call(Logs(place, transform, passed=passed), numbers(BATCH))
    KEPT.clear()
    (violation,) = found.outcome.violations
    assert violation.invariant == "tracers"
    assert [row for label, row in violation.details if label == "cause"] == []
    assert "keep the value in an nnx.Variable" in violation.hint or "do not keep arrays" in violation.hint
