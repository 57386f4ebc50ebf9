"""Counts and worst cases of outcomes: verdicts, peaks, programs on targets, and the verdict on a mode of flax."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace

from pytest_nnxcheck.core.catalogue import JIT
from pytest_nnxcheck.core.facts import Evidence
from pytest_nnxcheck.core.nesting import Nesting
from pytest_nnxcheck.core.outcome import Outcome, Verdict
from pytest_nnxcheck.core.peak import OnTarget

VERDICTS = {
    "violated": "failed",
    "failed": "raised",
    "held": "passed",
    "expected": "expected to fail",
    "rejected": "not supported by flax",
    "unfit": "left out",
}
"""Kinds of verdicts as people read them, the worst first."""


def kinds(outcomes: Iterable[Outcome]) -> Counter[str]:
    """Count the outcomes of each kind."""
    return Counter(kind(outcome.verdict, unfit=outcome.unfit) for outcome in outcomes)


def kind(verdict: str, *, unfit: bool) -> str:
    """The verdict; what was rejected because a layer cannot take the call counts as ``unfit``."""
    return "unfit" if unfit and verdict == "rejected" else verdict


def word(outcome: Outcome) -> str:
    """The verdict as people read it."""
    return VERDICTS[kind(outcome.verdict, unfit=outcome.unfit)]


def counts(of: Mapping[str, int]) -> str:
    """``1 failed, 31 passed``: the verdicts that occur, the worst first."""
    return ", ".join(f"{of[verdict]} {word}" for verdict, word in VERDICTS.items() if of.get(verdict))


def nothing_checked(outcomes: Iterable[Outcome]) -> bool:
    """True if in one of the modes flax rejected every nesting that has a layer."""
    nested = [outcome for outcome in outcomes if outcome.nesting.layers]
    checked = {outcome.nesting.mode for outcome in nested if outcome.verdict != "rejected"}
    return any(outcome.nesting.mode not in checked for outcome in nested)


def worst_peak(outcomes: Iterable[Outcome]) -> Outcome | None:
    """The outcome whose peak is the largest part of its budget, or just the largest."""
    measured = [outcome for outcome in outcomes if outcome.peak is not None]
    return max(measured, key=lambda outcome: height(outcome.peak, outcome.budget), default=None)


def height(peak: int | None, budget: int | None) -> tuple[float, int]:
    """Sort key of a peak: the part of its budget, then its bytes."""
    return (peak or 0) / (budget or math.inf), peak or 0


def worst_on_targets(outcomes: Iterable[Outcome]) -> tuple[OnTarget, ...]:
    """The worst program on each target: one that does not fit, then that with the largest part of the bytes that it may use."""
    return worst_of_targets(on for outcome in outcomes if outcome.evidence for on in outcome.evidence.targets)


def worst_of_targets(targets: Iterable[OnTarget]) -> tuple[OnTarget, ...]:
    """The worst program on each target, with the seconds of all programs there."""
    programs: dict[str, list[OnTarget]] = {}
    for on in targets:
        programs.setdefault(on.target, []).append(on)
    return tuple(replace(max(of, key=_badness), seconds=sum(on.seconds for on in of)) for of in programs.values())


def _badness(on: OnTarget) -> tuple[bool, bool, float]:
    """Sort key: programs that do not fit last, before them those that were compiled, by the part of the limit that they use."""
    return not on.fits, not on.left_out, (on.peak or 0) / (on.limit or math.inf)


_RANK = ("held", "rejected", "expected", "failed", "violated")
"""Verdicts of several calls under one nesting, the worst last."""


def record(outcomes: dict[Nesting, Outcome], outcome: Outcome) -> None:
    """Keep the worst verdict of a nesting, and its highest peak."""
    earlier = outcomes.get(outcome.nesting)
    outcomes[outcome.nesting] = outcome if earlier is None else worse(earlier, outcome)


def worse(old: Outcome, new: Outcome) -> Outcome:
    """The outcome of two calls under one nesting: the worse verdict, the higher peak, the notes of both."""
    worst = max(old, new, key=lambda outcome: _RANK.index(outcome.verdict))
    measured = worst_peak([old, new]) or worst
    notes = tuple(dict.fromkeys([*old.notes, *new.notes]))
    keys = tuple(dict.fromkeys([*old.expected, *new.expected]))
    # The evidence of a violation is what the message tells of.
    shown = worst.evidence if worst.violations else measured.evidence
    if targets := worst_on_targets([old, new]):
        shown = replace(shown or Evidence(), targets=targets)
    seconds = old.seconds + new.seconds
    return replace(
        worst, peak=measured.peak, budget=measured.budget, notes=notes, expected=keys, evidence=shown, seconds=seconds
    )


# --- by mode of flax


def by_mode(outcomes: Iterable[Outcome]) -> dict[str, list[Outcome]]:
    """The outcomes of each mode, in the order in which they ran."""
    outcomes_of: dict[str, list[Outcome]] = {}
    for outcome in outcomes:
        outcomes_of.setdefault(outcome.nesting.mode, []).append(outcome)
    return outcomes_of


def of_mode(outcomes: list[Outcome]) -> Verdict:
    """The verdict on a mode: the worst one; ``rejected`` where flax does not take the call."""
    bad: tuple[Verdict, ...] = ("violated", "failed")
    worst = next((word for word in bad if any(outcome.verdict == word for outcome in outcomes)), None)
    return worst or ("rejected" if rejection(outcomes) else "held")


def closes_mode(outcome: Outcome) -> bool:
    """True if flax refused, for its mode, the call itself or its plain jit: no nesting can run in that mode."""
    layers = [(layer.transform, layer.captures) for layer in outcome.nesting.layers]
    return is_refused_by_mode(outcome) and layers in ([], [(JIT, False)])


def is_refused_by_mode(outcome: Outcome) -> bool:
    """True if flax refused the nesting because its mode cannot do it."""
    return outcome.by_mode and outcome.verdict == "rejected"


def rejection(outcomes: list[Outcome]) -> str:
    """Why flax does not take the call in a mode; empty if it does. What a closure keeps from flax proves nothing."""
    without_closure = [o for o in outcomes if o.nesting.layers and not o.nesting.captures]
    refused = [outcome for outcome in outcomes if is_refused_by_mode(outcome)]
    final = [outcome for outcome in refused if closes_mode(outcome)]
    if final or (refused and all(outcome.verdict == "rejected" for outcome in without_closure)):
        return (final or refused)[0].reason
    return ""
