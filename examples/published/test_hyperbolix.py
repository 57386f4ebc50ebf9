"""hyperbolix: a Riemannian step uses the curvature of the model that the optimizer was made for. docs/published.md tells the story."""

from __future__ import annotations

import importlib
from typing import Any

import jax.numpy as jnp
import pytest
from flax import nnx
from training import STEP, Wrap, square, step_of

from pytest_nnxcheck import check

pytest.importorskip("hyperbolix", reason="hyperbolix is not installed")
hyperbolix = importlib.import_module("hyperbolix")
Poincare = importlib.import_module("hyperbolix.manifolds").Poincare
HypLinearPoincare = importlib.import_module("hyperbolix.nn_layers").HypLinearPoincare
riemannian_sgd = importlib.import_module("hyperbolix.optim").riemannian_sgd

X = jnp.full((2, 4), 0.1)


class Net(nnx.Module):
    """A hyperbolic layer, and its curvature."""

    def __init__(self, *, learned: bool) -> None:
        self.curvature = hyperbolix.LearnableCurvature(init_c=1.0)
        # A module in place of the function would be a part of the parameter
        curvature = (lambda: self.curvature()) if learned else 1.0  # noqa: PLW0108
        self.fc = HypLinearPoincare(Poincare(), 4, 3, rngs=nnx.Rngs(0), curvature=curvature)

    def __call__(self, x: Any) -> Any:
        return self.fc(x)


def sgd(model: nnx.Module) -> Any:
    return nnx.Optimizer(model, riemannian_sgd(0.1), wrt=nnx.Param)


def test_a_learned_curvature_is_a_constant_of_the_first_compile() -> None:
    """The curvature is a function, as its documentation says; the optimizer calls it with the model of its construction."""
    model = Net(learned=True)
    report = check(step_of(square), model, sgd(model), X, **STEP)
    assert [violation.invariant for violation in report.violations] == ["updates"]
    assert "model.curvature.raw is read past the arguments" in str(report)


@pytest.mark.nnx_invariants(**STEP)
def test_a_fixed_curvature(nnx_wrap: Wrap) -> None:
    model = Net(learned=False)
    assert nnx_wrap(step_of(square))(model, sgd(model), X).shape == ()
