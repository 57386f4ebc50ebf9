"""The facts of the traced program of a call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pytest_nnxcheck.compat import staging
from pytest_nnxcheck.core.facts import CallProgram
from pytest_nnxcheck.jaxprs import flow
from pytest_nnxcheck.jaxprs.captured import captured
from pytest_nnxcheck.jaxprs.waste import waste


def call_program(closed: Any, rewritten: Mapping[int, int], kept: Sequence[tuple[str, Any]]) -> CallProgram:
    """The facts of a closed jaxpr.

    ``rewritten`` are the results that are new values of arguments, by the number of the argument; ``kept`` are the arrays of the user's
    code, each with its name.
    """
    jaxpr = staging.open_jaxpr(closed)
    return CallProgram(
        captured=captured(closed, kept),
        donated=flow.donated_to_jits(jaxpr),
        inner_donations=flow.inner_donations(closed),
        writes_back=flow.writes_back(closed),
        remat_in_scan=flow.remat_in_scan(closed),
        branches=flow.branches(closed),
        calls_back=flow.calls_back(closed),
        waste=waste(jaxpr, rewritten),
        precision=flow.lowest_precision(closed),
        equations=flow.equations(closed),
        operations=flow.operations(closed),
    )
