"""Peak memory stays within its bound, and no program holds a second copy of its state."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from pytest_nnxcheck.compat import graph
from pytest_nnxcheck.core.catalogue import InvariantRow
from pytest_nnxcheck.core.chips import parse_target
from pytest_nnxcheck.core.facts import CallProgram, Evidence
from pytest_nnxcheck.core.on_target import OnTarget
from pytest_nnxcheck.core.outcome import Finding, FindingOnTarget, InProgram, Moment, Words
from pytest_nnxcheck.core.peak import FLOOR, Bound, Figures, Memory, PeakCause, Split, least_copy
from pytest_nnxcheck.core.setting_values import least_bytes, least_multiple
from pytest_nnxcheck.core.text import Row, format_bytes, told_apart
from pytest_nnxcheck.engine import rematted
from pytest_nnxcheck.engine.ran import Ran
from pytest_nnxcheck.invariants.advice import MemoryWasted, advised
from pytest_nnxcheck.reporting import memory_breakdown, target_rows

__tracebackhide__ = True  # pytest shows the frames of the user, not these

ROW = InvariantRow(
    "memory", order=20, severity=30, default=True, compiled=True, targeted=True, error="MemoryBudgetExceeded"
)


def judge(ran: Ran) -> Iterator[Finding]:
    """Judge by the bound, on the CPU and on targets; where nothing breaks it, by advice, if the settings make that a violation.

    On the CPU nothing is judged where the un-nested program was not measured.
    """
    memory, bound = ran.observation.memory, ran.bound
    on_cpu = of_program(ran, memory, bound) if memory is not None and bound is not None else ()
    there = bound or of_targets_alone(ran)
    findings = [*on_cpu, *(finding for on in ran.observation.targets for finding in of_target(on, ran, there))]
    advice = advised(ran)
    yield from findings or ([MemoryWasted(advice=advice)] if advice else [])


def of_program(ran: Ran, memory: Memory, bound: Bound) -> Iterator[Finding]:
    """A peak over the bound; with the default bound also copies of the state and captured constants."""
    copies, call, state = ran.observation.copies, ran.profile.program, ran.profile.copied_bytes
    figures = Figures(memory.split, bound, state, ran.profile.devices, cause(ran))
    if memory.peak > bound.budget:
        yield PeakOverBudget(figures=figures, handed_back=copies.handed_back, layers=gradient(ran))
    if bound.default and copies.count(state):
        yield StateCopied(figures=figures, handed_back=copies.handed_back, bytes=copies.bytes)
    if bound.default and captures(ran):
        yield ConstantsCaptured(figures=replace(figures, cause=captured_cause(call)), bytes=captured_bytes(call))


def of_target(on: OnTarget, ran: Ran, bound: Bound | None) -> Iterator[Finding]:
    """The failures on a target: the program does not fit, or is over a budget in bytes; with the default bound also copies of the state.

    A multiple of the expected peak is not judged there: a healthy cache takes 1.96 times as much on a TPU, in layouts of its own.
    """
    if not on.fits:
        yield DoesNotFit(on=on, layers=gradient(ran))
    elif bound is not None and bound.asked and (on.peak or 0) > bound.budget:
        yield OverBudgetOnTarget(on=on, bound=bound, layers=gradient(ran))
    if bound is not None and bound.default and on.copies >= least_copy(on.state):
        yield CopiedOnTarget(on=on, cause=cause(ran))


def of_targets_alone(ran: Ran) -> Bound | None:
    """The bound of a program that was not compiled here: a budget in bytes. Without a budget copies of the state are judged; a multiple has nothing to multiply."""
    budget = ran.call.settings.memory_budget
    if not ran.observation.refused or (budget is not None and budget.bytes is None):
        return None
    size = 0 if budget is None else budget.bytes or 0
    return Bound(0, size, default=budget is None, asked=budget.written or format_bytes(size) if budget else "")


def gradient(ran: Ran) -> Layers:
    """The layers of a call that takes a gradient; `None` where it takes none."""
    return rematted.layers_of(ran.call) if rematted.differentiates(ran.call) else None


def captures(ran: Ran) -> bool:
    """True if the call captures large constants of the user's: a generated closure captures the state by construction."""
    return not ran.observation.nesting.captures and captured_bytes(ran.profile.program) >= FLOOR


def captured_bytes(call: CallProgram) -> int:
    """The bytes of all arrays that the call captures."""
    return sum(constant.bytes for constant in call.captured)


