"""No text of the project has a phrase that CONTRIBUTING.md's page of style bans."""

from __future__ import annotations

import re
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
