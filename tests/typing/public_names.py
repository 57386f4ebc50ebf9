"""The public names as typed code uses them; read by mypy and by basedpyright, and never run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, assert_type

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import pytest_nnxcheck
from pytest_nnxcheck import (
    CheckError,
    DonationLost,
    ExpectedFailuresWarning,
    InvariantViolation,
    Layer,
    MemoryBudgetExceeded,
    Nesting,
    Outcome,
    ParityLost,
    Report,
    TracerResidue,
    UnexpectedPass,
    Violation,
    assert_invariants,
    check,
    register_transform,
)
from pytest_nnxcheck.api import Wrapped, wrap


def scale(x: jax.Array, by: float) -> jax.Array:
    return x * by


wrapped = wrap(scale)
assert_type(wrapped(jnp.ones(3), 2.0), jax.Array)
wrapped("three", 2.0)  # type: ignore[arg-type] # pyright: ignore[reportArgumentType]
fixture: Callable[[Any], Callable[..., Any]] = wrap
kept: Wrapped[[jax.Array, float], jax.Array] = wrapped


@pytest.mark.nnx_invariants(memory_budget="1MiB", styles=["argument"], expected_failures={"scan": "known"})
def test_marked(nnx_wrap: Callable[[Any], Callable[..., Any]]) -> None:
    assert nnx_wrap(nnx.Linear(2, 2, rngs=nnx.Rngs(0)))(jnp.ones((1, 2))).shape == (1, 2)


report = check(scale, jnp.ones(3), 2.0, styles="argument", max_examples=0)
assert_type(report, Report)
assert_type(report.ok, bool)
assert_type(report.outcomes, tuple[Outcome, ...])
assert_type(report.violations, tuple[Violation, ...])
assert_type(report.program(), str)
assert_type(report.outcomes[0].nesting, Nesting)
assert_type(report.outcomes[0].peak, int | None)
assert_type(report.outcomes[0].nesting.layers, tuple[Layer, ...])
assert_type(Nesting.parse("jit > scan"), Nesting)
assert_type(report.violations[0].invariant, str)
assert_type(pytest_nnxcheck.__version__, str)
assert_invariants(scale, jnp.ones(3), 2.0)


@register_transform("twice")
def twice(f: Callable[..., Any]) -> Callable[..., Any]:
    def layer(state: Any, *inputs: Any) -> Any:
        return f(state, *inputs)

    return layer


registered: Callable[[Callable[..., Any]], Callable[..., Any]] = twice

violations: tuple[type[InvariantViolation], ...] = (TracerResidue, MemoryBudgetExceeded, DonationLost, ParityLost)
errors: tuple[type[Exception], ...] = (CheckError, InvariantViolation, UnexpectedPass)
warnings: type[Warning] = ExpectedFailuresWarning
