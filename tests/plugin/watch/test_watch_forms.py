"""``--nnx-watch``: every form of a test, its local variables, and what the code of a model keeps when the model is gone."""

from __future__ import annotations

import sys

import pytest

FORMS = """
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


@pytest.mark.slow
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


LOCAL = """
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


@pytest.mark.slow
def test_the_local_variables_of_a_test(watch):
    result, failed = watch(LOCAL)
    says_so = "; local variables of tests are watched from Python 3.12 on" in result.stdout.str()
    assert says_so == (sys.version_info < (3, 12))
    if not says_so:
        assert failed == ["test_suite.py::test_leaves", "test_suite.py::test_wrapped"]
        result.stdout.fnmatch_lines(["*tracers in model.box.last", "*tracers in models?'a'??0?.box.last"])


@pytest.mark.skipif(sys.version_info < (3, 12), reason="local variables are watched from Python 3.12 on")
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
    result.stdout.fnmatch_lines(["*; local variables of tests are not watched: *sys.monitoring*"])


GONE = """
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


@pytest.mark.slow
@pytest.mark.parametrize("order", ["as written", "reversed"])
def test_what_the_code_of_a_model_keeps_is_found_when_the_model_is_gone(watch, pytester, order):
    """The test that left it is blamed, whatever comes before and after."""
    if order == "reversed":
        pytester.makeconftest("def pytest_collection_modifyitems(items): items.reverse()")
    result, failed = watch(GONE)
    assert failed == [f"test_suite.py::{name}" for name in ("test_class[Cached]", "test_class[Kept]", "test_masked")]
    result.stdout.fnmatch_lines(["*leaked *MASKS?2? * float32?2,2? *"])


TRAIN = """
losses, counted, callbacks = [], [], []

def train_step(model, x):
    loss = model(x, keep=False).mean()
    losses.append(loss)
    return loss

def healthy_step(model, x):
    loss = model(x, keep=False).mean()
    counted.append(loss.shape)
    return loss

class Trainer:
    history = []

    def step(self, model, x):
        self.history.append(x)
        return model(x, keep=False)

def log(value):
    pass

def logging_step(model, x):
    log(x)
    for callback in callbacks:
        callback(x)
    return model(x, keep=False)

def spying(seen):
    def step(model, x):
        seen.append(x)
        return model(x, keep=False)
    return step
"""

USES_TRAIN = """
import train

SEEN = []

def run(step):
    nnx.jit(step)(Net(), X)

def test_leaves():
    run(train.train_step)

def test_reported_once():
    assert train.train_step and train.losses

def test_class():
    run(train.Trainer().step)

def test_healthy():
    run(train.healthy_step)

# What a test looks into a trace by is its own.

def test_own_list():
    run(lambda model, x: SEEN.append(train.healthy_step(model, x)))

MADE = train.spying(SEEN)

def test_made_by_the_code_of_another_file():
    run(MADE)
    assert isinstance(SEEN[-1], jax.core.Tracer)

def test_patched(monkeypatch):
    seen = []
    monkeypatch.setattr(train, "log", seen.append)
    run(train.logging_step)
    assert isinstance(seen[0], jax.core.Tracer)

@pytest.fixture
def logged():
    log, seen = train.log, []
    train.log = seen.append
    yield seen
    train.log = log

def test_patched_by_a_fixture(logged):
    run(train.logging_step)
    assert isinstance(logged[0], jax.core.Tracer)

KEPT = []

def keep(x):
    KEPT.append(x)

def test_registered():
    train.callbacks.append(keep)
    run(train.logging_step)
"""


def test_what_code_of_another_file_keeps_is_found_and_what_the_test_keeps_is_not(watch, pytester):
    pytester.makepyfile(train=TRAIN)
    result, failed = watch(USES_TRAIN)
    assert failed == ["test_suite.py::test_class", "test_suite.py::test_leaves"]
    result.stdout.fnmatch_lines(
        [
            "nnx watch: tracers in losses?0?",
            "              created at train.py:4 (train_step)",
            "*test_suite.py::test_class  tracers in Trainer.history?0?",
        ]
    )
