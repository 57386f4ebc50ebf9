"""Peak memory stays within its bound, and no program holds a second copy of its state."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from pytest_nnxcheck.core.nesting import Nesting
from pytest_nnxcheck.core.outcome import (
    ConstantsCaptured,
    CopiedOnTarget,
    DoesNotFit,
    Finding,
    MemoryWasted,
    OverBudgetOnTarget,
    PeakOverBudget,
    StateCopied,
)
from pytest_nnxcheck.core.peak import FLOOR, Figures, OnTarget, PeakCause, least_copy
from pytest_nnxcheck.invariants.case import Case, Judgement, Program


def judge(case: Case) -> Judgement:
    """Judge by the bound; where nothing breaks it, by advice, if the settings make that a violation."""
    on_cpu = of_program(case.program, case.nesting) if case.program is not None else ()
    on_target = (finding for on in case.targets for finding in of_target(on, case.program, case.nesting))
    findings = (*on_cpu, *on_target)
    return Judgement.of("memory", findings or ([MemoryWasted(advice=case.advice)] if case.advice else ()))


def of_program(program: Program, nesting: Nesting) -> tuple[Finding, ...]:
    """A peak over the bound; with the default bound also copies of the state and captured constants."""
    findings: list[Finding] = []
    bound, copies = program.bound, program.copies.bytes
    figures = Figures(program.memory.split, bound, program.state, program.devices, cause(program, nesting))
    if program.memory.peak > bound.budget:
        findings.append(PeakOverBudget(figures=figures))
    if bound.default and copies >= least_copy(program.state):
        findings.append(StateCopied(figures=figures, bytes=copies))
    if bound.default and captures(program, nesting):
        own = replace(figures, cause=captured_cause(program))
        findings.append(ConstantsCaptured(figures=own, bytes=captured_bytes(program)))
    return tuple(findings)


def of_target(on: OnTarget, program: Program | None, nesting: Nesting) -> Iterator[Finding]:
    """The failures on a target: the program does not fit, or is over a budget in bytes; with the default bound also copies of the state.

    A multiple of the expected peak is not judged there: a healthy cache takes 1.96 times as much on a TPU, in layouts of its own.
    """
    bound = program.bound if program is not None else None
    if not on.fits:
        yield DoesNotFit(on=on)
    elif bound is not None and not bound.multiple and (on.peak or 0) > bound.budget:
        yield OverBudgetOnTarget(on=on, bound=bound)
    if program is not None and program.bound.default and on.copies >= least_copy(on.state):
        yield CopiedOnTarget(on=on, cause=cause(program, nesting))


def captures(program: Program, nesting: Nesting) -> bool:
    """True if the call captures large constants of the user's: a generated closure captures the state by construction."""
    return not nesting.captures and captured_bytes(program) >= FLOOR


def captured_bytes(program: Program) -> int:
    """The bytes of all arrays that the call captures."""
    return sum(constant.bytes for constant in program.of_call.captured)


def cause(program: Program, nesting: Nesting) -> PeakCause:
    """The cause of the peak, where that is known: a scan that writes its parameters back, constants that could be arguments, leaves that are
    returned as well, a branch that a vmap maps.
    """
    copies, least = program.copies, least_copy(program.state)
    if program.of_call.scans_references and copies.handed_back >= least:
        return "scan over references"
    if program.of_call.writes_back and copies.handed_back >= least:
        if not program.of_call.remat_in_scan:
            return "scan writes back"
        return "scan writes back, remat" if program.updates_can_be_off else "scan writes back, checkpoint"
    if captures(program, nesting):
        return captured_cause(program)
    if copies.returned >= least:
        return "returned"
    return "mapped branch" if program.of_call.branches and broadcasts_for_map(program, nesting) else ""


def broadcasts_for_map(program: Program, nesting: Nesting) -> bool:
    """True if a vmap repeats something large for each of its elements: if a mapped value chooses the branch, jax runs all branches, and repeats their operands."""
    used = program.memory.buffers
    repeats = (buffer for buffer in used if buffer.kind == "temporary" and "broadcast" in buffer.operation)
    return any(layer.row.axis == "elements" for layer in nesting.layers) and any(
        buffer.bytes >= FLOOR for buffer in repeats
    )


def captured_cause(program: Program) -> PeakCause:
    """The cause by the maker of the captured constants: the user's code keeps one of them, or the call made them all itself."""
    return (
        "captured constant" if any(constant.name for constant in program.of_call.captured) else "constant of the call"
    )
