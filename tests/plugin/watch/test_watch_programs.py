"""``--nnx-watch`` and memory: programs over the budget, programs that copy the state, and what the run says of them."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.usefixtures("aliased_bytes")
SUITE = """
import jax
import jax.numpy as jnp
import pytest

@pytest.fixture(scope="module")
def square():
    return jax.jit(lambda x: x @ x)(jnp.ones((64, 64)))

def test_large(square):
    x = jnp.ones((128, 128))
    def doubled(x):
        return x + x
    jax.jit(doubled)(x)
    jax.jit(lambda x: x * 3)(x)

def test_small(square):
    jax.jit(lambda x: x + 1)(jnp.ones(3))
"""


@pytest.fixture
def watch(pytester, inner_args):
    def run(source, *args):
        pytester.makepyfile(test_suite=source)
        return pytester.runpytest_inprocess(*inner_args, "-p", "no:randomly", "-p", "no:cacheprovider", *args)

    return run


def test_a_program_over_the_budget_fails_its_test(watch):
    result = watch(SUITE, "--nnx-watch", "--nnx-memory-budget=100KiB")
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(
        [
            "nnx watch: jit_doubled peaks at 128.0 KiB, over 100.0 KiB",
            "  test        test_suite.py::test_large",
            "  peak        128.0 KiB of jit_doubled, memory_budget 100.0 KiB:",
            "              arguments 64.0 KiB + outputs 64.0 KiB + temporaries *",
            "              compiled at test_suite.py:13 (test_large)",
            "              and 1 more",
            "test_suite.py::test_large  jit_doubled peaks at 128.0 KiB, over 100.0 KiB",
            "2 tests watched: 1 compiled programs over the budget*",
        ]
    )


def test_a_program_of_a_fixture_is_told_as_such(watch):
    result = watch(SUITE, "--nnx-watch=report", "--nnx-memory-budget=20KiB", "-k", "small", "-rA")
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines(
        [
            "  peak        32.0 KiB of jit__lambda*",
            "              compiled at test_suite.py:7 (square), for the fixture",
            "              square",
            "test_suite.py::test_small  jit__lambda* peaks at 32.0 KiB, over 20.0 KiB",
        ]
    )


@pytest.mark.parametrize(
    "args", [["--nnx-watch"], ["--nnx-watch", "--nnx-memory-budget=1GB"], ["--nnx-memory-budget=1"]]
)
def test_without_watch_or_within_the_budget_nothing_is_told(watch, args):
    result = watch(SUITE, *args)
    result.assert_outcomes(passed=2)
    result.stdout.no_fnmatch_line("*over*")


def test_a_multiple_is_told_to_be_for_marked_tests(watch, pytester):
    pytester.makeini("[pytest]\nnnx_watch = fail\nnnx_memory_budget = 2x\n")
    result = watch(SUITE)
    result.assert_outcomes(passed=2)
    result.stdout.fnmatch_lines(["*; memory_budget 2x is a multiple, which works in marked tests alone: write bytes *"])


COPIES = """
import bugs
from flax import nnx

def test_twice():
    model = bugs.ScanOverRemat(nnx.Rngs(0))
    nnx.jit(bugs.call_twice)(model, *bugs.inputs_scan_over_remat())

def test_once():
    model = bugs.ScanOverRemat(nnx.Rngs(0), "functional")
    nnx.jit(bugs.call_twice)(model, *bugs.inputs_scan_over_remat())
"""


@pytest.mark.slow
def test_a_program_that_copies_the_state_fails_its_test(watch):
    result = watch(COPIES, "--nnx-watch")
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(
        [
            "nnx watch: copied by a program: model.layers.kernel",
            "  copied      model.layers.kernel: temporaries of jit_*",
            "              compiled at test_suite.py:6 (test_twice)",
            "2 tests watched: 1 compiled programs that copy the state*",
        ]
    )
