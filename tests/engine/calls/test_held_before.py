"""Tracers in what the call is handed: an earlier transform left them, the constructor's own say. That is a finding, before any nesting."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from checking import broken, call, flat, hint, near, needs_kept_tracers, text
from flax import nnx
from healthy import FLAX, rngs
from probes import keeps_tracers

from pytest_nnxcheck import CheckError, check

X = jnp.ones((2, 4))
KEEPS = {
    "closure": lambda index: lambda: index,
    "plain object": lambda index: SimpleNamespace(index=index),
    **({"attribute": lambda index: index, "sum": lambda index: index + 0} if keeps_tracers() else {}),
}
CURES = {"Variable": nnx.Variable, **({"data": nnx.data} if FLAX >= (0, 12) else {})}


class Block(nnx.Module):
    def __init__(self, rngs: nnx.Rngs, index: jax.Array, keep: Any) -> None:
        self.linear = nnx.Linear(4, 4, rngs=rngs)
        self.index = keep(index)


class Stack(nnx.Module):
    """A stack of blocks that a vmapped constructor makes, each of which keeps its number, and never reads it."""

    def __init__(self, keep: Any) -> None:
        @nnx.split_rngs(splits=3)
        @nnx.vmap(in_axes=(0, 0), out_axes=0)
        def block(rngs: nnx.Rngs, index: jax.Array) -> Block:
            return Block(rngs, index, keep)

        self.blocks = block(rngs(), jnp.arange(3))

    def __call__(self, x: jax.Array) -> jax.Array:
        return x @ self.blocks.linear.kernel[...][0]


@pytest.mark.parametrize("keep", KEEPS)
def test_what_a_vmapped_constructor_keeps_is_a_tracer(keep):
    found = call(Stack(KEEPS[keep]), X)
    assert broken(found) == ["tracers"]
    assert ("leaked by", "a transform before the call") in found.outcome.violations[0].details
    assert f"created at {near(__file__)}:" in text(found)
    assert "index" in found.outcome.violations[0].summary
    assert found.outcome.violations[0].hint


@pytest.mark.parametrize("cure", CURES)
def test_in_a_variable_or_declared_as_data_it_holds(cure):
    assert check(Stack(CURES[cure]), X, styles="argument", max_examples=0, effort="quick").ok


@needs_kept_tracers
def test_it_is_the_finding_of_the_un_nested_call_alone():
    report = check(Stack(lambda value: value), X)
    (outcome,) = report.outcomes
    assert (outcome.verdict, outcome.nesting.layers) == ("violated", ())
    assert "tracers remain in model.blocks.index, before the call" in str(report)
    assert hint("plain value, data", path="model.blocks.index") in flat(str(report))
    assert call(Stack(lambda value: value), X, nesting="jit").outcome.verdict == "violated"


def test_an_argument_that_is_a_tracer():
    """The hint is followed: what the jit returns is an array."""
    kept: list[Any] = []
    returned = jax.jit(lambda x: kept.append(x * 2) or x * 2)(X)
    model = nnx.Linear(4, 4, rngs=rngs())
    found = call(lambda model, x: model(x["batch"]), model, {"batch": kept[0]})
    assert "tracers remain in x['batch'], before the call" in text(found)
    assert hint("input", path="x['batch']") in text(found)
    assert call(lambda model, x: model(x["batch"]), model, {"batch": returned}).outcome.verdict == "held"


def test_without_the_invariant_the_call_cannot_be_checked():
    with pytest.raises(
        CheckError, match="holds tracers that the plugin cannot remove, in .*index.*: add tracers to the invariants"
    ):
        call(Stack(KEEPS["closure"]), X, nesting="jit", invariants="memory")


@pytest.mark.slow
def test_its_program_fails_without_the_plugin(pytester, inner_args, tmp_path):
    pytester.makepyfile(
        """
        import jax
        import jax.numpy as jnp
        import pytest
        from flax import nnx

        class Kept:
            value = None

        class Model(nnx.Module):
            def __init__(self):
                self.linear = nnx.Linear(4, 4, rngs=nnx.Rngs(0))
                self.kept = Kept()

            def __call__(self, x):
                return self.linear(x)

        def remember(model, x):
            model.kept.value = x * 2
            return x

        @pytest.mark.nnx_invariants
        def test_model(nnx_wrap):
            model = Model()
            jax.jit(lambda x: remember(model, x))(jnp.ones((2, 4)))
            nnx_wrap(model)(jnp.ones((2, 4)))
        """
    )
    result = pytester.runpytest_inprocess(*inner_args, f"--basetemp={tmp_path}", "-p", "no:cacheprovider")
    result.assert_outcomes(failed=1)
    row = next(line for line in result.outlines if line.startswith("E ") and " program " in line)
    program = row.split(" program ")[1].strip()
    ran = subprocess.run([sys.executable, program], capture_output=True, text=True, check=False)
    assert ran.returncode == 1
    assert "nnx invariant broken: tracers\n  tracers remain in model.kept.value, before the call" in ran.stderr
