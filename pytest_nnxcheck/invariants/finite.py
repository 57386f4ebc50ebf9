"""No NaN and no infinity in state or outputs where the same calls without the nesting have none."""

from __future__ import annotations

from pytest_nnxcheck.core.notes import Fact
from pytest_nnxcheck.invariants.case import Case, Judgement


def judge(case: Case) -> Judgement:
    """Judge the values that became NaN or infinite under the nesting; the un-nested call has nothing to be compared with."""
    if isinstance(case.not_finite, str):
        return Judgement(notes=(Fact("raises un-nested", ("finite",), case.not_finite),))
    return Judgement.of("finite", case.not_finite)
