"""One nesting on the page: its sign, the bar of its memory, its cause."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import takewhile

from pytest_nnxcheck.core.text import format_bytes
from pytest_nnxcheck.reporting import records, tally, target_rows
from pytest_nnxcheck.reporting.memory_breakdown import formula
from pytest_nnxcheck.reporting.pages.html_elements import Html, joined, tag
from pytest_nnxcheck.reporting.records import Record

SYMBOLS = {"held": "✓", "violated": "✗", "failed": "!", "expected": "~", "rejected": "⊘", "unfit": "·"}
"""A sign for each verdict, beside its colour; ``unfit`` is what was rejected because a layer cannot take the call."""

_HEADROOM = 4
"""The greatest scale of the bars, as a multiple of the largest peak: they show a budget up to there."""


def kind(nesting: Record) -> str:
    """The verdict as a class of the style sheet."""
    return tally.kind(nesting["verdict"], unfit=nesting["unfit"])


def sign(verdict: str) -> Html:
    return tag("span", SYMBOLS[verdict], class_=f"cell {verdict}", aria_hidden="true")


def row(nesting: Record, target: str, width: int) -> Html:
    """One line of the list, which opens to the cause."""
    word = tag("span", nesting["word"], class_="word")
    name = tag("span", tag("code", nesting["nesting"]), " ", word, class_="name")
    time = tag("span", f"{nesting['seconds']:.2f} s", class_="time")
    summary = tag("summary", sign(kind(nesting)), name, bar(nesting, width), time)
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
    parts: list[Html | str] = [_wrong(nesting["word"], nesting["reason"])] if nesting["reason"] else []
    for violation in nesting["violations"]:
        hint = [("hint", violation["hint"], "advice")] if violation["hint"] else []
        # Rows without a label at the start go on with the sentence: what the same invariant says of a target.
        sentences = [text for _, text in takewhile(lambda row: not row[0], violation["details"])]
        details = [(label, text, "") for label, text in violation["details"][len(sentences) :]]
        wrong = _wrong(violation["invariant"], "\n".join([violation["summary"], *sentences]))
        parts += [wrong, _list([*hint, *details])]
    parts.append(_list(_rows(nesting)))
    if nesting["program_text"]:
        text = tag("pre", nesting["program_text"], tabindex=0)
        summary = tag("summary", f"Program: {nesting['program']}")
        parts.append(tag("details", summary, text, class_="program", open=unfolded))
    return joined(parts)


def _wrong(label: str, text: str) -> Html:
    return tag("p", tag("b", label), " ", tag("span", text), class_="wrong")


def _list(rows: Iterable[tuple[str, str, str]]) -> Html | str:
    """The rows (label, text, style) of a cause."""
    made = [
        (
            tag("dt", label, class_=style),
            tag("dd", tag("code", text) if style == "command" else text, class_=style),
        )
        for label, text, style in rows
    ]
    return tag("dl", made) if made else ""


def is_about_tracers(nesting: Record) -> bool:
    """True if the nesting broke by leaked tracers alone: how much memory it takes explains nothing then."""
    return {violation["invariant"] for violation in nesting["violations"]} == {"tracers"}


def _rows(nesting: Record) -> Iterator[tuple[str, str, str]]:
    """(label, text, style) of what is no part of a violation."""
    labels = {label for violation in nesting["violations"] for label, _ in violation["details"]}
    yield from ((label, text, "") for label, text in nesting["explained"])
    yield from (("note", note, "") for note in nesting["notes"])
    yield from (("expected", f"{key}, to fail", "") for key in nesting["expected_failures"])
    if not is_about_tracers(nesting):
        yield from ((label, text, "") for label, text in _memory_rows(nesting, labels))
    if nesting["program"] and not nesting["program_text"]:
        yield "program", nesting["program"], "command"
    yield "replay", nesting["replay"], "command"


def _memory_rows(nesting: Record, labels: set[str]) -> Iterator[tuple[str, str]]:
    """The peak in its parts, the expected peak, where the bytes are, and the targets, but for the rows that a violation has."""
    cpu = " on the CPU" if nesting["targets"] else ""
    if nesting["split"] and nesting["peak"] is not None and "peak" not in labels:
        sizes = {name: size for name, size in nesting["split"].items() if size}
        yield f"peak{cpu}", " = ".join(filter(None, [format_bytes(nesting["peak"]), formula(sizes)]))
    if nesting["expected_peak"] is not None and "expected" not in labels:
        yield f"expected{cpu}", format_bytes(nesting["expected_peak"])
    if not {"line", "un-nested"} & labels:
        yield from nesting["story"]
    yield from (each for each in target_rows.rows(records.targets_of([nesting])) if each[0] not in labels)
