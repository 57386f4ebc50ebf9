"""The figures as Markdown, and their place in a document between two markers."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence

from benchmarks.figures import Ratio, Result, Series, together
from benchmarks.plan import FIVE, MARKED

START, END = "<!-- speed table -->", "<!-- end -->"
HEAD = "| benchmark | case | what | against | ratio | what took | the other took |"


EFFORTS = {"default": ("quick", "default"), "quick": ("quick", "default"), "thorough": ("thorough", "default")}
OF_MARKED = {
    "first run": ("second run", "first run"),
    "twelve by hand": ("twelve by hand", "first run"),
    "what is needed": ("what is needed", "first run"),
    **{name: (name, "first run") for name in ("second run", "traces alone", "quick", "parity", "v5e")},
}
"""The columns of the tables in the document with a row for each subject: a side and what it is divided by; the first has seconds, those of the latter."""
ELSEWHERE = ("efforts", "floor", "by_hand", "marked", "with_targets")
"""Benchmarks that the document shows in another way, or names in a sentence."""
EARLY = ("before", "first_failure")
"""Benchmarks whose other side is an early commit: the data have them, and the plot."""


def in_document(results: Sequence[Result]) -> str:
    """The tables of the document: of several benchmarks of the same subjects one table, then the others."""
    today = [result for result in results if result.benchmark not in EARLY]
    others = [result for result in today if result.benchmark not in ELSEWHERE]
    ratios = {result.benchmark: (*result.ratios, *together(result.ratios, {*FIVE, *MARKED})) for result in today}
    tables = [
        by_subject(ratios.get("marked", ()), OF_MARKED),
        by_subject(ratios.get("efforts", ()), EFFORTS),
        *list(parts(others))[:-1],
        list(measured_on(today)),
    ]
    return "\n\n".join("\n".join(part) for part in tables if part) + "\n"


def by_subject(ratios: Sequence[Ratio], columns: Mapping[str, tuple[str, str]]) -> list[str]:
    """A row for each subject: seconds, and other sides as multiples of them."""
    rows: dict[str, dict[tuple[str, str], Ratio]] = {}
    for each in ratios:
        rows.setdefault(each.case, {})[each.over, each.under] = each
    (_, unit), *others = columns.items()
    lines = [f"| subject | {' | '.join(columns)} |", "|---" * (1 + len(columns)) + "|"]
    for case, found in rows.items():
        seconds = figure(found[unit].denominators, found[unit].unit) if unit in found else ""
        cells = [f"**{found[sides].median:.2f}**" if sides in found else "" for _, sides in others]
        lines.append(f"| {case} | {' | '.join([seconds, *cells])} |")
    return lines if rows else []


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
