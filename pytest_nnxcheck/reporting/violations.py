"""The message of an outcome: the words of its findings, and what explains them and the figures below. No code reads them back."""

from __future__ import annotations

from dataclasses import replace

from pytest_nnxcheck.core.catalogue import TARGETED
from pytest_nnxcheck.core.facts import Evidence
from pytest_nnxcheck.core.notes import RaisedUnNested, texts
from pytest_nnxcheck.core.outcome import Outcome, Violation
from pytest_nnxcheck.core.text import format_bytes, some
from pytest_nnxcheck.reporting import left_out, memory_breakdown, target_rows


def worded(outcome: Outcome) -> Outcome:
    """The outcome with its sentences: of its violations, of why it cannot take the call, and its notes."""
    # The rows of targets come once: under the first invariant that their compilers judge.
    tells = next((violation for violation in outcome.violations if violation.invariant in TARGETED), None)
    violations = tuple(
        with_text(violation, outcome.evidence, on_targets=violation is tells) for violation in outcome.violations
    )
    reason = outcome.reason if outcome.misfit is None else left_out.of_misfit(outcome.misfit)
    return replace(outcome, violations=violations, reason=reason, notes=(*outcome.notes, *texts(outcome.facts)))


def with_text(violation: Violation, evidence: Evidence | None, *, on_targets: bool) -> Violation:
    """A violation with its sentences; one that found nothing has those that it was made with."""
    summary, rows, hint = violation.summary, violation.details, violation.hint
    of_peak = any(finding.OF_PEAK for finding in violation.findings)
    if violation.findings:
        first, *others = violation.findings
        summary, more, hint = first.words(others)
        rows = (*rows, *more)
    for cause, text in zip(violation.explained, texts(violation.explained), strict=True):
        rows = (*rows, ("raises" if isinstance(cause, RaisedUnNested | str) else "cause", text))
    if evidence is not None and on_targets:
        rows = (*rows, *target_rows.rows(evidence.targets))
    if evidence is not None and evidence.split is not None and of_peak:
        where = memory_breakdown.rows(evidence)
        if where and evidence.targets:
            peak = format_bytes(evidence.split.peak)
            rows = (*rows, ("on the CPU", f"peak {peak}; the rows below are of this program"))
        rows = (*rows, *where)
    return replace(violation, summary=summary, details=rows, hint=hint)


def place(violation: Violation, evidence: Evidence | None) -> str:
    """The leaves that break an invariant, or else what the first finding says in one line of a summary."""
    if paths := [finding.path for finding in violation.findings if finding.path]:
        return some(paths, 2)
    return violation.findings[0].brief(violation.summary, evidence) if violation.findings else violation.summary
