"""A run as one page of HTML: a matrix of tests against nestings, and for each its memory, cause and program.

The page holds everything it shows, and its content security policy keeps it from loading anything else. It is readable
without scripts.
"""

from __future__ import annotations

import base64
import hashlib
import html
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import replace
from importlib import resources
from itertools import takewhile
from string import Template
from urllib.parse import quote

from pytest_nnxcheck.core.catalogue import CALL_FIRST, FURTHER, MODES, TRANSFORMS
from pytest_nnxcheck.core.nesting import UN_NESTED
from pytest_nnxcheck.core.text import Row, counted, format_bytes
from pytest_nnxcheck.reporting import report, target_rows
from pytest_nnxcheck.reporting.memory_breakdown import formula
from pytest_nnxcheck.reporting.records import Document, Head, NestingRecord, Record

TITLE = "nnx invariants"
Numbered = list[tuple[int, Record]]

PROGRAMS = 2_000_000
"""Characters of programs to paste that a page takes in: a browser opens a few megabytes at once."""

SYMBOLS = {"held": "✓", "violated": "✗", "failed": "!", "expected": "~", "rejected": "⊘", "unfit": "·"}
"""A sign for each verdict, beside its colour; ``unfit`` is what was rejected because a layer cannot take the call."""

_HEADROOM = 4
"""The greatest scale of the bars, as a multiple of the largest peak: they show a budget up to there."""

_COLUMNS = (UN_NESTED, *TRANSFORMS, CALL_FIRST, *FURTHER)


def render(document: Document) -> str:
    """The text of an ``.html`` report."""
    # The failing tests first, everywhere on the page.
    ordered = sorted(_with_programs(document.records), key=lambda record: record.head.passed)
    tests = list(enumerate(ordered, 1))
    bad = sum(not record.head.passed for record in ordered)
    run, script = document.run, read("html_page.js")
    only_failing = tag("label", tag("input", type="checkbox", id="only-failing"), " Failing tests only")
    bounds = list(dict.fromkeys(bound for record in ordered for bound in record.shares))
    # A choice of the order of the tests: the script shows it, and sorts.
    orders = [tag("option", text) for text in ("failing first", *(f"share of {bound}" for bound in bounds))]
    commit = [" at ", tag("code", run.commit[:10], title=run.commit)] if run.commit else ""
    return Template(read("html_page.html")).substitute(
        headline=_headline([record.head for record in ordered]),
        title=joined([run.project, " - "] if run.project else "", TITLE),
        project=joined([run.project, commit, " · "] if run.project else "", TITLE),
        icon=_icon(bad),
        tone="bad" if bad else "good",
        sign="✗" if bad else "✓",
        facts=joined(tag("li", fact) for fact in _facts_of_run(document)),
        legend=_legend(document.nestings),
        failing=only_failing if bad else "",
        order=tag("label", "Order ", tag("select", orders, id="order"), hidden=True) if bounds else "",
        matrix=_matrix(tests, bounds),
        articles=joined(_article(number, record, bounds) for number, record in tests),
        style=read("html_page.css"),
        script=script,
        digest=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
    )


def read(name: str) -> str:
    """The text of a file that the page is made of."""
    return resources.files(__package__).joinpath(name).read_text(encoding="utf-8")


def _with_programs(tests: Iterable[Record]) -> list[Record]:
    """The tests with as many programs as the page has room for, those of the messages first; the others are named by their path."""
    shown = [record.shown for record in tests if record.shown]
    room, kept = PROGRAMS, set[int]()
    for nesting in [*shown, *(nesting for record in tests for nesting in record.nestings)]:
        if id(nesting) not in kept and len(nesting.program_text) <= room:
            kept.add(id(nesting))
            room -= len(nesting.program_text)
    return [
        replace(record, nestings=tuple(n if id(n) in kept else replace(n, program_text="") for n in record.nestings))
        for record in tests
    ]


