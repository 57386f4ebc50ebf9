"""The floor plan holds: what a transform is stands in one place, and the folders are what the documents say."""

from __future__ import annotations

import ast
import importlib
import re
from pathlib import Path

import pytest

import pytest_nnxcheck
from pytest_nnxcheck import Layer, Nesting
from pytest_nnxcheck.core import catalogue
from pytest_nnxcheck.core.catalogue import CATALOGUE, INVARIANT_ROWS, ROWS, STYLES
from pytest_nnxcheck.core.nesting import impossible
from pytest_nnxcheck.transforms.compose import layer_function

ROOT = Path(__file__).parents[2]
PACKAGE = Path(pytest_nnxcheck.__file__).parent
MODULES = {str(path.relative_to(PACKAGE)): ast.parse(path.read_text()) for path in sorted(PACKAGE.rglob("*.py"))}
WORDS = ("core/catalogue.py", "transforms/", "core/notes.py", "compat/")
"""Where the name of a transform may stand in quotes."""


def test_no_transform_is_named_in_quotes_outside_of_the_catalogue():
    assert [
        f"{path}:{node.lineno} {node.value!r}"
        for path, module in MODULES.items()
        if not path.startswith(WORDS)
        for node in ast.walk(module)
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


def test_the_row_that_is_read_from_a_file_is_the_one_that_stands_there():
    files = [path.stem for path in (PACKAGE / "invariants").glob("[!_]*.py")]
    modules = {name: importlib.import_module(f"pytest_nnxcheck.invariants.{name}") for name in files}
    there = {name: module.ROW for name, module in modules.items() if hasattr(module, "ROW")}
    assert there == {row.name: row for row in INVARIANT_ROWS}
    assert len({row.order for row in INVARIANT_ROWS}) == len({row.severity for row in INVARIANT_ROWS}) == len(there)


@pytest.mark.parametrize(
    "text, words",
    [
        ('ROW: InvariantRow = InvariantRow("new")\n', "write ROW = InvariantRow('new', ...)"),
        ("", "holds no source of an invariant"),
    ],
)
def test_a_row_that_cannot_be_read_is_an_error(text, words, tmp_path):
    (tmp_path / "new.py").write_text(text)
    with pytest.raises(ImportError, match=re.escape(words)):
        [*catalogue._built_in(tmp_path)]


def test_no_class_name_stands_twice_in_the_package():
    places: dict[str, list[str]] = {}
    for path, module in MODULES.items():
        for node in ast.walk(module):
            if isinstance(node, ast.ClassDef):
                places.setdefault(node.name, []).append(path)
    assert {name: paths for name, paths in places.items() if len(paths) > 1} == {}


def test_the_document_names_no_file_that_is_not_there():
    text = (ROOT / "docs" / "inside.md").read_text()
    names = re.findall(r"`(\w+/\w+)`", text)
    assert [name for name in names if not (PACKAGE / name).is_dir() and not (PACKAGE / f"{name}.py").is_file()] == []


def test_a_quarter_of_the_tests_at_most_use_private_names():
    """A test asserts what a user would notice: most use a public name, or what the tests share."""
    private, every = [], 0
    folders = {path.stem for path in PACKAGE.iterdir()}
    for path in sorted((ROOT / "tests").rglob("*.py")):
        module = ast.parse(path.read_text())
        names = {
            alias.asname or alias.name
            for node in ast.walk(module)
            if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("pytest_nnxcheck")
            for alias in node.names
            if node.module != "pytest_nnxcheck" or alias.name in folders
        }
        tests = [
            node for node in ast.walk(module) if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
        ]
        every += len(tests)
        private += [
            f"{path.name}::{test.name}"
            for test in tests
            if names & {node.id for node in ast.walk(test) if isinstance(node, ast.Name)}
        ]
    assert len(private) <= every / 4, f"{len(private)} of {every}"


def test_data_of_the_documents_name_no_file_of_a_machine():
    path = re.compile(r"(?<![\w:/.])/\w+(?:/[\w.-]+)+\.py")
    data = {file.name: file.read_text() for file in (ROOT / "docs").glob("*.json")}
    assert data
    assert {name: found for name, text in data.items() if (found := path.findall(text))} == {}
