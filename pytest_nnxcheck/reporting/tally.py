"""Outcomes, counted: kinds of verdicts, the worst of several, the worst peak, whether anything was checked."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

from pytest_nnxcheck.core.catalogue import REMAT
from pytest_nnxcheck.core.nesting import Nesting
from pytest_nnxcheck.core.outcome import Outcome
from pytest_nnxcheck.core.text import format_bytes

VERDICTS = {
    "violated": "violated",
    "failed": "failed",
    "held": "held",
    "expected": "expected to fail",
    "rejected": "not supported by flax",
    "unfit": "left out",
}
"""Kinds of verdicts as people read them, the worst first."""


def kinds(outcomes: Iterable[Outcome]) -> Counter[str]:
    """How many of each verdict; what was rejected because a layer cannot take the call counts as ``unfit``."""
    return Counter("unfit" if outcome.unfit else outcome.verdict for outcome in outcomes)


def word(outcome: Outcome) -> str:
    """The verdict as people read it."""
    return next(VERDICTS[kind] for kind in kinds([outcome]))


def counts(of: Mapping[str, int]) -> str:
    """``1 violated, 31 held``: the verdicts that occur, the worst first."""
    return ", ".join(f"{of[verdict]} {word}" for verdict, word in VERDICTS.items() if of.get(verdict))


def nothing_checked(outcomes: Iterable[Outcome]) -> bool:
    """Whether flax rejected every nesting that is one, in any of the modes."""
    nested = [outcome for outcome in outcomes if outcome.nesting.layers]
    checked = {outcome.nesting.mode for outcome in nested if outcome.verdict != "rejected"}
    return any(outcome.nesting.mode not in checked for outcome in nested)


IDLE = 0.99
"""A remat that leaves this part of the peak or more saves nothing: the compiler itself rounds and reorders by less."""


def idle_remat(outcomes: Iterable[Outcome]) -> str:
    """The smallest nesting whose remat inside a grad costs time and saves no memory; empty if there is none."""
    peaks = {outcome.nesting: outcome.peak for outcome in outcomes if outcome.peak is not None}
    compared = [
        (nesting, peak, peaks[bare]) for nesting, peak in peaks.items() for bare in _bare(nesting) if bare in peaks
    ]
    idle = sorted((each for each in compared if each[1] >= IDLE * each[2]), key=lambda each: each[0].plainness)
    if not idle:
        return ""
    nesting, peak, without = idle[0]
    figures = f"{format_bytes(peak)} with it, {format_bytes(without)} without ({nesting})"
    others = f"; it does in {len(compared) - len(idle)} of {len(compared)} nestings" if compared[len(idle) :] else ""
    return f"remat does not lower the peak under grad: {figures}{others}"


def _bare(nesting: Nesting) -> Iterator[Nesting]:
    """The nesting without one of the remats inside its grad."""
    under_grad = False
    for number, layer in enumerate(nesting.layers):
        if under_grad and layer.transform == REMAT:
            yield replace(nesting, layers=nesting.layers[:number] + nesting.layers[number + 1 :])
        under_grad = under_grad or layer.row.pair == "gradients"


def worst_peak(outcomes: Iterable[Outcome]) -> Outcome | None:
    """The outcome whose peak is the largest part of its budget, or just the largest."""
    known = [outcome for outcome in outcomes if outcome.peak is not None]
    return max(known, key=lambda o: ((o.peak or 0) / (o.budget or float("inf")), o.peak or 0), default=None)


_RANK = ("held", "rejected", "expected", "failed", "violated")


def worse(known: Outcome, new: Outcome) -> Outcome:
    worst = max(known, new, key=lambda outcome: _RANK.index(outcome.verdict))
    measured = worst_peak([known, new]) or worst
    notes = tuple(dict.fromkeys([*known.notes, *new.notes]))
    keys = tuple(dict.fromkeys([*known.expected, *new.expected]))
    # The evidence of a violation is what the message tells of.
    shown = worst.evidence if worst.violations else measured.evidence
    return replace(worst, peak=measured.peak, budget=measured.budget, notes=notes, expected=keys, evidence=shown)
