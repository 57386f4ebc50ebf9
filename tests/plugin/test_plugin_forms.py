"""The forms of a test: functions, methods, classes, fixtures, parametrize, and the user's own hypothesis decorators."""

import pytest

HYPOTHESIS = "from hypothesis import HealthCheck, example, given, note, seed, settings, strategies as st\n"


@pytest.mark.parametrize(
    "source",
    [
        "class TestX:\n    @marked\n    def test_x(self, nnx_wrap):\n        assert isinstance(self, TestX)\n        nnx_wrap(Model())(1)\n",
        "@marked\nclass TestX:\n    def test_x(self, nnx_wrap): nnx_wrap(Model())(1)\n",
        "@marked\nclass TestX:\n    @staticmethod\n    def test_x(nnx_wrap): nnx_wrap(Model())(1)\n",
        "@marked\nclass TestX:\n    @classmethod\n    def test_x(cls, nnx_wrap):\n        assert cls is TestX\n        nnx_wrap(Model())(1)\n",
        "pytestmark = marked\ndef test_x(nnx_wrap): nnx_wrap(Model())(1)\n",
        "@marked\ndef test_x(nnx_wrap, tmp_path, capsys, monkeypatch): nnx_wrap(Model())(1)\n",
        "@marked\ndef test_x(nnx_wrap, n=3):\n    assert n == 3\n    nnx_wrap(Model())(1)\n",
        "@marked\ndef test_x(*, nnx_wrap): nnx_wrap(Model())(1)\n",
        "@marked\ndef test_x(nnx_wrap):\n    nnx_wrap(Model())(1)\n    pytest.skip('x') if False else None\n",
        "from unittest import mock\n@marked\n@mock.patch('os.getcwd')\ndef test_x(getcwd, nnx_wrap):\n    assert getcwd is __import__('os').getcwd\n    nnx_wrap(Model())(1)\n",
        "@pytest.fixture(autouse=True)\ndef auto(nnx_wrap, request):\n    if request.cls: request.cls.wrap = staticmethod(nnx_wrap)\n@marked\nclass TestX:\n    def test_x(self): self.wrap(Model())(1)\n",
    ],
)
def test_forms_of_a_test(run_inner, source):
    result = run_inner(source)
    result.assert_outcomes(passed=1)
    result.stdout.re_match_lines_random([r"test_inner.py::\S+  \d\d nestings: \d\d held; .*"])


@pytest.mark.parametrize("scope", ["function", "class", "module", "session"])
def test_fixtures_of_every_scope(run_inner, scope):
    source = f"""
@pytest.fixture(scope={scope!r}, params=[1, 2])
def model(nnx_wrap, request):
    return nnx_wrap(Model()), request.param
@marked
@pytest.mark.parametrize("x", [3, 4])
def test_x(model, x):
    assert model[0](x) == x
    assert model[1] in (1, 2)
"""
    result = run_inner(source)
    result.assert_outcomes(passed=4)
    result.stdout.fnmatch_lines(["test_inner.py::test_x[[]1-3]  *", "test_inner.py::test_x[[]2-4]  *"])


def test_parametrized_ids_survive_in_the_replay_line(run_inner):
    source = "@marked\n@pytest.mark.parametrize('x', ['{a} b'])\ndef test_x(nnx_wrap, x): nnx_wrap(Model(tracers=has('jit')))(x)\n"
    result = run_inner(source)
    result.stdout.fnmatch_lines(["*replay *pytest 'test_inner.py::test_x[[]{a} b]' --nnx-nesting jit"])


def test_the_users_given(run_inner):
    source = (
        HYPOTHESIS
        + """
SEEN = []
@marked(max_examples=30)
@given(x=st.integers(), flag=st.booleans())
def test_x(nnx_wrap, x, flag):
    SEEN.append((RUNS and RUNS[-1], x))
    assert nnx_wrap(Model())(x) == x

def test_ran():
    assert RUNS[0] == "un-nested" and RUNS[1] == "eval_shape[closure]"
    assert {x for _, x in SEEN[:39]} == {0}
    assert len({x for _, x in SEEN[39:]}) > 5 and len(set(RUNS[39:])) > 5
    assert len(RUNS) == 69
"""
    )
    run_inner(source).assert_outcomes(passed=2)


def test_data_and_nesting_shrink_together(run_inner):
    source = (
        HYPOTHESIS
        + """
@marked(sweep="singles", max_examples=200)
@given(x=st.integers())
def test_x(nnx_wrap, x):
    note(f"x is {x}")
    nnx_wrap(Model(tracers=lambda n: x > 16 and "vmap" in str(n)))(x)
"""
    )
    result = run_inner(source)
    result.stdout.fnmatch_lines(
        ["E * nnx invariant broken: tracers*", "E * nesting     vmap  *", "E *x=17*", "E *x is 17*"]
    )
    result.stdout.fnmatch_lines(["FAILED test_inner.py::test_x - nnx invariant broken: tracers"])


def test_the_users_examples_are_swept(run_inner):
    source = (
        HYPOTHESIS
        + """
SEEN = []
@marked(max_examples=0)
@example(11, "a")
@example(x=22, y="b")
@given(st.integers(), st.text())
def test_x(nnx_wrap, x, y):
    SEEN.append((x, y))
    nnx_wrap(Model())(x)

def test_ran():
    assert SEEN == [(11, "a")] * 39 + [(22, "b")] * 3
"""
    )
    run_inner(source).assert_outcomes(passed=2)


