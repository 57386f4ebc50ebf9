"""A run as one page of HTML: a matrix of tests against nestings, and for each its memory, cause and program.

The page holds everything it shows, and its content security policy keeps it from loading anything else. It is readable
without scripts. Nothing here imports pytest, hypothesis, jax or flax.
"""

from __future__ import annotations

import base64
import hashlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from importlib import resources
from typing import Any
from urllib.parse import quote

from pytest_nnxcheck.core.catalogue import CALL_FIRST, FURTHER, TRANSFORMS
from pytest_nnxcheck.core.nesting import MODES, UN_NESTED
from pytest_nnxcheck.reporting import records
from pytest_nnxcheck.reporting.html_nesting import SYMBOLS, Scale, bar, cause, cell, esc, kind, row
from pytest_nnxcheck.reporting.records import OfNesting, OfTest, Records
from pytest_nnxcheck.reporting.tally import VERDICTS

_COLUMNS = (UN_NESTED, *TRANSFORMS, CALL_FIRST, *FURTHER)
PROGRAMS = 2_000_000
"""Characters of programs to paste that a page takes in."""

# Browsers open what a link leads into by themselves; this is for those from before they did.
_SCRIPT = """
function reveal() {
  const found = document.getElementById(location.hash.slice(1));
  for (let at = found; at; at = at.parentElement) if (at.tagName === "DETAILS") at.open = true;
  if (found) found.scrollIntoView({block: "nearest"});
}
addEventListener("hashchange", reveal);
reveal();
"""


def render(document: Mapping[str, Any]) -> str:
    """The text of an ``.html`` report."""
    # The failing tests first, everywhere on the page.
    ordered = sorted(_with_programs(records.by_test(document)), key=lambda found: records.passed(found["test"]))
    tests = list(enumerate(ordered, 1))
    bad = sum(not records.passed(found["test"]) for _, found in tests)
    headline = _headline(bad, len(tests))
    body = "".join([_header(document, headline, bad), _filters(bad), _matrix(tests), _articles(tests)])
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{_policy()}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{headline} - nnx invariants</title>
<link rel="icon" href="{_icon(bad)}">
<style>{_style()}</style>
</head>
<body>
<a class="skip" href="#tests">Skip to the tests</a>
{body}
<script>{_SCRIPT}</script>
</body>
</html>
"""


def _with_programs(tests: list[Records]) -> list[Records]:
    """The tests with as many programs as the page has room for, those of the messages first; the others are named by their path."""
    shown = [nesting for found in tests if (nesting := records.shown(found))]
    room, kept = PROGRAMS, set[int]()
    for nesting in [*shown, *(nesting for found in tests for nesting in found["nestings"])]:
        if id(nesting) not in kept and len(nesting["program_text"]) <= room:
            kept.add(id(nesting))
            room -= len(nesting["program_text"])
    return [
        {
            "test": found["test"],
            "nestings": [n if id(n) in kept else {**n, "program_text": ""} for n in found["nestings"]],
        }
        for found in tests
    ]


def _policy() -> str:
    digest = base64.b64encode(hashlib.sha256(_SCRIPT.encode()).digest()).decode()
    return (
        f"default-src 'none'; style-src 'unsafe-inline'; img-src data:; script-src 'sha256-{digest}';"
        " base-uri 'none'; form-action 'none'"
    )


def _style() -> str:
    return resources.files("pytest_nnxcheck.reporting").joinpath("html_page.css").read_text(encoding="utf-8")


def _icon(bad: int) -> str:
    colour, sign = ("#b3261e", "M10 10L22 22M22 10L10 22") if bad else ("#1a7f45", "M9 17L14 22L23 10")
    shape = f'<path d="{sign}" stroke="#fff" stroke-width="4" fill="none"/>'
    svg = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 32 32"><rect width="32" height="32" rx="7" fill="{colour}"/>{shape}</svg>'
    return f"data:image/svg+xml,{quote(svg)}"


def _headline(bad: int, total: int) -> str:
    if not total:
        return "No marked test ran"
    return (
        f"{bad} of {total} test{'s' * (total != 1)} failed"
        if bad
        else f"All {total} tests passed"
        if total > 1
        else "1 test passed"
    )


def _header(document: Mapping[str, Any], headline: str, bad: int) -> str:
    run, packages = document["run"], document["run"].get("packages", {})
    nestings: list[OfNesting] = document["nestings"]
    versions = [f"{name} {packages[name]}" for name in ("jax", "flax", "hypothesis") if name in packages]
    left = sum(test["not_run"] for test in document["tests"])
    facts = [
        f"{len(nestings)} nestings" + (f", {left} not run" if left else ""),
        f"{run['seconds']:.0f} s",
        *versions,
        f"Python {run['python']}",
        run["platform"],
        run["started"],
    ]
    sign, style = ("✗", "bad") if bad else ("✓", "good")
    return (
        f'<header><p class="project">nnx invariants</p><h1 class="{style}"><span class="sign" aria-hidden="true">{sign}</span> {esc(headline)}</h1>'
        f'<ul class="facts">{"".join(f"<li>{esc(fact)}</li>" for fact in facts)}</ul>'
        f"{_legend(nestings)}</header>"
    )


def _legend(nestings: Iterable[OfNesting]) -> str:
    counted = Counter(map(kind, nestings))
    entries = "".join(
        f'<li><span class="cell {name}" aria-hidden="true">{SYMBOLS[name]}</span><b>{counted[name]}</b> {word}</li>'
        for name, word in VERDICTS.items()
        if counted[name]
    )
    return f'<ul class="legend" aria-label="Verdicts of the nestings">{entries}</ul>' if entries else ""


def _filters(bad: int) -> str:
    failing = '<label><input type="checkbox" id="only-failing"> Failing tests only</label>' if bad else ""
    return f'<div class="filters">{failing}<label><input type="checkbox" id="hide-held"> Hide nestings that held</label></div>'


# --- the matrix ----------------------------------------------------------------------------------------------------------


def _matrix(tests: list[tuple[int, Records]]) -> str:
    columns = _columns(nesting for _, found in tests for nesting in found["nestings"])
    if not columns:
        return ""
    heads = "".join(f'<th scope="col">{esc(column)}</th>' for column in columns)
    rows = "".join(line for number, found in tests for line in _lines(number, found, columns))
    return (
        '<section class="matrix" aria-labelledby="matrix"><h2 id="matrix">Tests by nesting</h2>'
        '<p class="hint">A square is one nesting, in the column of its outermost layer. Choose one to see its cause.</p>'
        f'<div class="scroll" tabindex="0" role="region" aria-labelledby="matrix"><table class="grid"><thead><tr><th scope="col">test</th>{heads}</tr></thead>'
        f"<tbody>{rows}</tbody></table></div></section>"
    )


def _columns(nestings: Iterable[OfNesting]) -> list[str]:
    """The outermost layers that occur, in the order of the transforms; the user's own come last."""
    found = {_column(nesting) for nesting in nestings}
    return [name for name in _COLUMNS if name in found] + sorted(found - {*_COLUMNS})


