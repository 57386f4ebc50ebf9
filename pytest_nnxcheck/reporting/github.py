"""What GitHub Actions shows of a run: an annotation at each failing line, and the summary page of the step.

Nothing here imports pytest, hypothesis, jax or flax.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pytest_nnxcheck.reporting import markdown, records
from pytest_nnxcheck.reporting.records import Records

SUMMARY = 1024 * 1024
"""Bytes that GitHub takes of the summary of one step; of a larger one it shows nothing."""

ANNOTATIONS = 10
"""Annotations that GitHub shows of one step."""

_LONGEST = 4_000


@dataclass(frozen=True, slots=True)
class Actions:
    """Where GitHub looks: the file of the step's summary, and the folder of the checkout, if they are known."""

    summary: Path | None
    workspace: Path | None

    @classmethod
    def of(cls, environ: Mapping[str, str]) -> Actions | None:
        """What the environment says; None outside of GitHub Actions."""
        if environ.get("GITHUB_ACTIONS") != "true":
            return None
        summary, workspace = environ.get("GITHUB_STEP_SUMMARY"), environ.get("GITHUB_WORKSPACE")
        return cls(Path(summary) if summary else None, Path(workspace) if workspace else None)

    def tell(self, document: Mapping[str, Any], root: Path) -> list[str]:
        """Fill the summary page; return the lines to print, which GitHub reads."""
        lines = list(commands(document, root, self.workspace or root))
        if self.summary is not None:
            try:
                append(self.summary, document)
            except OSError as error:
                lines.append(f"nnx report: cannot write the summary of the step: {error.strerror or error}")
        return lines


def append(summary: Path, document: Mapping[str, Any]) -> None:
    """Add the run to the summary of the step, as much of it as fits. Raises `OSError`."""
    there = summary.stat().st_size if summary.exists() else 0
    body = markdown.render(document, SUMMARY - there - 2)
    if there + len(body.encode()) < SUMMARY - 2:
        with summary.open("a", encoding="utf-8", newline="\n") as file:
            file.write(f"\n{body}\n" if there else f"{body}\n")


def commands(document: Mapping[str, Any], root: Path, workspace: Path) -> Iterator[str]:
    """One command for each failing test, the first ones; what is left of them is on the summary page."""
    bad = [found for found in records.by_test(document) if not records.passed(found["test"])]
    for found in bad[:ANNOTATIONS]:
        yield _annotation(found, root, workspace)


def _annotation(found: Records, root: Path, workspace: Path) -> str:
    test = found["test"]
    message = test["message"] or f"{test['nodeid']}: {test['outcome']}"
    title = message.partition("\n")[0].partition("  ")[0][:200]
    place = test["failed_at"] or test["place"]
    properties = (
        {"title": title} if place is None else _where(place["file"], place["line"], root, workspace) | {"title": title}
    )
    shown = ",".join(f"{name}={_property(value)}" for name, value in properties.items())
    return f"::error {shown}::{_data(message[:_LONGEST])}"


def _where(file: str, line: int, root: Path, workspace: Path) -> dict[str, str]:
    """GitHub names files from the top of the checkout, whose subfolder pytest's root may be."""
    path = os.path.relpath(os.path.realpath(root / file), os.path.realpath(workspace))
    outside = path.startswith(os.pardir)
    return {"file": (root / file).as_posix() if outside else Path(path).as_posix(), "line": str(line)}


def _data(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    return _data(text).replace(":", "%3A").replace(",", "%2C")
