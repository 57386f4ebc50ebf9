"""What is wrong in published packages, and was not known: asserted, with the layers beside it that hold. docs/published.md tells the story."""

from __future__ import annotations

import importlib

import jax.numpy as jnp
import pytest
from flax import nnx
from training import FORWARD, STEP, Wrap, adam, square, step_of

from pytest_nnxcheck import check

pytest.importorskip("artifex", reason="avitai-artifex is not installed")
pytest.importorskip("opifex", reason="opifex is not installed")
glow = importlib.import_module("artifex.generative_models.models.flow.glow")
spectral = importlib.import_module("opifex.neural.operators.specialized.spectral_normalization")

IMAGES = jnp.arange(2 * 4 * 4 * 4.0).reshape(2, 4, 4, 4)
ROWS = jnp.ones((3, 8))


def test_the_first_call_of_actnorm_changes_the_shape_of_its_parameters() -> None:
    """(1, 1, 4) becomes (1, 1, 1, 4): an optimizer made before the first call no longer fits."""
    layer = glow.ActNormLayer(4, rngs=nnx.Rngs(0))
    report = check(layer.forward, IMAGES, transforms="jit,scan,while_loop", styles="argument,functional")
    told = f"{report}\n{report.notes}\n{[outcome.notes for outcome in report.outcomes]}"
    assert "float32[1,1,4]" in told
    assert "float32[1,1,1,4]" in told
    left_out = [outcome.reason for outcome in report.outcomes if str(outcome.nesting) in ("scan", "while_loop")]
    assert len(left_out) == 2
    assert all("a carry keeps its types" in reason for reason in left_out)


def test_the_power_iteration_of_spectral_linear_stands_still_where_it_is_captured() -> None:
    """Its write is in a ``try``, and flax refuses it in a closure: no exception, no update. A note by default."""
    report = check(spectral.SpectralLinear(8, 6, rngs=nnx.Rngs(0)), ROWS, **FORWARD)
    assert report.ok
    notes = {str(outcome.nesting): outcome.notes for outcome in report.outcomes}
    assert any(
        "did not move under jit[closure]: the un-nested call changes it" in note for note in notes["jit[closure]"]
    )
    assert not notes["jit"]


def test_parity_makes_a_violation_of_it() -> None:
    layer = spectral.SpectralLinear(8, 6, rngs=nnx.Rngs(0))
    report = check(layer, ROWS, **FORWARD, invariants="parity", styles="argument,closure")
    assert [violation.invariant for violation in report.violations] == ["parity"]
    assert "closure" in str(report.broken[0].nesting)
    held = {str(outcome.nesting) for outcome in report.outcomes if outcome.verdict == "held"}
    assert {"jit", "scan", "remat", "while_loop"} <= held


# --- what holds, and was once called broken


@pytest.mark.nnx_invariants(**FORWARD)
def test_spectral_norm_writes_a_kernel_and_restores_it(nnx_wrap: Wrap) -> None:
    layer = spectral.SpectralNorm(nnx.Linear(8, 6, rngs=nnx.Rngs(0)), rngs=nnx.Rngs(1))
    assert nnx_wrap(layer)(ROWS).shape == (3, 6)


@pytest.mark.nnx_invariants(**STEP)
def test_a_training_step_through_spectral_layers(nnx_wrap: Wrap) -> None:
    layers = (
        spectral.SpectralLinear(8, 6, rngs=nnx.Rngs(0)),
        nnx.relu,
        spectral.SpectralLinear(6, 2, rngs=nnx.Rngs(1)),
    )
    model = nnx.Sequential(*layers)
    assert nnx_wrap(step_of(square))(model, adam(model), ROWS).shape == ()