def cause(ran: Ran) -> PeakCause:
    """The cause of the peak, where that is known: a scan that writes its parameters back, constants that could be arguments, leaves that are
    returned as well, a branch that a vmap maps.
    """
    copies, call, state = ran.observation.copies, ran.profile.program, ran.profile.copied_bytes
    if call.scans_references and copies.hands_back(state):
        return "scan over references"
    if call.writes_back and copies.hands_back(state):
        if not call.remat_in_scan:
            return "scan writes back"
        return "scan writes back, remat" if graph.remat_updates_can_be_off() else "scan writes back, checkpoint"
    if captures(ran):
        return captured_cause(call)
    if copies.returns(state):
        return "returned"
    return "mapped branch" if call.branches and broadcasts_for_map(ran) else ""


def broadcasts_for_map(ran: Ran) -> bool:
    """True if a vmap repeats something large for each of its elements: if a mapped value chooses the branch, jax runs all branches, and repeats their operands."""
    used = ran.observation.memory.buffers if ran.observation.memory else ()
    repeats = (buffer for buffer in used if buffer.kind == "temporary" and "broadcast" in buffer.operation)
    return any(layer.row.axis == "elements" for layer in ran.observation.nesting.layers) and any(
        buffer.bytes >= FLOOR for buffer in repeats
    )


def captured_cause(call: CallProgram) -> PeakCause:
    """The cause by the maker of the captured constants: the user's code keeps one of them, or the call made them all itself."""
    return "captured constant" if any(constant.name for constant in call.captured) else "constant of the call"


# --- findings

Layers = tuple[type, ...] | None
"""The classes of the layers of a call that takes a gradient, which saves values of its forward part; `None` where it takes none."""

SCANNED = (
    "scan with jax.lax.scan over the state of nnx.split, with nnx.merge in its body{checkpoint}: parameters go in and"
    " never come out"
)
CURES: dict[PeakCause, str] = {
    "scan over references": "read them by their index in the loop, reference[i]: jax.lax.scan over references copies them all, since it takes"
    " out the slice of each step and puts it back",
    "scan writes back": SCANNED.format(checkpoint=""),
    "scan writes back, checkpoint": SCANNED.format(checkpoint=" under jax.checkpoint"),
    "scan writes back, remat": "inside your nnx.scan write nnx.remat(f, graph_updates=False): without that, nnx.remat returns every parameter as if it had changed, and nnx.scan copies them all",
    "captured constant": "hand the captured arrays, or the module that holds them, to the function as an argument",
    "constant of the call": "make with jnp what NumPy makes in the call, or keep it in an nnx.Variable of the module: as a constant it is part of"
    " every program that is compiled",
    "mapped branch": "call every branch and choose among what they return, jnp.stack([f(x) for f in branches])[index]: where vmap maps the index it runs all"
    " of them anyway, and repeats the weights that they use for each element",
    "returned": "leave the state out of what the call returns: its caller has it in the module, and an output is an array of its own",
}
"""The change to make for each cause of a peak."""

OTHERWISE: dict[PeakCause, PeakCause] = {"scan writes back, remat": "scan writes back, checkpoint"}
"""The cause whose cure is the next best one where that of a cause does not help."""

FORWARDED: tuple[PeakCause, ...] = ("scan writes back", "scan writes back, checkpoint")
"""The causes whose cure is the program that was compiled to measure the copies: parameters go into its loops, and never come out."""

DONATE = "donate {names} as well: donate={donate!r} here, and nnx.jit(f, donate_argnames=...) in your own code"
"""The change to make where more arguments can be donated."""

REMAT_LAYERS = "put {layers} under {remat}: the gradient computes the values inside again, and does not save them"
"""The change to make where a gradient saves the values inside of layers."""


def cause_of(findings: Sequence[Finding]) -> PeakCause:
    """The first known cause of the findings: that of the CPU's peak, which is that of a target's copies."""
    causes = [each.figures.cause for each in findings if isinstance(each, OnCpu)]
    causes += [each.cause for each in findings if isinstance(each, CopiedOnTarget)]
    return next(filter(None, causes), "")


def layers_of_gradient(findings: Sequence[Finding]) -> Layers:
    """The layers of a call that takes a gradient, where a peak is over its bound."""
    over = (each.layers for each in findings if isinstance(each, PeakOverBudget | DoesNotFit | OverBudgetOnTarget))
    return next((layers for layers in over if layers is not None), None)


def cured_otherwise(findings: Sequence[Finding]) -> str:
    """The next best hint where the change for the cause of the findings does not help; empty if there is none."""
    if not (cause := OTHERWISE.get(cause_of(findings), "")):
        return ""
    first, *others = (
        replace(each, figures=replace(each.figures, cause=cause)) if isinstance(each, OnCpu) else each
        for each in findings
    )
    return first.words(others).hint