def test_an_example_that_is_expected_to_fail(run_inner):
    source = (
        HYPOTHESIS
        + """
@marked(max_examples=0)
@example(x=1).xfail(raises=ZeroDivisionError)
@given(x=st.just(2))
def test_x(nnx_wrap, x):
    nnx_wrap(Model())(x)
    1 / (x - 1)
"""
    )
    run_inner(source).assert_outcomes(passed=1)


@pytest.mark.parametrize("decorator", ["@given(data=st.data())", "@given(st.data())"])
def test_data_strategies(run_inner, decorator):
    source = (
        HYPOTHESIS
        + f"""
@marked(max_examples=30)
{decorator}
def test_x(nnx_wrap, data):
    nnx_wrap(Model())(data.draw(st.integers()))

def test_ran():
    assert len(RUNS) == 30 and len(set(RUNS)) > 5
"""
    )
    run_inner(source).assert_outcomes(passed=2)


def test_given_inferred_from_types(run_inner):
    source = (
        HYPOTHESIS
        + "@marked(max_examples=5)\n@given(x=...)\ndef test_x(nnx_wrap, x: int): assert nnx_wrap(Model())(x) == x\n"
    )
    run_inner(source).assert_outcomes(passed=1)


def test_assume_in_the_body(run_inner):
    source = (
        HYPOTHESIS
        + """
from hypothesis import assume
@marked(max_examples=20)
@given(x=st.integers())
def test_x(nnx_wrap, x):
    assume(x != 0)
    assert nnx_wrap(Model())(x) == x
def test_ran():
    assert any("un-nested" == run for run in RUNS) and any(">" in run for run in RUNS)
"""
    )
    run_inner(source).assert_outcomes(passed=2)


def test_the_users_settings_and_seed(run_inner):
    source = (
        HYPOTHESIS
        + """
from hypothesis import Phase, Verbosity
@marked(max_examples=5)
@seed(1)
@settings(verbosity=Verbosity.verbose, database=None, derandomize=False)
@given(x=st.integers())
def test_x(nnx_wrap, x):
    nnx_wrap(Model())(x)
@marked
@settings(max_examples=1)
def test_without_given(nnx_wrap):
    nnx_wrap(Model())(1)
"""
    )
    result = run_inner(source, "-s")
    result.assert_outcomes(passed=2)
    assert "test_x(" in result.stdout.str()


def test_a_class_with_given_and_a_method(run_inner):
    source = (
        HYPOTHESIS
        + """
@marked
class TestX:
    @given(x=st.integers())
    def test_x(self, nnx_wrap, x):
        assert nnx_wrap(Model())(x) == x
"""
    )
    run_inner(source).assert_outcomes(passed=1)


def test_a_function_scoped_fixture_is_refused_only_with_the_users_given(run_inner):
    plain = "@marked\ndef test_x(nnx_wrap, tmp_path): nnx_wrap(Model())(1)\n"
    own = HYPOTHESIS + "@marked\n@given(x=st.integers())\ndef test_x(nnx_wrap, tmp_path, x): nnx_wrap(Model())(1)\n"
    run_inner(plain).assert_outcomes(passed=1)
    result = run_inner(own)
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*FailedHealthCheck*tmp_path*"])


@pytest.mark.parametrize(
    "mark, outcome",
    [
        ("@pytest.mark.xfail(raises=AssertionError, strict=True)", "xfailed"),
        ("@pytest.mark.skip", "skipped"),
    ],
)
def test_xfail_and_skip_marks(run_inner, mark, outcome):
    source = f"{mark}\n@marked\ndef test_x(nnx_wrap): nnx_wrap(Model(tracers=has('jit')))(1)\n"
    run_inner(source).assert_outcomes(**{outcome: 1})


@pytest.mark.parametrize(
    "call, outcome",
    [("pytest.skip('no')", "skipped"), ("pytest.fail('no')", "failed"), ("pytest.xfail('no')", "xfailed")],
)
def test_outcomes_inside_the_body(run_inner, call, outcome):
    source = f"@marked\ndef test_x(nnx_wrap):\n    nnx_wrap(Model())(1)\n    {call}\ndef test_ran():\n    assert RUNS == ['un-nested']\n"
    run_inner(source).assert_outcomes(**{outcome: 1, "passed": 1})


def test_raises_around_the_users_own_exception(run_inner):
    source = "def subject(x): raise ValueError('mine')\n@marked\ndef test_x(nnx_wrap):\n    with pytest.raises(ValueError, match='mine'):\n        nnx_wrap(subject)(1)\n"
    result = run_inner(source)
    result.assert_outcomes(passed=1)


def test_last_failed_and_exit_first(run_inner):
    source = "@marked(max_examples=0)\n@pytest.mark.parametrize('x', [1, 2, 3])\ndef test_x(nnx_wrap, x): nnx_wrap(Model(tracers=lambda n: x == 2))(x)\n"
    run_inner(source, "-x").assert_outcomes(passed=1, failed=1)
    run_inner(source, "--lf").assert_outcomes(failed=1)


def test_statistics_and_selection_of_hypothesis(run_inner):
    source = "@marked\ndef test_x(nnx_wrap): nnx_wrap(Model(rejected=has('scan[closure]')))(1)\ndef test_y(): pass\n"
    result = run_inner(source, "--hypothesis-show-statistics", "-m", "hypothesis", "--hypothesis-seed=1")
    result.assert_outcomes(passed=1, deselected=1)
    result.stdout.fnmatch_lines(["*Hypothesis Statistics*", "*not supported by flax*"])
