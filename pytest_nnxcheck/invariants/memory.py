"""Peak memory stays within its bound, and no program holds a second copy of its state."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from pytest_nnxcheck.compat import graph
from pytest_nnxcheck.core.facts import Advice, Observation
from pytest_nnxcheck.core.outcome import (
    ConstantsCaptured,
    CopiedOnTarget,
    DoesNotFit,
    Figures,
    Finding,
    MemoryWasted,
    OverBudgetOnTarget,
    PeakCause,
    PeakOverBudget,
    StateCopied,
    Violation,
)
from pytest_nnxcheck.core.peak import FLOOR, Bound, OnTarget, least_copy
from pytest_nnxcheck.invariants.case import Case, Judgement
from pytest_nnxcheck.subject.profile import Profile


def judge(case: Case) -> Judgement:
    """The bound, and what breaks none but is advised against where the settings make that a violation."""
    advised = case.advice()  # whatever breaks: reports have the figures of the un-nested call that it is made of
    on_cpu = memory(case, case.bound) if case.bound is not None else ()
    on_target = tuple(finding for on in case.observation.targets for finding in memory_on(on, case))
    findings = (*on_cpu, *on_target) or wasted(advised)
    return Judgement((Violation("memory", findings=findings),) if findings else ())


def wasted(advice: tuple[Advice, ...]) -> tuple[Finding, ...]:
    """What advice on the un-nested call says is broken."""
    return (MemoryWasted(advice=advice),) if advice else ()


def memory(case: Case, bound: Bound) -> tuple[Finding, ...]:
    """What breaks the bound; with the default bound also copies of the state and captured constants."""
    observation, profile, used = case.observation, case.profile, case.observation.memory
    if used is None:
        return ()
    findings: list[Finding] = []
    copies = observation.copies.bytes
    figures = Figures(used.split, bound, profile.copied_bytes, profile.devices, cause(observation, profile))
    if used.peak > bound.budget:
        findings.append(PeakOverBudget(figures=figures))
    if bound.default and copies >= least_copy(profile.copied_bytes):
        findings.append(StateCopied(figures=figures, bytes=copies))
    if bound.default and captures(observation, profile):
        own = replace(figures, cause=captured_cause(profile))
        findings.append(ConstantsCaptured(figures=own, bytes=profile.constant_bytes))
    return tuple(findings)


def memory_on(on: OnTarget, case: Case) -> Iterator[Finding]:
    """What breaks on a target: it does not fit, or is over a budget in bytes; with the default bound also copies of the state.

    A multiple of the expected peak is not judged there: a healthy cache takes 1.96 times as much on a TPU, in layouts of its own.
    """
    bound = case.bound
    if not on.fits:
        yield DoesNotFit(on=on)
    elif bound is not None and not bound.multiple and (on.peak or 0) > bound.budget:
        yield OverBudgetOnTarget(on=on, bound=bound)
    if bound is not None and bound.default and on.copies >= least_copy(on.state):
        yield CopiedOnTarget(on=on, cause=cause(case.observation, case.profile))


def captures(observation: Observation, profile: Profile) -> bool:
    """Whether the call captures constants worth telling that are the user's: a generated closure captures the state by construction."""
    return not observation.nesting.captures and profile.constant_bytes >= FLOOR


def cause(observation: Observation, profile: Profile) -> PeakCause:
    """Why the peak is what it is, where that is known: a scan that writes its parameters back, constants that could be arguments, leaves that are
    returned as well, a branch that a vmap maps.
    """
    copies = observation.copies
    if profile.writes_back and copies.handed_back >= least_copy(profile.copied_bytes):
        if not profile.remat_in_scan:
            return "scan writes back"
        return "scan writes back, remat" if graph.remat_updates_can_be_off() else "scan writes back, checkpoint"
    if captures(observation, profile):
        return captured_cause(profile)
    if copies.returned >= least_copy(profile.copied_bytes):
        return "returned"
    return "mapped branch" if profile.branches and broadcasts_for_map(observation) else ""


def broadcasts_for_map(observation: Observation) -> bool:
    """Whether a vmap repeats something large for each of its elements: of a branch that is chosen by a mapped value, jax runs all, and repeats what they use."""
    used = observation.memory.buffers if observation.memory else ()
    repeats = (buffer for buffer in used if buffer.kind == "temporary" and "broadcast" in buffer.operation)
    return any(layer.row.axis == "elements" for layer in observation.nesting.layers) and any(
        buffer.bytes >= FLOOR for buffer in repeats
    )


def captured_cause(profile: Profile) -> PeakCause:
    """Whether the user's code keeps one of the captured constants, or the call made them all itself."""
    return "captured constant" if any(constant.name for constant in profile.captured) else "constant of the call"
