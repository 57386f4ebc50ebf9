"""No text of the project has a phrase, and no docstring a first word, that CONTRIBUTING.md's page of style bans."""

from __future__ import annotations

import ast
import io
import re
import tokenize
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

PACKAGE = ROOT / "pytest_nnxcheck"
MODULES = sorted(PACKAGE.rglob("*.py"))
VAGUE = re.compile(r"(?:What|Whether|Of|Which|How|Those|Where)\b")
"""First words of a docstring that is neither an imperative nor a noun phrase."""


def docstrings(source: str) -> Iterator[tuple[int, str]]:
    """The docstrings of modules, classes and functions, and the texts below fields and constants, by their lines."""
    for node in ast.walk(ast.parse(source)):
        body = getattr(node, "body", ())
        for statement in body if isinstance(body, list) else ():
            match statement:
                case ast.Expr(value=ast.Constant(value=str(text))):
                    yield statement.lineno, " ".join(text.split())


def comments(source: str) -> Iterator[tuple[int, str]]:
    """The comments, by their lines."""
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string


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


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_docstrings_begin_plainly_and_code_has_no_banned_phrase(path):
    source = path.read_text()
    texts = [*docstrings(source), *comments(source)]
    assert not [(line, text) for line, text in docstrings(source) if VAGUE.match(text)]
    assert not [(line, match[0]) for line, text in texts for match in BANNED.finditer(text)]


def test_docstrings_and_comments_are_found():
    source = '"""A module."""\nLIMIT = 1\n"""How many."""\nclass A:\n    """A class."""\n    size: int\n    """Of\n    which."""\n    # stands\n'
    assert sorted(docstrings(source)) == [(1, "A module."), (3, "How many."), (5, "A class."), (7, "Of which.")]
    assert [*comments(source)] == [(9, "# stands")]


@pytest.mark.parametrize("text", ["Whether two leaves share a buffer.", "What broke.", "Of its value.", "Where it is."])
def test_a_vague_first_word_is_found(text):
    assert VAGUE.match(text)


@pytest.mark.parametrize("text", ["True if two leaves share a buffer.", "Offer a hint.", "However many."])
def test_a_plain_first_word_is_not(text):
    assert not VAGUE.match(text)
