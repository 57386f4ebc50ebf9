"""``--nnx-watch``: a suite that nobody changed, the one test that left something behind, and what the run says."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

HEAD = """
import jax
import jax.numpy as jnp
import pytest
from flax import nnx

class Box:
    pass

class Net(nnx.Module):
    def __init__(self):
        self.linear = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
        self.box = Box()

    def __call__(self, x, keep=True):
        y = self.linear(x)
        if keep:
            self.box.last = y
        return y

X = jnp.ones((1, 2))

def poison(model):
    nnx.jit(lambda x: model(x))(X)

def use(model):
    nnx.jit(lambda model, x: model(x, keep=False))(model, X)

"""
THIRTY = (
    HEAD
    + """
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
)
BLAMED = ["test_suite.py::test_model[17]"]
local_variables = pytest.mark.skipif(
    sys.version_info < (3, 12), reason="local variables are watched from Python 3.12 on"
)


@pytest.fixture
def watch(pytester, inner_args):
    """Run a suite watched: the result, and the tests that failed."""

    def run(source, *args, subprocess=False, option="--nnx-watch"):
        pytester.makepyfile(test_suite=source)
        start = pytester.runpytest_subprocess if subprocess else pytester.runpytest_inprocess
        result = start(*inner_args, "-p", "no:randomly", "-p", "no:cacheprovider", *filter(None, [option]), *args)
        return result, sorted(
            {line.split(" - ")[0].split()[1] for line in result.outlines if line.startswith("FAILED")}
        )

    return run


def test_a_model_of_a_module_is_blamed_on_the_one_test_that_poisoned_it(watch):
    result, failed = watch(THIRTY)
    assert failed == BLAMED
    result.assert_outcomes(passed=29, failed=1)
    result.stdout.fnmatch_lines(
        [
            "nnx watch: tracers in model.box.last",
            "  test       test_suite.py::test_model?17?",
            "  leaked     model.box.last   attribute float32?1,2?   <- DynamicJaxprTracer",
            "*created at *test_suite.py:*__call__)",
            "  hint       keep the value in an nnx.Variable of the module: model.box.last belongs to a plain Python object*",
            "  see        @pytest.mark.nnx_invariants *",
            "*= nnx watch =*",
            "test_suite.py::test_model?17?  tracers in model.box.last",
            "30 tests watched: 1 left tracers behind*",
        ]
    )


def test_without_the_option_nothing_is_watched(watch):
    result, failed = watch(THIRTY, option=None)
    assert failed == []
    result.stdout.no_fnmatch_line("*nnx watch*")


def test_reported_only(watch):
    result, failed = watch(THIRTY, option="--nnx-watch=report")
    assert failed == []
    result.assert_outcomes(passed=30)
    result.stdout.fnmatch_lines(
        ["test_suite.py::test_model?17?  tracers in model.box.last", "30 tests watched: 1 left *"]
    )


@pytest.mark.slow
def test_a_worker_blames_the_same_test(watch):
    pytest.importorskip("xdist")
    result, failed = watch(THIRTY, "-n2", subprocess=True)
    assert failed == BLAMED
    result.stdout.fnmatch_lines(
        ["test_suite.py::test_model?17?  tracers in *", "30 tests watched: 1 left tracers behind*"]
    )


SHUFFLE = """
import random
def pytest_collection_modifyitems(items):
    random.Random({seed}).shuffle(items)
"""


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_the_order_of_the_tests_does_not_matter(watch, pytester, seed):
    pytester.makeconftest(SHUFFLE.format(seed=seed))
    assert watch(THIRTY)[1] == BLAMED


def test_a_path_may_follow_the_option(watch, pytester):
    result, _ = watch(HEAD + "def test_it():\n    use(Net())\n", "test_suite.py")
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines(["1 test watched: nothing was left behind*"])


def test_the_ini_file_asks_for_it_and_the_command_line_takes_it_back(watch, pytester):
    pytester.makeini("[pytest]\nnnx_watch = fail\n")
    assert watch(THIRTY, option=None)[1] == BLAMED
    assert watch(THIRTY, option="--nnx-watch=off")[1] == []


