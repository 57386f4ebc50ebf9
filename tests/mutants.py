"""Break the code on purpose, one place at a time: a test must fail for each. ``nox -s mutants`` draws places from the whole package.

``python tests/mutants.py [FILE | FOLDER ...] [--count 100] [--seed 0] [--tests tests]`` draws from these. Each mutant is made in a copy of the package, which the tests
import in place of it: those that run the changed line, the shortest first. Some mutants change nothing that anybody could notice; read each that lives.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

import covered

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "pytest_nnxcheck"
OPTIONS = ("-q", "-p", "no:cacheprovider", "-p", "pytest_nnxcheck", "-m", "not full")
"""The package is imported first, or the root, which pytest puts on the path for its `conftest.py`, would have it."""
PATIENCE = 90.0
"""Seconds of tests that a mutant may live through. A line that every check runs has hundreds of tests."""
SWAPPED = {
    ast.Eq: ast.NotEq,
    ast.Lt: ast.LtE,
    ast.Gt: ast.GtE,
    ast.In: ast.NotIn,
    ast.Is: ast.IsNot,
    ast.Add: ast.Sub,
    ast.Mult: ast.FloorDiv,
}
SWAPPED |= {other: one for one, other in SWAPPED.items()} | {ast.Div: ast.Mult}


@dataclass(frozen=True, slots=True)
class Mutant:
    """A piece of a file and what is there instead."""

    file: str
    function: str
    """Empty for what an import runs."""
    lines: range
    """Of the statement, for a compound one of its head, for a default of the function. A test that runs none of them cannot notice."""
    text: str
    """The whole file, as it is."""
    start: int
    """Of the piece, in bytes."""
    old: str
    new: str

    def __str__(self) -> str:
        return f"{self.file}:{self.lines[0]} {self.function}: {' '.join(self.old.split())[:100]} -> {self.new[:100]}"

    def changed(self) -> str:
        """The whole file, changed."""
        text = self.text.encode()
        return (text[: self.start] + self.new.encode() + text[self.start + len(self.old.encode()) :]).decode()

    def compiles(self) -> bool:
        try:
            compile(self.changed(), self.file, "exec")
        except SyntaxError:
            return False
        return True


def changes(node: ast.AST) -> Iterator[tuple[ast.AST, str]]:  # noqa: C901  # one case each
    """What can go wrong in a node: a part of it, or the whole, and the text instead."""
    match node:
        case ast.If() | ast.IfExp() | ast.While() if not isinstance(node.test, ast.Compare | ast.UnaryOp):
            yield node.test, f"(not ({ast.unparse(node.test)}))"
        case ast.comprehension():
            yield from ((condition, "True") for condition in node.ifs)
        case ast.Compare(ops=[op]) if type(op) in SWAPPED:
            yield node, f"({ast.unparse(ast.Compare(node.left, [SWAPPED[type(op)]()], node.comparators))})"
        case ast.BinOp() if type(node.op) in SWAPPED:
            yield node, f"({ast.unparse(ast.BinOp(node.left, SWAPPED[type(node.op)](), node.right))})"
        case ast.BoolOp():
            for dropped in node.values:
                rest = [value for value in node.values if value is not dropped]
                yield node, f"({ast.unparse(rest[0] if len(rest) == 1 else ast.BoolOp(node.op, rest))})"
        case ast.UnaryOp(op=ast.Not()):
            yield node, f"bool({ast.unparse(node.operand)})"
        case ast.Constant(value=bool()):
            yield node, str(not node.value)
        case ast.Constant(value=int()):
            yield node, str(node.value + 1)
        case ast.Return(value=ast.expr() as value) if ast.unparse(value) != "None":
            yield node, "return None"
        case ast.Expr(value=ast.Call() | ast.Yield()) | ast.AugAssign() | ast.Raise() | ast.Delete() | ast.Continue():
            yield node, "pass"
        case ast.Assign(targets=[ast.Attribute() | ast.Subscript()]):
            yield node, "pass"


def mutants_of(path: Path) -> Iterator[Mutant]:
    """Every mutant of a file of the package."""
    text = path.read_text()
    yield from _mutants_in(ast.parse(text), str(path.resolve().relative_to(PACKAGE)), text, "", range(1, 2))


def _mutants_in(node: ast.AST, file: str, text: str, function: str, lines: range) -> Iterator[Mutant]:
    skipped = [*getattr(node, "decorator_list", ()), getattr(node, "annotation", None), getattr(node, "returns", None)]
    for child in ast.iter_child_nodes(node):
        if any(child is each for each in skipped) or (
            isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test)
        ):
            continue
        if isinstance(child, ast.stmt):
            body = None if isinstance(child, ast.FunctionDef) else getattr(child, "body", None)
            lines = range(child.lineno, body[0].lineno if body else child.end_lineno + 1)
        name = f"{function}.{child.name}".lstrip(".") if isinstance(child, ast.FunctionDef) else function
        for piece, new in changes(child):
            old = ast.get_source_segment(text, piece) or ""
            above = "".join(text.splitlines(keepends=True)[: piece.lineno - 1])
            yield Mutant(file, name, lines, text, len(above.encode()) + piece.col_offset, old, new)
        yield from _mutants_in(child, file, text, name, lines)


@dataclass(frozen=True)
class Coverage:
    """Which tests run a line of a file, and how many seconds each takes."""

    tests: dict[tuple[str, int], set[str]] = field(default_factory=lambda: defaultdict(set))
    seconds: dict[str, float] = field(default_factory=dict)

    def of(self, mutant: Mutant) -> list[str]:
        """The tests that run the statement of a mutant, as many as there is patience for. For what an import runs, those of its file."""
        of_statement = {test for line in mutant.lines for test in self.tests.get((mutant.file, line), ())}
        of_file = {test for (file, _), tests in self.tests.items() if file == mutant.file for test in tests}
        found = of_statement if mutant.function else of_file or set(self.seconds)
        chosen, spent = [], 0.0
        for test in sorted(found & self.seconds.keys(), key=lambda test: (self.seconds[test], test)):
            spent += self.seconds[test]
            if spent > PATIENCE and chosen:
                break
            chosen.append(test)
        return chosen


def coverage(tests: list[str]) -> Coverage:
    """Run these tests once. Their lines are kept until a file of the package or of the tests changes."""
    every = [path for folder in (PACKAGE, ROOT / "tests") for path in sorted(folder.rglob("*.py"))]
    state = hashlib.sha256(b"".join([repr(tests).encode(), *map(Path.read_bytes, every)]))
    kept = ROOT / ".pytest_cache" / f"covered-{state.hexdigest()[:16]}"
    if not kept.is_dir():
        with tempfile.TemporaryDirectory() as start, tempfile.TemporaryDirectory() as written:
            (Path(start) / "sitecustomize.py").write_text("import covered\n")
            arguments = [*OPTIONS, "-n", "2", "-p", "covered", *tests]
            done = run(arguments, os.pathsep.join(map(str, (ROOT, ROOT / "tests", start))), {covered.FOLDER: written})
            print(done.stdout, flush=True)  # noqa: T201  # a program that reports
            shutil.copytree(written, kept)
    found = Coverage()
    for path in sorted(kept.iterdir()):
        record = json.loads(path.read_text())
        found.seconds.update(record["seconds"])
        for test, files in record["lines"].items():
            for file, lines in files.items():
                for line in lines:
                    found.tests[file, line].add(test)
    return found


def reason_alive(mutant: Mutant, tests: list[str], seconds: float) -> str:
    """Why a mutant is alive; empty where a test failed, or did not end."""
    if not tests:
        return "no test runs it"
    with tempfile.TemporaryDirectory() as folder:
        shutil.copytree(PACKAGE, Path(folder) / PACKAGE.name, ignore=shutil.ignore_patterns("__pycache__"))
        (Path(folder) / PACKAGE.name / mutant.file).write_text(mutant.changed())
        try:
            done = run([*OPTIONS, "-x", *tests], folder, timeout=60 + 5 * seconds)
        except subprocess.TimeoutExpired:
            return ""
    return f"{len(tests)} tests passed" if done.returncode == 0 else ""


def run(
    arguments: list[str], path: str, more: dict[str, str] | None = None, timeout: float | None = None
) -> subprocess.CompletedProcess[str]:
    """Pytest, with what is on a path in place of what is installed."""
    environment = {**os.environ, "PYTHONPATH": path, "PYTHONSAFEPATH": "1", "JAX_PLATFORMS": "cpu", **(more or {})}
    command = [sys.executable, "-P", "-m", "pytest", *arguments]
    return subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=timeout
    )


def main() -> bool:
    """Whether more than a fifth of the mutants that were drawn live."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("places", nargs="*", type=Path, default=[PACKAGE])
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tests", nargs="*", default=["tests"])
    given = parser.parse_args()
    paths = [path for place in given.places for path in ([place] if place.is_file() else sorted(place.rglob("*.py")))]
    every = [mutant for path in paths for mutant in mutants_of(path)]
    random.Random(given.seed).shuffle(every)
    drawn = list(islice(filter(Mutant.compiles, every), given.count))
    known = coverage(given.tests)
    tests = [known.of(mutant) for mutant in drawn]
    seconds = [sum(known.seconds[test] for test in those) for those in tests]
    alive = 0
    with ThreadPoolExecutor(2) as pool:
        for mutant, reason in zip(drawn, pool.map(reason_alive, drawn, tests, seconds), strict=True):
            alive += bool(reason)
            print(f"{f'ALIVE, {reason}:' if reason else 'dead'} {mutant}", flush=True)  # noqa: T201  # a program that reports
    print(f"{alive} of {len(drawn)} are alive, drawn from {len(every)}")  # noqa: T201  # a program that reports
    return alive * 5 > len(drawn)


if __name__ == "__main__":
    sys.exit(main())
