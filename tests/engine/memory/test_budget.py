"""A budget in bytes bounds one call: the nesting's own axes are added to it, and what one call or a nesting wastes is not."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import pytest
from bugs import ScanOverRemat, call_twice, inputs_scan_over_remat
from checking import Example, broken, call, text
from flax import nnx
from healthy import assign, numbers, rngs
from memory_evidence import shown
from rewritten_leaves import CHANGES, Codebook

from pytest_nnxcheck.xla import buffers

ONE_CALL = ["jit", "jit > remat", "jit > while_loop"]
WITH_AXES = ["jit > vmap", "jit > vmap[functional]", "jit > scan", "jit > scan > vmap", "jit > grad > fori_loop"]


class Mlp(nnx.Module):
    """Parameters of 1 MiB."""

    def __init__(self):
        self.up = nnx.Linear(256, 512, use_bias=False, rngs=rngs())
        self.down = nnx.Linear(512, 256, use_bias=False, rngs=rngs())

    def __call__(self, x):
        return self.down(nnx.relu(self.up(x)))


class Wasteful(Mlp):
    """An outer product that nobody needs: more in one call. With axes more is expected of it too, the un-nested program says it."""

    def __call__(self, x):
        return super().__call__(x) + jnp.sort(x[:8, :, None] * x[:8, None, :]).sum((0, -1))


def batch():
    return numbers((96, 256))


def peak(model, nesting, example):
    return call(model, batch(), nesting=nesting, example=example).outcome.peak


@pytest.fixture(scope="module")
def budget(memo):
    """What one call may hold: as much as the largest of these, and a tenth. (Older jax copies an operand of a mapped product.)"""
    return round(1.1 * max(peak(Mlp(), nesting, Example(memo)) for nesting in ONE_CALL))


@pytest.mark.slow
@pytest.mark.parametrize("nesting", ONE_CALL)
def test_one_call_is_held_to_the_bytes_themselves(budget, nesting, example):
    settings = {"nesting": nesting, "example": example}
    held = call(Mlp(), batch(), memory_budget=budget, **settings)
    assert (held.outcome.verdict, held.outcome.budget) == ("held", budget)
    over = call(Mlp(), batch(), memory_budget=held.outcome.peak - 1, **settings)
    assert broken(over) == ["memory"]
    assert f"budget {shown(held.outcome.peak - 1)} (memory_budget)" in text(over)
    assert broken(call(Wasteful(), batch(), memory_budget=budget, **settings)) == ["memory"]


@pytest.mark.parametrize("nesting", WITH_AXES[:4])
def test_the_axes_of_a_nesting_are_added(budget, nesting, example):
    held = call(Mlp(), batch(), nesting=nesting, memory_budget=budget, example=example)
    assert held.outcome.verdict == "held", text(held)
    assert held.outcome.peak > budget  # by the bytes alone it was condemned
    assert held.outcome.budget > budget


@pytest.mark.slow
@pytest.mark.parametrize("nesting", WITH_AXES)
def test_what_is_added_is_the_expected_peak_less_the_un_nested_one(nesting, example):
    """By the peaks that reports show: the un-nested program of a gradient is the gradient."""
    un_nested = "jit[functional] > grad[functional]" if "grad" in nesting else "jit[functional]"
    further = {"transforms": "jit,vmap,scan,grad,fori_loop", "example": example}
    expected = call(Mlp(), batch(), nesting=nesting, memory_budget="1x", **further).outcome.budget
    peak = call(Mlp(), batch(), nesting=un_nested, **further).outcome.peak
    found = call(Mlp(), batch(), nesting=nesting, memory_budget=10**6, **further).outcome
    assert found.budget - 10**6 == expected - peak > 0


class Scattered(nnx.Module):
    """Adds to a few rows of a large leaf."""

    def __init__(self):
        self.rows = nnx.Cache(jnp.ones((1024, 64)))

    def __call__(self, x):
        assign(self.rows, self.rows[...].at[jnp.array([1, 5, 9])].add(x))
        return x.sum()


@pytest.mark.slow
@pytest.mark.parametrize("nesting", ["jit > vmap", "jit > scan", "jit > call_first"])
@pytest.mark.parametrize("make", [Scattered, *(partial(Codebook, CHANGES[name]) for name in ("branch", "shift"))])
def test_a_leaf_that_is_rewritten_fits_the_un_nested_peak_and_what_the_axes_add(make, nesting):
    if (make, nesting, jax.__version_info__[:2]) == (Scattered, "jit > vmap", (0, 5)):
        pytest.skip("the XLA of jax 0.5 holds a mapped scatter five times")
    x = jnp.ones(64 if make is Scattered else 256)
    one = call(make(), x, nesting="jit").outcome.peak
    found = call(make(), x, nesting=nesting, memory_budget=one)
    assert found.outcome.verdict == "held", text(found)


@pytest.mark.slow
def test_more_than_the_axes_need_is_a_violation():
    """google/flax#4871: a second call in one program copies the parameters, which is no matter of its axes."""
    model, inputs = ScanOverRemat(nnx.Rngs(0)), inputs_scan_over_remat()
    one = call(model, *inputs, nesting="jit").outcome.peak
    assert call(model, *inputs, nesting="jit", memory_budget=one).outcome.verdict == "held"
    found = call(model, *inputs, nesting="jit > call_first", memory_budget=one)
    assert broken(found) == ["memory"]
    more = found.outcome.budget - one
    told = f"budget {shown(one + more)} (memory_budget {shown(one)} + {shown(more)} for the nesting's own axes)"
    assert told in text(found)
    assert f"is over the budget of {shown(one + more)}" in text(found)


