"""No tracers remain in the state, the module, the code of the subject, or anything reachable from them."""

from __future__ import annotations

from pytest_nnxcheck.compat import graph
from pytest_nnxcheck.core.facts import Leak, Observation
from pytest_nnxcheck.core.outcome import Finding, MadeInEndedTrace, StateTouched, TracerLeft, Violation
from pytest_nnxcheck.invariants.case import Case, Judgement


def judge(case: Case) -> Judgement:
    """Tracers that the nesting left, else Variables of the user's own that an ended trace made."""
    pinned = tuple(MadeInEndedTrace(path, type=type_) for path, type_ in case.originals.pinned)
    findings = tracers(case.observation) or pinned
    return Judgement((Violation("tracers", findings=findings),) if findings else ())


def tracers(observation: Observation) -> tuple[Finding, ...]:
    """Tracers that outlived their trace, else leaves of a state that ``eval_shape`` touched: it only asks for shapes."""
    left = tuple(TracerLeft(leak.path, leak=leak, has_data=graph.has_data()) for leak in remaining(observation))
    return left or tuple(StateTouched(path, layer=layer) for layer, path in observation.mutated)


def remaining(observation: Observation) -> tuple[Leak, ...]:
    """Leaks that survive the program, or that killed it; those that died with an inner module are no violation."""
    if observation.leaks or not graph.is_tracer_error(observation.error):
        return observation.leaks
    return observation.dropped
