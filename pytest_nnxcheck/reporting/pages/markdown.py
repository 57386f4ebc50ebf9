"""A run as Markdown, for a pull request or the summary page of GitHub Actions: the failing tests first, cut to what fits.

Nothing here imports pytest, hypothesis, jax or flax.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from pytest_nnxcheck.core.text import counted, format_bytes
from pytest_nnxcheck.reporting import records, target_rows
from pytest_nnxcheck.reporting.records import Record, Records
from pytest_nnxcheck.reporting.tally import counts

COMMENT = 65_536
"""Bytes that the comment of a pull request may have on GitHub; the characters that it counts are never more."""

STEP = 1024 * 1024
"""Bytes that GitHub takes of the summary of one step; of a larger one it shows nothing."""

_LONGEST = 8_000
"""Characters of one message or program: a comment then has room for those of several tests."""
_RESERVED = 400
"""Bytes for the last line, which says what does not fit."""
_SPECIAL = re.compile(r"[^\w\s./:;,=()%+-]|_(?!\w)|(?<!\w)_")
_UNSAFE_IN_CODE = re.compile(r"[`|\\\n\r\t]|^\s|\s$|^$")
_TABLE = "| test | broken | smallest nesting | peak | budget |\n|---|---|---|---:|---:|\n"
_PASSED = "| test | nestings | worst peak | of budget |\n|---|---|---:|---:|\n"


def render(document: Mapping[str, Any], limit: int = COMMENT) -> str:
    """The text of a ``.md`` report, of at most ``limit`` bytes."""
    tests = records.by_test(document)
    bad = [record for record in tests if not records.passed(record["test"])]
    good = [record for record in tests if records.passed(record["test"])]
    space = _Space(limit - _RESERVED)
    space.take(_head(document, bad, tests))
    on_targets = any(nesting["targets"] for nesting in document["nestings"])
    table, passed = map(_with_targets, (_TABLE, _PASSED)) if on_targets else (_TABLE, _PASSED)
    cell = _on_targets if on_targets else lambda _: ""
    rows = space.fill(table, (_failing_row(record, cell) for record in bad))
    detailed = space.fill("", map(_details, bad))
    left = len(bad) - min(rows, detailed)
    if good:
        label = f"{counted(len(good), 'test')} passed or skipped"
        told = (_passing_row(record, cell) for record in good)
        left += len(good) - space.fill(_open(label) + passed, told, "\n</details>\n")
    if measured := [record for record in tests if record["test"]["un_nested_peak"]]:
        pieces = sum(len(record["test"]["advice"]) for record in measured)
        advice = f", and advice on {pieces} of them" if pieces else ""
        space.fill(
            _open(f"Where the bytes of the un-nested calls are{advice}"), map(_memory, measured), "\n</details>\n"
        )
    if left:
        space.take(
            f"\n{left} more tests do not fit in here, or not with their messages: see the .html or .json report.\n",
            force=True,
        )
    return space.text()


def step_summary(environ: Mapping[str, str]) -> Path | None:
    """The file of the step's summary; `None` outside of GitHub Actions."""
    summary = environ.get("GITHUB_STEP_SUMMARY") if environ.get("GITHUB_ACTIONS") == "true" else None
    return Path(summary) if summary else None


def append(summary: Path, document: Mapping[str, Any]) -> None:
    """Add the run to the summary of the step, as much of it as fits. Raises `OSError`."""
    _append(summary, lambda limit: render(document, limit))


def append_watch(summary: Path, count: str, lines: Iterable[str]) -> None:
    """Add the tests that left something behind, as many as fit. Raises `OSError`."""

    def render_watch(limit: int) -> str:
        space = _Space(limit)
        space.take(f"## ✗ nnx watch\n\n{text(count)}\n\n", force=True)
        space.fill("", (f"* {text(line)}\n" for line in lines))
        return space.text()

    _append(summary, render_watch)


def _append(summary: Path, render_within: Callable[[int], str]) -> None:
    there = summary.stat().st_size if summary.exists() else 0
    body = render_within(STEP - there - 2)
    if there + len(body.encode()) < STEP - 2:
        with summary.open("a", encoding="utf-8", newline="\n") as file:
            file.write(f"\n{body}\n" if there else f"{body}\n")


class _Space:
    """Parts of a text, up to a number of bytes."""

    def __init__(self, limit: int) -> None:
        self.left = limit
        self.parts: list[str] = []

    def take(self, part: str, *, force: bool = False) -> bool:
        size = len(part.encode())
        if size > self.left and not force:
            return False
        self.left -= size
        self.parts.append(part)
        return True

    def fill(self, head: str, parts: Iterable[str], tail: str = "\n") -> int:
        """Take as many of the parts as fit, between head and tail, which are there if any is. Return how many."""
        taken = 0
        for part in parts:
            frame = 0 if taken else len(head.encode()) + len(tail.encode())
            if len(part.encode()) + frame > self.left:
                break
            if not taken:
                self.take(head)
                self.left -= len(tail.encode())
            self.take(part)
            taken += 1
        if taken:
            self.parts.append(tail)
        return taken

    def text(self) -> str:
        return "".join(self.parts)


