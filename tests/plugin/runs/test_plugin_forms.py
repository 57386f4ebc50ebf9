"""The forms of a test: functions, methods, classes, fixtures, parametrize, and the user's own hypothesis decorators."""

import pytest

HYPOTHESIS = "from hypothesis import HealthCheck, example, given, note, seed, settings, strategies as st\n"


FORMS = [
    "class TestX:\n    @marked\n    def test_x(self, nnx_wrap):\n        assert isinstance(self, TestX)\n        nnx_wrap(Model())(1)\n",
    "@marked\nclass TestX:\n    @staticmethod\n    def test_x(nnx_wrap): nnx_wrap(Model())(1)\n",
    "@marked\nclass TestX:\n    @classmethod\n    def test_x(cls, nnx_wrap):\n        assert cls is TestX\n        nnx_wrap(Model())(1)\n",
    "pytestmark = marked\ndef test_x(nnx_wrap): nnx_wrap(Model())(1)\n",
    "@marked\ndef test_x(nnx_wrap, tmp_path, capsys, monkeypatch): nnx_wrap(Model())(1)\n",
    "@marked\ndef test_x(nnx_wrap, n=3):\n    assert n == 3\n    nnx_wrap(Model())(1)\n",
    "@marked\ndef test_x(*, nnx_wrap): nnx_wrap(Model())(1)\n",
    "from unittest import mock\n@marked\n@mock.patch('os.getcwd')\ndef test_x(getcwd, nnx_wrap):\n    assert getcwd is __import__('os').getcwd\n    nnx_wrap(Model())(1)\n",
    "@pytest.fixture(autouse=True)\ndef auto(nnx_wrap, request):\n    if request.cls: request.cls.wrap = staticmethod(nnx_wrap)\n@marked\nclass TestX:\n    def test_x(self): self.wrap(Model())(1)\n",
]


def test_forms_of_a_test(run_inner, pytester):
    head = "import pytest\nfrom fake_engine import Model\nmarked = pytest.mark.nnx_invariants\n"
    files = {f"test_{number:02}": head + source for number, source in enumerate(FORMS)}
    pytester.makepyfile(**files)
    result = run_inner("")
    result.assert_outcomes(passed=len(FORMS))
    result.stdout.re_match_lines([rf"{name}.py::\S+  \d\d nestings: \d\d passed; .*" for name in files])


@pytest.mark.slow
def test_fixtures_of_every_scope(run_inner):
    source = """
@pytest.fixture(scope="{0}", params=[1, 2])
def model_{0}(nnx_wrap, request):
    return nnx_wrap(Model()), request.param
@marked
@pytest.mark.parametrize("x", [3, 4])
def test_{0}(model_{0}, x):
    assert model_{0}[0](x) == x
"""
    scopes = ("function", "class", "module", "session")
    result = run_inner("".join(map(source.format, scopes)))
    result.assert_outcomes(passed=16)
    for scope in scopes:
        result.stdout.fnmatch_lines(
            [f"test_inner.py::test_{scope}[[]1-3]  *", f"test_inner.py::test_{scope}[[]2-4]  *"]
        )


def test_the_replay_line_is_typed_where_the_run_was_started(run_inner, pytester, inner_args, monkeypatch):
    inner = pytester.mkdir("inner")
    (inner / "__init__.py").touch()
    run_inner("\n")
    source = (pytester.path / "test_inner.py").read_text() + "\n"
    (inner / "test_below.py").write_text(
        source
        + "@marked\n@pytest.mark.parametrize('x', ['{a} b'])\ndef test_x(nnx_wrap, x): nnx_wrap(Model(tracers=has('jit')))(x)\n"
    )
    pytester.makeini("[pytest]\n")
    monkeypatch.chdir(inner)
    result = pytester.runpytest_inprocess(*inner_args, "test_below.py")
    result.stdout.fnmatch_lines(["E* test        inner/test_below.py::test_x[[]{a} b]"])
    result.stdout.fnmatch_lines(["*replay *pytest 'test_below.py::test_x[[]{a} b]' --nnx-nesting jit"])


def test_the_users_given(run_inner):
    source = """
SEEN = []
@marked(max_examples=30)
@given(x=st.integers(), flag=st.booleans())
def test_x(nnx_wrap, x, flag):
    SEEN.append((RUNS and RUNS[-1], x))
    assert nnx_wrap(Model())(x) == x

def test_ran():
    assert RUNS[0] == "un-nested" and RUNS[1] == "eval_shape[closure]"
    swept = len(RUNS) - 30
    assert {x for _, x in SEEN[:swept]} == {0}
    assert len({x for _, x in SEEN[swept:]}) > 5 and len(set(RUNS[swept:])) > 5
"""
    run_inner(HYPOTHESIS + source).assert_outcomes(passed=2)


def test_data_and_nesting_shrink_together(run_inner):
    source = """
@marked(sweep="singles", max_examples=200)
@given(x=st.integers())
def test_x(nnx_wrap, x):
    note(f"x is {x}")
    nnx_wrap(Model(tracers=lambda n: x > 16 and "vmap" in str(n)))(x)
"""
    result = run_inner(HYPOTHESIS + source)
    result.stdout.fnmatch_lines(
        ["E * nnx invariant broken: tracers*", "E * nesting     vmap  *", "E *x=17*", "E *x is 17*"]
    )
    result.stdout.fnmatch_lines(["FAILED test_inner.py::test_x - nnx tracers: tracers is broken"])


