"""No document and no message of the project has a phrase that CONTRIBUTING.md's page of style bans."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BANNED = re.compile(
    r"\b(?:is|are|was|were) told\b|\bstands\b|\bstand (?:in|at|there|side)\b|\bcomes to\b|\bheld (?:up )?against\b|\bholds? \S+(?: \S+)? against\b|\bof (?:which|whom)\b|\bby itself\b"
    r"|\bwhat (?:it|was|is|\w+ing|(?:the|a|an) [\w-]+) left\b(?! out)",
    re.IGNORECASE,
)
TEXTS = [
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted((ROOT / "examples").rglob("*.md")),
    *(ROOT / name for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")),
]
BAD_EXAMPLE = re.compile(r"^\| not \| but \|$.*?^$", re.MULTILINE | re.DOTALL)
"""The table of the page of style, whose first column is banned on purpose."""


@pytest.mark.parametrize("path", TEXTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_documents_have_no_banned_phrase(path):
    text = BAD_EXAMPLE.sub("", path.read_text())
    found = [(text.count("\n", 0, match.start()) + 1, match[0]) for match in BANNED.finditer(text)]
    assert not found


def messages(source: str) -> Iterator[tuple[int, str]]:
    """The string literals of a module that are no docstrings, each with its line; of an f-string its fixed parts, joined."""
    nodes = list(ast.walk(ast.parse(source)))
    docstrings = {node.value for node in nodes if isinstance(node, ast.Expr)}
    parts = {part for node in nodes if isinstance(node, ast.JoinedStr) for part in node.values}
    for node in nodes:
        if isinstance(node, ast.JoinedStr):
            yield node.lineno, "".join(part.value if isinstance(part, ast.Constant) else "x" for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in docstrings | parts:
            yield node.lineno, node.value


PACKAGE = ROOT / "pytest_nnxcheck"


@pytest.mark.parametrize("folder", sorted({path.parent for path in PACKAGE.rglob("*.py")}), ids=lambda path: path.name)
def test_messages_have_no_banned_phrase(folder):
    found = [
        (path.name, line, match[0])
        for path in folder.glob("*.py")
        for line, text in messages(path.read_text())
        for match in BANNED.finditer(text)
    ]
    assert not found


def test_messages_are_literals_without_docstrings():
    source = '''"""of which"""
def f(file):
    """comes to"""
    raise ValueError(f"{file}: of {file} which" + "is told")
'''
    assert sorted(messages(source)) == [(4, "is told"), (4, "x: of x which")]


@pytest.mark.parametrize(
    "phrase",
    ["is told", "stands", "comes to", "held against", "holds this figure against", "of which", "what the call left"],
)
def test_a_banned_phrase_is_found(phrase):
    assert BANNED.search(f"A leaf {phrase} something.")


def test_a_plain_sentence_is_not():
    assert not BANNED.search(
        "The plugin compares the peak with the budget, and the message names each leaf that leaked."
    )
