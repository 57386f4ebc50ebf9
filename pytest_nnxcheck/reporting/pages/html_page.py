"""A run as one page of HTML: a matrix of tests against nestings, and for each its memory, cause and program.

The page holds everything it shows, and its content security policy keeps it from loading anything else. It is readable
without scripts.
"""

from __future__ import annotations

import base64
import hashlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from importlib import resources
from string import Template
from typing import Any
from urllib.parse import quote

from pytest_nnxcheck.core.catalogue import CALL_FIRST, FURTHER, MODES, TRANSFORMS
from pytest_nnxcheck.core.nesting import UN_NESTED
from pytest_nnxcheck.core.peak import OnTarget
from pytest_nnxcheck.core.text import counted
from pytest_nnxcheck.reporting import records, target_rows
from pytest_nnxcheck.reporting.pages.html_elements import Html, joined, tag
from pytest_nnxcheck.reporting.pages.html_nesting import (
    SYMBOLS,
    bar,
    cause,
    full_width,
    is_about_tracers,
    kind,
    row,
    sign,
)
from pytest_nnxcheck.reporting.records import Record, Records
from pytest_nnxcheck.reporting.tally import VERDICTS, counts

TITLE = "nnx invariants"
Numbered = list[tuple[int, Records]]

PROGRAMS = 2_000_000
"""Characters of programs to paste that a page takes in: a browser opens a few megabytes at once."""

_COLUMNS = (UN_NESTED, *TRANSFORMS, CALL_FIRST, *FURTHER)