def test_the_users_examples_are_swept(run_inner):
    source = """
SEEN = []
@marked(max_examples=0)
@example(11, "a")
@example(x=22, y="b")
@given(st.integers(), st.text())
def test_x(nnx_wrap, x, y):
    SEEN.append((x, y))
    nnx_wrap(Model())(x)

def test_ran():
    assert SEEN == [(11, "a")] * 40 + [(22, "b")] * 3

@marked(max_examples=0)
@example(x=1).xfail(raises=ZeroDivisionError)
@given(x=st.just(2))
def test_expected_to_fail(nnx_wrap, x):
    nnx_wrap(Model())(x)
    1 / (x - 1)
"""
    run_inner(HYPOTHESIS + source).assert_outcomes(passed=3)


def test_data_strategies(run_inner):
    source = """
@marked(max_examples=30)
@given({})
def test_{}(nnx_wrap, data):
    nnx_wrap(Model())(data.draw(st.integers()))
"""
    ran = "def test_ran():\n    assert len(RUNS) == 60 and len(set(RUNS[:30])) > 5 and len(set(RUNS[30:])) > 5\n"
    source = source.format("data=st.data()", "named") + source.format("st.data()", "positional")
    run_inner(HYPOTHESIS + source + ran).assert_outcomes(passed=3)


@pytest.mark.slow
def test_further_forms_with_the_users_given_settings_and_seed(run_inner):
    source = """
from hypothesis import Phase, Verbosity, assume
@marked(max_examples=5)
@given(x=...)
def test_inferred_from_types(nnx_wrap, x: int):
    assert nnx_wrap(Model())(x) == x
@marked(max_examples=5)
class TestX:
    @given(x=st.integers())
    def test_method(self, nnx_wrap, x):
        assert nnx_wrap(Model())(x) == x
@marked(max_examples=20)
@given(x=st.integers())
def test_assume(nnx_wrap, x):
    assume(x != 0)
    assert nnx_wrap(Model())(x) == x
@marked(max_examples=5)
@seed(1)
@settings(verbosity=Verbosity.verbose, database=None, derandomize=False)
@given(x=st.integers())
def test_verbose(nnx_wrap, x):
    nnx_wrap(Model())(x)
@marked
@settings(max_examples=1)
def test_without_given(nnx_wrap):
    nnx_wrap(Model())(1)
"""
    result = run_inner(HYPOTHESIS + source, "-s")
    result.assert_outcomes(passed=5)
    assert "test_verbose(" in result.stdout.str()


@pytest.mark.slow
def test_a_function_scoped_fixture_is_refused_only_with_the_users_given(run_inner):
    test = "@marked\n@given(x=st.integers())\ndef test_x(nnx_wrap, tmp_path, x): nnx_wrap(Model())(1)\n"
    result = run_inner(HYPOTHESIS + test)
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*FailedHealthCheck*tmp_path*"])


def test_marks_and_outcomes_inside_the_body(run_inner):
    marks = ("@pytest.mark.xfail(raises=AssertionError, strict=True)", "@pytest.mark.skip")
    source = "MODELS = []\n" + "".join(
        f"{mark}\n@marked\ndef test_mark_{number}(nnx_wrap): nnx_wrap(Model(tracers=has('jit')))(1)\n"
        for number, mark in enumerate(marks)
    )
    for word in ("skip", "fail", "xfail"):
        source += f"@marked\ndef test_{word}(nnx_wrap):\n    MODELS.append(Model())\n    nnx_wrap(MODELS[-1])(1)\n    pytest.{word}('no')\n"
    source += "def raising(x): raise ValueError('mine')\n@marked\ndef test_raises(nnx_wrap):\n    with pytest.raises(ValueError, match='mine'): nnx_wrap(raising)(1)\n"
    # What fails un-nested runs once more with the user's own object, where nothing is checked.
    source += "def test_ran(): assert [[*map(str, model.calls)] for model in MODELS] == [['un-nested'], ['un-nested'], [], ['un-nested']]\n"
    run_inner(source).assert_outcomes(xfailed=2, skipped=2, failed=1, passed=2)


def test_statistics_and_selection_of_hypothesis(run_inner):
    source = "@marked\ndef test_x(nnx_wrap): nnx_wrap(Model(rejected=lambda each: len(each.layers) > 1))(1)\ndef test_y(): pass\n"
    result = run_inner(source, "--hypothesis-show-statistics", "-m", "hypothesis", "--hypothesis-seed=1")
    result.assert_outcomes(passed=1, deselected=1)
    result.stdout.fnmatch_lines(["*Hypothesis Statistics*", "*[*] *%, not supported by flax"])


def test_the_example_of_the_users_given_shows_the_nesting_in_a_line(run_inner):
    source = """
@marked
@given(x=st.integers(0, 1))
def test_breaks(nnx_wrap, x): nnx_wrap(Model(tracers=has('jit')))(x)
@marked
@given(x=st.integers(0, 1))
def test_fails(nnx_wrap, x): assert nnx_wrap(Model())(x) < 1
"""
    told = run_inner(HYPOTHESIS + source).stdout.str()
    assert "    nnx_nesting=<the chains sweep>,\n" in told
    assert "nnx_nesting=Nesting.parse('un-nested')," in told
    assert "Settings(" not in told
