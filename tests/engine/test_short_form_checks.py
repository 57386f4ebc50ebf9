"""The checks of a short program to paste, called as functions: each finds what it is told to look for, and nothing else."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from healthy import assign

from pytest_nnxcheck.reproducer.runtime.short_form import (
    captures_little,
    keeps_donated_buffers,
    leaves_no_tracers,
    peak_is_within,
    plain_call,
)

KEPT = {}


class Scale(nnx.Module):
    def __init__(self):
        self.factor = nnx.Param(jnp.ones(64))

    def __call__(self, x):
        return x * self.factor[...]


def keeps(x):
    KEPT["x"] = x + 1
    return x


def test_a_tracer_that_is_alive_is_a_leak():
    with pytest.raises(AssertionError, match=r"leaked KEPT\['x'\]   float32\[3\]"):
        leaves_no_tracers(lambda: jax.jit(keeps)(jnp.ones(3)), ("KEPT['x']", "float32[3]"))
    KEPT.clear()
    assert leaves_no_tracers(lambda: jax.jit(keeps)(jnp.ones(3)), ("KEPT['x']", "float32[4]")).shape == (3,)
    KEPT.clear()


def test_what_an_exception_holds_is_no_leak_and_the_exception_comes_out():
    def fails(x):
        inside = x + 1
        raise RuntimeError(inside.shape)

    with pytest.raises(RuntimeError):
        leaves_no_tracers(lambda: jax.jit(fails)(jnp.ones(3)), ("x", "float32[3]"))


def test_a_leaf_in_a_new_buffer_is_lost_and_one_in_its_own_is_kept():
    model = Scale()

    def replaces(state):
        assign(state.factor, state.factor[...] + 1)

    with pytest.raises(AssertionError, match=r"model.factor   float32\[64\]   not reused by XLA"):
        keeps_donated_buffers(replaces, model, [], {"model.factor": (0, 0)}, {})
    keeps_donated_buffers(lambda state: None, model, [], {"model.factor": (0, 0)}, {})
    donating = jax.jit(lambda x: x + 1, donate_argnums=0)

    def donates(state):
        assign(state.factor, donating(state.factor[...]))

    keeps_donated_buffers(donates, model, [], {"model.factor": (0, 0)}, {})


def test_an_input_is_held_against_the_output_that_is_its_new_value():
    model, x = Scale(), jnp.ones(8)
    donating = jax.jit(lambda x: x + 1, donate_argnums=0)
    keeps_donated_buffers(lambda state, x: (jnp.ones(3), donating(x)), model, [x], {}, {"x": (0, 1)})
    for run, why in [
        (lambda state, x: (x + 1,), "not reused by XLA"),
        (lambda state, x: (x.astype(jnp.bfloat16),), r"became bfloat16\[8\]"),
        (lambda state, x: (), "not returned"),
    ]:
        with pytest.raises(AssertionError, match=why):
            keeps_donated_buffers(run, model, [jnp.ones(8)], {}, {"x": (0, 0)})


def test_a_peak_is_held_against_the_limit_and_against_the_copies_that_were_seen(capsys):
    compiled = jax.jit(lambda x: x @ x).lower(jnp.ones((64, 64))).compile()
    peak_is_within(compiled, 1 << 20)
    assert capsys.readouterr().out.startswith("peak ")
    with pytest.raises(AssertionError, match=r"is over the budget of 1.0 KiB"):
        peak_is_within(compiled, 1 << 10)
    with pytest.raises(AssertionError, match=r"holds 0.5 more copies of its state at the peak"):
        peak_is_within(compiled, 1 << 20, state=1 << 15, copied=1 << 14, seen=1 << 15)
    peak_is_within(compiled, 1 << 20, state=1 << 15, copied=1 << 14, seen=1 << 17)


def test_captured_arrays_are_counted():
    weights = jnp.ones((64, 64))
    call = plain_call(lambda model, x: model(x) @ weights, (Scale(), jnp.ones((2, 64))), {}, ("model",))
    with pytest.raises(AssertionError, match=r"captures 16.0 KiB of constants"):
        captures_little(*call[:3], 1 << 14)
    captures_little(*call[:3], 1 << 15)


def test_a_call_is_taken_apart_and_put_together():
    model, other = Scale(), Scale()

    def function(batch, first, *, second, train):
        return {"y": second(first(batch["x"])), "n": len(batch) + train}

    batch = {"x": jnp.ones((2, 64)), "mask": None}
    program, state, inputs, rebuild = plain_call(
        function, (batch, model), {"second": other, "train": True}, ("first", "second")
    )
    assert len(inputs) == 1
    assert state.first is model
    assert state.second is other
    output = rebuild(program(state, *inputs))
    assert output["n"] == 3
    assert output["y"].shape == (2, 64)
    assert plain_call(model, (batch["x"],), {}, ("model",))[1] is model
    assert plain_call(lambda: jnp.ones(2), (), {}, ())[2][0].shape == (), "a program has an input"