def test_a_bad_word_says_what_to_write(watch, pytester):
    pytester.makeini("[pytest]\nnnx_watch = fial\n")
    result, _ = watch(THIRTY, option=None)
    result.stderr.fnmatch_lines(["*ini option nnx_watch (tox.ini): unknown watch 'fial', did you mean 'fail'?*"])


FORMS = (
    HEAD
    + """
import functools
import unittest
import hypothesis
from hypothesis import strategies as st

MODEL = Net()

def test_global():
    poison(MODEL)

def test_global_used():
    use(MODEL)

class TestPlain:
    model = Net()

    def test_class_attribute(self):
        poison(self.model)

    def test_used(self):
        use(self.model)

class TestCase(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.model = Net()

    def setUp(self):
        self.mine = Net()

    def test_class_model(self):
        poison(self.model)

    def test_own_model(self):
        poison(self.mine)

    def test_used(self):
        use(self.model)
        use(self.mine)

DRAWN = Net()

@hypothesis.given(st.integers(0, 3))
@hypothesis.settings(max_examples=5, database=None)
def test_drawn(number):
    poison(DRAWN)

@hypothesis.given(st.integers(0, 3))
@hypothesis.settings(max_examples=5, database=None)
def test_drawn_used(number):
    use(DRAWN)

@pytest.fixture(params=["a", "b"])
def either(request):
    return Net(), request.param

def test_fixture_of_parameters(either):
    (poison if either[1] == "a" else use)(either[0])

def test_asked_for_later(request):
    poison(request.getfixturevalue("late"))

@pytest.fixture
def late():
    return Net()
"""
)


def test_every_form_of_a_test(watch):
    _, failed = watch(FORMS)
    assert failed == [
        "test_suite.py::TestCase::test_class_model",
        "test_suite.py::TestCase::test_own_model",
        "test_suite.py::TestPlain::test_class_attribute",
        "test_suite.py::test_asked_for_later",
        "test_suite.py::test_drawn",
        "test_suite.py::test_fixture_of_parameters[a]",
        "test_suite.py::test_global",
    ]


LOCAL = (
    HEAD
    + """
import functools

def test_leaves():
    model = Net()
    poison(model)

def test_leaves_nothing():
    model = Net()
    use(model)

def twice(test):
    @functools.wraps(test)
    def run():
        test()
        test()
    return run

@twice
def test_wrapped():
    models = {"a": [Net()]}
    poison(models["a"][0])

@jax.jit
def traced():
    model = Net()
    model(X)
    return 0

def test_calls_what_is_traced():
    traced()

test_under_a_transform = functools.wraps(test_leaves_nothing)(lambda: print(jax.jit(inside)()))

def inside():
    model = Net()
    model(X)
    return 0

test_under_a_transform.__wrapped__ = inside
"""
)


@local_variables
def test_the_local_variables_of_a_test(watch):
    result, failed = watch(LOCAL)
    assert failed == ["test_suite.py::test_leaves", "test_suite.py::test_wrapped"]
    result.stdout.fnmatch_lines(["*tracers in model.box.last", "*tracers in models?'a'??0?.box.last"])


def test_python_that_sees_no_returns_says_so(watch):
    result, _ = watch(LOCAL)
    says_so = "; local variables of tests, and calls of modules, are watched from Python 3.12 on" in result.stdout.str()
    assert says_so == (sys.version_info < (3, 12))


@local_variables
def test_ids_that_other_tools_hold_are_left_to_them(watch):
    for tool in (3, 4):
        sys.monitoring.use_tool_id(tool, "another")
    try:
        result, failed = watch(LOCAL)
        names = [sys.monitoring.get_tool(tool) for tool in (3, 4)]
    finally:
        for tool in (3, 4):
            sys.monitoring.free_tool_id(tool)
    assert (failed, names) == ([], ["another"] * 2)
    result.stdout.fnmatch_lines(
        ["*; local variables of tests, and calls of modules, are not watched: *sys.monitoring*"]
    )


