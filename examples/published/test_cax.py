"""cax: a replay buffer that a jitted step captures keeps its tracers. docs/published.md tells the story."""

from __future__ import annotations

import importlib
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from training import FORWARD, Wrap

from pytest_nnxcheck import check

pytest.importorskip("cax", reason="cax is not installed")
Buffer = importlib.import_module("cax.nn.buffer").Buffer

BATCH = jnp.ones((2, 3))


def add_and_sample(buffer: Any, batch: Any) -> Any:
    return buffer.add(batch).sample(jax.random.key(0), batch_size=2)


def test_a_captured_buffer_keeps_tracers() -> None:
    """It holds plain arrays, whose write flax does not look at."""
    report = check(add_and_sample, Buffer.create(4, jnp.zeros(3)), BATCH, **FORWARD)
    assert {violation.invariant for violation in report.violations} == {"tracers"}
    assert str(report.broken[0].nesting) == "jit[closure]"
    assert "buffer.data" in str(report)


@pytest.mark.nnx_invariants(**FORWARD, styles="argument,functional")
def test_a_buffer_that_is_an_argument(nnx_wrap: Wrap) -> None:
    nnx_wrap(add_and_sample)(Buffer.create(4, jnp.zeros(3)), BATCH)