def _icon(bad: int) -> str:
    colour, sign = ("#b3261e", "M10 10L22 22M22 10L10 22") if bad else ("#1a7f45", "M9 17L14 22L23 10")
    shape = f'<path d="{sign}" stroke="#fff" stroke-width="4" fill="none"/>'
    square = f'<rect width="32" height="32" rx="7" fill="{colour}"/>'
    svg = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 32 32">{square}{shape}</svg>'
    return f"data:image/svg+xml,{quote(svg)}"


def _headline(heads: list[Head]) -> str:
    if not heads:
        return "No marked test ran"
    passed = f"All {len(heads)} tests passed" if heads[1:] else "1 test passed"
    return report.not_passed(heads) or passed


def _facts_of_run(document: Document) -> list[str]:
    run, left = document.run, sum(record.head.not_run for record in document.records)
    return [
        f"{len(document.nestings)} nestings" + (f", {left} not run" if left else ""),
        f"{run.seconds:.0f} s",
        *(f"{name} {run.packages[name]}" for name in ("jax", "flax", "hypothesis") if name in run.packages),
        f"Python {run.python}",
        run.platform,
        run.started,
    ]


def _legend(nestings: Iterable[NestingRecord]) -> Html | str:
    by_kind = Counter(map(kind, nestings))
    entries = [
        tag("li", sign(name), tag("b", by_kind[name]), f" {word}")
        for name, word in report.VERDICTS.items()
        if by_kind[name]
    ]
    return tag("ul", entries, class_="legend", aria_label="Verdicts of the nestings") if entries else ""


def kind(nesting: NestingRecord) -> str:
    """The verdict as a class of the style sheet."""
    return report.kind(nesting.verdict, unfit=nesting.unfit)


def sign(verdict: str) -> Html:
    return tag("span", SYMBOLS[verdict], class_=f"cell {verdict}", aria_hidden="true")


def _state(record: Record) -> str:
    return "ok" if record.head.passed else "bad"


def _shares(record: Record, bounds: list[str]) -> str:
    """The shares of a test in the order of the choice; a test without one is the last."""
    return " ".join(str(round(record.shares.get(bound, -1.0), 4)).replace("inf", "Infinity") for bound in bounds)


def _name(head: Head) -> Html:
    file, colons, name = head.nodeid.partition("::")
    return joined(tag("span", file + colons, class_="file"), tag("wbr"), tag("span", name, class_="test-name"))


# --- the matrix ----------------------------------------------------------------------------------------------------------


def _matrix(tests: Numbered, bounds: list[str]) -> Html | str:
    nestings = [nesting for _, record in tests for nesting in record.nestings]
    outermost = set(map(_column, nestings))
    # In the order of the transforms; the user's own come last.
    columns = [name for name in _COLUMNS if name in outermost] + sorted(outermost - {*_COLUMNS})
    if not columns:
        return ""
    targets = list(dict.fromkeys(on.target for nesting in nestings for on in nesting.targets))
    hint = "A square is one nesting, in the column of its outermost transform. Choose one to see its cause."
    heading = tag("thead", tag("tr", [tag("th", name, scope="col") for name in ("test", *columns, *targets)]))

    def grid(tests: Numbered) -> Html:
        lines = [line for each in tests for line in _lines(*each, columns, targets, bounds)]
        table = tag("table", heading, tag("tbody", lines), class_="grid")
        return tag("div", table, class_="scroll", tabindex=0, role="region", aria_labelledby="matrix")

    bad = [each for each in tests if not each[1].head.passed]
    rest = [each for each in tests if each[1].head.passed]
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


def _column(nesting: NestingRecord) -> str:
    return nesting.layers[0].partition("[")[0] if nesting.layers else UN_NESTED


