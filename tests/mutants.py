"""Break the code on purpose, one place at a time: a test must fail for each. ``nox -s mutants`` runs all of them.

``python tests/mutants.py [NUMBER | FRAGMENT ...]`` runs those with these numbers, or with one of these texts in their names.
Each is made in a copy of the package, which the tests import in place of it. The table is ``tests/mutant_table.py``.
"""

from __future__ import annotations

import ast
import copy
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path

from mutant_table import MUTANTS, Mutant

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "pytest_nnxcheck"
_DEFINITIONS = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
_ASSIGNMENTS = ast.Assign | ast.AnnAssign


class UnfitError(Exception):
    """A mutant that breaks nothing: why."""


def broken(mutant: Mutant) -> tuple[Path, str]:
    """The file that a mutant breaks, from the folder of the package, and its text then."""
    path, module, scope = place_of(mutant, ast.parse)
    change(mutant, scope)
    text = ast.unparse(module)
    try:
        compile(text, path, "exec")
    except SyntaxError as error:
        raise UnfitError(str(error)) from error
    return path, text


def place_of(mutant: Mutant, parse: Callable[[str], ast.Module]) -> tuple[Path, ast.Module, ast.AST]:
    """The file, its syntax tree, and in this the definition that a mutant names."""
    stem, _, name = mutant.where.partition(".")
    found = [
        (path, module, scope)
        for path, text in sources().get(stem, ())
        for module in [parse(text)]
        for scope in scopes_of(module, name.split("."))
    ]
    if len(found) != 1:
        raise UnfitError(f"{len(found)} functions, classes or constants have the name {mutant.where}")
    return found[0]


def change(mutant: Mutant, scope: ast.AST) -> None:
    """Break a definition in place."""
    before = ast.dump(scope)
    try:
        mutant.effect.change(scope)
    except SyntaxError as error:
        raise UnfitError(str(error)) from error
    if ast.dump(scope) == before:
        raise UnfitError("it changes nothing")


def tests_of(mutant: Mutant) -> list[Path]:
    """The test files of a mutant."""
    found = {name: test_files().get(name, []) for name in mutant.tests.split()}
    if wrong := [name for name, paths in found.items() if len(paths) != 1]:
        raise UnfitError(f"not one file each: {', '.join(wrong)}")
    return [path for paths in found.values() for path in paths]


parsed = cache(ast.parse)
"""A syntax tree that nothing changes."""


@cache
def test_files() -> dict[str, list[Path]]:
    """The test files, by their names."""
    files: dict[str, list[Path]] = {}
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        files.setdefault(path.name, []).append(path)
    return files


@cache
def sources() -> dict[str, list[tuple[Path, str]]]:
    """Paths and texts of the files of the package, by the name that a mutant calls them."""
    files: dict[str, list[tuple[Path, str]]] = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        stem = path.parent.name if path.stem == "__init__" else path.stem
        files.setdefault(stem, []).append((path.relative_to(PACKAGE), path.read_text()))
    return files


def scopes_of(node: ast.AST, names: list[str]) -> list[ast.AST]:
    """The definitions that a dotted name means, inside of a module, a class or a function."""
    if not names:
        return [node]
    first, *rest = names
    return [scope for inner in _definitions_in(node) if first in _names_of(inner) for scope in scopes_of(inner, rest)]


def _definitions_in(node: ast.AST) -> list[ast.AST]:
    found: list[ast.AST] = []
    for child in ast.iter_child_nodes(node):
        found += [child] if isinstance(child, _DEFINITIONS | _ASSIGNMENTS) else _definitions_in(child)
    return found


def _names_of(node: ast.AST) -> list[str]:
    if isinstance(node, _DEFINITIONS):
        return [node.name]
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    return [target.id for target in targets if isinstance(target, ast.Name)]


def unfit(mutant: Mutant) -> str:
    """Why a mutant proves nothing; empty where it can be run."""
    try:
        *_, scope = place_of(mutant, parsed)
        change(mutant, copy.deepcopy(scope))
        tests_of(mutant)
    except UnfitError as error:
        return str(error)
    return ""


def survives(mutant: Mutant) -> str:
    """Why a mutant is alive; empty where a test failed."""
    try:
        file, text = broken(mutant)
        tests = tests_of(mutant)
    except UnfitError as error:
        return f"{error}: write the mutant anew"
    with tempfile.TemporaryDirectory() as folder:
        shutil.copytree(PACKAGE, Path(folder) / PACKAGE.name, ignore=shutil.ignore_patterns("__pycache__"))
        (Path(folder) / PACKAGE.name / file).write_text(text)
        for test in tests:
            done = run(test, folder)
            if "FAILED tests/" in done.stdout or "ERROR tests/" in done.stdout:
                return ""
            if done.returncode != 0:
                return f"{test.name} ended with {done.returncode}: {done.stdout[-300:]}"
    return f"no test of {mutant.tests} failed"


def run(test: Path, folder: str) -> subprocess.CompletedProcess[str]:
    """A test file on the package in a folder, until the first failure."""
    options = "-q -x -n 2 -p no:cacheprovider".split()
    command = [sys.executable, "-P", "-m", "pytest", *options, "-m", "not full", str(test)]
    environment = {**os.environ, "PYTHONPATH": folder, "PYTHONSAFEPATH": "1", "JAX_PLATFORMS": "cpu"}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)


def main(words: list[str]) -> int:
    """How many of the mutants with these numbers or names are alive; of all, without words."""
    alive = 0
    for number, mutant in enumerate(MUTANTS):
        if words and not any(int(word) == number if word.isdigit() else word in str(mutant) for word in words):
            continue
        reason = survives(mutant)
        alive += bool(reason)
        print(f"{number:>3} {'ALIVE' if reason else 'dead '} {mutant} {reason}", flush=True)  # noqa: T201  # a program that reports
    return alive


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
