"""optax: the first state of L-BFGS has one array under two names, which no step can donate; with copies it holds. docs/published.md tells the story."""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from training import FORWARD, Wrap

from pytest_nnxcheck import check

pytestmark = pytest.mark.skipif(version("optax") != "0.2.8", reason="another version of optax is installed")
SOLVER = optax.lbfgs(learning_rate=0.1, linesearch=None)
PARAMETERS = {"w": jnp.arange(3.0)}
DONATED = FORWARD | {"donate": "all"}


def step(parameters: Any, state: Any) -> Any:
    gradients = jax.grad(lambda parameters: (parameters["w"] ** 2).sum())(parameters)
    updates, state = SOLVER.update(gradients, state, parameters)
    return optax.apply_updates(parameters, updates), state


def test_the_first_state_cannot_be_donated() -> None:
    report = check(step, PARAMETERS, SOLVER.init(PARAMETERS), **DONATED)
    assert {violation.invariant for violation in report.violations} == {"donation"}
    said = " ".join(str(report).split())  # its lines are as wide as a terminal
    assert "state[0].diff_params_memory['w'] and state[0].diff_updates_memory['w'] share a buffer" in said


@pytest.mark.nnx_invariants(**DONATED)
def test_a_copy_of_it_can(nnx_wrap: Wrap) -> None:
    state = jax.tree.map(jnp.copy, SOLVER.init(PARAMETERS))
    assert nnx_wrap(step)(PARAMETERS, state)[0]["w"].shape == (3,)
