"""``--nnx-watch=calls``: bugs in suites that nobody marked, and that a test keeps its outcome, its counters and its random numbers."""

from __future__ import annotations

import re

import pytest

HEAD = """
import functools
import itertools
import random
import unittest
from unittest import mock

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

X = jnp.ones((2, 4))

def linear():
    return nnx.Linear(4, 4, kernel_init=nnx.initializers.ones_init(), rngs=nnx.Rngs(0))

"""
PLANTED = """
SEEN = []

class Probe(nnx.Module):
    def __init__(self):
        self.linear = linear()

    def __call__(self, x):
        SEEN.append(x)
        return self.linear(x)

class TestProbe(unittest.TestCase):
    def test_list(self):
        self.assertEqual(Probe()(X).shape, (2, 4))
        self.assertEqual(len(SEEN), 1)

@functools.cache
def causal(length):
    return jnp.tril(jnp.ones((length, length)))

class Attention(nnx.Module):
    def __init__(self):
        self.linear = linear()

    def scores(self, x):
        return causal(x.shape[0]) @ self.linear(x)

def test_warm():
    assert causal(2).shape == (2, 2)

def test_cached():
    attention = Attention()
    assert attention.scores(X).shape == (2, 4)
    assert attention.linear.bias.shape == (4,)

def test_again():
    Attention().scores(X)

@nnx.jit
def promote(model, rate):
    kernel = model.kernel
    kernel.value = kernel.value * rate

def test_promoted():
    promote(nnx.Linear(32, 32, param_dtype=jnp.bfloat16, rngs=nnx.Rngs(0)), jnp.float32(1))

def loss(model, x):
    return model(x).sum()

def test_healthy():
    assert loss(linear(), X) == loss(linear(), jnp.ones((2, 4)))

class Checked(nnx.Module):
    def __init__(self):
        self.linear = linear()

    def size(self, x):
        return self.linear(x).sum()

    def __call__(self, x, *, strict=True):
        if strict and bool((x < 0).any()):
            raise ValueError("negative")
        return self.size(x)

def test_callback():
    nnx.recursive_map(lambda path, node: node, Probe()) if hasattr(nnx, "recursive_map") else None

def filled(shapes, count):
    if count == 0:
        raise ValueError("no data")
    return jnp.ones(shapes.kernel.value.shape) / count

def test_of_shapes():
    filled(nnx.eval_shape(linear), jnp.ones((), jnp.int32))

def test_eager():
    assert Checked()(X)
    with pytest.raises(ValueError):
        Checked()(-X)
"""


@pytest.fixture
def calls(pytester, inner_args):
    """Run a suite with its calls checked."""

    def run(source, *args, option="--nnx-watch=calls", how="inprocess"):
        pytester.makepyfile(test_suite=HEAD + source)
        quiet = ("-p", "no:randomly", "-rfs")
        return getattr(pytester, f"runpytest_{how}")(*inner_args, *quiet, option, *args)

    return run


def failed(result):
    return {line.split(" - ")[0].removeprefix("FAILED ") for line in result.outlines if line.startswith("FAILED")}


BROKEN = {
    "nnx-call::test_suite.Attention.scores(f32(2,4))",
    "nnx-call::test_suite.Probe(f32(2,4))",
    "nnx-call::test_suite.promote(Linear, f32())",
}


def test_planted_bugs_are_found_and_the_tests_pass(calls):
    result = calls(PLANTED, "-vv")
    assert failed(result) == BROKEN
    result.assert_outcomes(passed=9 + 2, failed=3, skipped=2)
    result.stdout.fnmatch_lines(
        [
            "  tracers     tracers remain in causal.cache[[]2[]]",
            "  replay      pytest test_suite.py::test_cached --nnx-watch=calls --nnx-nesting jit",
            "  call        test_suite.Attention.scores(f32[[]2,4[]]), made by",
            "              test_suite.py::test_cached at line 52, and 1 other",
            "  to keep it",
            "    @pytest.mark.nnx_invariants",
            "    def test_cached(nnx_wrap):",
            "        attention = Attention()",
            "        assert nnx_wrap(attention.scores)(X).shape == (2, 4)",
            "nnx-call::test_suite.Checked(f32(2,4))  eager: TracerBoolConversionError*",
            "7 distinct calls: 2 passed, 3 failed, 2 eager",
        ]
    )
    # The call inside of the eager one is checked in its place.
    result.stdout.fnmatch_lines(["nnx-call::test_suite.Checked.size(f32(2,4))  16 nestings: 16 passed*"])


