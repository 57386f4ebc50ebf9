"""The invariants: one file each, whose ``judge`` takes a case and gives a judgement. Nothing here runs the call, or knows pytest.

An invariant is a row of `core.catalogue.INVARIANT_ROWS` and a file of that name.
"""

from __future__ import annotations

import importlib

from pytest_nnxcheck.core.catalogue import INVARIANT_ROWS, Invariant
from pytest_nnxcheck.invariants.case import Case, Judgement

__all__ = ["Case", "Judgement", "judge"]


def judge(case: Case) -> Judgement:
    """What the invariants that are asked for say of a case, in their order."""
    judgement = Judgement()
    for row in INVARIANT_ROWS:
        if row.name in case.settings.invariants and can_judge(row, case, judgement):
            judgement += importlib.import_module(f"{__name__}.{row.name}").judge(case)
    return judgement


def can_judge(row: Invariant, case: Case, judgement: Judgement) -> bool:
    """Whether a case shows what an invariant is about; values are compared where the call ended, left no tracers, and broke nothing else."""
    observation = case.observation
    ended = observation.error is None and not observation.leaks and not judgement.violations
    return ended if row.values else True
