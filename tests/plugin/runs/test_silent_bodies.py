"""A nesting under which a body calls nothing is no nesting that holds: the test fails, and says how many there are."""

import random

import hypothesis
import pytest
from checking import nnx_wrap
from fake_engine import Model

from pytest_nnxcheck import check
from pytest_nnxcheck.core.settings import merge, parse_given
from pytest_nnxcheck.runner import conclude, hypothesis_test
from pytest_nnxcheck.runner.run import Run

QUICK = merge(parse_given({"effort": "quick", "styles": "argument"}, str))
NESTINGS = 10
"""Of that sweep: un-nested, six transforms, `jit > call_first`, two chains."""


def problem_where(skips):
    """What a test ends with whose body makes no call in some of its runs, by their number."""
    runs = []

    @hypothesis.settings(database=None, derandomize=True)
    def body():
        runs.append(len(runs))
        if runs[-1] not in skips:
            nnx_wrap(Model())(3)

    run = Run(QUICK)
    hypothesis_test.build(body, run, ())()
    return conclude.proves_nothing(run), len(runs)


@pytest.mark.usefixtures("fake")
def test_a_body_that_always_calls_is_checked():
    assert problem_where(()) == ("", NESTINGS)


@pytest.mark.usefixtures("fake")
@pytest.mark.parametrize("seed", range(8))
def test_no_test_passes_whose_body_skips_its_call_under_some_nestings(seed):
    draw = random.Random(seed)
    skips = {*draw.sample(range(NESTINGS), draw.randint(1, NESTINGS))}
    problem, _ = problem_where(skips)
    # Without an un-nested call nothing else runs.
    if 0 not in skips:
        assert problem.startswith(f"nnx test made no call under {len(skips)} of {NESTINGS} nestings, ")
    assert problem


CACHED = """
KEPT = {}
@marked(effort="quick", styles="argument")
def test_kept(nnx_wrap):
    if "y" not in KEPT:
        KEPT["y"] = nnx_wrap(Model())(3)
    assert KEPT["y"] == 3

TEACHER = {}
@marked(effort="quick", styles="argument")
def test_one_kept(nnx_wrap):
    student, teacher = nnx_wrap(Model()), nnx_wrap(Model())
    if "y" not in TEACHER:
        TEACHER["y"] = teacher(3)
    assert student(3) == TEACHER["y"]

@marked(effort="quick", styles="argument")
def test_both_called(nnx_wrap):
    student, teacher = nnx_wrap(Model()), nnx_wrap(Model())
    assert student(3) == teacher(3)

TURNS = iter((3, 1, 2) * 9)
@marked(effort="quick", styles="argument")
def test_a_loop_of_any_length(nnx_wrap):
    model = Model()
    for _ in range(next(TURNS)):
        assert nnx_wrap(lambda x: model(x))(3) == 3

from hypothesis import given, strategies as st
@marked(effort="quick", max_examples=8)
@given(x=st.integers(0, 1))
def test_arguments_of_its_own_may_leave_out_some(nnx_wrap, x):
    if x == 0:
        nnx_wrap(Model())(x)
"""


def test_each_object_of_a_body_is_called_under_each_nesting(run_inner):
    result = run_inner(CACHED)
    result.assert_outcomes(failed=2, passed=3)
    result.stdout.fnmatch_lines(["*nnx test made no call under 9 of 10 nestings, *"])
    result.stdout.fnmatch_lines(
        ["*nnx test made no call of some of the 2 objects that it wraps under 9 of 10 nestings, *"]
    )


@pytest.mark.usefixtures("fake")
@pytest.mark.parametrize("invariants", ["memory", "donation,memory", "recompilation"])
def test_invariants_of_compiled_programs_ask_for_a_jit(invariants):
    with pytest.raises(Exception, match="nothing was checked: .* no nesting has an outer jit"):
        check(Model(), 3, invariants=invariants, transforms="scan", styles="argument")
    assert check(Model(), 3, invariants=invariants, transforms="jit,scan", styles="argument").ok
    assert check(Model(), 3, invariants=f"tracers,{invariants}", transforms="scan", styles="argument").ok


@pytest.mark.usefixtures("fake")
def test_donation_asks_for_something_that_is_donated():
    with pytest.raises(
        Exception,
        match=r"nothing was checked: donation cannot be broken, no program donates a buffer \(donate is none\): donate what",
    ):
        check(Model(), 3, invariants="donation", donate="none", styles="argument")
    assert check(Model(), 3, invariants="donation", styles="argument").ok
    assert check(Model(), 3, invariants="tracers,donation", donate="none", styles="argument").ok