def tried(before: int, after: int, *, enough: bool = True) -> str:
    """The words behind a hint whose change was made and compiled: the peaks without it and with it."""
    return f" (tried: peak {' -> '.join(told_apart(before, after))}{'' if enough else ', which is not enough'})"


class OfPeak(Finding):
    """A finding of this invariant: of several each has a sentence, and the figures come once."""

    __slots__ = ()
    OF_PEAK: ClassVar[bool] = True

    def words(self, others: Sequence[Finding] = ()) -> Words:
        findings = [self, *others]
        on_cpu = [each.figures for each in findings if isinstance(each, OnCpu)]
        bounds = [each.bound for each in findings if isinstance(each, OverBudgetOnTarget)]
        # Without figures of the CPU, which show it, the budget of a target has a row of its own.
        passes = passing(findings)
        figures = totals(on_cpu[0], passes) if on_cpu else [*map(budget, bounds[:1]), *passes]
        cause = cause_of(findings)
        # Advice for the cause, or on how to fit a target.
        cures = [CURES[cause]] if cause else [each.cure() for each in findings if isinstance(each, DoesNotFit)]
        handed_back = max((each.handed_back for each in findings if isinstance(each, OnCpu)), default=0)
        if cause in FORWARDED and handed_back:
            peak = on_cpu[0].split.peak
            cures = [cure + tried(peak, peak - handed_back) for cure in cures]
        rows = [("", each.sentence()) for each in others]
        there = [each.on for each in findings if isinstance(each, DoesNotFit | OverBudgetOnTarget)]
        figures += [row for on in there for row in target_rows.where(on)]
        return Words(self.sentence(), [*rows, *figures], next(iter(cures), ""))


@dataclass(frozen=True, slots=True, kw_only=True)
class OnCpu(OfPeak):
    """A finding about a program on the CPU."""

    figures: Figures
    handed_back: int = 0
    """Bytes that the same program does not hold if its loops hand nothing back unchanged: it was compiled to measure the copies."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PeakOverBudget(OnCpu):
    """More than the budget."""

    layers: Layers = None

    def sentence(self) -> str:
        peak, most = told_apart(self.figures.split.peak, self.figures.bound.budget)
        return f"peak {peak} is over the budget of {most}"

    def look(self, call: InProgram) -> Iterator[tuple[Moment, str]]:
        yield over(self.figures.split, self.figures.bound.budget)


@dataclass(frozen=True, slots=True, kw_only=True)
class StateCopied(OnCpu):
    """Copies of the state at the peak."""

    bytes: int
    """The size of all copies together."""

    def sentence(self) -> str:
        return f"the program holds {self.bytes / self.figures.state:.2f} extra copies of its state at its peak"

    def look(self, call: InProgram) -> Iterator[tuple[Moment, str]]:
        yield over(self.figures.split, self.figures.split.peak - self.bytes // 2)

    def brief(self, summary: str, evidence: Evidence | None) -> str:
        return named_copy(self.bytes, summary, evidence)


@dataclass(frozen=True, slots=True, kw_only=True)
class ConstantsCaptured(OnCpu):
    """Arrays of the user's that became constants of the program."""

    bytes: int

    def sentence(self) -> str:
        split = self.figures.split
        kept = f"; {memory_breakdown.kept(split)}" if memory_breakdown.left_out(self.bytes, split) else ""
        return f"the call captures {format_bytes(self.bytes)} of constants{kept}"

    def look(self, call: InProgram) -> Iterator[tuple[Moment, str]]:
        yield "first", f"captured_bytes(program, state, inputs) >= {FLOOR}"


def over(split: Split, most: int) -> tuple[Moment, str]:
    """Look for a peak over so many bytes. No total of XLA's counts constants: where they decide, they are taken off the bound."""
    decide = split.peak - split.constants <= most
    return "after", f"peak(executable) > {most - split.constants * decide}"


def over_on_target(on: OnTarget, most: int | None) -> tuple[Moment, str]:
    """Look for a peak over so many bytes on a target."""
    return "after", f"peak_on_target(executable, {bool(parse_target(on.target).chip.gpu)}) > {most}"


@dataclass(frozen=True, slots=True, kw_only=True)
class DoesNotFit(OfPeak, FindingOnTarget):
    """More than a program may use of the memory of a target."""

    layers: Layers = None

    def sentence(self) -> str:
        on, limit = self.on, target_rows.limit(self.on)
        if on.exhausted:
            return f"the program does not compile for {target_rows.device(on)}: a kernel needs more {on.exhausted} than there is"
        figures = f"peak {target_rows.peak(on.peak, on.limit)} of" if on.peak is not None else "it needs more than"
        return f"the program does not fit {target_rows.device(on)}: {figures} {limit}"

    def look(self, call: InProgram) -> Iterator[tuple[Moment, str]]:
        yield over_on_target(self.on, self.on.limit)

    def cure(self) -> str:
        """Ways to need less memory a device; none of them was tried."""
        if self.on.exhausted:
            return "make the blocks of the kernel smaller: those of its pl.BlockSpec, and its scratch_shapes"
        larger = target_rows.larger_slices(self.on.target)
        slices = f", or shard over more devices: {', '.join(larger)}" if larger else ""
        return f"make the batch smaller, wrap the layers in nnx.remat so that their outputs are computed again{slices}"


