"""A run as one page of HTML: a matrix of tests against nestings, and for each its memory, cause and program.

The page holds everything it shows, and its content security policy keeps it from loading anything else. It is readable
without scripts.
"""

from __future__ import annotations

import base64
import hashlib
import html
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from importlib import resources
from string import Template
from typing import Any
from urllib.parse import quote

from pytest_nnxcheck.core.catalogue import CALL_FIRST, FURTHER, MODES, TRANSFORMS
from pytest_nnxcheck.core.nesting import UN_NESTED
from pytest_nnxcheck.core.text import counted, format_bytes
from pytest_nnxcheck.reporting import records, tally, target_rows
from pytest_nnxcheck.reporting.memory_breakdown import formula
from pytest_nnxcheck.reporting.records import Record, Records
from pytest_nnxcheck.reporting.tally import VERDICTS, counts

Numbered = list[tuple[int, Records]]

SYMBOLS = {"held": "✓", "violated": "✗", "failed": "!", "expected": "~", "rejected": "⊘", "unfit": "·"}
"""A sign for each verdict, beside its colour; ``unfit`` is what was rejected because a layer cannot take the call."""

PROGRAMS = 2_000_000
"""Characters of programs to paste that a page takes in: a browser opens a few megabytes at once."""

_COLUMNS = (UN_NESTED, *TRANSFORMS, CALL_FIRST, *FURTHER)
_HEADROOM = 4
"""The greatest scale of the bars, as a multiple of the largest peak: they show a budget up to there."""

VOID = ("input", "wbr")
"""Elements that have no content, and no end."""


def render(document: Mapping[str, Any]) -> str:
    """The text of an ``.html`` report."""
    # The failing tests first, everywhere on the page.
    ordered = sorted(_with_programs(records.by_test(document)), key=lambda record: records.passed(record["test"]))
    tests = list(enumerate(ordered, 1))
    bad = sum(not records.passed(record["test"]) for record in ordered)
    script = read("html_page.js")
    only_failing = tag("label", tag("input", type="checkbox", id="only-failing"), " Failing tests only")
    return Template(read("html_page.html")).substitute(
        headline=_headline(bad, len(tests)),
        icon=_icon(bad),
        tone="bad" if bad else "good",
        sign="✗" if bad else "✓",
        facts=joined(tag("li", fact) for fact in _facts_of_run(document)),
        legend=_legend(document["nestings"]),
        failing=only_failing if bad else "",
        matrix=_matrix(tests),
        articles=joined(_article(number, record) for number, record in tests),
        style=read("html_page.css"),
        script=script,
        digest=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
    )


def read(name: str) -> str:
    """The text of a file that the page is made of."""
    return resources.files(__package__).joinpath(name).read_text(encoding="utf-8")


def _with_programs(tests: list[Records]) -> list[Records]:
    """The tests with as many programs as the page has room for, those of the messages first; the others are named by their path."""
    shown = [nesting for record in tests if (nesting := records.shown(record))]
    room, kept = PROGRAMS, set[int]()
    for nesting in [*shown, *(nesting for record in tests for nesting in record["nestings"])]:
        if id(nesting) not in kept and len(nesting["program_text"]) <= room:
            kept.add(id(nesting))
            room -= len(nesting["program_text"])
    return [
        {
            "test": record["test"],
            "nestings": [n if id(n) in kept else {**n, "program_text": ""} for n in record["nestings"]],
        }
        for record in tests
    ]


def _icon(bad: int) -> str:
    colour, sign = ("#b3261e", "M10 10L22 22M22 10L10 22") if bad else ("#1a7f45", "M9 17L14 22L23 10")
    shape = f'<path d="{sign}" stroke="#fff" stroke-width="4" fill="none"/>'
    square = f'<rect width="32" height="32" rx="7" fill="{colour}"/>'
    svg = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 32 32">{square}{shape}</svg>'
    return f"data:image/svg+xml,{quote(svg)}"


def _headline(bad: int, total: int) -> str:
    if not total:
        return "No marked test ran"
    if bad:
        return f"{bad} of {counted(total, 'test')} failed"
    return f"All {total} tests passed" if total > 1 else "1 test passed"