@pytest.mark.slow
def test_workers_find_the_same(calls):
    result = calls(PLANTED, "-n2", how="subprocess")
    assert failed(result) == BROKEN
    result.assert_outcomes(passed=9 + 2, failed=3, skipped=2)
    result.stdout.fnmatch_lines(["7 distinct calls: 2 passed, 3 failed, 2 eager"])


@pytest.mark.slow
def test_lf_makes_a_call_that_failed_again(calls):
    calls(PLANTED, "-k", "list or again or healthy")
    result = calls(PLANTED, "--lf")
    assert failed(result) == {"nnx-call::test_suite.Attention.scores(f32(2,4))", "nnx-call::test_suite.Probe(f32(2,4))"}
    result.assert_outcomes(passed=2, failed=2)


def test_a_known_failure_of_a_call_is_expected(calls, pytester):
    pytester.makefile(".toml", known='["nnx-call::*Probe*"]\ntracers = "a log"\n')
    result = calls(PLANTED, "-k", "list or healthy", "--nnx-expected-failures=known.toml")
    result.assert_outcomes(passed=2 + 2, deselected=7)
    result.stdout.fnmatch_lines(["*Probe*15 expected to fail*"])


OUTCOMES = """
CALLS = 0
TICKS = itertools.count()

class Net(nnx.Module):
    made = 0

    def __init__(self):
        self.linear, self.calls = linear(), nnx.BatchStat(jnp.zeros((), jnp.int32))

    def helper(self, x):
        return x

    def __call__(self, x):
        global CALLS
        CALLS += 1
        Net.made += 1
        self.calls.value = self.calls.value + 1
        print("called", next(TICKS))
        return self.helper(self.linear(x)) + random.random() + np.random.rand()

def test_counters(capsys):
    random.seed(3)
    np.random.seed(4)
    net = Net()
    y = net(X)
    assert (CALLS, Net.made, int(net.calls.value)) == (1, 1, 1)
    assert capsys.readouterr().out == "called 0\\n"
    random.seed(3)
    np.random.seed(4)
    assert jnp.allclose(y, 4 + random.random() + np.random.rand())

class Augmented(nnx.Module):
    def __init__(self):
        self.linear, self.seen = linear(), 0
        self.own = [random.Random(1), np.random.default_rng(2), np.random.RandomState(3), random.SystemRandom()]

    def __call__(self, x):
        SUMS[0] += 1
        python, new, old, _ = self.own
        return self.linear(x) + python.random() + new.random() + old.rand()

SUMS = np.zeros(2)

def test_generators_of_its_own():
    again = [random.Random(1).random(), np.random.default_rng(2).random(), np.random.RandomState(3).rand()]
    assert jnp.allclose(Augmented()(X), 4 + sum(again))
    assert SUMS.tolist() == [1, 0]

def test_iterator():
    batches = iter([X, X])
    nnx.jit(lambda net, batches=batches: net.linear(next(batches)))(Net())
    next(batches)

def test_mock():
    with mock.patch.object(Net, "helper", side_effect=lambda x: x) as helper:
        Net()(X)
    helper.assert_called_once()

def test_traces():
    traces = 0

    @nnx.jit
    def step(net, x):
        nonlocal traces
        traces += 1
        return net.linear(x)

    net = Net()
    for rows in (2, 2, 3, 3):
        step(net, jnp.ones((rows, 4)))
    assert traces == 2
    for _ in range(2):
        step(Decorated(), X)  # checked as well, when the function has traces that it keeps
    assert traces == 3
    step(net, X)
    assert traces == 3

def generated(function):
    # In code that is in no file, with an argument of its own, as checkers of types do.
    scope = {"function": function}
    exec("def wrapper(*args, its_own=function): return its_own(*args)", scope)
    return functools.wraps(function)(scope["wrapper"])

class Decorated(nnx.Module):
    def __init__(self):
        self.linear = linear()

    @generated
    def __call__(self, x):
        return self.linear(x)

def drop(model, x, rngs):
    return nnx.Dropout(0.5, rngs=rngs)(model(x))

def test_decorated():
    drop(Decorated(), X, nnx.Rngs(0))
    Decorated()(X)

@hypothesis.given(st.integers(1, 2))
@hypothesis.settings(max_examples=3, deadline=None, database=None)
def test_drawn(rows):
    assert linear()(jnp.ones((rows, 4))).shape == (rows, 4)

def test_random_streams():
    first, second = (nnx.Dropout(0.5, rngs=nnx.Rngs(1)) for _ in range(2))
    assert (first(X) == second(X)).all() and not (first(X + 1) == second(X)).all()

def test_donated():
    step = nnx.jit(lambda net: net.linear(X), donate_argnums=0)
    net = Net()
    old = net.linear.bias.value
    step(net)
    assert old.is_deleted() and not net.linear.bias.value.is_deleted()

class Lazy(nnx.Module):
    def __init__(self):
        self.scale = nnx.data(None) if hasattr(nnx, "data") else None

    def __call__(self, x):
        if self.scale is None:
            self.scale = nnx.Param(jnp.ones(4))
        return x * self.scale.value

def test_lazy():
    lazy = Lazy()
    lazy(X)
    lazy(X)

def test_raises():
    class Raises(nnx.Module):
        def __call__(self, x):
            raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        Raises()(X)
"""