def _lines(number: int, record: Record, columns: list[str], targets: list[str], bounds: list[str]) -> Iterator[Html]:
    """The lines of one test: one for each mode that it ran in."""
    for mode in list(dict.fromkeys(nesting.mode for nesting in record.nestings)) or [MODES[0]]:
        cells: dict[str, list[Html]] = {column: [] for column in columns}
        for place, nesting in sorted(enumerate(record.nestings, 1), key=lambda pair: len(pair[1].layers)):
            if nesting.mode == mode:
                # The cause of the nesting that the message is about is at the top of its test.
                target = f"t{number}" if nesting is record.shown else f"t{number}n{place}"
                cells[_column(nesting)].append(_cell(nesting, target))
        shown = [" ", tag("span", mode, class_="mode")] if mode != MODES[0] else ""
        name = tag("th", tag("a", _name(record.head), href=f"#t{number}"), shown, scope="row")
        squares = [
            tag("td", tag("div", of, class_="cells"), data_column=column) if of else tag("td", class_="empty")
            for column, of in cells.items()
        ]
        worst = report.worst_of_targets(on for n in record.nestings if n.mode == mode for on in n.targets)
        over = {on.target for on in worst if not on.left_out and (on.may_not_fit or not on.fits)}
        fits = {
            on.target: tag("span", target_rows.brief([on]), class_="fit over" if on.target in over else "fit")
            for on in worst
        }
        on_targets = [
            tag("td", fits[name], data_column=name) if name in fits else tag("td", class_="empty") for name in targets
        ]
        yield tag("tr", name, squares, on_targets, class_=_state(record), data_share=_shares(record, bounds))


def _cell(nesting: NestingRecord, target: str) -> Html:
    """A square of the matrix, which leads to the cause."""
    words = [nesting.word, *(violation.invariant for violation in nesting.violations)]
    label, name = f"{nesting.nesting}: {', '.join(words)}", kind(nesting)
    return tag("a", SYMBOLS[name], class_=f"cell {name}", href=f"#{target}", title=label, aria_label=label)


# --- the tests -----------------------------------------------------------------------------------------------------------


def _article(number: int, record: Record, bounds: list[str]) -> Html:
    """A test: in full if it failed, else one line that opens to the rest."""
    head, width = record.head, full_width(record.nestings)
    place = [f"{head.place.file}:{head.place.line}"] if head.place else []
    time_and_place = [f"{head.seconds:.1f} s", *place]
    name, facts = tag("h3", _badge(head), " ", _name(head)), list(_facts_of_test(record))
    style, share, target = _state(record), _shares(record, bounds), f"t{number}"
    inside = joined(_inside(number, record, width))
    if not head.passed:
        line = tag("p", " · ".join([*facts, *time_and_place]), class_="summary")
        return tag("article", name, line, inside, class_=style, id=target, data_share=share)
    line = tag("summary", name, tag("span", " · ".join(facts), class_="summary"), *_worst_peak(record, width))
    rest = tag("div", tag("p", " · ".join(time_and_place), class_="summary"), inside, id=target, class_="inside")
    return tag("article", tag("details", line, rest), class_=style, data_share=share)


def _inside(number: int, record: Record, width: int) -> Iterator[Html]:
    """All about a test below its name and its counts."""
    head = record.head
    notes = [*head.notes, *(f"advice: {piece}" for piece in head.advice)]
    if not record.is_about_tracers:
        yield from _worst_peak(record, width)
    if head.message:
        yield _failure(record)
    if notes:
        yield tag("ul", [tag("li", note) for note in notes], class_="notes")
    if head.un_nested_peak and not record.is_about_tracers:
        rows = [tag("tr", tag("th", label), tag("td", text)) for label, text in head.un_nested_peak]
        summary = tag("summary", "Where the bytes of the un-nested call are")
        yield tag("details", summary, tag("table", rows, class_="rows"), class_="raw")
    if record.nestings:
        ordered = sorted(enumerate(record.nestings, 1), key=lambda pair: kind(pair[1]) not in {"violated", "failed"})
        listed = [_nesting(nesting, f"t{number}n{place}", width) for place, nesting in ordered]
        summary = tag("summary", f"{counted(len(record.nestings), 'nesting')}, with memory and causes")
        yield tag("details", summary, listed, class_="nestings", open=head.passed)


def _worst_peak(record: Record, width: int) -> Iterator[Html]:
    """The largest peak of a test beside its budget; nothing where none was measured."""
    if (worst := record.worst) and worst.peak is not None:
        share = f"{100 * worst.peak / worst.budget:.0f} %" if worst.budget else ""
        parts = tag("span", "worst peak", class_="label"), tag("code", worst.nesting), bar(worst, width)
        yield tag("span", *parts, tag("span", share, class_="share"), class_="worst")