def _column(nesting: OfNesting) -> str:
    return nesting["layers"][0].partition("[")[0] if nesting["layers"] else UN_NESTED


def _lines(number: int, found: Records, columns: list[str]) -> Iterator[str]:
    """The lines of one test: one for each mode that it ran in."""
    modes = list(dict.fromkeys(nesting["mode"] for nesting in found["nestings"])) or [MODES[0]]
    for mode in modes:
        cells: dict[str, list[str]] = {column: [] for column in columns}
        for place, nesting in sorted(enumerate(found["nestings"], 1), key=lambda pair: len(pair[1]["layers"])):
            if nesting["mode"] == mode:
                cells[_column(nesting)].append(cell(nesting, f"t{number}n{place}"))
        shown = f' <span class="mode">{esc(mode)}</span>' if mode != MODES[0] else ""
        name = f'<th scope="row"><a href="#t{number}">{_name(found["test"])}</a>{shown}</th>'
        squares = "".join(
            f'<td data-column="{esc(column)}"><div class="cells">{"".join(of)}</div></td>'
            if of
            else '<td class="empty"></td>'
            for column, of in cells.items()
        )
        yield f'<tr class="{_state(found["test"])}">{name}{squares}</tr>'


def _name(test: OfTest) -> str:
    file, colons, name = test["nodeid"].partition("::")
    return f'<span class="file">{esc(file + colons)}</span><wbr><span class="test-name">{esc(name)}</span>'


def _state(test: OfTest) -> str:
    return "ok" if records.passed(test) else "bad"


# --- the tests -----------------------------------------------------------------------------------------------------------


