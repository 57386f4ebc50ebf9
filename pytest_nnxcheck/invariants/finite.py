"""No NaN and no infinity in state or outputs where the same calls without the nesting have none."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from pytest_nnxcheck.compat.arrays import describe
from pytest_nnxcheck.core.catalogue import InvariantRow
from pytest_nnxcheck.core.notes import Fact
from pytest_nnxcheck.core.outcome import Finding
from pytest_nnxcheck.core.text import Row, first_line
from pytest_nnxcheck.engine.ran import Ran
from pytest_nnxcheck.engine.reference import effect_against
from pytest_nnxcheck.values.effects import UNCHANGED, Effect, by_name, inexact, numbers

__tracebackhide__ = True  # pytest shows the frames of the user, not these

ROW = InvariantRow("finite", order=50, severity=60, values=True, runs=True)


def judge(ran: Ran) -> Iterator[Finding | Fact]:
    """Judge the values that became NaN or infinite under the nesting; the un-nested call has nothing to be compared with."""
    if ran.reference is None or not ran.observation.nesting.layers:
        return
    wanted = ran.reference.wanted
    if wanted.error is not None:
        yield Fact("raises un-nested", ("finite",), first_line(wanted.error))
        return
    got = effect_against(ran.call.subject, ran.observation, wanted)
    yield from in_state(wanted, got)
    yield from in_outputs(wanted, got)


@dataclass(frozen=True, slots=True, kw_only=True)
class NotFinite(Finding):
    """A leaf or an output with elements that are NaN or infinite, where those of the un-nested call are finite."""

    type: str
    wrong: int
    """The number of such elements."""
    elements: int

    def sentence(self) -> str:
        return f"{self.path} is NaN or infinite, and finite in the un-nested call"

    def rows(self) -> list[Row]:
        return [("not finite", f"{self.path}   {self.type}   {self.wrong} of {self.elements} elements")]


def in_state(wanted: Effect, got: Effect) -> Iterator[NotFinite]:
    """The leaves that are not finite after the nesting, and finite after the same calls without it."""
    for path, leaf in got.after.leaves.items():
        other = wanted.after.leaves.get(path)
        if other is not None and other.value is UNCHANGED:
            other = got.before.leaves.get(path)
        yield from worse(path, leaf.value, None if other is None else other.value)


def in_outputs(wanted: Effect, got: Effect) -> Iterator[NotFinite]:
    """The outputs that are not finite, over all elements of the axes; in the un-nested output alone where the two differ in structure."""
    names = [[*by_name(effect, whole=False)] for effect in (wanted, got)]
    have, want = (by_name(effect, whole=names[0] == names[1]) for effect in (got, wanted))
    for name, arrays in have.items():
        others = want.get(name, [])
        for number, array in enumerate(arrays):
            yield from worse(name, array, others[number] if number < len(others) else None)


def worse(path: str, have: Any, want: Any) -> Iterator[NotFinite]:
    """A finding if elements of an array are not finite, and finite in the other one, where that has its shape."""
    if not inexact(have) or (hasattr(have, "is_deleted") and have.is_deleted()):
        return
    wrong = ~np.isfinite(numbers(have))
    if want is not None and np.shape(want) == wrong.shape and inexact(want):
        wrong &= np.isfinite(numbers(want))
    if wrong.any():
        yield NotFinite(path, type=describe(have), wrong=int(np.count_nonzero(wrong)), elements=wrong.size)
