"""Static fields of an argument: every copy that jax makes of it has the very same ones, so that what a call puts there stays."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from checking import Example, call, flat, text
from flax import nnx, struct
from healthy import numbers, rngs

from pytest_nnxcheck import check

X = numbers((2, 4))
QUICK = {"effort": "quick", "transforms": "jit,scan", "styles": "argument"}


class Log:
    def __init__(self) -> None:
        self.rows: list[Any] = []


@functools.partial(jax.tree_util.register_dataclass, data_fields=["x"], meta_fields=["log"])
class Registered:
    def __init__(self, x: Any, log: Any) -> None:
        self.x, self.log = x, log


@struct.dataclass
class Struct:
    x: jax.Array
    log: Any = struct.field(pytree_node=False)


@jax.tree_util.register_pytree_node_class
class Outer:
    """Takes another one in."""

    __slots__ = ("inner", "log")

    def __init__(self, inner: Any, log: Any) -> None:
        self.inner, self.log = inner, log

    def tree_flatten(self) -> Any:
        return (self.inner,), (self.log,)

    @classmethod
    def tree_unflatten(cls, static: Any, children: Any) -> Outer:
        return cls(*children, *static)


def partial_of(keep: Callable[[Any], object]) -> Any:
    def multiply(w: Any, y: Any) -> Any:
        rows.append(keep(y))
        return w * y

    rows: list[Any] = []
    return jax.tree_util.Partial(multiply, numbers((4,)))


FORMS: dict[str, tuple[Any, Callable[[Any], Any], str]] = {
    "registered": (lambda: Registered(X, Log()), lambda c: c.log, "context.log.rows[0]"),
    "struct": (lambda: Struct(X, Log()), lambda c: c.log, "context.log.rows[0]"),
    "slots": (lambda: Outer(X, Log()), lambda c: c.log, "context.log.rows[0]"),
    "inside": (
        lambda: {"batch": [Outer(Struct(X, Log()), "outer")]},
        lambda c: c["batch"][0].inner.log,
        "context['batch'][0].inner.log.rows[0]",
    ),
}
"""How to make an argument, how to get at its log, and the path of what is in there."""


def logging(log_of: Callable[[Any], Any], keep: Callable[[Any], object]) -> Any:
    def step(model: nnx.Linear, x: Any, context: Any) -> Any:
        y = model(x)
        log_of(context).rows.append(keep(y))
        return y

    return step


@pytest.mark.parametrize("form", FORMS)
def test_a_tracer_that_is_left_in_a_static_field_is_found(form: str) -> None:
    make, log_of, path = FORMS[form]
    context = make()
    report = check(logging(log_of, lambda y: y), nnx.Linear(4, 4, rngs=rngs()), X, context, **QUICK)
    assert f"tracers remain in {path}" in flat(str(report))
    assert log_of(context).rows == []  # taken out again


@pytest.mark.parametrize("form", FORMS)
def test_a_static_field_that_keeps_no_tracer_holds(form: str) -> None:
    make, log_of, _ = FORMS[form]
    context = make()
    log_of(context).rows.append(X)  # an array of the caller's own may be there
    report = check(logging(log_of, lambda y: y.shape), nnx.Linear(4, 4, rngs=rngs()), X, context, **QUICK)
    assert report.ok, str(report)


def test_the_function_of_a_partial_is_a_static_field() -> None:
    def step(model: nnx.Linear, x: Any, scale: Any) -> Any:
        return scale(model(x))

    model = nnx.Linear(4, 4, rngs=rngs())
    leaky = check(step, model, X, partial_of(lambda y: y), **QUICK)
    assert "tracers remain in scale (closure of partial_of.<locals>.multiply: rows[0])" in flat(str(leaky))
    assert check(step, model, X, partial_of(jnp.shape), **QUICK).ok


def test_two_calls_that_differ_in_a_static_field_alone_are_two_calls() -> None:
    """One has an output of another shape: they share no fact."""

    def step(model: nnx.Linear, context: Struct) -> Any:
        return model(context.x).sum() if context.log == "sum" else model(context.x)

    example, model = Example(), nnx.Linear(4, 4, rngs=rngs())
    for how, shape in (("sum", ()), ("rows", (2, 4)), ("sum", ())):
        found = call(step, model, Struct(X, how), nesting="jit > while_loop", example=example)
        assert found.outcome.verdict == "held", text(found)
        assert found.output.shape == shape
