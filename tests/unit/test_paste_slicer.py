"""The source of definitions, with all that they name: of a module of the user's, and of ours."""

from __future__ import annotations

import importlib
import sys

import pytest

from pytest_nnxcheck.paste.slicer import NoSource, Slice, bound_by, read
from pytest_nnxcheck.transforms import layers

USER = """
import functools, os, pytest
import numpy as np
from helpers_of_user import make, plain
from itertools import chain as chained
from math import *

os.environ.setdefault("OF_USER", "1")
marked = pytest.mark.slow
MODELS = {}

def register(cls):
    MODELS[cls.__name__] = cls
    return cls

@register
class Model:
    size = 4  # as it is

@marked
class TestModel:
    pytestmark = pytest.mark.slow

    def test_one(self):
        return make(MODELS["Model"].size)

@pytest.fixture
def unused():
    return np.zeros(3)

def needs_pytest():
    return marked

needs_pytest()

def counts():
    return functools.reduce(chained, [sqrt(4)])

def outer(n):
    def inner():
        return n + counts()
    return inner
"""
HELPERS = """
import pytest

def make(n):
    return n

def plain():
    return make(1)
"""


@pytest.fixture
def user(tmp_path, monkeypatch):
    (tmp_path / "of_user.py").write_text(USER, "utf-8")
    (tmp_path / "helpers_of_user.py").write_text(HELPERS, "utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("OF_USER", "1")
    yield importlib.import_module("of_user")
    for name in ("of_user", "helpers_of_user"):
        sys.modules.pop(name)


def copied(user, *names):
    made = Slice()
    made.take(user, names)
    return made, "\n\n".join(made.chunks(ours=False))


def test_a_definition_comes_with_what_it_names_and_a_module_that_imports_pytest_is_copied(user):
    made, text = copied(user, "TestModel")
    assert text.startswith("def make(n):"), "what a module needs of another comes first"
    assert "class TestModel:\n    pass\n" in text, "marks are pytest's"
    assert "size = 4  # as it is" in text
    assert "def unused" not in text
    assert "def plain" not in text
    assert not made.missing


def test_what_runs_for_its_effect_comes_along_where_it_does_without_pytest(user):
    made, text = copied(user, "counts")
    assert 'os.environ.setdefault("OF_USER", "1")' in text
    assert "@register\nclass Model:" in text, "a registry is filled"
    assert "\nneeds_pytest()" not in text
    assert {*made.imports} >= {"import functools", "from itertools import chain as chained", "from math import sqrt"}


def test_what_is_made_with_pytest_is_missing(user):
    made, text = copied(user, "needs_pytest")
    assert [*made.missing] == ["marked"]
    assert "marked = " not in text


def test_a_function_in_a_function_is_copied_at_the_left_margin(user):
    made = Slice()
    assert made.take_function(user.outer(1)) == "inner"
    assert "def inner():\n    return n + counts()" in made.chunks(ours=False)
    with pytest.raises(NoSource):
        made.take_function(eval("lambda: 0", {"__name__": "nowhere"}))


def test_our_code_is_bare_and_its_rooms_are_followed():
    made = Slice()
    made.take(layers, ["shard_map_functional"])
    text = "\n\n".join(made.chunks(ours=True))
    assert "= shard_map(pure, mesh(), REPLICATED)" in text
    assert "def shard_map(" in text, "compat.shard_map"
    assert text.index("def functional(") < text.index("def shard_map_functional(")
    assert "compat" not in text.replace("jax.experimental", "")
    assert '"""' not in text


def test_guards_against_calls_that_a_layer_cannot_take_are_left_out():
    made = Slice()
    made.take(layers, ["grad_argument"])
    text = "\n\n".join(made.chunks(ours=True))
    assert "needs_graph_updates" not in text
    assert "Unfit" not in text


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
    import ast

    assert bound_by(ast.parse(text).body[0]) == names


def test_a_module_without_a_file_has_no_source():
    with pytest.raises(NoSource):
        read(sys.modules["builtins"])
