"""A run as Markdown, for a pull request or the summary page of GitHub Actions: the failing tests first, cut to what fits.

Nothing here imports pytest, hypothesis, jax or flax.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from pytest_nnxcheck.core.on_target import OnTarget
from pytest_nnxcheck.core.text import counted, format_bytes
from pytest_nnxcheck.reporting import target_rows
from pytest_nnxcheck.reporting.records import Document, Head, Record
from pytest_nnxcheck.reporting.report import counts, not_passed, worst_of_targets

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


def render(document: Document, limit: int = COMMENT) -> str:
    """The text of a ``.md`` report, of at most ``limit`` bytes."""
    tests = document.records
    bad = [record for record in tests if not record.head.passed]
    good = [record for record in tests if record.head.passed]
    space = _Space(limit - _RESERVED)
    space.take(_head(document))
    on_targets = any(record.head.targets for record in tests)
    table, passed = map(_with_targets, (_TABLE, _PASSED)) if on_targets else (_TABLE, _PASSED)
    rows = space.fill(table, (_failing_row(record, on_targets=on_targets) for record in bad))
    detailed = space.fill("", map(_details, bad))
    left = len(bad) - min(rows, detailed)
    if good:
        told = (_passing_row(record, on_targets=on_targets) for record in good)
        opened = _open(f"{counted(len(good), 'test')} passed or skipped")
        left += len(good) - space.fill(opened + passed, told, "\n</details>\n")
    if measured := [each.head for each in tests if each.head.un_nested_peak and not each.is_about_tracers]:
        pieces = sum(len(head.advice) for head in measured)
        advice = f", and advice on {pieces} of them" if pieces else ""
        opened = _open(f"Where the bytes of the un-nested calls are{advice}")
        space.fill(opened, map(_memory, measured), "\n</details>\n")
    if left:
        more = f"{left} more tests do not fit in here, or not with their messages: see the .html or .json report."
        space.take(f"\n{more}\n", force=True)
    return "".join(space.parts)


def step_summary(environ: Mapping[str, str]) -> Path | None:
    """The file of the step's summary; `None` outside of GitHub Actions."""
    summary = environ.get("GITHUB_STEP_SUMMARY") if environ.get("GITHUB_ACTIONS") == "true" else None
    return Path(summary) if summary else None


def append(summary: Path, document: Document) -> None:
    """Add the run to the summary of the step, as much of it as fits. Raises `OSError`."""
    _append(summary, lambda limit: render(document, limit))


def append_watch(summary: Path, count: str, lines: Iterable[str]) -> None:
    """Add the tests that left something behind, as many as fit. Raises `OSError`."""

    def render_watch(limit: int) -> str:
        space = _Space(limit)
        space.take(f"## ✗ nnx watch\n\n{text(count)}\n\n", force=True)
        space.fill("", (f"* {text(line)}\n" for line in lines))
        return "".join(space.parts)

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


def _head(document: Document) -> str:
    tests, packages = document.records, document.run.packages
    versions = ", ".join(f"{text(name)} {text(packages[name])}" for name in ("jax", "flax") if name in packages)
    if not tests:
        return f"## nnx invariants: no marked test ran\n\n{versions}\n\n"
    ends = not_passed([record.head for record in tests])
    verdict = f"✗ nnx invariants: {ends}" if ends else "✓ nnx invariants: all pass"
    total = Counter[str]()
    for record in tests:
        total.update(record.head.counts)
    left = sum(record.head.not_run for record in tests)
    verdicts = (counts(total) or "none") + (f", {left} not run" if left else "")
    what = f"{counted(len(document.nestings), 'nesting')} of {counted(len(tests), 'test')}"
    return f"## {verdict}\n\n{what}: {verdicts}  \n{versions}\n\n"


def _with_targets(table: str) -> str:
    """The head of a table with a last column for the compilers of targets."""
    names, rule = table.splitlines()
    return f"{names} targets |\n{rule}---|\n"


def _failing_row(record: Record, *, on_targets: bool) -> str:
    shown = record.shown
    cells = [code(record.head.nodeid), text(record.broken), code(shown.nesting) if shown else "-"]
    cells += [_bytes(shown.peak), _bytes(shown.budget)] if shown and not shown.is_about_tracers else ["-", "-"]
    return _row([*cells, *([_brief(shown.targets if shown else ())] if on_targets else [])])


def _passing_row(record: Record, *, on_targets: bool) -> str:
    head = record.head
    left = f", {head.not_run} not run" if head.not_run else ""
    tried = f"{len(record.nestings)}: {counts(head.counts)}{left}" if record.nestings else head.outcome
    cells = [code(head.nodeid), text(tried), _bytes(head.peak), _bytes(head.budget)]
    return _row([*cells, *([_brief(head.targets)] if on_targets else [])])


def _row(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |\n"


def _bytes(size: int | None) -> str:
    return "-" if size is None else format_bytes(size)


def _brief(targets: Iterable[OnTarget]) -> str:
    return text(target_rows.brief(worst_of_targets(targets))) or "-"


def _memory(head: Head) -> str:
    rows = [*head.un_nested_peak, *(("advice", piece) for piece in head.advice)]
    return f"{code(head.nodeid)}\n\n" + fenced("\n".join(f"{label:<10}{words}" for label, words in rows)) + "\n"


def _open(label: str) -> str:
    return f"<details><summary>{label}</summary>\n\n"


def _details(record: Record) -> str:
    shown, message = record.shown, record.head.message or record.head.outcome
    where = f" under {html_code(shown.nesting)}" if shown else ""
    label = f"{html_code(record.head.nodeid)}: {text(record.broken)}{where}"
    if len(message) > _LONGEST:
        message = f"{message[:_LONGEST]}\n... {len(message) - _LONGEST} characters more"
    parts = [_open(label), fenced(message)]
    if shown and 0 < len(shown.program_text) <= _LONGEST:  # a part of a program is of no use
        parts += ["\nThe same without the plugin:\n\n", fenced(shown.program_text, "python")]
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
