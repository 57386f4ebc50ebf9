"""No tracers remain in the state, the module, the code of the subject, or anything reachable from them."""

from __future__ import annotations

from pytest_nnxcheck import compat
from pytest_nnxcheck.core.nesting import Layer
from pytest_nnxcheck.core.observation import Leak, Observation
from pytest_nnxcheck.core.outcome import Finding, Violation
from pytest_nnxcheck.invariants import hints
from pytest_nnxcheck.invariants.case import Case, Judgement

SHOWN = 6


def judge(case: Case) -> Judgement:
    """Tracers that the nesting left, else Variables of the user's own that an ended trace made."""
    pinned_first = (pinned(case.originals.pinned),) if case.originals.pinned else ()
    return Judgement(tracers(case.observation) or pinned_first)


def tracers(observation: Observation) -> tuple[Violation, ...]:
    """Violations for tracers that outlived their trace, and for a state that ``eval_shape`` touched."""
    leaks = remaining(observation)
    if leaks:
        return (residue(leaks),)
    if observation.mutated:
        return (touched(observation.mutated),)
    return ()


def remaining(observation: Observation) -> tuple[Leak, ...]:
    """Leaks that survive the program, or that killed it; those that died with an inner module are no violation."""
    if observation.leaks or not compat.is_tracer_error(observation.error):
        return observation.leaks
    return observation.dropped


def residue(leaks: tuple[Leak, ...]) -> Violation:
    details = []
    for leak in leaks[:SHOWN]:
        details.append(("leaked", f"{leak.path}   {leak.holder} {leak.type}   <- {leak.kind}"))
        if leak.line:
            details.append(("", f"created at {leak.line}"))
    if len(leaks) > SHOWN:
        details.append(("", f"and {len(leaks) - SHOWN} more"))
    blamed = leaks[0].layer
    details.append(("left by", str(blamed) if blamed else "the call itself, un-nested"))
    paths = ", ".join(leak.path for leak in leaks[:2])
    return Violation(
        "tracers",
        f"tracers remain in {paths}",
        tuple(details),
        hints.residue(leaks[0].path, leaks[0].holder, blamed, leaks[0].place),
        tuple(Finding("tracer left", leak.path) for leak in leaks),
    )


def pinned(paths: tuple[tuple[str, str], ...]) -> Violation:
    """Variables, (path, type), that were made in a trace that has ended. They hold no tracer any more, and flax refuses to write them."""
    rows = tuple(("pinned", f"{path}   {kind}") for path, kind in paths[:SHOWN])
    more = (("", f"and {len(paths) - SHOWN} more"),) if len(paths) > SHOWN else ()
    return Violation(
        "tracers",
        f"{paths[0][0]} was made in a trace that has ended: flax refuses every write to it",
        (*rows, *more),
        hints.hint("pinned"),
        tuple(Finding("made in an ended trace", path) for path, _ in paths),
    )


def touched(mutated: tuple[tuple[Layer, str], ...]) -> Violation:
    """eval_shape only asks for shapes: whatever it changes in the state was not meant."""
    rows = tuple(("changed", path) for _, path in mutated[:SHOWN])
    return Violation(
        "tracers",
        f"eval_shape changed {mutated[0][1]}",
        (*rows, ("left by", str(mutated[0][0]))),
        findings=tuple(Finding("state touched", path) for _, path in mutated),
    )
