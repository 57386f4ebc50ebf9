"""A suite whose tests fail, written in every form that a test may have."""

from __future__ import annotations

FORMS = """
import dataclasses
import enum
import os
from helpers_of_user import make, shown_by
from itertools import chain as chained
from math import *
from hypothesis import given, settings
from hypothesis import strategies as st

KEPT = []
split = stack = own = nesting = None  # names that our own part of the program has too

class Kind(enum.Enum):
    TANH = "tanh"

@dataclasses.dataclass(frozen=True)
class Config:
    width: int = 4
    kind: Kind = Kind.TANH

class Größe(nnx.Module):
    def __init__(self, config, rngs):
        self.linear = nnx.Linear(config.width, config.width, rngs=rngs)

    def __call__(self, x):
        assert split is stack is own is nesting is None
        KEPT.append(self.linear(x))
        return KEPT[-1]

@pytest.fixture
def config():
    return Config()

@pytest.fixture
def model(config):
    yield Größe(config, nnx.Rngs(0))

@pytest.fixture(params=[4], ids=["four"])
def x(request):
    return jnp.arange(2.0 * request.param).reshape(2, request.param)

@marked
def test_fixtures(nnx_wrap, model, x):
    nnx_wrap(model)(x)

@marked
@pytest.mark.parametrize("config, make", [(Config(4), lambda: nnx.Rngs(0))])
def test_parameters(nnx_wrap, config, make):
    nnx_wrap(Größe(config, make()))(jnp.ones((2, config.width)))

@marked
@given(rows=st.integers(1, 3))
@settings(max_examples=2)
def test_drawn(nnx_wrap, rows):
    nnx_wrap(Größe(Config(), nnx.Rngs(0)))(jnp.ones((rows, 4)))

@marked
class TestClass:
    width = 4

    def setup_method(self):
        self.config = Config(self.width)

    def helper(self):
        return Größe(self.config, nnx.Rngs(0))

    def test_method(self, nnx_wrap):
        nnx_wrap(self.helper())(jnp.ones((2, self.width)))

    def test_other(self, nnx_wrap):
        pytest.skip("not the one")

    @staticmethod
    def test_static(nnx_wrap, model, x):
        nnx_wrap(model)(x)

    @classmethod
    def test_of_class(cls, nnx_wrap):
        nnx_wrap(Größe(Config(cls.width), nnx.Rngs(0)))(jnp.ones((2, cls.width)))

    class TestInner:  # of which nothing is left
        pytestmark = pytest.mark.filterwarnings("ignore")

        def test_other(self, nnx_wrap):
            pytest.skip("not the one either")

@marked
@pytest.mark.parametrize("text", ["a\\nb'\\"\\"\\"", "ünï\\u2028 \\\\ {x} %s"])
def test_hostile(nnx_wrap, text):
    y = nnx_wrap(Größe(Config(), nnx.Rngs(0)))(jnp.ones((2, 4)))
    assert text

def over(describe, report):  # so are these, which the test takes from around it
    def test_around(nnx_wrap):
        nnx_wrap(Größe(Config(), nnx.Rngs(0)))(jnp.ones((describe, report)))

    return marked(test_around)

test_around = over(2, 4)

MODELS, HOOKS = {}, []

def register(name):
    def registered(cls):
        MODELS[name] = cls
        return cls
    return registered

@register("größe")
class Registered(Größe):
    pass

HOOKS.append(KEPT.append)

def over_models(test):  # reads the registry as well, and is for pytest
    return pytest.mark.parametrize("name", MODELS)(test)

@over_models
def test_names(name):
    assert name

@marked
def test_registered(nnx_wrap):
    model = MODELS["größe"](Config(), nnx.Rngs(0))
    nnx_wrap(lambda model, x: [hook(model(x)) for hook in HOOKS])(model, jnp.ones((2, 4)))

@marked
def test_own_assertion(nnx_wrap):
    assert nnx_wrap(nnx.Linear(4, 4, rngs=nnx.Rngs(0)))(jnp.ones((2, 4))).sum() > 100, "too small"

@marked
def test_only_nested(nnx_wrap):
    def forward(model, x):
        y = model(x)
        if isinstance(y, jax.core.Tracer):
            raise KeyError("no tracers here")
        return y

    nnx_wrap(forward)(nnx.Linear(4, 4, rngs=nnx.Rngs(0)), jnp.ones((2, 4)))

def of_a_list(models, x):
    KEPT.append(models[0](x))

def of_a_subject(subject, x):
    KEPT.append(subject(x))

def of_wrapped(wrapped, x):
    KEPT.append(wrapped(x))

@marked
@pytest.mark.parametrize("function", [of_a_list, of_a_subject, of_wrapped])
def test_parameter(nnx_wrap, function):
    model = nnx.Linear(4, 4, rngs=nnx.Rngs(0))
    nnx_wrap(function)([model] if function is of_a_list else model, jnp.ones((2, 4)))

os.environ.setdefault("OF_USER", "1")

def first_of(*values):
    return next(chained(values)) + sqrt(4) - 2

@marked
def test_of_helpers(nnx_wrap):
    assert os.environ["OF_USER"] == "1"
    nnx_wrap(lambda model, x: KEPT.append(model(x)))(make(4), first_of(jnp.ones((2, 4))))

@marked
def test_made_with_pytest(nnx_wrap):
    nnx_wrap(Größe(Config(), nnx.Rngs(0)))(jnp.ones((2, 4)))
    assert shown_by(marked)
"""
HELPERS = """
import pytest
from flax import nnx

def make(width):
    return nnx.Linear(width, width, rngs=nnx.Rngs(0))

def shown_by(mark):
    return mark

def unused():
    return pytest.skip()
"""
"""A module of helpers, which no program can import, since it imports pytest."""
