"""Suites whose tests call a module outside of any transform, and the file of marked tests that is written for one of them."""

from __future__ import annotations

CONFTEST = """
import jax.numpy as jnp
import pytest

@pytest.fixture
def batch():
    return jnp.ones((2, 4))
"""
HEAD = """
import jax
import jax.numpy as jnp
import pytest
from flax import nnx

WIDTH = 4

class Net(nnx.Module):
    def __init__(self, rngs):
        self.linear = nnx.Linear(WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x):
        return nnx.relu(self.linear(x))

@pytest.fixture
def net():
    return Net(nnx.Rngs(0))

"""
SURE = """
def test_built():
    "The words of the author."
    model = Net(nnx.Rngs(0))
    x = jnp.ones((2, WIDTH))
    assert model(x).shape == (2, 4)
    assert model

def test_fixtures(net, batch):
    y = net(net(batch))
    assert y.shape == (2, 4)

@pytest.mark.parametrize("rows", [1, 3])
def test_rows(rows, net):
    net(jnp.ones((rows, WIDTH)))

class TestNet:
    def test_method(self, batch):
        from flax.nnx import Linear
        assert jnp.isfinite(Linear(4, 2, rngs=nnx.Rngs(0))(batch)).all()

def test_jitted_first(net, batch):
    nnx.jit(lambda net, x: net(x))(net, batch)
    y = jax.nn.relu(net(batch))
"""
NONE = """
def test_jitted(net, batch):
    nnx.jit(lambda net, x: net(x))(net, batch)

def test_nothing(net):
    assert net.linear

def test_rngs():
    nnx.Rngs(0)()

def test_fails(net, batch):
    net(batch)
    raise AssertionError
"""
GAPS = """
import contextlib

def test_loop(net, batch):
    for _ in range(2):
        net(batch)

def helper(model):
    return model(jnp.ones((1, 4)))

def test_helper(net):
    helper(net)

class TestSelf:
    @pytest.fixture
    def mine(self):
        return Net(nnx.Rngs(0))

    def test_self(self, batch):
        self.model = Net(nnx.Rngs(0))
        self.model(batch)

    def test_of_its_class(self, mine, batch):
        mine(batch)

@contextlib.contextmanager
def nothing():
    yield

@nothing()
def test_decorated():
    Net(nnx.Rngs(0))(jnp.ones((1, 4)))
"""

MARKS = """
import numpy as np

BUILT = {}

@pytest.fixture
def build():
    BUILT["net"] = Net(nnx.Rngs(0))
    yield
    BUILT.clear()

pytestmark = [pytest.mark.usefixtures("build"), pytest.mark.filterwarnings("ignore:none such")]

@pytest.mark.parametrize(("rows", "more"), [(1, 2), (3, 4)])
class TestOfClass:
    def test_marks(self, rows, more):
        assert BUILT["net"](jnp.ones((rows, more, WIDTH))).shape == (rows, more, WIDTH)

def test_named_as_a_builtin(net, batch):
    map = net
    assert map(batch).ndim == 2

def test_handed_what_a_builtin_makes(net):
    assert net(np.zeros((2, WIDTH), np.float32)).shape == (2, WIDTH)

@pytest.mark.parametrize(argnames=["rows"], argvalues=[[1]])
def test_keywords(rows, *, batch):
    assert BUILT["net"](batch[:rows]).ndim == 2
"""
"""Marks of the class and of the file, which a marked test needs as well."""
GAPS_OF_MARKS = """
import sys
import unittest

@pytest.mark.skipif(sys.platform == "none", reason="none such")
class TestSkipped:
    def test_condition(self, net, batch):
        net(batch)

class TestSetup:
    def setup_method(self):
        self.width = WIDTH

    def test_setup(self, net, batch):
        net(batch)

class TestSetupOfClass:
    @classmethod
    def setup_class(cls):
        cls.width = WIDTH

    def test_setup_class(self, net, batch):
        net(batch)

def test_extended(net, batch):
    ys = []
    ys.extend(map(net, [batch]))

def test_mapped(net, batch):
    assert len(list(map(net, [batch, batch]))) == 2

def test_sorted(net, batch):
    assert len(sorted([batch], key=net)) == 1

class NetTest(unittest.TestCase):
    def test_case(self):
        self.assertEqual(Net(nnx.Rngs(0))(jnp.ones((2, WIDTH))).ndim, 2)
"""
"""What is not certain because of what stands around the test, and of what makes the call."""


WRITTEN = '''"""Tests marked with nnx_invariants, from tests that call a module outside of any transform: read them before you keep them."""

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from test_suite import Net, WIDTH, net


# test_suite.py::TestNet::test_method calls Linear in line 38 of test_suite.py
@pytest.mark.nnx_invariants
def test_method(nnx_wrap, batch):
    from flax.nnx import Linear
    assert jnp.isfinite(nnx_wrap(Linear(4, 2, rngs=nnx.Rngs(0)))(batch)).all()


# test_suite.py::test_built calls Net in line 24 of test_suite.py
@pytest.mark.nnx_invariants
def test_built(nnx_wrap):
    model = Net(nnx.Rngs(0))
    x = jnp.ones((2, WIDTH))
    assert nnx_wrap(model)(x).shape == (2, 4)


# test_suite.py::test_fixtures calls Net in line 28 of test_suite.py
@pytest.mark.nnx_invariants
def test_fixtures(nnx_wrap, net, batch):
    y = net(nnx_wrap(net)(batch))


# test_suite.py::test_jitted_first calls Net in line 42 of test_suite.py
@pytest.mark.nnx_invariants
def test_jitted_first(nnx_wrap, net, batch):
    nnx.jit(lambda net, x: net(x))(net, batch)
    y = jax.nn.relu(nnx_wrap(net)(batch))


# test_suite.py::test_rows calls Net in line 33 of test_suite.py
@pytest.mark.nnx_invariants
@pytest.mark.parametrize('rows', [1, 3])
def test_rows(nnx_wrap, rows, net):
    nnx_wrap(net)(jnp.ones((rows, WIDTH)))
'''


DECORATED = """
import functools
import unittest

def checked(method):
    @functools.wraps(method)
    def call(*args):
        return method(*args)
    return call

class Checked(Net):
    @checked
    @checked
    def __call__(self, x):
        return self.linear(x)

class NetTest(unittest.TestCase):
    ROWS = 2

    def test_checked(self):
        assert Checked(nnx.Rngs(0))(jnp.ones((NetTest.ROWS, 4))) is not None
"""


OTHER = """
class Net(nnx.Module):
    def __init__(self, rngs):
        self.kernel = nnx.Param(jnp.ones((4, 4)))

    def __call__(self, x):
        return x @ self.kernel

def test_built():
    assert Net(None)(jnp.ones((2, 4))).shape == (2, 4)

def test_fixtures(net, batch):
    net(batch)
"""


DEFINED = """
class TestLocal:
    def test_class(self, batch):
        class Double(nnx.Module):
            def __call__(self, x):
                return self.scaled(x)

            def scaled(self, x):
                return 2 * x

        def both(x):
            return Double()(x)

        assert Double()(batch).shape == both(batch).shape
"""
