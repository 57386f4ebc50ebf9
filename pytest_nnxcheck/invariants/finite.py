"""No NaN and no infinity in state or outputs where the same calls without the nesting have none."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from pytest_nnxcheck.compat.arrays import describe
from pytest_nnxcheck.core.notes import Fact
from pytest_nnxcheck.core.outcome import NotFinite, Violation
from pytest_nnxcheck.core.text import first_line
from pytest_nnxcheck.invariants.case import Case, Judgement
from pytest_nnxcheck.invariants.parity import by_name, inexact, numbers
from pytest_nnxcheck.subject.state_facts import UNCHANGED, Effect


def judge(case: Case) -> Judgement:
    """What became NaN or infinite under the nesting; nothing is there to compare the un-nested call with."""
    effects = case.effects() if case.effects is not None else None
    if effects is None:
        return Judgement()
    wanted, got = effects
    if wanted.error is not None:
        return Judgement(notes=(Fact("raises un-nested", ("finite",), first_line(wanted.error)),))
    findings = (*of_state(wanted, got), *of_outputs(wanted, got))
    return Judgement((Violation("finite", findings=findings),) if findings else ())


def of_state(wanted: Effect, got: Effect) -> Iterator[NotFinite]:
    """The leaves that the nesting left, against those that the same calls left."""
    for path, leaf in got.after.leaves.items():
        other = wanted.after.leaves.get(path)
        if other is not None and other.value is UNCHANGED:
            other = got.before.leaves.get(path)
        yield from worse(path, leaf.value, None if other is None else other.value)


def of_outputs(wanted: Effect, got: Effect) -> Iterator[NotFinite]:
    """The outputs of all elements of the axes; of the un-nested output alone where the two differ in structure."""
    names = [[*by_name(effect, whole=False)] for effect in (wanted, got)]
    have, want = (by_name(effect, whole=names[0] == names[1]) for effect in (got, wanted))
    for name, arrays in have.items():
        others = want.get(name, [])
        for number, array in enumerate(arrays):
            yield from worse(name, array, others[number] if number < len(others) else None)


def worse(path: str, have: Any, want: Any) -> Iterator[NotFinite]:
    """What is not finite in an array, and finite in the other one, where that has its shape."""
    if not inexact(have) or (hasattr(have, "is_deleted") and have.is_deleted()):
        return
    wrong = ~np.isfinite(numbers(have))
    if want is not None and np.shape(want) == wrong.shape and inexact(want):
        wrong &= np.isfinite(numbers(want))
    if wrong.any():
        yield NotFinite(path, type=describe(have), wrong=int(np.count_nonzero(wrong)), elements=wrong.size)
