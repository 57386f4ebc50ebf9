"""The floor plan holds: what a transform is stands in one place, and the folders are what the documents say."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import pytest_nnxcheck
from pytest_nnxcheck.core.catalogue import CATALOGUE, ROWS, STYLES
from pytest_nnxcheck.core.nesting import Layer, Nesting, impossible
from pytest_nnxcheck.transforms.compose import layer_function

PACKAGE = Path(pytest_nnxcheck.__file__).parent
WORDS = ("core/catalogue.py", "transforms/", "invariants/hints.py", "compat/")
"""Where the name of a transform may stand in quotes."""


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_no_transform_is_named_in_quotes_outside_of_the_catalogue(path):
    if str(path.relative_to(PACKAGE)).startswith(WORDS):
        return
    constants = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Constant)]
    named = [f"{node.value!r} in line {node.lineno}" for node in constants if node.value in CATALOGUE]
    assert named == []


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_every_row_has_a_function_a_style(row):
    layers = [Layer(row.name, style) for style in row.styles]
    assert len({layer_function(layer) for layer in layers}) == len(row.styles)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_what_a_row_says_goes_together(row):
    assert row.styles == STYLES[: len(row.styles)]
    assert bool(row.loop) == (row.means in {"carry", "repeat", "iterate"})
    assert row.iterates == (row.means == "iterate")
    assert (row.axis == "calls") == (row.pair == "first call")
    twice = Nesting((Layer(row.name), Layer(row.name)))
    assert impossible(twice) == row.excludes_itself or row.iterates
