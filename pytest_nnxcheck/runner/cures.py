"""Cures of a failure of memory that the plugin can apply: the nesting runs once more with each, until one helps.

The hint of the message has both peaks then; one that was tried and did not help is left out. A cure that needs an edit of the user's source is not tried.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import replace

from pytest_nnxcheck.compat import graph
from pytest_nnxcheck.core.catalogue import REMAT
from pytest_nnxcheck.core.outcome import FindingOnTarget, Outcome
from pytest_nnxcheck.core.peak import PeakCause
from pytest_nnxcheck.core.settings import Settings
from pytest_nnxcheck.invariants.memory import DONATE, cause_of, cured_otherwise, tried

TryOut = Callable[[Settings], Outcome | None]
"""Runs the nesting that failed with other settings; `None` where the test body raised before the call."""

APPLIED: dict[PeakCause, Callable[[], AbstractContextManager[Callable[[], bool]]]] = {
    "scan writes back, remat": graph.remat_without_updates
}
"""The cures of a cause that the plugin applies while the body runs: each gives a function that says whether the body used it."""

LOWER = 0.05
"""The share of a peak that a cure has to save where the memory breaks the rule with it too."""


def measured(outcome: Outcome, settings: Settings, try_out: TryOut) -> Outcome:
    """The outcome whose hint on memory was tried: with both peaks, or without the hint where it did not help. Donation is tried where no hint helped."""
    broken = next((violation for violation in outcome.violations if violation.invariant == "memory"), None)
    if broken is None:
        return outcome
    hint, helped = broken.hint, ""
    # A generated layer that is a remat is none of the user's, and stays as it is.
    ours = any(layer.transform == REMAT for layer in outcome.nesting.layers)
    if not ours and (apply := APPLIED.get(cause_of(broken.findings))):
        with apply() as used:
            cured = try_out(settings)
        if used():
            helped = saved(outcome, cured)
            hint = f"{hint}{helped}" if helped else cured_otherwise(broken.findings)
    hints = [hint, *(() if helped else donations(outcome, settings, try_out))]
    first, *others = [*filter(None, hints), ""]
    violations = tuple(replace(v, hint=first) if v is broken else v for v in outcome.violations)
    rows = [("hint", other) for other in others if other]
    return replace(outcome, violations=violations, explained=(*outcome.explained, *rows))


def donations(outcome: Outcome, settings: Settings, try_out: TryOut) -> Iterator[str]:
    """The hint to donate more of the arguments, where that helps."""
    names = outcome.evidence.reusable if outcome.evidence else ()
    roots = dict.fromkeys(re.split(r"[.\[]", name)[0] for name in names)
    more = [",".join(["state", *roots])] if roots and settings.donate == "state" else []
    for donate in ["state", *more] if settings.donate == "none" else more:
        if helped := saved(outcome, try_out(replace(settings, donate=donate))):
            named = ", ".join(donate.split(",")[1:]) or "the state"
            yield DONATE.format(names=named, donate=donate) + helped
            return


def saved(before: Outcome, after: Outcome | None) -> str:
    """The words on what a cure saves; empty where it does not help, or where something else breaks with it.

    It helps where the memory keeps the rule with it, or where the peak is clearly lower.
    """
    if after is None or after.verdict not in ("held", "violated"):
        return ""
    broke, breaks = ({violation.invariant for violation in each.violations} for each in (before, after))
    old, new = peak_of(before, before), peak_of(after, before)
    if old is None or new is None or not breaks <= broke:
        return ""
    holds = "memory" not in breaks
    if new >= old or not (holds or new <= (1 - LOWER) * old):
        return ""
    return tried(old, new, enough=holds)


def peak_of(outcome: Outcome, broken: Outcome) -> int | None:
    """The peak of an outcome in the program that broke: on the CPU, or on the target that the first finding is about; `None` where it is not known."""
    findings = (finding for each in broken.violations if each.invariant == "memory" for finding in each.findings)
    first = next(findings, None)
    if not isinstance(first, FindingOnTarget):
        return outcome.peak
    targets = outcome.evidence.targets if outcome.evidence else ()
    return next((on.peak for on in targets if on.target == first.on.target), None)
