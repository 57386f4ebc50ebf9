"""A program that another platform alone can lower is left out on this one, with the reason: a kernel of Pallas for TPUs, a precision of products."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from checking import flat
from flax import nnx
from jax.experimental import pallas as pl

from pytest_nnxcheck import CheckError, check

FEW = {"sweep": "singles", "styles": "argument", "transforms": "jit,scan", "max_examples": 0}


class Model(nnx.Module):
    def __init__(self, rngs, *, interpret):
        self.linear, self.interpret = nnx.Linear(8, 128, rngs=rngs), interpret

    def __call__(self, x):
        def kernel(x, o):
            o[...] = x[...] * 2

        y = self.linear(x)
        shape = jax.ShapeDtypeStruct(y.shape, y.dtype)
        return pl.pallas_call(kernel, out_shape=shape, interpret=self.interpret)(y)


def handed(*, interpret, abstract):
    make = lambda: (Model(nnx.Rngs(0), interpret=interpret), jnp.ones((8, 8)))  # noqa: E731
    return nnx.eval_shape(make) if abstract else make()


@pytest.mark.parametrize("abstract", [False, True])
def test_its_jits_are_left_out_and_its_traces_are_checked(abstract):
    report = check(*handed(interpret=False, abstract=abstract), **FEW)
    assert report.ok
    verdicts = {str(each.nesting): each.verdict for each in report.outcomes}
    assert verdicts == {"un-nested": "held" if abstract else "rejected", "jit": "rejected", "scan": "held"}
    assert "jit left out: this CPU cannot lower the program (ValueError: Only interpret mode" in flat(
        " ".join(report.notes)
    )
    assert "memory and donation not asserted: this CPU cannot lower the program" in str(report)
    interpreted = check(*handed(interpret=True, abstract=abstract), **FEW)
    assert {each.verdict for each in interpreted.outcomes} == {"held"}
    assert "not asserted: this CPU" not in str(interpreted)


def test_where_nothing_else_is_asserted_the_check_says_so():
    with pytest.raises(CheckError, match="nothing was checked: .*this CPU cannot lower the program .*--nnx-target"):
        check(*handed(interpret=False, abstract=False), nesting="jit")
    assert check(*handed(interpret=True, abstract=False), nesting="jit").ok


@pytest.mark.skipif(not hasattr(jax.lax, "DotAlgorithmPreset"), reason="this jax names no algorithms of products")
def test_a_precision_that_no_cpu_has_is_left_out_too():
    precision = jax.lax.DotAlgorithmPreset.F16_F16_F32
    report = check(nnx.Linear(8, 8, precision=precision, rngs=nnx.Rngs(0)), jnp.ones((8, 8)), **FEW)
    assert {str(each.nesting): each.verdict for each in report.outcomes}["jit"] == "rejected"
    assert "jit left out: this CPU cannot lower the program (ValueError: The precision" in flat(" ".join(report.notes))