def _head(document: Mapping[str, Any], bad: list[Records], tests: list[Records]) -> str:
    packages = document["run"].get("packages", {})
    versions = ", ".join(f"{text(name)} {text(packages[name])}" for name in ("jax", "flax") if name in packages)
    if not tests:
        return f"## nnx invariants: no marked test ran\n\n{versions}\n\n"
    verdict = f"✗ nnx invariants: {len(bad)} of {len(tests)} tests failed" if bad else "✓ nnx invariants: all pass"
    total = Counter[str]()
    for record in tests:
        total.update(record["test"]["counts"])
    nestings = len(document["nestings"])
    left = sum(record["test"]["not_run"] for record in tests)
    verdicts = (counts(total) or "none") + (f", {left} not run" if left else "")
    return (
        f"## {verdict}\n\n{counted(nestings, 'nesting')} of {counted(len(tests), 'test')}: {verdicts}  \n{versions}\n\n"
    )


def _with_targets(table: str) -> str:
    """The head of a table with a last column for the compilers of targets."""
    names, rule = table.splitlines()
    return f"{names} targets |\n{rule}---|\n"


def _on_targets(nestings: list[Record]) -> str:
    """The cell of that column."""
    return f" {text(target_rows.brief(records.targets_of(nestings))) or '-'} |"


def _failing_row(record: Records, cell: Callable[[list[Record]], str]) -> str:
    shown = records.shown(record)
    nesting = code(shown["nesting"]) if shown else "-"
    peak, budget = (_bytes(shown["peak"]), _bytes(shown["budget"])) if shown else ("-", "-")
    row = f"| {code(record['test']['nodeid'])} | {text(records.broken(record))} | {nesting} | {peak} | {budget} |"
    return f"{row}{cell([shown] if shown else [])}\n"


def _bytes(size: int | None) -> str:
    return "-" if size is None else format_bytes(size)


def _passing_row(record: Records, cell: Callable[[list[Record]], str]) -> str:
    test, worst = record["test"], records.worst_peak(record)
    name = code(test["nodeid"])
    left = f", {test['not_run']} not run" if test["not_run"] else ""
    tried = f"{len(record['nestings'])}: {counts(test['counts'])}{left}" if record["nestings"] else test["outcome"]
    peak, budget = (_bytes(worst["peak"]), _bytes(worst["budget"])) if worst else ("-", "-")
    return f"| {name} | {text(tried)} | {peak} | {budget} |{cell(record['nestings'])}\n"


def _memory(record: Records) -> str:
    test = record["test"]
    rows = [*test["un_nested_peak"], *(("advice", piece) for piece in test["advice"])]
    return f"{code(test['nodeid'])}\n\n" + fenced("\n".join(f"{label:<10}{words}" for label, words in rows)) + "\n"


def _open(label: str) -> str:
    return f"<details><summary>{label}</summary>\n\n"


def _details(record: Records) -> str:
    shown = records.shown(record)
    where = f" under {html_code(shown['nesting'])}" if shown else ""
    label = f"{html_code(record['test']['nodeid'])}: {text(records.broken(record))}{where}"
    message = record["test"]["message"] or record["test"]["outcome"]
    if len(message) > _LONGEST:
        message = f"{message[:_LONGEST]}\n... {len(message) - _LONGEST} characters more"
    parts = [_open(label), fenced(message)]
    if shown and 0 < len(shown["program_text"]) <= _LONGEST:  # a part of a program is of no use
        parts += ["\nThe same without the plugin:\n\n", fenced(shown["program_text"], "python")]
    return "".join([*parts, "\n</details>\n\n"])


def fenced(body: str, language: str = "text") -> str:
    """A block of code that nothing in the text can end."""
    fence = "`" * max(3, 1 + max(map(len, re.findall("`+", body)), default=0))
    return f"{fence}{language}\n{body}\n{fence}\n"


def code(name: str) -> str:
    """A name as code, in a sentence or a cell of a table."""
    return html_code(name) if _UNSAFE_IN_CODE.search(name) else f"`{name}`"


def html_code(name: str) -> str:
    """A name as code in HTML, where Markdown has no quoting that always works."""
    return f"<code>{text(name)}</code>"


def text(words: str) -> str:
    """Text that is neither Markdown nor HTML, on one line: what could be either is written as a number."""
    return _SPECIAL.sub(lambda match: f"&#{ord(match[0])};", " ".join(words.split()))