def _articles(tests: list[tuple[int, Records]]) -> str:
    return (
        f'<main id="tests"><h2>Tests</h2>{_key()}{"".join(_article(number, found) for number, found in tests)}</main>'
    )


def _key() -> str:
    entries = [
        ("resident", "arguments + outputs - aliased"),
        ("temporaries", "temporaries"),
        ("constants", "captured constants"),
    ]
    parts = "".join(f'<li><i class="{name}"></i>{word}</li>' for name, word in entries)
    marks = '<li><b class="expected-mark"></b>expected peak</li><li><b class="budget-mark"></b>budget</li>'
    return f'<ul class="key" aria-label="Parts of a memory bar">{parts}{marks}</ul>'


def _article(number: int, found: Records) -> str:
    test, nestings = found["test"], found["nestings"]
    scale = Scale.of(nestings)
    rows = "".join(
        row(nesting, f"t{number}n{place}", scale)
        for place, nesting in sorted(
            enumerate(nestings, 1), key=lambda pair: kind(pair[1]) not in {"violated", "failed"}
        )
    )
    listed = (
        f'<details class="nestings"><summary>{len(nestings)} nesting{"s" * (len(nestings) != 1)}, with memory and causes</summary>{rows}</details>'
        if nestings
        else ""
    )
    told = [*test["notes"], *(f"advice: {piece}" for piece in test["advice"])]
    noted = "".join(f"<li>{esc(note)}</li>" for note in told)
    notes = f'<ul class="notes">{noted}</ul>' if noted else ""
    return (
        f'<article class="{_state(test)}" id="t{number}"><h3>{_badge(test)} {_name(test)}</h3>'
        f'<p class="summary">{esc(" · ".join(_facts(found)))}</p>'
        f"{_worst(found, scale)}{_failure(found)}{notes}{_un_nested(test['un_nested_peak'])}{listed}</article>"
    )


def _un_nested(rows: list[list[str]]) -> str:
    """Where the bytes of the call are that runs in no nesting."""
    if not rows:
        return ""
    listed = "".join(f"<tr><th>{esc(label)}</th><td>{esc(told)}</td></tr>" for label, told in rows)
    return f'<details><summary>Where the bytes of the un-nested call are</summary><table class="rows">{listed}</table></details>'


def _facts(found: Records) -> Iterator[str]:
    test = found["test"]
    if found["nestings"]:
        total = len(found["nestings"])
        counted = ", ".join(
            f"{test['counts'][name]} {word}" for name, word in VERDICTS.items() if test["counts"].get(name)
        )
        left = f", {test['not_run']} not run" if test["not_run"] else ""
        yield f"{total} nesting{'s' * (total != 1)}: {counted}{left}"
    if list(test["modes"]) not in ([], [MODES[0]]):
        yield "modes: " + ", ".join(f"{mode} {verdict}" for mode, verdict in test["modes"].items())
    yield f"{test['seconds']:.1f} s"
    if test["place"]:
        yield f"{test['place']['file']}:{test['place']['line']}"


def _badge(test: OfTest) -> str:
    """The verdict; of a test that failed although its nestings hold, and of one that did not run, what pytest says."""
    bad = not records.passed(test)
    word = test["verdict"] if test["verdict"] and bad == (test["verdict"] != "held") else test["outcome"]
    style = test["verdict"] if word == test["verdict"] else "failed" if bad else "rejected"
    return f'<span class="badge {style}">{SYMBOLS[style]} {esc(word)}</span>'


def _worst(found: Records, scale: Scale) -> str:
    worst = records.worst_peak(found)
    if worst is None:
        return ""
    return f'<p class="worst"><span class="label">worst peak</span> <code>{esc(worst["nesting"])}</code>{bar(worst, scale)}</p>'


def _failure(found: Records) -> str:
    """The cause of the smallest failing nesting, and the message as pytest has printed it."""
    test, shown = found["test"], records.shown(found)
    if not test["message"]:
        return ""
    message = f'<pre class="message" tabindex="0">{esc(test["message"])}</pre>'
    if shown is None or not shown["violations"]:
        return f'<div class="failure">{message}</div>'
    head = f'<p class="smallest">Smallest nesting that breaks: <code>{esc(shown["nesting"])}</code></p>'
    return f'<div class="failure">{head}{cause(shown, unfolded=False)}<details class="raw"><summary>Message of pytest</summary>{message}</details></div>'
