"""The ledger of a peak: its heads add up to it, and each byte of a training step is under its own."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from healthy import rngs
from wild_training import apply_gradients, optimizer_of

from pytest_nnxcheck import check
from pytest_nnxcheck.reporting.memory_breakdown import in_words

WIDE, ROWS = 256, 1024
OF_BATCH = 4 * WIDE * ROWS
"""The bytes of what a wide layer makes of the batch."""

MEMORY = {"nesting": "jit", "invariants": "memory"}


class Mlp(nnx.Module):
    """Two layers, with something between them that the backward pass needs."""

    def __init__(self, rngs):
        self.first, self.second = nnx.Linear(8, WIDE, rngs=rngs), nnx.Linear(WIDE, 8, rngs=rngs)

    def __call__(self, x):
        return self.second(nnx.tanh(self.first(x)))


def step(model, optimizer, x):
    loss, gradients = nnx.value_and_grad(lambda model: (model(x) ** 2).mean())(model)
    apply_gradients(optimizer, model, gradients)
    return loss


def decode(model, x):
    return jax.lax.scan(lambda x, _: (model(x), None), x, length=8)[0]


def ledger_of(subject, *args, **settings):
    (outcome,) = check(subject, *args, **MEMORY, **settings).outcomes
    found = dict(outcome.evidence.ledger)
    assert sum(found.values()) == outcome.peak
    return found


@pytest.mark.skipif(jax.__version_info__ < (0, 7), reason="before, the operations of a backward pass have no name")
def test_a_training_step_has_its_bytes_under_their_heads():
    model = Mlp(rngs())
    found = ledger_of(step, *optimizer_of(model), jnp.ones((ROWS, 8)))
    state = sum(leaf.nbytes for leaf in jax.tree.leaves(nnx.state(model)))
    assert found["state"] == state
    assert 2 * state <= found["optimizer state"] <= 2 * state + 16
    assert found["inputs"] == 4 * 8 * ROWS
    assert found["saved for the backward pass"] >= OF_BATCH
    assert found.get("not explained", 0) < 0.05 * sum(found.values())


def test_a_forward_call_saves_nothing():
    found = ledger_of(Mlp(rngs()), jnp.ones((ROWS, 8)))
    assert found["other temporaries"] >= OF_BATCH
    assert not {"saved for the backward pass", "gradients"} & found.keys()


@pytest.mark.skipif(jax.__version_info__ < (0, 12), reason="older XLA for the CPU makes no bfloat16")
def test_weights_that_are_cast_before_a_loop_are_casts_of_the_state():
    """float32 weights and arithmetic in bfloat16: half of the state once more."""
    model = nnx.Sequential(*(nnx.Linear(WIDE, WIDE, dtype=jnp.bfloat16, rngs=rngs()) for _ in range(4)))
    found = ledger_of(decode, model, jnp.ones((2, WIDE), jnp.bfloat16))
    assert found["casts of the state"] == 4 * 2 * WIDE * WIDE


def test_the_message_of_a_failure_has_the_largest_heads():
    report = check(Mlp(rngs()), jnp.ones((ROWS, 8)), **MEMORY, memory_budget="1KiB")
    assert re.search(r"^ *holds +other temporaries \d\.0 MiB", str(report), re.MULTILINE)


@pytest.mark.parametrize(
    "ledger, words",
    [
        ((("state", 2048), ("outputs", 4096)), "outputs 4.0 KiB, state 2.0 KiB"),
        ((("state", 4096), ("outputs", 8), ("constants", 4)), "state 4.0 KiB, the rest 12 B"),
        ((("state", 4096), ("in the same memory", -2048)), "state 4.0 KiB, in the same memory -2.0 KiB"),
    ],
)
def test_the_words_of_a_ledger_add_up(ledger, words):
    assert in_words(ledger) == words
