"""Cures of a failure of memory that the plugin can apply: the nesting runs once more with each, until one helps.

The hint of the message has both peaks then; one that was tried and did not help is left out. A cure that needs an edit of the user's source is not tried.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import NamedTuple

from pytest_nnxcheck.compat import graph
from pytest_nnxcheck.core.catalogue import REMAT
from pytest_nnxcheck.core.outcome import FindingOnTarget, Outcome, Violation
from pytest_nnxcheck.core.peak import PeakCause
from pytest_nnxcheck.core.settings import Settings
from pytest_nnxcheck.engine.rematted import under_remat
from pytest_nnxcheck.invariants.memory import (
    DONATE,
    REMAT_LAYERS,
    cause_of,
    cured_otherwise,
    layers_of_gradient,
    tried,
)

TryOut = Callable[[Settings], Outcome | None]
"""Runs the nesting that failed with other settings; `None` where the test body raised before the call."""

APPLIED: dict[PeakCause, Callable[[], AbstractContextManager[Callable[[], bool]]]] = {
    "scan writes back, remat": graph.remat_without_updates
}
"""The cures of a cause that the plugin applies while the body runs: each gives a function that says whether the body used it."""

LOWER = 0.05
"""The share of a peak that a cure has to save where the memory breaks the rule with it too."""


class Hint(NamedTuple):
    """A hint, and whether the memory keeps the rule with it."""

    text: str = ""
    enough: bool = False


def measured(outcome: Outcome, settings: Settings, try_out: TryOut) -> Outcome:
    """The outcome whose hint on memory was tried: with both peaks, or without the hint where it did not help. Further cures are tried until one is enough."""
    broken = next((violation for violation in outcome.violations if violation.invariant == "memory"), None)
    if broken is None:
        return outcome
    hints = [of_cause(outcome, broken, settings, try_out)]
    if not hints[0].enough:
        hints.append(donation(outcome, settings, try_out))
    if not hints[-1].enough and (layers := layers_of_gradient(broken.findings)) is not None:
        hints.append(remat(outcome, settings, try_out, layers))
        if hints[-1].text and not cause_of(broken.findings):
            del hints[0]  # the general one, which says to put layers under a remat as well
    first, *others = [*(hint.text for hint in hints if hint.text), ""]
    violations = tuple(replace(v, hint=first) if v is broken else v for v in outcome.violations)
    rows = [("hint", other) for other in others if other]
    return replace(outcome, violations=violations, explained=(*outcome.explained, *rows))


def of_cause(outcome: Outcome, broken: Violation, settings: Settings, try_out: TryOut) -> Hint:
    """The hint for the cause of a failure: tried where the plugin can apply the cure, and where that does not help the next best one."""
    apply = APPLIED.get(cause_of(broken.findings))
    # A generated layer that is a remat is none of the user's, and stays as it is.
    if apply is None or any(layer.transform == REMAT for layer in outcome.nesting.layers):
        return Hint(broken.hint)
    with apply() as used:
        cured = try_out(settings)
    if not used():
        return Hint(broken.hint)
    found = saved(outcome, cured, broken.hint)
    return found if found.text else Hint(cured_otherwise(broken.findings))


def donation(outcome: Outcome, settings: Settings, try_out: TryOut) -> Hint:
    """The hint to donate more of the arguments, where that helps."""
    names = outcome.evidence.reusable if outcome.evidence else ()
    roots = dict.fromkeys(re.split(r"[.\[]", name)[0] for name in names)
    more = [",".join(["state", *roots])] if roots and settings.donate == "state" else []
    for donate in ["state", *more] if settings.donate == "none" else more:
        named = ", ".join(donate.split(",")[1:]) or "the state"
        cured = try_out(replace(settings, donate=donate))
        if (found := saved(outcome, cured, DONATE.format(names=named, donate=donate))).text:
            return found
    return Hint()


def remat(outcome: Outcome, settings: Settings, try_out: TryOut, layers: Sequence[type]) -> Hint:
    """The hint to put the layers under a remat, where that helps: the gradient computes again what it would read from memory."""
    with under_remat(layers) as placed:
        cured = try_out(settings)
    if not placed:
        return Hint()
    written = f"nnx.remat(f{', graph_updates=False' if graph.remat_updates_can_be_off() else ''})"
    return saved(outcome, cured, REMAT_LAYERS.format(layers=" and ".join(placed), remat=written))


def saved(before: Outcome, after: Outcome | None, hint: str) -> Hint:
    """The hint with the bytes that its change saves; empty where it does not help, or where something else breaks with it.

    It helps where the memory keeps the rule with it, or where the peak is clearly lower.
    """
    if after is None or after.verdict not in ("held", "violated"):
        return Hint()
    broke, breaks = ({violation.invariant for violation in each.violations} for each in (before, after))
    old, new = peak_of(before, before), peak_of(after, before)
    if old is None or new is None or not breaks <= broke:
        return Hint()
    enough = "memory" not in breaks
    if new >= old or not (enough or new <= (1 - LOWER) * old):
        return Hint()
    return Hint(hint + tried(old, new, enough=enough), enough)


def peak_of(outcome: Outcome, broken: Outcome) -> int | None:
    """The peak of an outcome in the program that broke: on the CPU, or on the target that the first finding is about; `None` where it is not known."""
    findings = (finding for each in broken.violations if each.invariant == "memory" for finding in each.findings)
    first = next(findings, None)
    if not isinstance(first, FindingOnTarget):
        return outcome.peak
    targets = outcome.evidence.targets if outcome.evidence else ()
    return next((on.peak for on in targets if on.target == first.on.target), None)
