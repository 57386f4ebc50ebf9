"""A second call with arguments of the same types is not traced again, nor is a jit inside it, so that nothing is compiled for it."""

from __future__ import annotations

from pytest_nnxcheck.core.notes import Fact
from pytest_nnxcheck.core.outcome import MISSING
from pytest_nnxcheck.invariants.case import Case, Judgement


def judge(case: Case) -> Judgement:
    """Judge state that gets another type, so that the next call is traced again, and the jits inside that are traced in each call."""
    if any(MISSING in (moved.before, moved.after) for moved in case.second_call):
        return Judgement.of("recompilation", case.inner_jits, [Fact("adds state", ("recompilation",))])
    return Judgement.of("recompilation", (*case.second_call, *case.inner_jits))
