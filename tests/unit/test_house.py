"""The floor plan holds: what a transform is stands in one place, and the folders are what the documents say."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import mutants
import pytest

import pytest_nnxcheck
from pytest_nnxcheck.core.catalogue import CATALOGUE, ROWS, STYLES
from pytest_nnxcheck.core.nesting import Layer, Nesting, impossible
from pytest_nnxcheck.transforms.compose import layer_function

ROOT = Path(__file__).parents[2]
PACKAGE = Path(pytest_nnxcheck.__file__).parent
WORDS = ("core/catalogue.py", "transforms/", "reporting/hints.py", "compat/")
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
    assert bool(row.loop) == (row.means in {"carry", "repeat"})
    assert (row.axis == "calls") == (row.pair == "first call")
    twice = Nesting((Layer(row.name), Layer(row.name)))
    clash = impossible(twice)
    assert (clash.of if clash else "") == row.excludes_itself


def test_the_document_shows_every_file_of_every_folder():
    text = (ROOT / "docs" / "inside.md").read_text()
    rows = [line.split("|") for line in text.splitlines() if line.startswith("| `")]
    shown = {cells[1].strip(" `"): re.findall(r"`(\w+)`", cells[3]) for cells in rows if len(cells) == 5}
    folders = [path for path in PACKAGE.iterdir() if path.is_dir() and path.name != "__pycache__"]
    there = {folder.name: sorted(files_of(folder)) for folder in folders}
    assert {folder: sorted(files) for folder, files in shown.items()} == there


def test_the_document_names_no_file_that_is_not_there():
    text = (ROOT / "docs" / "inside.md").read_text()
    for name in re.findall(r"`(\w+/\w+)`", text):
        assert (PACKAGE / name).is_dir() or (PACKAGE / f"{name}.py").is_file(), name


def files_of(folder):
    for path in folder.iterdir():
        if path.stem not in ("__init__", "__pycache__") and (path.suffix == ".py" or path.is_dir()):
            yield path.stem


def test_a_folder_has_few_files_and_a_file_few_lines():
    sizes = {path: len(path.read_text().splitlines()) for path in PACKAGE.rglob("*.py")}
    assert {str(path.relative_to(PACKAGE)): size for path, size in sizes.items() if size > 400} == {}
    files = {folder: [*files_of(folder)] for folder in {path.parent for path in sizes}}
    files[PACKAGE] = [
        name for name in files[PACKAGE] if not (PACKAGE / name).is_dir()
    ]  # the floor plan lists the folders
    assert {folder.name: len(names) for folder, names in files.items() if len(names) > 12} == {}


@pytest.mark.parametrize("mutant", mutants.MUTANTS, ids=lambda mutant: mutant.file)
def test_what_a_mutant_breaks_stands_in_the_code_once(mutant):
    """In the checkout, which a run of the mutants leaves as it is."""
    assert (ROOT / "pytest_nnxcheck" / mutant.file).read_text().count(mutant.old) == 1
    for name in mutant.tests.split():
        assert len([*(ROOT / "tests").rglob(name)]) == 1
