"""No tracers remain in the state, the module, the code of the subject, or anything reachable from them."""

from __future__ import annotations

from pytest_nnxcheck.core.facts import Leak
from pytest_nnxcheck.core.outcome import Finding, MadeInEndedTrace, StateTouched, TracerLeft
from pytest_nnxcheck.invariants.case import Case, Judgement, Tracers


def judge(case: Case) -> Judgement:
    """Judge the tracers that leaked.

    Where none leaked, judge the leaves that an ``eval_shape`` touched. Where it touched none, judge the user's own Variables that an ended trace made.
    """
    run = case.tracers
    left = tuple(TracerLeft(leak.path, leak=leak, has_data=run.has_data) for leak in remaining(run))
    touched = tuple(StateTouched(path, layer=layer) for layer, path in run.touched)
    pinned = tuple(MadeInEndedTrace(path, type=type_) for path, type_ in run.pinned)
    findings: tuple[Finding, ...] = left or touched or pinned
    return Judgement.of("tracers", findings)


def remaining(run: Tracers) -> tuple[Leak, ...]:
    """Leaks that survive the program, or that killed it; those that died with an inner module are no violation."""
    return run.dropped if run.raised and not run.leaks else run.leaks