@dataclass(frozen=True, slots=True, kw_only=True)
class OverBudgetOnTarget(OfPeak, FindingOnTarget):
    """More than a budget in bytes allows, on a target."""

    bound: Bound
    layers: Layers = None

    def sentence(self) -> str:
        most, on = self.bound.budget, self.on
        peak = target_rows.peak(on.peak or 0, most)
        return f"peak {peak} on {on.target} is over the budget of {format_bytes(most)}"

    def look(self, call: InProgram) -> Iterator[tuple[Moment, str]]:
        yield over_on_target(self.on, self.bound.budget)


@dataclass(frozen=True, slots=True, kw_only=True)
class CopiedOnTarget(OfPeak, FindingOnTarget):
    """Copies of the state at the peak, on a target."""

    cause: PeakCause = ""
    """The `PeakCause` of the program on the CPU."""

    def sentence(self) -> str:
        on = self.on
        return f"the program holds {on.copies / max(on.state, 1):.2f} extra copies of its state on {on.target}"

    def look(self, call: InProgram) -> Iterator[tuple[Moment, str]]:
        if self.on.split is not None:
            yield "after", f"peak(executable) > {self.on.split.peak - self.on.copies // 2}"

    def brief(self, summary: str, evidence: Evidence | None) -> str:
        return named_copy(self.on.copies, summary, evidence)


def named_copy(size: int, summary: str, evidence: Evidence | None) -> str:
    """The leaf that is there twice, or else the bytes, before the summary."""
    copies = [held.name for held in (evidence.buffers if evidence else ()) if held.name and held.whole]
    return f"{copies[0] if copies else format_bytes(size)}: {summary}"


def passing(findings: Sequence[Finding]) -> list[Row]:
    """The row of the smallest budget, rounded, with which the nesting passes: bytes where bytes were asked for, else a multiple.

    None has a row where a program does not fit its target.
    """
    peaks = [each.figures.split.peak for each in findings if isinstance(each, OnCpu)]
    peaks += [each.on.peak or 0 for each in findings if isinstance(each, OverBudgetOnTarget)]
    bounds = [each.figures.bound for each in findings if isinstance(each, OnCpu)]
    bounds += [each.bound for each in findings if isinstance(each, OverBudgetOnTarget)]
    if not peaks or any(isinstance(each, DoesNotFit) for each in findings):
        return []
    peak, bound = max(peaks), bounds[0]
    size = least_bytes(peak) if bound.asked or not bound.expected else least_multiple([(peak, bound.expected)])
    alone = any(isinstance(each, StateCopied | ConstantsCaptured | CopiedOnTarget) for each in findings)
    return [("", f'passes with memory_budget="{size}"{": a budget of your own allows extra copies" if alone else ""}')]


def totals(figures: Figures, passes: Sequence[Row]) -> list[Row]:
    """Rows of the sums; `memory_breakdown` says where the bytes are."""
    split = figures.split
    rows = [
        ("peak", f"{format_bytes(split.peak)} = {memory_breakdown.formula(split.parts)}"),
        budget(figures.bound, split.peak),
        *passes,
        (
            "expected",
            f"{format_bytes(figures.bound.expected)}: the un-nested peak, and the larger arrays of a scan or a vmap in the nesting",
        ),
        ("state", format_bytes(figures.state)),
    ]
    return [*rows, ("devices", f"{figures.devices}, the bytes are those of one")] if figures.devices > 1 else rows


def budget(bound: Bound, peak: int | None = None) -> Row:
    """The row of a budget: where it comes from, and whether a ``peak`` is within it, since a program within it may hold a copy of the state."""
    size = format_bytes(bound.budget)
    if not bound.multiple:
        origin = "memory_budget" if bound.asked == size else f"memory_budget {bound.asked}"
    else:
        origin = f"{bound.multiple} the expected peak"
        if bound.default or bound.asked:
            origin += f" + {FLOOR // 1024} KiB, the default"
        if bound.asked:
            origin += f", which is more than memory_budget {bound.asked}"
    within = (
        "; the peak is within it, the extra copies fail the test" if peak is not None and peak <= bound.budget else ""
    )
    return "budget", f"{size} ({origin}){within}"
