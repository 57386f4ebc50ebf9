"""The last lines of a watched run: which tests call a module outside of any transform, where, and what marks the first."""

from __future__ import annotations

import sys

import pytest

pytestmark = pytest.mark.skipif(sys.version_info < (3, 12), reason="calls are watched from Python 3.12 on")

HEAD = """\
import functools
import jax.numpy as jnp
import pytest
import unittest
from flax import nnx

X = jnp.ones((2, 4))

class Block(nnx.Module):
    def __init__(self):
        self.linear = nnx.Linear(4, 4, kernel_init=nnx.initializers.ones_init(), rngs=nnx.Rngs(0))

    def __call__(self, x):
        return self.linear(x)

@pytest.fixture
def block():
    return Block()

def helper(block):
    return block(X)

"""


@pytest.fixture
def last_lines(watch):
    """What the run says of tests to mark: nothing, or its title and what follows."""

    def run(body, *args):
        result, _ = watch(body, *args, head=HEAD)
        lines = result.outlines
        start = next((number for number, line in enumerate(lines) if "could be checked" in line), len(lines))
        return [line for line in lines[start:] if not line.startswith("=")]

    return run


def test_the_first_tests_their_lines_and_what_marks_the_first(last_lines):
    body = """
def test_block(block):
    x = X
    assert block(
        x
    ).shape == (2, 4)

class TestBlock:
    def test_method(self):
        Block()(X)

@pytest.mark.parametrize("rows", [1, 2])
def test_rows(rows, block):
    helper(block)

def test_jitted_first(block):
    nnx.jit(helper)(block)
    functools.reduce(lambda x, _: block(x), range(2), X)
"""
    assert last_lines(body) == [
        "4 tests call a module outside of any transform, and could be checked under nestings:",
        "  test_suite.py::TestBlock::test_method  calls Block at test_suite.py:32",
        "  test_suite.py::test_block  calls Block at test_suite.py:26",
        "  test_suite.py::test_jitted_first  calls Block at test_suite.py:40",
        "  and 1 more, see -v",
        "To mark test_suite.py::TestBlock::test_method, put the marker above it, let it take nnx_wrap, and wrap the module before line 32 (model: the name of yours):",
        "    @pytest.mark.nnx_invariants",
        "    def test_method(self, nnx_wrap):",
        "        model = nnx_wrap(model)",
    ]
    assert "  test_suite.py::test_rows  calls Block at test_suite.py:36" in last_lines(body, "-v")


NAMES = {
    "a variable": ("def test_it():\n    net = Block()\n    net(X)\n", "net"),
    "a fixture": ("def test_it(block):\n    helper(block)\n", "block"),
    "an attribute": (
        "class TestIt:\n    def test_it(self):\n        self.net = Block()\n        self.net(X)\n",
        "self.net",
    ),
    "an item": ("def test_it():\n    nets = [Block(), Block()]\n    nets[1](X)\n", "nets[1]"),
    "a key": ("def test_it():\n    nets = {'a': Block()}\n    nets['a'](X)\n", "nets['a']"),
    "a global": ("NET = Block()\n\ndef test_it():\n    NET(X)\n", "NET"),
    "a captured one": ("def test_it():\n    net = Block()\n    assert [net(x) for x in (X,)]\n", "net"),
}


@pytest.mark.parametrize("form", NAMES)
def test_the_lines_have_the_name_that_the_test_has_for_its_module(form, last_lines):
    body, name = NAMES[form]
    *_, head, _, _, wrap = last_lines(body)
    assert wrap == f"        {name} = nnx_wrap({name})"
    assert "the name of yours" not in head


def test_a_call_that_the_test_makes_itself_is_named_before_one_that_a_function_makes(last_lines):
    body = """
def prepared(block):
    block(X)
    return block

def test_own(block):
    block = prepared(block)
    nnx.jit(helper)(block)
    block(
        X)
    helper(block)

def test_of_another(block):
    prepared(block)
    helper(block)
"""
    assert last_lines(body)[1:3] == [
        "  test_suite.py::test_of_another  calls Block at test_suite.py:36",
        "  test_suite.py::test_own  calls Block at test_suite.py:31",
    ]


def test_the_file_is_named_from_the_root_of_the_run(last_lines, pytester):
    (pytester.path / "suites").mkdir()
    (pytester.path / "suites" / "base.py").write_text(
        HEAD + "class Base:\n    def test_base(self):\n        Block()(X)\n"
    )
    lines = last_lines("from suites.base import Base\n\nclass TestInherited(Base):\n    pass\n")
    assert lines[1] == "  test_suite.py::TestInherited::test_base  calls Block at suites/base.py:25"


NOT_NAMED = """
def test_jitted(block):
    nnx.jit(lambda block, x: block(x))(block, X)

def test_jitted_helper(block):
    nnx.jit(helper)(block)

def test_no_call(block):
    assert block.linear and nnx.Rngs(0)() is not None
"""


@pytest.mark.parametrize(
    "body",
    [
        pytest.param(NOT_NAMED, id="inside of a transform alone"),
        pytest.param(
            """
@pytest.fixture
def output(block):
    return block(X)

def test_asked_for(output):
    assert output.ndim == 2

def test_asked_for_inside(request):
    assert request.getfixturevalue("output").ndim == 2
""",
            id="by a fixture",
        ),
        pytest.param(
            """
@pytest.mark.nnx_invariants(effort="quick", transforms="jit", styles="argument")
def test_marked(nnx_wrap, block):
    block(nnx_wrap(block)(X))
""",
            id="of a marked test",
        ),
        pytest.param(
            """
class BlockTest(unittest.TestCase):
    def test_case(self):
        Block()(X)

async def test_async():
    Block()(X)
""",
            id="of tests that cannot be marked",
        ),
        pytest.param("def test_fails(block):\n    block(X)\n    raise AssertionError\n", id="of a test that fails"),
    ],
)
def test_nothing_is_said_of_a_call(last_lines, pytester, body):
    pytester.makeconftest(AWAITING)
    assert last_lines(body) == []


AWAITING = """
import asyncio
import inspect
import pytest

@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem):
    if inspect.iscoroutinefunction(pyfuncitem.obj):
        asyncio.run(pyfuncitem.obj())
        return True
"""


def test_the_lines_make_a_marked_test_that_runs(last_lines, pytester, inner_args):
    body = "def test_block(block):\n    assert block(X).ndim == 2\n"
    *_, mark, definition, wrap = (line.removeprefix("    ") for line in last_lines(body))
    marked = "\n".join([mark, definition.replace("...", "block"), wrap, *body.splitlines()[1:]])
    pytester.makepyfile(test_suite=HEAD + marked)
    few = ("--nnx-effort=quick", "--nnx-transforms=jit", "--nnx-styles=argument")
    result = pytester.runpytest_inprocess(*inner_args, "-p", "no:randomly", "-p", "no:cacheprovider", *few)
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines(["test_suite.py::test_block  *"])
