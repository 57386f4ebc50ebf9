"""``--nnx-watch``: a suite that nobody changed, the one test that left something behind, and what the run says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from healthy import FLAX

THIRTY = """
@pytest.fixture(scope="module")
def model():
    return Net()

@pytest.mark.parametrize("number", range(30))
def test_model(model, number):
    if number == 17:
        poison(model)
    else:
        use(model)
"""
BLAMED = ["test_suite.py::test_model[17]"]


def test_a_model_of_a_module_is_blamed_on_the_one_test_that_poisoned_it(watch):
    result, failed = watch(THIRTY)
    assert failed == BLAMED
    result.assert_outcomes(passed=29, failed=1)
    result.stdout.fnmatch_lines(
        [
            "nnx watch: tracers in model.box.last",
            "  test        test_suite.py::test_model?17?",
            "  leaked      model.box.last   DynamicJaxprTracer float32?1,2? in",
            "              attribute",
            "              created at test_suite.py:*__call__)",
            "  hint        keep the value in an nnx.Variable of the module:",
            "              model.box.last belongs to a plain Python object*",
            "  see         @pytest.mark.nnx_invariants *",
            "*= nnx watch =*",
            "test_suite.py::test_model?17?  tracers in model.box.last",
            "30 tests watched: 1 left tracers behind*",
        ]
    )


@pytest.mark.slow
def test_the_summary_of_a_step_has_it_too(watch, pytester, monkeypatch):
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(pytester.path / "summary.md"))
    watch(THIRTY)
    summary = (pytester.path / "summary.md").read_text()
    assert "## ✗ nnx watch\n\n30 tests watched: 1 left tracers behind" in summary
    assert "\n* test_suite.py::test_model&#91;17&#93; tracers in model.box.last\n" in summary


MARKED = """
def test_it():
    use(Net())

@pytest.mark.nnx_invariants(effort="quick", transforms="jit", styles="argument")
def test_marked(nnx_wrap):
    nnx_wrap(nnx.Linear(2, 2, rngs=nnx.Rngs(0)))(jnp.ones((1, 2)))
"""


def test_a_marked_test_is_checked_and_not_watched_and_a_path_may_follow_the_option(watch):
    result, _ = watch(MARKED, "test_suite.py")
    result.assert_outcomes(passed=2)
    result.stdout.fnmatch_lines(["1 test watched: no test left a tracer behind*"])
    result, _ = watch(MARKED, "-k", "marked")
    result.stdout.fnmatch_lines(["0 tests watched: tests marked with nnx_invariants are checked instead*"])


def test_the_page_shows_the_failures_of_its_suite(pytester, inner_args):
    page = (Path(__file__).parents[3] / "docs" / "watch.md").read_text()
    (suite,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    left, *of_call = re.findall(r"```text\n(.*?)```", page, re.DOTALL)
    pytester.makepyfile(test_net=suite)
    quiet = ("-p", "no:randomly", "-p", "no:cacheprovider")
    result = pytester.runpytest_inprocess(*inner_args, *quiet, "--nnx-watch")
    result.assert_outcomes(passed=2, failed=1)
    # Python 3.11 has no qualified names.
    assert left in result.stdout.str().replace(f"{pytester.path}/", "").replace("(__call__)", "(Net.__call__)")
    if FLAX < (0, 12, 7):  # which refuses the array in a dict, by an exception
        return
    message = pytester.runpytest_inprocess(*inner_args, *quiet, "--nnx-watch=calls").stdout.str()
    assert [part for part in of_call if part not in message] == []
