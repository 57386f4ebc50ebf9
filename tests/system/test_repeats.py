"""The same commit gives the same verdicts: twice in a row, in one process or two, without a cache."""

from __future__ import annotations

import re

import pytest

SUITE = """
import jax.numpy as jnp
import pytest
from flax import nnx

pytestmark = pytest.mark.nnx_invariants(sweep="singles", SETTINGS)


class Net(nnx.Module):
    def __init__(self):
        self.linear = nnx.Linear(4, 4, rngs=nnx.Rngs(0))
        self.norm = nnx.BatchNorm(4, rngs=nnx.Rngs(0))

    def __call__(self, x):
        return self.norm(self.linear(x))


KEPT = {}


class Keeps(Net):
    def __call__(self, x):
        KEPT["last"] = y = super().__call__(x)
        return y


@pytest.mark.parametrize("width", [1, 2])
def test_healthy(nnx_wrap, width):
    assert nnx_wrap(Net())(jnp.ones((width, 4))).shape == (width, 4)


def test_leaky(nnx_wrap):
    nnx_wrap(Keeps())(jnp.ones((2, 4)))
"""


@pytest.mark.parametrize(
    "settings",
    [
        'max_examples=3, styles="argument", transforms="jit,scan"',
        pytest.param('max_examples=6, styles="argument,functional"', marks=pytest.mark.full),
    ],
)
def test_verdicts_repeat(pytester, inner_args, settings):
    pytester.makepyfile(test_models=SUITE.replace("SETTINGS", settings))
    runs = {}
    for options in ["-n0", "-n2", "-n0 -p no:cacheprovider -W error --strict-markers"]:
        result = pytester.runpytest_subprocess(*inner_args, "-p", "xdist", *options.split())
        result.assert_outcomes(passed=2, failed=1)
        lines = [line for line in result.outlines if re.match(r"test_models.py::\S+  \d+ nesting", line)]
        assert len(lines) == 3
        broken = [line for line in result.outlines if re.match(r"E (?!.* (replay|program)  )", line)]
        runs[options] = ([line.partition(";")[0] for line in lines], broken)
    assert len({str(run) for run in runs.values()}) == 1, runs
