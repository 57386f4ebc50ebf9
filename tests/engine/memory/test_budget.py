"""A budget in bytes bounds the plain call under its jit; a nesting breaks it only where it is over the default multiple as well."""

from __future__ import annotations

import re
from decimal import Decimal
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from bugs import ScanOverRemat, call_twice, inputs_scan_over_remat
from checking import Example, broken, call, slow, text
from flax import nnx
from healthy import assign, numbers, rngs
from hypothesis import given, settings
from hypothesis import strategies as st
from memory_evidence import shown

from pytest_nnxcheck import check
from pytest_nnxcheck.xla import buffers

PLAIN = ["jit", "jit[functional]", "jit[closure]"]
NESTED = [
    "jit > while_loop",
    "jit > remat > fori_loop",
    "jit > vmap",
    "jit > vmap[functional]",
    "jit > vmap > scan",
    "jit > call_first",
    "jit > jit",
]


class Mlp(nnx.Module):
    """Parameters of 1 MiB."""

    def __init__(self):
        self.up = nnx.Linear(256, 512, use_bias=False, rngs=rngs())
        self.down = nnx.Linear(512, 256, use_bias=False, rngs=rngs())

    def __call__(self, x):
        return self.down(nnx.relu(self.up(x)))


class InPlace(nnx.Module):
    """XLA fuses the plain call into one loop over its output: it has no temporaries, where a loop or a map around it needs two."""

    def __init__(self):
        self.scale = nnx.Param(jnp.ones(1024))

    def __call__(self, x):
        return jnp.tanh(x * self.scale[...]) * 2 + x


class Counting(nnx.Module):
    """The same, where the call writes its state."""

    def __init__(self):
        self.total = nnx.Variable(jnp.zeros((256, 1024)))

    def __call__(self, x):
        assign(self.total, self.total[...] + x)
        return self.total[...].sum()


FUSED = {"in place": InPlace, "in place, written": Counting}


def fused_batch():
    return numbers((256, 1024))


@pytest.mark.parametrize("nesting", PLAIN)
def test_bytes_bound_the_plain_call(nesting, example):
    settings = {"nesting": nesting, "example": example}
    peak = call(Mlp(), numbers((96, 256)), **settings).outcome.peak
    held = call(Mlp(), numbers((96, 256)), memory_budget=peak, **settings)
    assert (held.outcome.verdict, held.outcome.budget) == ("held", peak)
    over = call(Mlp(), numbers((96, 256)), memory_budget=peak - 1, **settings)
    assert broken(over) == ["memory"]
    assert f"budget {shown(peak - 1)} (memory_budget)" in text(over)


@pytest.mark.parametrize("nesting", NESTED)
@pytest.mark.parametrize("make", FUSED.values(), ids=FUSED)
def test_a_nesting_that_is_larger_only_by_its_own_layers_keeps_the_budget(make, nesting, example):
    most = call(make(), fused_batch(), nesting="jit", example=example).outcome.peak
    found = call(make(), fused_batch(), nesting=nesting, memory_budget=most, example=example)
    assert found.outcome.verdict == "held", text(found)


def test_some_of_those_nestings_take_more_than_the_bytes(example):
    """Else the test before this one shows nothing."""
    most = call(InPlace(), fused_batch(), nesting="jit", example=example).outcome.peak
    peaks = {each: call(InPlace(), fused_batch(), nesting=each, example=example).outcome.peak for each in NESTED}
    assert {"jit > while_loop", "jit > remat > fori_loop", "jit > vmap"} <= {
        each for each in peaks if peaks[each] > most
    }


def test_a_nesting_over_both_breaks_it():
    """google/flax#4871: a second call in one program copies the parameters."""
    model, inputs = ScanOverRemat(nnx.Rngs(0)), inputs_scan_over_remat()
    most = call(model, *inputs, nesting="jit", memory_budget="1GiB").outcome.peak
    assert call(model, *inputs, nesting="jit", memory_budget=most).outcome.verdict == "held"
    found = call(model, *inputs, nesting="jit > call_first", memory_budget=most)
    assert broken(found) == ["memory"]
    budget = found.outcome.budget
    assert budget > most
    origin = f"2x the expected peak + 64 KiB, the default, which is more than memory_budget {shown(most)}"
    assert f"budget {shown(budget)} ({origin})" in text(found)
    assert f"is over the budget of {shown(budget)}" in text(found)


@pytest.mark.slow
def test_a_nesting_within_the_bytes_holds_whatever_its_multiple():
    model, inputs = ScanOverRemat(nnx.Rngs(0)), inputs_scan_over_remat()
    found = call(model, *inputs, nesting="jit > call_first", memory_budget="16MiB")
    assert (found.outcome.verdict, found.outcome.budget) == ("held", 2**24)


IN_PLACE = """
import jax.numpy as jnp
import pytest
from test_budget import InPlace, fused_batch

@pytest.mark.nnx_invariants({given}transforms="jit,vmap,while_loop", styles="argument", sweep="short", max_examples=0)
def test_call(nnx_wrap):
    nnx_wrap(InPlace())(fused_batch())
"""
KEPT, BROKEN = 2_200_000, 2_000_000
"""More than the plain call needs, and less; other nestings need up to 8 MiB."""


