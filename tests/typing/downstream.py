"""Tests as a typed repository writes them: `nox -s types` has mypy and pyright read this file in their strict modes. Nothing runs it."""

# pyright: strict

from collections.abc import Callable, Iterator, Mapping
from typing import Any, assert_type

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import pytest_nnxcheck
from pytest_nnxcheck import (
    Breach,
    CheckError,
    DonationLost,
    ExpectedFailuresWarning,
    Invariant,
    InvariantViolation,
    Layer,
    MemoryBudgetExceeded,
    NestedCall,
    Nesting,
    Outcome,
    ParityLost,
    Report,
    TracerResidue,
    UnexpectedPass,
    Violation,
    Wrap,
    Wrapped,
    assert_invariants,
    check,
    register_invariant,
    register_transform,
)


def vector() -> jax.Array:
    return jnp.ones(4)  # pyright: ignore[reportUnknownMemberType]  # jax leaves a type of it open


class Scale(nnx.Module):
    def __init__(self, scale: float) -> None:
        self.factor = nnx.Param(scale * vector())

    def __call__(self, x: jax.Array, *, bias: float = 0.0) -> jax.Array:
        return x * self.factor[...] + bias


def train_step(model: Scale, x: jax.Array) -> jax.Array:
    return model(x).sum()


@register_transform("scan_layers", style="functional")
def scan_layers(f: Callable[..., Any]) -> Callable[..., Any]:
    return f


assert_type(scan_layers(train_step), Callable[..., Any])


@pytest.mark.nnx_invariants(effort="quick", memory_budget="2x", expected_failures={"jit > scan": "a link"})
def test_a_module(nnx_wrap: Wrap) -> None:
    scale = nnx_wrap(Scale(2.0))
    assert_type(scale(vector(), bias=1.0), jax.Array)
    scale("text")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    assert scale(vector()).shape == (4,)


@pytest.mark.nnx_invariants
def test_a_step(nnx_wrap: Wrap) -> None:
    step = nnx_wrap(train_step)
    as_function: Callable[[Scale, jax.Array], jax.Array] = step
    wrapped: Wrapped[[Scale, jax.Array], jax.Array] = nnx_wrap(as_function)
    assert_type(wrapped(Scale(2.0), vector()), jax.Array)
    step(vector())  # type: ignore[call-arg, arg-type]  # pyright: ignore[reportCallIssue]
    nnx_wrap(3)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]


def read(report: Report) -> str:
    smallest = next(iter(report.broken), None)
    assert_type(smallest, Outcome | None)
    assert_type(report.violations, tuple[Violation, ...])
    assert_type(report.outcomes, tuple[Outcome, ...])
    assert_type(report.ok, bool)
    if smallest is None:
        return report.program()
    assert_type(smallest.nesting, Nesting)
    assert_type(smallest.nesting.layers, tuple[Layer, ...])
    assert_type(smallest.peak, int | None)
    assert_type(report.violations[0].invariant, str)
    return ", ".join(violation.summary for violation in smallest.violations)


def test_in_a_script() -> None:
    settings: Mapping[str, Any] = {"nesting": "jit > scan", "invariants": ("tracers",)}
    assert_type(check(Scale(2.0), vector(), kwargs={"bias": 1.0}, **settings), Report)
    with pytest.raises(InvariantViolation) as caught:
        assert_invariants(train_step, Scale(2.0), vector())
    assert_type(caught.value.outcome, Outcome)
    assert Nesting.parse("jit > scan") == Nesting((Layer("jit"), Layer("scan")))


def keeps_types(call: NestedCall) -> Iterator[Breach]:
    for path, leaf in call.after.items():
        if leaf.dtype != call.before[path].dtype:
            yield Breach(path, summary=f"{path} became {leaf.dtype}")


@pytest.hookimpl(tryfirst=True)
def pytest_nnx_invariants(config: pytest.Config) -> list[Invariant]:
    return [Invariant("keeps_types", keeps_types, default=True)]


register_invariant(Invariant("also", keeps_types))
Invariant("x", lambda call: [3])  # type: ignore[list-item]  # pyright: ignore[reportArgumentType]

violations: tuple[type[InvariantViolation], ...] = (TracerResidue, MemoryBudgetExceeded, DonationLost, ParityLost)
errors: tuple[type[Exception], ...] = (CheckError, InvariantViolation, UnexpectedPass)
warnings: type[Warning] = ExpectedFailuresWarning
assert_type(pytest_nnxcheck.__version__, str)
