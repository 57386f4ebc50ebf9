"""jaxkan: the grid of a layer is a plain object, no part of the model's state. docs/published.md tells the story."""

from __future__ import annotations

import importlib
from typing import Any

import jax
import pytest
from training import FORWARD, Wrap

from pytest_nnxcheck import check

pytest.importorskip("jaxkan", reason="jaxkan is not installed")
KAN = importlib.import_module("jaxkan.models.KAN").KAN

X = jax.random.uniform(jax.random.key(0), (8, 2), minval=-1.0)


def network() -> Any:
    return KAN([2, 3, 1], "spline", {"k": 3, "G": 3}, seed=0)


def test_a_grid_is_a_tracer_after_one_jit() -> None:
    report = check(lambda model, x: model.update_grids(x, 3), network(), X, transforms="jit", styles="argument")
    assert [violation.invariant for violation in report.violations] == ["tracers"]
    assert "model.layers[0].grid.item" in str(report)


@pytest.mark.nnx_invariants(**FORWARD)
def test_its_forward_call(nnx_wrap: Wrap) -> None:
    assert nnx_wrap(network())(X).shape == (8, 1)