GONE = (
    HEAD
    + """
import functools

MASKS = {}

@functools.cache
def cached(x):
    return jnp.ones(x)

def mask(n):
    if n not in MASKS:
        MASKS[n] = jnp.ones((n, n))
    return MASKS[n]

class Masked(nnx.Module):
    def __call__(self, x):
        return x @ mask(x.shape[-1])

class Cached(nnx.Module):
    def __call__(self, x):
        return x + cached(x.shape)

class Kept(nnx.Module):
    last = None

    def __call__(self, x):
        Kept.last = x * 2
        return x

class Healthy(nnx.Module):
    def __call__(self, x):
        return x @ jnp.ones((2, 2))

def jitted(module):
    return nnx.jit(lambda module, x: module(x))(module, X)

def build():
    return Masked()

def test_masked():
    assert jitted(build()).shape == (1, 2)

def test_masked_held():
    module = Masked()
    assert module

@pytest.mark.parametrize("kind", [Cached, Kept, Healthy])
def test_class(kind):
    jitted(kind())

def test_class_held():
    module = Kept()
    assert module
"""
)


@pytest.mark.parametrize("order", ["as written", "reversed"])
def test_what_the_code_of_a_model_keeps_is_found_when_the_model_is_gone(watch, pytester, order):
    """The test that left it is blamed, whatever comes before and after."""
    if order == "reversed":
        pytester.makeconftest("def pytest_collection_modifyitems(items): items.reverse()")
    result, failed = watch(GONE)
    assert failed == [f"test_suite.py::{name}" for name in ("test_class[Cached]", "test_class[Kept]", "test_masked")]
    result.stdout.fnmatch_lines(["*leaked *MASKS?2? * float32?2,2? *"])


def test_the_summary_of_a_step_has_it_too(watch, pytester, monkeypatch):
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(pytester.path / "summary.md"))
    watch(THIRTY)
    summary = (pytester.path / "summary.md").read_text()
    assert "## ✗ nnx watch\n\n30 tests watched: 1 left tracers behind" in summary
    assert "\n* test_suite.py::test_model&#91;17&#93; tracers in model.box.last\n" in summary


BEFORE = (
    HEAD
    + """
@pytest.fixture
def model():
    model = Net()
    poison(model)
    return model

def test_innocent(model):
    assert model.box

SHARED = Net()

@pytest.fixture
def torn_down():
    yield
    poison(SHARED)

def test_first(torn_down):
    use(SHARED)

def test_second():
    use(SHARED)

def test_third():
    use(SHARED)
"""
)


def test_what_a_fixture_left_is_told_with_the_test_and_not_as_its_doing(watch):
    result, failed = watch(BEFORE)
    assert failed == ["test_suite.py::test_innocent", "test_suite.py::test_second"]
    result.stdout.fnmatch_lines(
        ["*there before the call of the test: a fixture, a teardown, an import or an earlier test left it"]
    )


RAISES = (
    HEAD
    + """
MODEL = Net()

def test_fails():
    poison(MODEL)
    raise ValueError("its own")

def test_after():
    use(MODEL)

OTHER = Net()

@pytest.mark.xfail(strict=True)
def test_expected():
    poison(OTHER)
    raise ValueError("known")

THIRD = Net()

def test_skips():
    poison(THIRD)
    pytest.skip("half way")
"""
)


def test_a_test_that_fails_keeps_its_own_error_and_is_blamed_all_the_same(watch):
    result, failed = watch(RAISES)
    assert failed == ["test_suite.py::test_fails"]
    result.stdout.fnmatch_lines(
        [
            "E       ValueError: its own",
            "*nnx watch: tracers in MODEL.box.last",
            "test_suite.py::test_fails  tracers in *",
        ]
    )
    result.stdout.fnmatch_lines(
        ["test_suite.py::test_expected  tracers in *", "test_suite.py::test_skips  tracers in *"]
    )
    result.assert_outcomes(passed=1, failed=1, xfailed=1, skipped=1)