def _facts_of_run(document: Mapping[str, Any]) -> list[str]:
    run, packages = document["run"], document["run"].get("packages", {})
    left = sum(test["not_run"] for test in document["tests"])
    return [
        f"{len(document['nestings'])} nestings" + (f", {left} not run" if left else ""),
        f"{run['seconds']:.0f} s",
        *(f"{name} {packages[name]}" for name in ("jax", "flax", "hypothesis") if name in packages),
        f"Python {run['python']}",
        run["platform"],
        run["started"],
    ]


def _legend(nestings: Iterable[Record]) -> Html | str:
    by_kind = Counter(map(kind, nestings))
    entries = [
        tag("li", _sign(name), tag("b", by_kind[name]), f" {word}") for name, word in VERDICTS.items() if by_kind[name]
    ]
    return tag("ul", entries, class_="legend", aria_label="Verdicts of the nestings") if entries else ""


def _sign(verdict: str) -> Html:
    return tag("span", SYMBOLS[verdict], class_=f"cell {verdict}", aria_hidden="true")


# --- the matrix ----------------------------------------------------------------------------------------------------------


def _matrix(tests: Numbered) -> Html | str:
    outermost = {_column(nesting) for _, record in tests for nesting in record["nestings"]}
    # In the order of the transforms; the user's own come last.
    columns = [name for name in _COLUMNS if name in outermost] + sorted(outermost - {*_COLUMNS})
    if not columns:
        return ""
    hint = "A square is one nesting, in the column of its outermost layer. Choose one to see its cause."
    head = tag("tr", [tag("th", name, scope="col") for name in ("test", *columns)])
    lines = [line for number, record in tests for line in _lines(number, record, columns)]
    grid = tag("table", tag("thead", head), tag("tbody", lines), class_="grid")
    return tag(
        "section",
        tag("h2", "Tests by nesting", id="matrix"),
        tag("p", hint, class_="hint"),
        tag("div", grid, class_="scroll", tabindex=0, role="region", aria_labelledby="matrix"),
        class_="matrix",
        aria_labelledby="matrix",
    )


def _column(nesting: Record) -> str:
    return nesting["layers"][0].partition("[")[0] if nesting["layers"] else UN_NESTED


def _lines(number: int, record: Records, columns: list[str]) -> Iterator[Html]:
    """The lines of one test: one for each mode that it ran in."""
    modes = list(dict.fromkeys(nesting["mode"] for nesting in record["nestings"])) or [MODES[0]]
    for mode in modes:
        cells: dict[str, list[Html]] = {column: [] for column in columns}
        for place, nesting in sorted(enumerate(record["nestings"], 1), key=lambda pair: len(pair[1]["layers"])):
            if nesting["mode"] == mode:
                cells[_column(nesting)].append(cell(nesting, f"t{number}n{place}"))
        shown = [" ", tag("span", mode, class_="mode")] if mode != MODES[0] else ""
        name = tag("th", tag("a", _name(record["test"]), href=f"#t{number}"), shown, scope="row")
        squares = [
            tag("td", tag("div", of, class_="cells"), data_column=column) if of else tag("td", class_="empty")
            for column, of in cells.items()
        ]
        yield tag("tr", name, squares, class_=_state(record["test"]))


def _name(test: Record) -> Html:
    file, colons, name = test["nodeid"].partition("::")
    return joined(tag("span", file + colons, class_="file"), tag("wbr"), tag("span", name, class_="test-name"))


def _state(test: Record) -> str:
    return "ok" if records.passed(test) else "bad"


def cell(nesting: Record, target: str) -> Html:
    """A square of the matrix, which leads to the cause."""
    words = [nesting["word"], *(violation["invariant"] for violation in nesting["violations"])]
    label, name = f"{nesting['nesting']}: {', '.join(words)}", kind(nesting)
    return tag("a", SYMBOLS[name], class_=f"cell {name}", href=f"#{target}", title=label, aria_label=label)


def kind(nesting: Record) -> str:
    """The verdict as a class of the style sheet."""
    return tally.kind(nesting["verdict"], unfit=nesting["unfit"])


# --- the tests -----------------------------------------------------------------------------------------------------------