def render(document: Mapping[str, Any]) -> str:
    """The text of an ``.html`` report."""
    # The failing tests first, everywhere on the page.
    ordered = sorted(_with_programs(records.by_test(document)), key=lambda record: records.passed(record["test"]))
    tests = list(enumerate(ordered, 1))
    bad = sum(not records.passed(record["test"]) for record in ordered)
    script, project = read("html_page.js"), document["run"].get("project")
    only_failing = tag("label", tag("input", type="checkbox", id="only-failing"), " Failing tests only")
    bounds = list(dict.fromkeys(bound for record in ordered for bound in records.shares(record)))
    return Template(read("html_page.html")).substitute(
        headline=_headline(bad, len(tests)),
        title=joined([project, " - "] if project else "", TITLE),
        project=joined(_project(document["run"]), TITLE),
        icon=_icon(bad),
        tone="bad" if bad else "good",
        sign="✗" if bad else "✓",
        facts=joined(tag("li", fact) for fact in _facts_of_run(document)),
        legend=_legend(document["nestings"]),
        failing=only_failing if bad else "",
        order=_order(bounds),
        matrix=_matrix(tests, bounds),
        articles=joined(_article(number, record, bounds) for number, record in tests),
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


def _project(run: Mapping[str, Any]) -> Iterator[object]:
    """The project and its commit, as far as the report knows them."""
    if project := run.get("project"):
        yield project
        if commit := run.get("commit"):
            yield " at ", tag("code", commit[:10], title=commit)
        yield " · "


def _order(bounds: list[str]) -> Html | str:
    """A choice of the order of the tests. The script shows it, and sorts."""
    if not bounds:
        return ""
    options = [tag("option", text) for text in ("failing first", *(f"share of {bound}" for bound in bounds))]
    return tag("label", "Order ", tag("select", options, id="order"), hidden=True)


def _shares(record: Records, bounds: list[str]) -> str:
    """The shares of a test in the order of the choice; a test without one is the last."""
    found = records.shares(record)
    return " ".join(str(round(found.get(bound, -1.0), 4)).replace("inf", "Infinity") for bound in bounds)


def _legend(nestings: Iterable[Record]) -> Html | str:
    by_kind = Counter(map(kind, nestings))
    entries = [
        tag("li", sign(name), tag("b", by_kind[name]), f" {word}") for name, word in VERDICTS.items() if by_kind[name]
    ]
    return tag("ul", entries, class_="legend", aria_label="Verdicts of the nestings") if entries else ""


# --- the matrix ----------------------------------------------------------------------------------------------------------


def _matrix(tests: Numbered, bounds: list[str]) -> Html | str:
    outermost = {_column(nesting) for _, record in tests for nesting in record["nestings"]}
    # In the order of the transforms; the user's own come last.
    columns = [name for name in _COLUMNS if name in outermost] + sorted(outermost - {*_COLUMNS})
    if not columns:
        return ""
    nestings = (nesting for _, record in tests for nesting in record["nestings"])
    targets = list(dict.fromkeys(on["target"] for nesting in nestings for on in nesting["targets"]))
    hint = "A square is one nesting, in the column of its outermost transform. Choose one to see its cause."
    head = tag("thead", tag("tr", [tag("th", name, scope="col") for name in ("test", *columns, *targets)]))

    def grid(tests: Numbered) -> Html:
        lines = [line for each in tests for line in _lines(*each, columns, targets, bounds)]
        table = tag("table", head, tag("tbody", lines), class_="grid")
        return tag("div", table, class_="scroll", tabindex=0, role="region", aria_labelledby="matrix")

    bad = [each for each in tests if not records.passed(each[1]["test"])]
    rest = [each for each in tests if records.passed(each[1]["test"])]
    folded = tag("summary", f"{counted(len(rest), 'further test')}")
    return tag(
        "section",
        tag("h2", "Tests by nesting", id="matrix"),
        tag("p", hint, class_="hint"),
        grid(bad or rest),
        tag("details", folded, grid(rest), class_="further ok") if bad and rest else "",
        class_="matrix",
        aria_labelledby="matrix",
    )


def _column(nesting: Record) -> str:
    return nesting["layers"][0].partition("[")[0] if nesting["layers"] else UN_NESTED


def _lines(number: int, record: Records, columns: list[str], targets: list[str], bounds: list[str]) -> Iterator[Html]:
    """The lines of one test: one for each mode that it ran in."""
    smallest = records.shown(record)
    modes = list(dict.fromkeys(nesting["mode"] for nesting in record["nestings"])) or [MODES[0]]
    for mode in modes:
        cells: dict[str, list[Html]] = {column: [] for column in columns}
        for place, nesting in sorted(enumerate(record["nestings"], 1), key=lambda pair: len(pair[1]["layers"])):
            if nesting["mode"] == mode:
                # The cause of the nesting that the message is about is at the top of its test.
                target = f"t{number}" if nesting is smallest else f"t{number}n{place}"
                cells[_column(nesting)].append(cell(nesting, target))
        shown = [" ", tag("span", mode, class_="mode")] if mode != MODES[0] else ""
        name = tag("th", tag("a", _name(record["test"]), href=f"#t{number}"), shown, scope="row")
        squares = [
            tag("td", tag("div", of, class_="cells"), data_column=column) if of else tag("td", class_="empty")
            for column, of in cells.items()
        ]
        on = {each.target: each for each in records.targets_of(n for n in record["nestings"] if n["mode"] == mode)}
        fits = [
            tag("td", _fit(on[name]), data_column=name) if name in on else tag("td", class_="empty") for name in targets
        ]
        yield tag("tr", name, squares, fits, class_=_state(record["test"]), data_share=_shares(record, bounds))


def _fit(on: OnTarget) -> Html:
    return tag("span", target_rows.brief([on]), class_="fit" if on.fits or on.left_out else "fit over")


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


# --- the tests -----------------------------------------------------------------------------------------------------------


def _article(number: int, record: Records, bounds: list[str]) -> Html:
    """A test: in full if it failed, else one line that opens to the rest."""
    test, width = record["test"], full_width(record["nestings"])
    bad = not records.passed(test)
    name, facts = tag("h3", _badge(test), " ", _name(test)), list(_facts_of_test(record))
    share, target = _shares(record, bounds), f"t{number}"
    inside = joined(_inside(number, record, width))
    if bad:
        line = tag("p", " · ".join([*facts, *_time_and_place(test)]), class_="summary")
        return tag("article", name, line, inside, class_="bad", id=target, data_share=share)
    line = tag("summary", name, tag("span", " · ".join(facts), class_="summary"), *_worst_peak(record, width))
    more = tag("p", " · ".join(_time_and_place(test)), class_="summary")
    folded = tag("details", line, tag("div", more, inside, id=target, class_="inside"))
    return tag("article", folded, class_="ok", data_share=share)


def _inside(number: int, record: Records, width: int) -> Iterator[Html]:
    """All about a test below its name and its counts."""
    test, nestings, smallest = record["test"], record["nestings"], records.shown(record)
    notes = [*test["notes"], *(f"advice: {piece}" for piece in test["advice"])]
    if not (smallest and is_about_tracers(smallest)):
        yield from _worst_peak(record, width)
    if test["message"]:
        yield _failure(record)
    if notes:
        yield tag("ul", [tag("li", note) for note in notes], class_="notes")
    if test["un_nested_peak"]:
        rows = [tag("tr", tag("th", label), tag("td", text)) for label, text in test["un_nested_peak"]]
        summary = tag("summary", "Where the bytes of the un-nested call are")
        yield tag("details", summary, tag("table", rows, class_="rows"), class_="raw")
    if nestings:
        ordered = sorted(enumerate(nestings, 1), key=lambda pair: kind(pair[1]) not in {"violated", "failed"})
        listed = [row(nesting, f"t{number}n{place}", width) for place, nesting in ordered]
        summary = tag("summary", f"{counted(len(nestings), 'nesting')}, with memory and causes")
        yield tag("details", summary, listed, class_="nestings", open=records.passed(test))


def _worst_peak(record: Records, width: int) -> Iterator[Html]:
    """The largest peak of a test beside its budget; nothing where none was measured."""
    if worst := records.worst_peak(record):
        share = f"{100 * worst['peak'] / worst['budget']:.0f} %" if worst["budget"] else ""
        parts = tag("span", "worst peak", class_="label"), tag("code", worst["nesting"]), bar(worst, width)
        yield tag("span", *parts, tag("span", share, class_="share"), class_="worst")


def _facts_of_test(record: Records) -> Iterator[str]:
    test = record["test"]
    if record["nestings"]:
        left = f", {test['not_run']} not run" if test["not_run"] else ""
        yield f"{counted(len(record['nestings']), 'nesting')}: {counts(test['counts'])}{left}"
    elif records.passed(test) and test["message"]:
        yield records.broken(record)  # why it was skipped
    if list(test["modes"]) not in ([], [MODES[0]]):
        yield "modes: " + ", ".join(f"{mode} {VERDICTS[verdict]}" for mode, verdict in test["modes"].items())
    if on := records.targets_of(record["nestings"]):
        yield target_rows.brief(on)


def _time_and_place(test: Record) -> Iterator[str]:
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
    head = tag("p", "Smallest nesting that fails: ", tag("code", shown["nesting"]), class_="smallest")
    raw = tag("details", tag("summary", "Message of pytest"), message, class_="raw")
    return tag("div", head, cause(shown, unfolded=False), raw, class_="failure")
