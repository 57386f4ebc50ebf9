"""The invariants: one file each, whose ``judge`` takes a case and gives a judgement. Nothing here runs the call, or knows pytest.

An invariant is a row of `core.catalogue.INVARIANT_ROWS` and a file of that name; those of the user's own are all judged by `own`.
"""

from __future__ import annotations

import importlib
from dataclasses import replace

from pytest_nnxcheck.core.catalogue import InvariantRow, rows_of, severity
from pytest_nnxcheck.invariants import own
from pytest_nnxcheck.invariants.case import Case, Judgement

__all__ = ["Case", "Judgement", "judge"]


def judge(case: Case) -> Judgement:
    """What the invariants that are asked for say of a case; of what broke the most serious first."""
    judgement = Judgement()
    for row in rows_of(case.settings.invariants):
        if not can_judge(row, case, judgement):
            continue
        if row.function is not None:
            judgement += own.judge(case, row)
        else:
            judgement += importlib.import_module(f"{__name__}.{row.name}").judge(case)
    return replace(
        judgement, violations=tuple(sorted(judgement.violations, key=lambda broken: severity(broken.invariant)))
    )


def can_judge(row: InvariantRow, case: Case, judgement: Judgement) -> bool:
    """Whether a case shows what an invariant is about.

    Values are compared where the call ended, left no tracers, and broke nothing else; an invariant of the user's own is asked where it ended
    and left none, whatever else broke.
    """
    observation = case.observation
    ended = observation.error is None and not observation.leaks
    if row.function is not None:
        measured = observation.memory is not None or not row.compiled
        return ended and measured and not (row.runs and observation.abstract)
    return ended and not judgement.violations if row.values else True
