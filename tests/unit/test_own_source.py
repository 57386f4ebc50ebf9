"""Our own functions as text: what is left out of them, and who gives way where two things have one name."""

from __future__ import annotations

import ast

import pytest

from pytest_nnxcheck.reproducer.own_source import Bare, bound_by, import_lines, renamed


def bare(text):
    return ast.unparse(Bare().visit(ast.parse(text)))


def test_texts_annotations_and_guards_do_nothing_in_a_program():
    text = '''
def layer(f: Program, plan: Plan) -> Program:
    """What it is."""
    import jax
    needs_graph_updates("a layer", plan)  # only some modes have them
    if not f:
        raise Unfit("nothing to call")
    made: list[int] = []
    left: int
    return made
'''
    assert bare(text) == "def layer(f, plan):\n    made = []\n    return made"
    assert bare('class Odd:\n    """Nothing more."""') == "class Odd:\n    pass"


@pytest.mark.parametrize(
    "text, names, written",
    [
        ("def f(x):\n    return compat.zeros(x)", {"compat.zeros": "zeros"}, "def f(x):\n    return zeros(x)"),
        ("def f(zeros):\n    return compat.zeros(zeros)", {"compat.zeros": "zeros"}, "def f(zeros_):\n    return zeros(zeros_)"),
        ("zeros = compat.zeros()", {"compat.zeros": "zeros"}, "zeros_ = zeros()"),
        ("def f(x):\n    return first(x.first, first=first)", {"first": "first_"}, "def f(x):\n    return first_(x.first, first=first_)"),
        ("text = 'first'  # as it is", {}, "text = 'first'  # as it is"),
    ],
)  # fmt: skip
def test_a_name_is_changed_where_it_is_one_and_a_local_that_has_it_gives_way(text, names, written):
    assert renamed(text, names) == written


@pytest.mark.parametrize(
    "text, names",
    [
        ("import os.path, sys as system", {"os", "system"}),
        ("if True:\n    def f(): inner = 1\nelse:\n    (a, *b), c = 1, 2", {"f", "a", "b", "c"}),
        ("Model.size = 4", {"Model"}),
        ("jax.config.update('jax_enable_x64', True)", set()),
    ],
)
def test_the_names_that_a_statement_binds_or_changes(text, names):
    assert bound_by(ast.parse(text).body[0]) == names


def test_imports_stand_in_order_those_of_the_standard_library_and_of_one_module_in_one_line():
    lines = ["from flax import nnx", "import jax.numpy as jnp", "import re", "from a import c", "import gc", "from a import b"]  # fmt: skip
    assert import_lines(lines) == ["import gc, re", "import jax.numpy as jnp", "from a import b, c", "from flax import nnx"]  # fmt: skip