def _facts_of_test(record: Record) -> Iterator[str]:
    head = record.head
    if record.nestings:
        left = f", {head.not_run} not run" if head.not_run else ""
        yield f"{counted(len(record.nestings), 'nesting')}: {report.counts(head.counts)}{left}"
    elif head.passed and head.message:
        yield record.broken  # why it was skipped
    if modes := report.modes_of(head):
        yield f"modes: {modes}"
    if head.targets:
        yield target_rows.brief(head.targets)


def _badge(head: Head) -> Html:
    """The verdict; of a test that was interrupted, failed although its nestings hold, or did not run, what pytest says."""
    if head.outcome == "interrupted":
        return tag("span", "■ interrupted", class_="badge failed")
    if head.verdict and (head.verdict == "held") == head.passed:
        # A test without a nesting that raised may have this verdict: see `Report.verdict`.
        word, style = "failed" if head.verdict == "failed" else report.VERDICTS[head.verdict], str(head.verdict)
    else:
        word, style = head.outcome, "rejected" if head.passed else "failed"
    return tag("span", f"{SYMBOLS[style]} {word}", class_=f"badge {style}")


def _failure(record: Record) -> Html:
    """The cause of the smallest failing nesting, and the message as pytest has printed it."""
    shown, message = record.shown, tag("pre", record.head.message, class_="message", tabindex=0)
    if shown is None or not shown.violations:
        return tag("div", message, class_="failure")
    line = tag("p", "Smallest nesting that fails: ", tag("code", shown.nesting), class_="smallest")
    raw = tag("details", tag("summary", "Message of pytest"), message, class_="raw")
    return tag("div", line, cause(shown, unfolded=False), raw, class_="failure")


# --- a nesting -----------------------------------------------------------------------------------------------------------


def _nesting(nesting: NestingRecord, target: str, width: int) -> Html:
    """One line of the list, which opens to the cause."""
    word = tag("span", nesting.word, class_="word")
    name = tag("span", tag("code", nesting.nesting), " ", word, class_="name")
    time = tag("span", f"{nesting.seconds:.2f} s", class_="time")
    summary = tag("summary", sign(kind(nesting)), name, bar(nesting, width), time)
    inside = tag("div", cause(nesting), class_="cause", id=target)
    return tag("details", summary, inside, class_=f"nesting {kind(nesting)}")


def full_width(nestings: Iterable[NestingRecord]) -> int:
    """The bytes at the right end of the bars of one test: its largest peak or expected peak; a budget far above both does not squeeze them."""
    measured = [nesting for nesting in nestings if nesting.peak is not None]
    highest = max((max(nesting.peak or 0, nesting.expected_peak or 0) for nesting in measured), default=0)
    budget = max((nesting.budget or 0 for nesting in measured), default=0)
    return max(highest, min(budget, _HEADROOM * highest), 1)


def bar(nesting: NestingRecord, width: int) -> Html:
    """The peak as a bar in its parts, with marks for the expected peak and the budget, and the figures in words."""
    peak, budget, split = nesting.peak, nesting.budget, nesting.split
    if peak is None:
        return tag("span", "not measured", class_="bar-cell none")

    def percent(size: int) -> str:
        return f"{max(0.0, min(100.0, 100 * size / width)):.2f}%"

    passing = {"temporaries": split.temporaries, "constants": split.constants} if split else {}
    parts = {"resident": peak - sum(passing.values()), **passing}
    marks = {"expected-mark": nesting.expected_peak, "budget-mark": budget}
    drawn = [tag("i", class_=name, style=f"width:{percent(size)}") for name, size in parts.items()]
    drawn += [tag("b", class_=name, style=f"left:{percent(at)}") for name, at in marks.items() if at is not None]
    over = budget is not None and peak > budget
    bound = "" if budget is None else f" {'over' if over else 'of'} {format_bytes(budget)}"
    figures = tag("span", f"{format_bytes(peak)}{bound}", class_="figures over" if over else "figures")
    return tag("span", tag("span", drawn, class_="bar", aria_hidden="true"), figures, class_="bar-cell")