def test_a_budget_in_powers_of_1000_is_shown_as_it_was_written_too(example):
    found = call(Mlp(), batch(), nesting="jit", memory_budget="1.5KB", example=example)
    assert "budget 1.5 KiB (memory_budget 1.5KB)" in text(found)


class PooledHead(nnx.Module):
    """The head of a convolutional classifier."""

    def __init__(self):
        self.linear = nnx.Linear(24, 1280, rngs=rngs())

    def __call__(self, x):
        return nnx.relu(self.linear(x)).mean((1, 2))


def test_broadcasts_that_two_calls_share_are_expected():
    """XLA makes the broadcasts of a bias and of the zero of a relu once for both; for one call newer jax fuses them away."""
    found = call(PooledHead(), jnp.ones((2, 8, 8, 24)), nesting="jit > call_first")
    assert found.outcome.verdict == "held", text(found)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_a_copy_of_parameters_in_16_bit_floats_is_still_told(dtype):
    """google/flax#4871 in 16 bits: XLA of older jaxlib copies the stack in float32, slice by slice, and back."""
    graphdef, state = nnx.split(ScanOverRemat(nnx.Rngs(0)))
    model = nnx.merge(graphdef, jax.tree.map(lambda leaf: leaf.astype(dtype), state))
    inputs = [x.astype(dtype) for x in inputs_scan_over_remat()]
    found = call(call_twice, model, *inputs, nesting="jit")
    assert [violation.invariant for violation in found.outcome.violations] == ["memory"]
    assert "extra copies of its state" in text(found)
    assert "copy of model.layers.kernel (" in text(found)


def test_parameters_that_are_computed_with_in_float32_are_no_copy():
    model = nnx.Linear(256, 256, param_dtype=jnp.bfloat16, dtype=jnp.float32, rngs=rngs())
    found = call(model, jnp.ones((4, 256)), nesting="jit")
    assert found.outcome.verdict == "held", text(found)
    assert any(buffer.shape == "float32[256,256]" for buffer in found.outcome.evidence.buffers)


def test_only_what_repeats_far_fewer_elements_is_a_broadcast():
    def program(bias, x):
        return jnp.broadcast_to(bias, (2, 8, 8, 1280)), jnp.broadcast_to(x, (2, 64, 1280)), jnp.sin(x)

    compiled = jax.jit(program).lower(jnp.ones(1280), jnp.ones((64, 1280))).compile()
    shapes = {buffer.shape for buffer in buffers.read(compiled).buffers if buffer.broadcast}
    assert shapes == {"float32[2,8,8,1280]"}
