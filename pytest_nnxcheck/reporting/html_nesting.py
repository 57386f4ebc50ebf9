"""One nesting on the page: its square in the matrix, its row with the memory bar, and its cause.

Nothing here imports pytest, hypothesis, jax or flax.
"""

from __future__ import annotations

import html
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from pytest_nnxcheck.core.text import format_bytes
from pytest_nnxcheck.reporting.records import OfNesting

SYMBOLS = {"held": "✓", "violated": "✗", "failed": "!", "expected": "~", "rejected": "⊘", "unfit": "·"}
"""A sign for each verdict, beside its colour; ``unfit`` is what was rejected because a layer cannot take the call."""

BAD = ("violated", "failed")
_HEADROOM = 4


def esc(text: object) -> str:
    """Text as HTML, in an element or a quoted attribute."""
    return html.escape(str(text))


def kind(nesting: OfNesting) -> str:
    """The verdict as a class of the style sheet."""
    return "unfit" if nesting["word"] == "left out" else nesting["verdict"]


@dataclass(frozen=True, slots=True)
class Scale:
    """What the bars of one test are drawn against: bytes at their right end."""

    top: int

    @classmethod
    def of(cls, nestings: Iterable[OfNesting]) -> Scale:
        """Of the largest peak or expected peak; a budget far above both does not squeeze the bars."""
        known = [nesting for nesting in nestings if nesting["peak"] is not None]
        peaks = [max(nesting["peak"] or 0, nesting["expected_peak"] or 0) for nesting in known]
        budgets = [nesting["budget"] or 0 for nesting in known]
        highest = max(peaks, default=0)
        return cls(max(highest, min(max(budgets, default=0), _HEADROOM * highest), 1))

    def percent(self, size: int) -> str:
        """The part of the bar that so many bytes take."""
        return f"{max(0.0, min(100.0, 100 * size / self.top)):.2f}%"


def cell(nesting: OfNesting, target: str) -> str:
    """A square of the matrix, which leads to the cause."""
    words = [nesting["word"], *(violation["invariant"] for violation in nesting["violations"])]
    label = esc(f"{nesting['nesting']}: {', '.join(words)}")
    name = kind(nesting)
    return f'<a class="cell {name}" href="#{target}" title="{label}" aria-label="{label}">{SYMBOLS[name]}</a>'


def row(nesting: OfNesting, target: str, scale: Scale) -> str:
    """One line of the list, which opens to the cause."""
    name = kind(nesting)
    line = (
        f'<span class="cell {name}" aria-hidden="true">{SYMBOLS[name]}</span><span class="name"><code>{esc(nesting["nesting"])}</code>'
        f' <span class="word">{esc(nesting["word"])}</span></span>{bar(nesting, scale)}'
        f'<span class="time">{nesting["seconds"]:.2f} s</span>'
    )
    return f'<details class="nesting {name}"><summary>{line}</summary><div class="cause" id="{target}">{cause(nesting)}</div></details>'


def bar(nesting: OfNesting, scale: Scale) -> str:
    """The peak as a bar in its parts, with marks for the expected peak and the budget, and the figures in words."""
    peak, budget = nesting["peak"], nesting["budget"]
    if peak is None:
        return '<span class="bar-cell none">not measured</span>'
    parts = "".join(f'<i class="{name}" style="width:{scale.percent(size)}"></i>' for name, size in _parts(nesting))
    marks = [("expected-mark", nesting["expected_peak"]), ("budget-mark", budget)]
    drawn = "".join(f'<b class="{name}" style="left:{scale.percent(at)}"></b>' for name, at in marks if at is not None)
    over = budget is not None and peak > budget
    bound = "" if budget is None else f" {'over' if over else 'of'} {format_bytes(budget)}"
    figures = f'<span class="figures{" over" if over else ""}">{format_bytes(peak)}{bound}</span>'
    return f'<span class="bar-cell"><span class="bar" aria-hidden="true">{parts}{drawn}</span>{figures}</span>'


def _parts(nesting: OfNesting) -> list[tuple[str, int]]:
    """The peak in three: what stays, what is there for a while, what was captured."""
    split, peak = nesting["split"], nesting["peak"] or 0
    if split is None:
        return [("resident", peak)]
    resident = peak - split["temporaries"] - split["constants"]
    return [("resident", resident), ("temporaries", split["temporaries"]), ("constants", split["constants"])]


def cause(nesting: OfNesting, *, unfolded: bool = True) -> str:
    """Why the verdict is what it is, what was measured, how to run it again, and the program that shows the same."""
    rows = "".join(
        f'<dt class="{style}">{esc(label)}</dt><dd class="{style}">{esc(text)}</dd>'
        for label, text, style in _rows(nesting)
    )
    program = ""
    if nesting["program_text"]:
        name = esc(nesting["program"])
        state = " open" if unfolded else ""
        program = f'<details class="program"{state}><summary>Program: {name}</summary><pre tabindex="0">{esc(nesting["program_text"])}</pre></details>'
    return f"<dl>{rows}</dl>{program}"


def _rows(nesting: OfNesting) -> Iterator[tuple[str, str, str]]:
    """(label, text, style) of the list in a cause."""
    told = set()
    if nesting["reason"]:
        yield nesting["word"], nesting["reason"], "reason"
    for violation in nesting["violations"]:
        yield violation["invariant"], violation["summary"], "reason"
        for label, text in violation["details"]:
            told.add(label)
            yield label, text, ""
        if violation["hint"]:
            yield "hint", violation["hint"], "advice"
    for label, text in nesting["explained"]:
        yield label, text, ""
    yield from (("note", note, "") for note in nesting["notes"])
    yield from (("expected", f"{key}, to fail", "") for key in nesting["expected_failures"])
    yield from _measured(nesting, told)
    if nesting["program"] and not nesting["program_text"]:
        yield "program", nesting["program"], "command"
    yield "replay", nesting["replay"], "command"


def _measured(nesting: OfNesting, told: set[str]) -> Iterator[tuple[str, str, str]]:
    if nesting["split"] and nesting["peak"] is not None and "peak" not in told:
        yield "peak", formula(nesting["peak"], nesting["split"]), ""
    if nesting["expected_peak"] is not None and "expected" not in told:
        yield "expected", format_bytes(nesting["expected_peak"]), ""
    if not {"line", "un-nested"} & told:
        yield from ((label, text, "") for label, text in nesting["story"])


def formula(peak: int, split: Mapping[str, int]) -> str:
    """``1.5 MiB = arguments 1.0 MiB + ...``."""
    added = " + ".join(f"{name} {format_bytes(size)}" for name, size in split.items() if name != "aliased" and size)
    aliased = f" - aliased {format_bytes(split['aliased'])}" if split["aliased"] else ""
    return f"{format_bytes(peak)} = {added}{aliased}" if added else format_bytes(peak)