def test_a_test_sees_nothing_of_the_checks_of_its_calls(calls):
    result = calls(OUTCOMES)
    assert failed(result) == set()
    result.stdout.fnmatch_lines(
        [
            "* distinct calls: * passed, 1 not checked",
            "*not checked: it leads to a list_iterator, which can be read once",
        ]
    )
    result.stdout.fnmatch_lines(
        ["nnx-call::test_suite.Decorated(f32(2,4))  *", "nnx-call::test_suite.drop(Decorated, f32(2,4), Rngs)  *"]
    )
    assert not re.search("fault|eager", result.stdout.str())


TWO_OF_A_NAME = """
class Stack(nnx.Module):
    def __init__(self, layers):
        self.layers = nnx.List([linear() for _ in range(layers)]) if hasattr(nnx, "List") else [linear() for _ in range(layers)]

    def __call__(self, x):
        for layer in self.layers:
            x = layer(x)
        return x

@pytest.mark.parametrize("layers", [1, 2])
def test_stack(layers):
    Stack(layers)(X)

def test_one_after_the_other():
    for layers in range(3, 9):  # each at the address of one that is gone, most likely
        Stack(layers)(X)
"""


def test_two_calls_with_one_name_have_the_same_ids_in_every_process(calls):
    def ids(*args, how="subprocess"):
        result = calls(TWO_OF_A_NAME, *args, option="--nnx-watch=list", how=how)
        return {line.split()[0] for line in result.outlines if line.startswith("nnx-call::")}

    alone = ids()
    assert len(alone) == 8
    assert ids() == alone


def test_time_that_is_over_is_said_and_skips_the_calls(calls):
    result = calls(PLANTED, "--nnx-watch-seconds=0")
    result.assert_outcomes(passed=9, skipped=6)
    result.stdout.fnmatch_lines(["*6 distinct calls: 6 not checked in 0 s"])


def test_a_list_checks_nothing(calls):
    result = calls(PLANTED, option="--nnx-watch=list")
    result.assert_outcomes(passed=9)
    result.stdout.fnmatch_lines(
        [
            "nnx-call::test_suite.Attention.scores(f32(2,4))  made at test_suite.py:52",
            "nnx-call::test_suite.Checked(f32(2,4))  made at test_suite.py:*",
            "6 distinct calls",
        ]
    )
