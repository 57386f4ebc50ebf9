"""The summary page of a step of GitHub Actions: the run as Markdown, as much of it as fits."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pytest_nnxcheck.reporting import markdown

LONGEST = 1024 * 1024
"""Bytes that GitHub takes of the summary of one step; of a larger one it shows nothing."""


def file_of(environ: Mapping[str, str]) -> Path | None:
    """The file of the step's summary; `None` outside of GitHub Actions."""
    summary = environ.get("GITHUB_STEP_SUMMARY") if environ.get("GITHUB_ACTIONS") == "true" else None
    return Path(summary) if summary else None


def append(summary: Path, document: Mapping[str, Any]) -> None:
    """Add the run to the summary of the step. Raises `OSError`."""
    there = summary.stat().st_size if summary.exists() else 0
    body = markdown.render(document, LONGEST - there - 2)
    if there + len(body.encode()) < LONGEST - 2:
        with summary.open("a", encoding="utf-8", newline="\n") as file:
            file.write(f"\n{body}\n" if there else f"{body}\n")