def _article(number: int, record: Records) -> Html:
    test, nestings, width = record["test"], record["nestings"], full_width(record["nestings"])
    worst, notes = records.worst_peak(record), [*test["notes"], *(f"advice: {piece}" for piece in test["advice"])]
    parts: list[object] = [
        tag("h3", _badge(test), " ", _name(test)),
        tag("p", " · ".join(_facts_of_test(record)), class_="summary"),
    ]
    if worst is not None:
        label = tag("span", "worst peak", class_="label")
        parts.append(tag("p", label, " ", tag("code", worst["nesting"]), bar(worst, width), class_="worst"))
    if test["message"]:
        parts.append(_failure(record))
    if notes:
        parts.append(tag("ul", [tag("li", note) for note in notes], class_="notes"))
    if test["un_nested_peak"]:
        rows = [tag("tr", tag("th", label), tag("td", text)) for label, text in test["un_nested_peak"]]
        summary = tag("summary", "Where the bytes of the un-nested call are")
        parts.append(tag("details", summary, tag("table", rows, class_="rows")))
    if nestings:
        ordered = sorted(enumerate(nestings, 1), key=lambda pair: kind(pair[1]) not in {"violated", "failed"})
        listed = [_row(nesting, f"t{number}n{place}", width) for place, nesting in ordered]
        summary = tag("summary", f"{counted(len(nestings), 'nesting')}, with memory and causes")
        parts.append(tag("details", summary, listed, class_="nestings"))
    return tag("article", parts, class_=_state(test), id=f"t{number}")


def _facts_of_test(record: Records) -> Iterator[str]:
    test = record["test"]
    if record["nestings"]:
        left = f", {test['not_run']} not run" if test["not_run"] else ""
        yield f"{counted(len(record['nestings']), 'nesting')}: {counts(test['counts'])}{left}"
    if list(test["modes"]) not in ([], [MODES[0]]):
        yield "modes: " + ", ".join(f"{mode} {VERDICTS[verdict]}" for mode, verdict in test["modes"].items())
    if on := records.targets_of(record["nestings"]):
        yield target_rows.brief(on)
    yield f"{test['seconds']:.1f} s"
    if test["place"]:
        yield f"{test['place']['file']}:{test['place']['line']}"


def _badge(test: Record) -> Html:
    """The verdict; of a test that failed although its nestings hold, and of one that did not run, what pytest says."""
    bad = not records.passed(test)
    verdict = test["verdict"]
    if verdict and bad == (verdict != "held"):
        # A test without a nesting that raised may have this verdict: see `Report.verdict`.
        word, style = "failed" if verdict == "failed" else VERDICTS[verdict], verdict
    else:
        word, style = test["outcome"], "failed" if bad else "rejected"
    return tag("span", f"{SYMBOLS[style]} {word}", class_=f"badge {style}")


def _failure(record: Records) -> Html:
    """The cause of the smallest failing nesting, and the message as pytest has printed it."""
    shown = records.shown(record)
    message = tag("pre", record["test"]["message"], class_="message", tabindex=0)
    if shown is None or not shown["violations"]:
        return tag("div", message, class_="failure")
    head = tag("p", "Smallest nesting that breaks: ", tag("code", shown["nesting"]), class_="smallest")
    raw = tag("details", tag("summary", "Message of pytest"), message, class_="raw")
    return tag("div", head, cause(shown, unfolded=False), raw, class_="failure")


# --- one nesting ---------------------------------------------------------------------------------------------------------


def _row(nesting: Record, target: str, width: int) -> Html:
    """One line of the list, which opens to the cause."""
    word = tag("span", nesting["word"], class_="word")
    name = tag("span", tag("code", nesting["nesting"]), " ", word, class_="name")
    time = tag("span", f"{nesting['seconds']:.2f} s", class_="time")
    summary = tag("summary", _sign(kind(nesting)), name, bar(nesting, width), time)
    inside = tag("div", cause(nesting), class_="cause", id=target)
    return tag("details", summary, inside, class_=f"nesting {kind(nesting)}")


def full_width(nestings: Iterable[Record]) -> int:
    """The bytes at the right end of the bars of one test: its largest peak or expected peak; a budget far above both does not squeeze them."""
    measured = [nesting for nesting in nestings if nesting["peak"] is not None]
    highest = max((max(nesting["peak"] or 0, nesting["expected_peak"] or 0) for nesting in measured), default=0)
    budget = max((nesting["budget"] or 0 for nesting in measured), default=0)
    return max(highest, min(budget, _HEADROOM * highest), 1)