@pytest.mark.parametrize("source", ["marker", *slow("check()", "option", "ini file")])
def test_wherever_the_bytes_are_given(source, pytester, inner_args):
    for size, failing in ((KEPT, 0), (BROKEN, 1)):
        if source == "check()":
            settings = {"transforms": "jit,vmap,while_loop", "styles": "argument", "all": True, "max_examples": 0}
            report = check(InPlace(), fused_batch(), memory_budget=size, **settings)
            assert [str(each.nesting) for each in report.outcomes if each.violations] == ["jit"] * failing
            continue
        given = f"memory_budget={size}, " if source == "marker" else ""
        (pytester.path / "test_it.py").write_text(IN_PLACE.format(given=given))
        pytester.makeini(f"[pytest]\nnnx_memory_budget = {size}" if source == "ini file" else "[pytest]")
        option = [f"--nnx-memory-budget={size}"] if source == "option" else []
        pytester.syspathinsert(Path(__file__).parent)
        result = pytester.runpytest_inprocess(*inner_args, "--nnx-all", *option)
        result.assert_outcomes(failed=failing, passed=1 - failing)
        if failing:
            result.stdout.fnmatch_lines(["E * nesting     jit", "E * tried * 1 failed, 5 passed"])


def pasted(message: str) -> list[str]:
    """The budgets that a message offers."""
    return re.findall(
        r'"([\d.]+(?:x|[KMGT]?i?B))"', " ".join(message.partition("passes with memory_budget")[2].split())
    )


def a_tenth_less(budget: str) -> str:
    number, unit = re.fullmatch(r"([\d.]+)(.+)", budget).groups()
    return f"{Decimal(number) - (1 if unit == 'B' else Decimal('0.1'))}{unit}"


OVER = {
    "bytes": (Mlp, 1024, {}),
    "bytes, a nesting over the default too": (ScanOverRemat, 1024, {"nesting": "jit > call_first"}),
    "a multiple": (Mlp, "0.3x", {}),
    "copies": (ScanOverRemat, None, {"nesting": "jit > call_first"}),
}


@pytest.mark.parametrize("over", ["bytes", "a multiple", *slow("bytes, a nesting over the default too", "copies")])
@settings(max_examples=2, deadline=None, derandomize=True)
@given(rows=st.integers(1, 12))
def test_the_budget_of_a_failure_is_the_smallest_that_passes(over, rows):
    make, budget, more = OVER[over]
    model = make(nnx.Rngs(0)) if make is ScanOverRemat else make()
    x = numbers((rows, 128 if make is ScanOverRemat else 256))
    example = Example()
    found = call(model, x, memory_budget=budget, **{"nesting": "jit", "example": example, **more})
    assert broken(found) == ["memory"]
    (passing,) = pasted(text(found))
    assert passing.endswith("B" if isinstance(budget, int) else "x")
    for chosen, verdict in ((passing, "held"), (a_tenth_less(passing), "violated")):
        again = call(model, x, memory_budget=chosen, **{"nesting": "jit", "example": example, **more})
        assert again.outcome.verdict == verdict, (chosen, text(again))


TWO_CALLS = """
import pytest
from test_budget import InPlace, Mlp, fused_batch, numbers

@pytest.mark.nnx_invariants(transforms="jit,while_loop", styles="argument", sweep="short", max_examples=0)
def test_two_calls(nnx_wrap):
    nnx_wrap(InPlace())(fused_batch())
    nnx_wrap(Mlp())(numbers((96, 256)))
"""


@pytest.mark.slow
def test_the_budgets_of_a_test_that_passes_are_the_smallest(pytester, inner_args):
    """Each of its calls is within them, whichever has the worst peak."""
    pytester.makepyfile(test_it=TWO_CALLS)
    pytester.syspathinsert(Path(__file__).parent)
    said = pytester.runpytest_inprocess(*inner_args, "-v").stdout.str()
    multiple, size = pasted(said)
    assert (multiple[-1], size[-1]) == ("x", "B")
    assert re.search(r"holds at its peak: state 1\.0 MiB, .* \(jit\)", said)
    for budget in (multiple, size):
        held = pytester.runpytest_inprocess(*inner_args, f"--nnx-memory-budget={budget}")
        held.assert_outcomes(passed=1)
        assert pasted(held.stdout.str()) == []  # only -v has them
        less = pytester.runpytest_inprocess(*inner_args, "-v", f"--nnx-memory-budget={a_tenth_less(budget)}")
        less.assert_outcomes(failed=1)
        assert pasted(less.stdout.str()) == [budget]  # of the failure alone


def test_a_budget_in_powers_of_1000_is_shown_as_it_was_written_too(example):
    found = call(Mlp(), numbers((96, 256)), nesting="jit", memory_budget="1.5KB", example=example)
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


@pytest.mark.parametrize("dtype", ["bfloat16", *slow("float16")])
def test_a_copy_of_parameters_in_16_bit_floats_is_still_told(dtype):
    """google/flax#4871 in 16 bits: XLA of older jaxlib copies the stack in float32, slice by slice, and back."""
    graphdef, state = nnx.split(ScanOverRemat(nnx.Rngs(0)))
    model = nnx.merge(graphdef, jax.tree.map(lambda leaf: leaf.astype(dtype), state))
    inputs = [x.astype(dtype) for x in inputs_scan_over_remat()]
    found = call(call_twice, model, *inputs, nesting="jit")
    assert [violation.invariant for violation in found.outcome.violations] == ["memory"]
    assert "extra copies of its state" in text(found)
    assert "copy of model.layers.kernel (" in text(found)


@pytest.mark.slow
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
