"""Outputs and state after a nesting are the same as after the same calls without it."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from pytest_nnxcheck.core.catalogue import ROWS
from pytest_nnxcheck.core.nesting import Nesting
from pytest_nnxcheck.core.outcome import DropCause, ValueDiffers
from pytest_nnxcheck.invariants.case import Case, Judgement

BROADCASTING = tuple(row.name for row in ROWS if row.axis and not row.pair)


def judge(case: Case) -> Judgement:
    """Judge the values that differ, the first with its cause where that is known."""
    different = case.differences
    findings = [replace(each, cause=cause(each, case.nesting)) for each in different.left[:1]]
    judgement = Judgement.of("parity", (*findings, *different.left[1:]), different.notes)
    return replace(judgement, of_call=different.of_call)


def cause(first: ValueDiffers, nesting: Nesting) -> DropCause | Literal[""]:
    """Name the cause that dropped the update of the first value that differs; empty where that is unknown.

    Transforms carry no attribute out. A layer that broadcasts the state drops its updates. A transform inside the call changed a copy.
    """
    if first.cause or not nesting.layers:
        return first.cause or "copy"
    if first.of == "attribute" and first.label in ("dropped", "attribute"):
        return "attribute"
    broadcasts = any(layer.transform in BROADCASTING for layer in nesting.layers)
    return "broadcast" if first.label == "dropped" and broadcasts else ""