def bar(nesting: Record, width: int) -> Html:
    """The peak as a bar in its parts, with marks for the expected peak and the budget, and the figures in words."""
    peak, budget, split = nesting["peak"], nesting["budget"], nesting["split"]
    if peak is None:
        return tag("span", "not measured", class_="bar-cell none")

    def percent(size: int) -> str:
        return f"{max(0.0, min(100.0, 100 * size / width)):.2f}%"

    passing = {name: split[name] for name in ("temporaries", "constants")} if split else {}
    parts = {"resident": peak - sum(passing.values()), **passing}
    marks = {"expected-mark": nesting["expected_peak"], "budget-mark": budget}
    drawn = [tag("i", class_=name, style=f"width:{percent(size)}") for name, size in parts.items()]
    drawn += [tag("b", class_=name, style=f"left:{percent(at)}") for name, at in marks.items() if at is not None]
    over = budget is not None and peak > budget
    bound = "" if budget is None else f" {'over' if over else 'of'} {format_bytes(budget)}"
    figures = tag("span", f"{format_bytes(peak)}{bound}", class_="figures over" if over else "figures")
    return tag("span", tag("span", drawn, class_="bar", aria_hidden="true"), figures, class_="bar-cell")


def cause(nesting: Record, *, unfolded: bool = True) -> Html:
    """Why the verdict is what it is, what was measured, how to run it again, and the program that shows the same."""
    rows = [(tag("dt", label, class_=style), tag("dd", text, class_=style)) for label, text, style in _rows(nesting)]
    program: Html | str = ""
    if nesting["program_text"]:
        text = tag("pre", nesting["program_text"], tabindex=0)
        summary = tag("summary", f"Program: {nesting['program']}")
        program = tag("details", summary, text, class_="program", open=unfolded)
    return joined(tag("dl", rows), program)


def _rows(nesting: Record) -> Iterator[tuple[str, str, str]]:
    """(label, text, style) of the list in a cause."""
    labels = {label for violation in nesting["violations"] for label, _ in violation["details"]}
    if nesting["reason"]:
        yield nesting["word"], nesting["reason"], "reason"
    for violation in nesting["violations"]:
        yield violation["invariant"], violation["summary"], "reason"
        if violation["hint"]:
            yield "hint", violation["hint"], "advice"
        yield from ((label, text, "") for label, text in violation["details"])
    yield from ((label, text, "") for label, text in nesting["explained"])
    yield from (("note", note, "") for note in nesting["notes"])
    yield from (("expected", f"{key}, to fail", "") for key in nesting["expected_failures"])
    cpu = " on the CPU" if nesting["targets"] else ""
    # Its memory does not explain why a tracer leaked.
    leaks_alone = {violation["invariant"] for violation in nesting["violations"]} == {"tracers"}
    if nesting["split"] and nesting["peak"] is not None and "peak" not in labels and not leaks_alone:
        sizes = {name: size for name, size in nesting["split"].items() if size}
        yield f"peak{cpu}", " = ".join(filter(None, [format_bytes(nesting["peak"]), formula(sizes)])), ""
    if nesting["expected_peak"] is not None and "expected" not in labels and not leaks_alone:
        yield f"expected{cpu}", format_bytes(nesting["expected_peak"]), ""
    if not {"line", "un-nested"} & labels:
        yield from ((label, text, "") for label, text in nesting["story"])
    on = target_rows.rows(records.targets_of([nesting]))
    yield from ((label, text, "") for label, text in on if label not in labels)
    if nesting["program"] and not nesting["program_text"]:
        yield "program", nesting["program"], "command"
    yield "replay", nesting["replay"], "command"


# --- elements: text gets into one, or into an attribute, through `tag` alone, which escapes it


class Html(str):
    """Text that is HTML already."""

    __slots__ = ()


def tag(name: str, *content: object, **attributes: object) -> Html:
    """``<name>``, with content and attributes escaped: ``class_`` is ``class``, ``aria_label`` ``aria-label``; one that is `False` is left out."""
    written = [
        f" {key.strip('_').replace('_', '-')}" + ("" if value is True else f'="{html.escape(str(value))}"')
        for key, value in attributes.items()
        if value is not False
    ]
    start = Html(f"<{name}{''.join(written)}>")
    return start if name in VOID else Html(f"{start}{joined(*content)}</{name}>")


def joined(*content: object) -> Html:
    """Elements one after the other, lists of them among them; all else is text."""
    return Html("".join(map(_html, content)))


def _html(part: object) -> str:
    if isinstance(part, Html):
        return part
    if isinstance(part, Iterable) and not isinstance(part, str):
        return joined(*part)
    return html.escape(str(part))
