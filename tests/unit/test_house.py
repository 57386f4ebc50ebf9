"""The floor plan holds: what a transform is stands in one place, and the folders are what the documents say."""

from __future__ import annotations

import ast
import re
from dataclasses import fields
from pathlib import Path

import mutants

import pytest_nnxcheck
from pytest_nnxcheck.core.catalogue import CATALOGUE, INVARIANT_ROWS, OWN_NEEDS, ROWS, STYLES
from pytest_nnxcheck.core.nesting import Layer, Nesting, impossible
from pytest_nnxcheck.engine.gather import GATHER
from pytest_nnxcheck.invariants.case import Case
from pytest_nnxcheck.transforms.compose import layer_function

ROOT = Path(__file__).parents[2]
PACKAGE = Path(pytest_nnxcheck.__file__).parent
WORDS = ("core/catalogue.py", "transforms/", "reporting/hints.py", "compat/")
"""Where the name of a transform may stand in quotes."""


def test_no_transform_is_named_in_quotes_outside_of_the_catalogue():
    assert [
        f"{path}:{node.lineno} {node.value!r}"
        for files in mutants.sources().values()
        for path, text in files
        if not str(path).startswith(WORDS)
        for node in ast.walk(mutants.parsed(text))
        if isinstance(node, ast.Constant) and node.value in CATALOGUE
    ] == []


def test_every_row_has_a_function_a_style():
    functions = {row.name: {layer_function(Layer(row.name, style)) for style in row.styles} for row in ROWS}
    assert [row.name for row in ROWS if len(functions[row.name]) != len(row.styles)] == []


def test_what_a_row_says_goes_together():
    assert [(row.name, rule) for row in ROWS for rule, holds in rules_of(row).items() if not holds] == []


def rules_of(row):
    clash = impossible(Nesting((Layer(row.name), Layer(row.name))))
    return {
        "its styles are the first ones": row.styles == STYLES[: len(row.styles)],
        "a loop carries or repeats": bool(row.loop) == (row.means in {"carry", "repeat"}),
        "an axis of calls pairs with the first": (row.axis == "calls") == (row.pair == "first call"),
        "what it says of itself inside of itself": (clash.of if clash else "") == row.excludes_itself,
    }


def test_each_need_of_an_invariant_is_a_field_of_a_case_and_has_a_function_that_gathers_it():
    needs = {need for row in INVARIANT_ROWS for need in row.needs} | {*OWN_NEEDS}
    assert needs == GATHER.keys() == {field.name for field in fields(Case)} - {"nesting"}


def test_the_document_shows_every_file_of_every_folder():
    text = (ROOT / "docs" / "inside.md").read_text()
    rows = [line.split("|") for line in text.splitlines() if line.startswith("| `")]
    shown = {cells[1].strip(" `"): re.findall(r"`(\w+)`", cells[3]) for cells in rows if len(cells) == 5}
    folders = [path for path in PACKAGE.iterdir() if path.is_dir() and path.name != "__pycache__"]
    there = {folder.name: sorted(files_of(folder)) for folder in folders}
    assert {folder: sorted(files) for folder, files in shown.items()} == there


def test_the_document_names_no_file_that_is_not_there():
    text = (ROOT / "docs" / "inside.md").read_text()
    names = re.findall(r"`(\w+/\w+)`", text)
    assert [name for name in names if not (PACKAGE / name).is_dir() and not (PACKAGE / f"{name}.py").is_file()] == []


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


def test_every_mutant_breaks_what_is_there_and_has_tests():
    """In the checkout, which a run of the mutants leaves as it is."""
    assert {str(mutant): why for mutant in mutants.MUTANTS if (why := mutants.unfit(mutant))} == {}