def cause(nesting: NestingRecord, *, unfolded: bool = True) -> Html:
    """Why the verdict is what it is, what was measured, how to run it again, and the program that shows the same."""
    parts: list[Html | str] = [_wrong(nesting.word, nesting.reason)] if nesting.reason else []
    for violation in nesting.violations:
        hint = [("hint", violation.hint, "advice")] if violation.hint else []
        # Rows without a label at the start go on with the sentence: what the same invariant says of a target.
        sentences = [text for _, text in takewhile(lambda row: not row[0], violation.details)]
        details = [(label, text, "") for label, text in violation.details[len(sentences) :]]
        wrong = _wrong(violation.invariant, "\n".join([violation.summary, *sentences]))
        parts += [wrong, _list([*hint, *details])]
    parts.append(_list(_rows(nesting)))
    parts += _pictures(nesting)
    if nesting.program_text:
        text = tag("pre", nesting.program_text, tabindex=0)
        parts.append(
            tag("details", tag("summary", f"Program: {nesting.program}"), text, class_="program", open=unfolded)
        )
    return joined(parts)


def _pictures(nesting: NestingRecord) -> Iterator[Html]:
    """The pictures of its memory: on the CPU, and on each target that it was compiled for."""
    if nesting.picture and not nesting.is_about_tracers:
        yield _picture("Memory", nesting.picture.svg(nesting.budget))
    for on in report.worst_of_targets(nesting.targets):
        if on.picture:
            yield _picture(f"Memory on {on.target}", on.picture.svg(on.limit, "a program may use"))


def _picture(title: str, svg: str) -> Html:
    return tag("figure", tag("figcaption", title), Html(svg), class_="picture")


def _wrong(label: str, text: str) -> Html:
    return tag("p", tag("b", label), " ", tag("span", text), class_="wrong")


def _list(rows: Iterable[tuple[str, str, str]]) -> Html | str:
    """The rows (label, text, style) of a cause."""
    made = [
        (tag("dt", label, class_=style), tag("dd", tag("code", text) if style == "command" else text, class_=style))
        for label, text, style in rows
    ]
    return tag("dl", made) if made else ""


def _rows(nesting: NestingRecord) -> Iterator[tuple[str, str, str]]:
    """(label, text, style) of what is no part of a violation."""
    labels = {label for violation in nesting.violations for label, _ in violation.details}
    yield from ((label, text, "") for label, text in nesting.explained)
    yield from (("note", note, "") for note in nesting.notes)
    yield from (("expected", f"{key}, to fail", "") for key in nesting.expected_failures)
    if not nesting.is_about_tracers:
        yield from ((label, text, "") for label, text in _memory_rows(nesting, labels))
    if nesting.program and not nesting.program_text:
        yield "program", nesting.program, "command"
    yield "replay", nesting.replay, "command"


def _memory_rows(nesting: NestingRecord, labels: set[str]) -> Iterator[Row]:
    """The peak in its parts, the expected peak, where the bytes are, and the targets, but for the rows that a violation has."""
    cpu = " on the CPU" if nesting.targets else ""
    if nesting.split and nesting.peak is not None and "peak" not in labels:
        sizes = {name: size for name, size in nesting.split.parts.items() if size}
        yield f"peak{cpu}", " = ".join(filter(None, [format_bytes(nesting.peak), formula(sizes)]))
    if nesting.expected_peak is not None and "expected" not in labels:
        yield f"expected{cpu}", format_bytes(nesting.expected_peak)
    if not {"line", "un-nested"} & labels:
        yield from nesting.story
    targets = report.worst_of_targets(nesting.targets)
    yield from (each for each in target_rows.rows(targets) if each[0] not in labels)
    yield from (row for on in targets for row in target_rows.program(on))


# --- elements: text gets into one, or into an attribute, through `tag` alone, which escapes it ----------------------------

VOID = ("input", "wbr")
"""Elements that have no content, and no end."""


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