RAISES_WITH_ITS_OWN = (
    HEAD
    + """
def test_raises():
    own = Net()
    poison(own)
    raise ValueError("its own")
"""
)


def test_local_variables_of_a_test_that_raises_are_in_its_traceback(watch):
    """On every Python: nothing has to be monitored for them."""
    result, failed = watch(RAISES_WITH_ITS_OWN)
    assert failed == ["test_suite.py::test_raises"]
    result.stdout.fnmatch_lines(["E       ValueError: its own", "test_suite.py::test_raises  tracers in own.box.last"])


DONATES = (
    HEAD
    + """
import warnings

def total(state):
    return jax.tree.map(lambda array: array.sum(), state)

def test_for_nothing():
    model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
    jax.jit(total, donate_argnums=0)(nnx.state(model))

def test_used():
    model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
    jax.jit(lambda state: jax.tree.map(lambda array: array * 2, state), donate_argnums=0)(nnx.state(model))

def test_expected():
    with pytest.warns(UserWarning, match="donated"):
        jax.jit(lambda x: x[:1], donate_argnums=0)(jnp.ones((5, 5)))

@pytest.mark.filterwarnings("ignore:Some donated")
def test_ignored():
    jax.jit(lambda x: x[:1], donate_argnums=0)(jnp.ones((6, 5)))
"""
)


def test_donated_leaves_that_jax_could_not_use_fail_the_test(watch):
    result, failed = watch(DONATES, "-Wdefault")
    assert failed == ["test_suite.py::test_for_nothing"]
    result.stdout.fnmatch_lines(
        [
            "nnx watch: donated for nothing: model.bias, model.kernel",
            "  donated    float32?3?   model.bias",
            "  donated    float32?2,3?   model.kernel",
            "*to the program called at *test_suite.py:* (test_for_nothing), which has no output of that type for the buffer",
            "  hint       return the new value of every donated array",
            "*UserWarning: Some donated buffers were not usable*",
            "4 tests watched: 1 donated for nothing*",
        ]
    )


ASSERTED = (
    HEAD
    + """
def test_temporary():
    assert jax.jit(lambda x: x[:1], donate_argnums=0)(jnp.ones((5, 5))).shape == (1, 5)
"""
)


def test_what_pytest_keeps_of_an_assertion_is_no_name_of_the_users(watch):
    result, _ = watch(ASSERTED, "-Wdefault")
    result.stdout.fnmatch_lines(["  donated    float32?5,5?   which no local variable holds"])


MARKED = """
import pytest
from flax import nnx

@pytest.mark.nnx_invariants(effort="quick", transforms="jit", styles="argument")
def test_marked(nnx_wrap):
    import jax.numpy as jnp
    nnx_wrap(nnx.Linear(2, 2, rngs=nnx.Rngs(0)))(jnp.ones((1, 2)))
"""


def test_a_marked_test_is_checked_and_not_watched(watch):
    result, _ = watch(MARKED)
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines(["0 tests watched: nothing was left behind*"])


PLAIN = """
import sys

def test_it():
    assert "jax" not in sys.modules
    assert "numpy" not in sys.modules
"""


def test_a_suite_without_jax_stays_one(watch):
    result, _ = watch(PLAIN, subprocess=True)
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines(["1 test watched: nothing was left behind*"])


def test_the_page_shows_the_failure_of_its_suite(pytester, inner_args):
    page = (Path(__file__).parents[3] / "docs" / "watch.md").read_text()
    (suite,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    (shown,) = re.findall(r"```text\n(.*?)```", page, re.DOTALL)
    pytester.makepyfile(test_net=suite)
    result = pytester.runpytest_inprocess(*inner_args, "-p", "no:randomly", "-p", "no:cacheprovider", "--nnx-watch")
    result.assert_outcomes(passed=2, failed=1)
    message = (
        result.stdout.str().replace(f"{pytester.path}/", "").replace("(__call__)", "(Net.__call__)")
    )  # Python 3.11 has no qualified names
    assert shown in message
