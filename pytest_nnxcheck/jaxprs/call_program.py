"""The facts of the traced program of a call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pytest_nnxcheck.compat import staging
from pytest_nnxcheck.compat.arrays import discharged, is_ref_type
from pytest_nnxcheck.core.facts import CallProgram
from pytest_nnxcheck.jaxprs import flow
from pytest_nnxcheck.jaxprs.captured import captured
from pytest_nnxcheck.jaxprs.forwarding import forwarded


def in_arrays(traced: Any) -> Any:
    """The jaxpr with arrays in the place of references among its arguments: what it writes to these as it was read is no change."""
    plain = discharged(traced, last_values=False)
    return traced if plain is traced else forwarded(plain)


def call_program(
    traced: Any, closed: Any, rewritten: Mapping[int, int], kept: Sequence[tuple[str, Any]]
) -> CallProgram:
    """The facts of a jaxpr as it was ``traced``, and ``closed``, with arrays in the place of references.

    ``rewritten`` are the results that are new values of arguments, by the number of the argument; ``kept`` are the arrays of the user's
    code, each with its name.
    """
    jaxpr, own = staging.open_jaxpr(closed), staging.open_jaxpr(traced)
    in_references = any(is_ref_type(var.aval) for var in (*own.invars, *own.constvars))
    return CallProgram(
        captured=captured(closed, kept),
        donated=flow.donated_to_jits(jaxpr),
        inner_donations=flow.inner_donations(closed),
        writes_back=flow.writes_back(traced),
        remat_in_scan=flow.remat_in_scan(traced),
        branches=flow.branches(closed),
        calls_back=flow.calls_back(closed),
        jaxpr=jaxpr,
        rewritten=rewritten,
        precision=flow.lowest_precision(closed),
        equations=flow.equations(closed),
        operations=flow.operations(closed),
        in_references=in_references,
        scans_references=flow.scans_references(traced),
        written_twice=flow.written_twice(traced) if in_references else "",
    )
