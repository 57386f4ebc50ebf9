"""The figures as Markdown, and their place in a document between two markers."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Sequence

from benchmarks.figures import Ratio, Result, Series, together
from benchmarks.plan import FIVE, MARKED

START, END = "<!-- speed table -->", "<!-- end -->"
HEAD = "| benchmark | case | what | against | ratio | what took | the other took |"


BY_SUBJECT = {
    "quick / default": ("quick", "default"),
    "thorough / default": ("thorough", "default"),
    "default / plain loop": ("default", "floor"),
    "default / by hand": ("default", "by_hand"),
}
"""The columns of the table in the document with a row for each subject."""
EARLY = ("before", "first_failure")
"""Benchmarks whose other side is an early commit: the data have them, and the plot."""


def in_document(results: Sequence[Result]) -> str:
    """The tables of the document: of several benchmarks of the same subjects one table, then the others."""
    today = [result for result in results if result.benchmark not in EARLY]
    others = [result for result in today if result.benchmark not in ("efforts", "floor", "by_hand")]
    tables = [by_subject(today), *list(parts(others))[:-1], list(measured_on(today))]
    return "\n\n".join("\n".join(part) for part in tables) + "\n"


def by_subject(results: Sequence[Result]) -> list[str]:
    """A row for each subject: the seconds of a check, and the ratios of `BY_SUBJECT`."""
    rows: dict[str, dict[tuple[str, str], Ratio]] = {}
    for result in results:
        for each in (*result.ratios, *together(result.ratios, FIVE)):
            case = "together" if each.case.endswith("together") else each.case
            rows.setdefault(case, {})[each.over, each.under] = each
    lines = [f"| subject | default | {' | '.join(BY_SUBJECT)} |", "|---" * (2 + len(BY_SUBJECT)) + "|"]
    for case in (*FIVE, "together"):
        found = [rows.get(case, {}).get(sides) for sides in BY_SUBJECT.values()]
        seconds = figure(found[2].numerators, found[2].unit) if found[2] else ""
        cells = [f"**{each.median:.2f}**" if each else "" for each in found]
        lines.append(f"| {case} | {seconds} | {' | '.join(cells)} |")
    return lines


def markdown(results: Sequence[Result]) -> str:
    """All tables of a run: the ratios, then the series, then what was measured on what."""
    return "\n\n".join("\n".join(part) for part in parts(results)) + "\n"


def parts(results: Sequence[Result]) -> Iterator[list[str]]:
    rows = [
        ratio_row(result.benchmark, each)
        for result in results
        for each in (*result.ratios, *together(result.ratios, {*FIVE, *MARKED}))
    ]
    if rows:
        yield [HEAD, "|---" * (HEAD.count("|") - 1) + "|", *rows]
    for result in results:
        for each in result.series:
            yield series_rows(each)
    yield list(measured_on(results))


def ratio_row(benchmark: str, row: Ratio) -> str:
    """One ratio, with the medians of its sides; the data have every sample."""
    one, other = (figure(values, row.unit) for values in (row.numerators, row.denominators))
    cells = (
        benchmark,
        row.case,
        row.over,
        row.under,
        f"**{row.median:.2f}**",
        one,
        other,
    )
    return f"| {' | '.join(cells)} |"


def figure(values: Sequence[float], unit: str) -> str:
    """The median of one side."""
    middle = statistics.median(values)
    return f"{middle:.{1 if middle >= 10 else 2}f} {unit}"


def series_rows(series: Series) -> list[str]:
    """A table of one row: the sizes above, the seconds below."""
    medians = [f"{median:.1f}" for median in series.medians]
    return [
        f"| {series.axis} | {' | '.join(map(str, series.sizes))} |",
        "|---" * (len(series.sizes) + 1) + "|",
        f"| {series.name}, {series.unit} | {' | '.join(medians)} |",
    ]


def measured_on(results: Iterable[Result]) -> Iterator[str]:
    """The environments, each with its benchmarks, and the notes."""
    by_environment: dict[str, list[str]] = {}
    for result in results:
        by_environment.setdefault(result.environment, []).append(result.benchmark)
    for where, names in by_environment.items():
        yield f"* {', '.join(names)}: {where}."
    for result in results:
        yield from (f"* {result.benchmark}: {note}." for note in result.notes)


def put_between(document: str, table: str, start: str = START, end: str = END) -> str:
    """The document with the table between its markers. Raises `ValueError` where they are not there once each, in order."""
    before, found, rest = document.partition(start)
    _, closed, after = rest.partition(end)
    if not found or not closed or start in rest or end in after:
        raise ValueError(f"the document must have {start} once and {end} once after it")
    return f"{before}{start}\n\n{table}\n{end}{after}"
