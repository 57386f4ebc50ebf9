"""The sentences of a violation: summary, rows and hint, made of its findings, one function an invariant. No code reads them back."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

from pytest_nnxcheck.core import outcome as data
from pytest_nnxcheck.core.facts import Evidence, Leak
from pytest_nnxcheck.core.notes import RaisedUnNested
from pytest_nnxcheck.core.outcome import Finding, Outcome, Violation
from pytest_nnxcheck.core.peak import FLOOR, Bound, Figures, PeakCause
from pytest_nnxcheck.core.text import Row, format_bytes, some
from pytest_nnxcheck.reporting import hints, left_out, memory_breakdown, notes, target_rows

Findings = tuple[Any, ...]
"""The findings of one violation: all of one class, but for those of memory, donation and recompilation."""

OnCpu = data.PeakOverBudget | data.StateCopied | data.ConstantsCaptured
"""Findings of memory on the CPU: they have figures."""

Text = tuple[str, Iterable[Row], str]
"""Summary, rows and hint."""

SHOWN = 6
"""Findings that have a row: as many as people read. The others are counted."""
SHOWN_BUFFERS = 12
"""The same for donation: a lost buffer takes one row, and who mends them wants the list."""


def worded(outcome: Outcome) -> Outcome:
    """The outcome with its sentences: of its violations, of why it cannot take the call, and its notes."""
    # The rows of targets come once: under memory, or by donation where that alone broke.
    tells = next((violation for violation in outcome.violations if violation.invariant in ("memory", "donation")), None)
    violations = tuple(
        with_text(violation, outcome.evidence, on_targets=violation is tells) for violation in outcome.violations
    )
    reason = outcome.reason if outcome.misfit is None else left_out.of_misfit(outcome.misfit)
    return replace(outcome, violations=violations, reason=reason, notes=(*outcome.notes, *notes.texts(outcome.facts)))


def with_text(violation: Violation, evidence: Evidence | None, *, on_targets: bool) -> Violation:
    """A violation with its sentences; one that found nothing has those that it was made with."""
    summary, rows, hint = violation.summary, violation.details, violation.hint
    if violation.findings:
        summary, more, hint = TEXTS.get(violation.invariant, own)(violation.findings)
        rows = (*rows, *more)
    for cause in violation.explained:
        label = "raises" if isinstance(cause, RaisedUnNested | str) else "cause"
        rows = (*rows, (label, notes.explanation(cause)))
    if evidence is not None and on_targets:
        rows = (*rows, *target_rows.rows(evidence.targets))
    if evidence is not None and evidence.split is not None and violation.invariant == "memory":
        where = memory_breakdown.rows(evidence)
        if where and evidence.targets:
            peak = format_bytes(evidence.split.peak)
            rows = (*rows, ("on the CPU", f"peak {peak}; the rows below are of this program"))
        rows = (*rows, *where)
    return replace(violation, summary=summary, details=rows, hint=hint)


def rest(findings: Findings, shown: int = SHOWN) -> list[Row]:
    """A row that counts the findings without a row."""
    return [("", f"and {len(findings) - shown} more")] if len(findings) > shown else []


def place(violation: Violation, evidence: Evidence | None) -> str:
    """The leaves that break an invariant, or else the bytes: for one line of a summary."""
    if paths := [finding.path for finding in violation.findings if finding.path]:
        return some(paths, 2)
    match violation.findings[:1]:
        case [data.MemoryWasted(advice=(first, *_))]:
            return hints.advice(first)
        case [data.StateCopied() | data.CopiedOnTarget() as first]:
            copies = [held.name for held in (evidence.buffers if evidence else ()) if held.name and held.whole]
            size = first.bytes if isinstance(first, data.StateCopied) else first.on.copies
            return f"{copies[0] if copies else format_bytes(size)}: {violation.summary}"
    return violation.summary


# --- tracers


def tracers(findings: Findings) -> Text:
    """The text on leaked tracers, on Variables that flax refuses to write, or on leaves that a layer touched."""
    first, shown = findings[0], findings[:SHOWN]
    if isinstance(first, data.TracerLeft):
        rows = [row for finding in shown for row in leaked(finding.leak)]
        paths = ", ".join(finding.path for finding in findings[:2])
        when, un_nested = "", "the call itself, un-nested"
        if first.leak.before:
            when, un_nested = ", before the call", "a transform before the call"
        leaked_by = ("leaked by", first.leak.layer or un_nested)
        return f"tracers remain in {paths}{when}", [*rows, *rest(findings), leaked_by], hints.tracer_left(first)
    if isinstance(first, data.MadeInEndedTrace):
        rows = [("pinned", f"{finding.path}   {finding.type}") for finding in shown]
        summary = f"{first.path} was made in a trace that has ended: flax refuses every write to it"
        return summary, [*rows, *rest(findings)], hints.hint("pinned")
    rows = [("changed", finding.path) for finding in shown]
    return f"eval_shape changed {first.path}", [*rows, *rest(findings), ("leaked by", str(first.layer))], ""


def leaked(leak: Leak) -> list[Row]:
    """Rows of a tracer: what holds it, and the line that made it."""
    row = ("leaked", f"{leak.path}   {leak.kind} {leak.type} in {leak.holder}")
    return [row, ("", f"created at {leak.line}")] if leak.line else [row]


# --- memory


def memory(findings: Findings) -> Text:
    """The text on what breaks the bound, with the figures; or on advice that was asked to be a violation."""
    first = findings[0]
    if isinstance(first, data.MemoryWasted):
        texts = dict.fromkeys(map(hints.advice, first.advice))
        return "the un-nested call spends memory that it need not", [("advice", text) for text in texts], ""
    summary, *others = map(of_memory, findings)
    on_cpu = [finding.figures for finding in findings if isinstance(finding, OnCpu)]
    bounds = [finding.bound for finding in findings if isinstance(finding, data.OverBudgetOnTarget)]
    # Without figures of the CPU, which show it, the budget of a target has a row of its own.
    figures = totals(on_cpu[0]) if on_cpu else [budget(bound) for bound in bounds[:1]]
    return summary, [*(("", text) for text in others), *figures], hint_of_memory(findings)


def hint_of_memory(findings: Findings) -> str:
    """Advice for the cause of the CPU's peak, which is that of a target's copies; or on how to fit a target."""
    causes: list[PeakCause] = [finding.figures.cause for finding in findings if isinstance(finding, OnCpu)]
    causes += [finding.cause for finding in findings if isinstance(finding, data.CopiedOnTarget)]
    unfit = [finding.on.target for finding in findings if isinstance(finding, data.DoesNotFit)]
    if known := [cause for cause in causes if cause]:
        return hints.peak(known[0])
    return hints.does_not_fit(target_rows.larger_slices(unfit[0])) if unfit else ""


def of_memory(finding: OnCpu | data.FindingOnTarget) -> str:
    """The sentence of one finding of memory."""
    if not isinstance(finding, OnCpu):
        return target_rows.sentence(finding)
    figures = finding.figures
    match finding:
        case data.PeakOverBudget():
            peak, most = format_bytes(figures.split.peak), format_bytes(figures.bound.budget)
            return f"peak {peak} is over the budget of {most}"
        case data.StateCopied(bytes=size):
            return f"the program holds {size / figures.state:.2f} extra copies of its state at its peak"
        case data.ConstantsCaptured(bytes=size):
            kept = memory_breakdown.kept(figures.split) if memory_breakdown.left_out(size, figures.split) else ""
            return f"the call captures {format_bytes(size)} of constants" + (kept and f"; {kept}")


def totals(figures: Figures) -> list[Row]:
    """Rows of the sums; `memory_breakdown` says where the bytes are."""
    split = figures.split
    rows = [
        ("peak", f"{format_bytes(split.peak)} = {memory_breakdown.formula(split.parts)}"),
        budget(figures.bound, split.peak),
        (
            "expected",
            f"{format_bytes(figures.bound.expected)}: the un-nested peak, and the larger arrays of a scan or a vmap in the nesting",
        ),
        ("state", format_bytes(figures.state)),
    ]
    return [*rows, ("devices", f"{figures.devices}, the bytes are those of one")] if figures.devices > 1 else rows


def budget(bound: Bound, peak: int | None = None) -> Row:
    """The row of a budget: where it comes from, and whether a ``peak`` is within it, since a program within it may hold a copy of the state."""
    if bound.multiple:
        origin = f"{bound.multiple} the expected peak{f' + {FLOOR // 1024} KiB, the default' if bound.default else ''}"
    else:
        axes = f" + {format_bytes(bound.axes)} for the nesting's own axes" if bound.axes else ""
        asked = bound.written or (format_bytes(bound.budget - bound.axes) if bound.axes else "")
        origin = f"memory_budget {asked}{axes}".rstrip()
    within = (
        "; the peak is within it, so this is not why the test fails"
        if peak is not None and peak <= bound.budget
        else ""
    )
    return "budget", f"{format_bytes(bound.budget)} ({origin}){within}"


# --- donation


def donation(findings: Findings) -> Text:
    """The text on buffers that were lost, or cannot be donated; the first is the summary."""
    first, *others = map(of_buffer, findings)
    rows = [*others[: SHOWN_BUFFERS - 1], *rest(findings, SHOWN_BUFFERS)]
    return first[1], rows, hints.buffer(findings[0])


def of_buffer(finding: Finding) -> Row:
    """The row of one finding of donation."""
    path = finding.path
    match finding:
        case data.LostOnTarget():
            return "lost", target_rows.sentence(finding)
        case data.SharedBuffer(other=other, inside=True):
            return "shared", f"{path} and {other} share a buffer: a jit inside the call donates it, and deletes both"
        case data.Orphaned(other=other):
            return "deleted", f"{path} got the array of {other}, which a jit inside the call donates: it is deleted"
        case data.SharedBuffer(other=other, twice=twice):
            refused = "donate it twice" if twice else "donate it and use it beside that"
            return "shared", f"{path} and {other} share a buffer: XLA refuses to {refused}"
        case data.ViewedBuffer(holder=holder):
            return "viewed", f"{path} is viewed by {holder}: its buffer cannot be reused"
        case data.LostBuffer():
            return "lost", f"{path}   {finding.type}   {loss(finding)}"
    return "dropped", f"{path}   not written back: the call updates a copy of the optimizer"


def loss(finding: data.LostBuffer) -> str:
    """Why a buffer was lost."""
    match finding.cause:
        case "dtype" | "shape":
            return notes.retyped(finding)
        case "sharding":
            return "sharding changed from {} to {}".format(*finding.shardings)
        case "not returned":
            return "not returned"
        case "reference":
            return "replaced, and not written: its Variable holds another reference now, or an array"
    if finding.abstract:
        return "no output of the compiled program is aliased with it"
    before, *after = finding.pointers
    where = f"pointer {before:#x} before, {after[0]:#x} after" if after else "no buffer after"
    return f"{'jax_debug_nans keeps the old value' if finding.debug_nans else 'not reused by XLA'} ({where})"


# --- parity


def parity(findings: Findings) -> Text:
    """The text on values that differ; the first is the summary."""
    first = findings[0]
    rows = [(finding.label, f"{finding.path}   {difference(finding)}") for finding in findings[:SHOWN]]
    return differs(first), [*rows, *rest(findings)], hints.value(first)


def differs(first: data.ValueDiffers) -> str:
    """The summary for the first difference."""
    match first.label:
        case "dropped" | "attribute" if first.of == "attribute":
            return f"{first.path}: expected {first.want}, as after the same calls one by one (a loop makes one call in each step), got {first.have}"
        case "dropped" if first.cause == "reference":
            return f"{first.path}, a reference, kept its old value: a transform of flax wrote to a copy of it"
        case "dropped" if first.cause == "copy":
            return f"{first.path} kept its old value: a transform inside the call updated a copy of it"
        case "dropped":
            return f"{first.path} kept its old value: the update was dropped"
        case "differs" if first.cause == "copy":
            return f"{first.path} differs from what the same call leaves without its jits"
        case "deleted":
            return f"{first.path} was donated, and no new value took its place"
        case "missing":
            return f"{first.path} is missing: the call adds it"
        case "added":
            return f"{first.path} was added: the call adds no such leaf"
    return f"{first.path} differs from that of the un-nested call"


def difference(finding: data.ValueDiffers) -> str:
    """The figures of a difference: what was expected, and what is there."""
    match finding.label:
        case "missing":
            return f"{finding.of} after the run"
        case "added":
            return f"{finding.of} that the call does not add"
        case "deleted":
            return f"{finding.of} {finding.type} was donated, and no new value took its place"
    if not finding.elements:
        return f"expected {finding.want}, got {finding.have}"
    heading, wrong = f"{finding.of} {finding.type}".strip(), f"{finding.wrong} of {finding.elements} elements differ"
    if finding.allowed is None:
        return f"{heading}   expected {finding.want}, got {finding.have}; {wrong}"
    values = f"expected {finding.want:.5g}, got {finding.have:.5g}; {wrong}"
    return f"{heading}   largest difference {finding.size:.3g} ({finding.allowed:.2g} allowed): {values}"


# --- finite


def finite(findings: Findings) -> Text:
    """The text on values that are not finite, and are in the un-nested call; the first is the summary."""
    rows = [
        ("not finite", f"{finding.path}   {finding.type}   {finding.wrong} of {finding.elements} elements")
        for finding in findings[:SHOWN]
    ]
    return f"{findings[0].path} is NaN or infinite, and finite in the un-nested call", [*rows, *rest(findings)], ""


# --- recompilation


def recompilation(findings: Findings) -> Text:
    """The text on what a further call is traced again for; the first is the summary."""
    inside = tuple(finding for finding in findings if isinstance(finding, data.JitTracedAgain))
    moved = tuple(finding for finding in findings if isinstance(finding, data.TypeMoved))
    traced = [("traced", of_jit(finding)) for finding in inside[:SHOWN]]
    if not moved:
        summary = f"each call traces {inside[0].path} again, for the same types: it makes a jit anew, or a function that a jit is handed"
        return summary, [*traced, *rest(inside)], hints.hint("jit made anew")
    first = moved[0]
    if not first.label:
        return (
            "a second call with the same types is traced again: no attribute and no type of a leaf differs",
            traced,
            "",
        )
    rows = [
        ("changed", f"{each.path}   {each.before} before the call, {each.after} after it") for each in moved[:SHOWN]
    ]
    summary = f"a second call is traced again: {first.path} has changed"
    return summary, [*rows, *rest(moved), *traced], hints.moved(first)


def of_jit(finding: data.JitTracedAgain) -> str:
    """A function that a jit traces in each call: how often, and what calls it."""
    times = f"{finding.times} times" if finding.times > 1 else "once"
    where = f" ({finding.line})" if finding.line else ""
    return f"{finding.path}{where}   {times} a call; its jit is called at {', '.join(finding.called)}"


# --- an invariant of the user's own


def own(findings: Findings) -> Text:
    """The text of an invariant of the user's own, in its own words; the first breach is the summary."""
    first, *others = findings
    path = (("where", first.path),) if first.path else ()
    also = [row for breach in others[: SHOWN - 1] for row in (("also", breach.summary), *map(tuple, breach.details))]
    return first.summary, [*path, *map(tuple, first.details), *also, *rest(findings)], first.hint


TEXTS: dict[str, Callable[[Findings], Text]] = {
    "tracers": tracers,
    "memory": memory,
    "donation": donation,
    "recompilation": recompilation,
    "finite": finite,
    "parity": parity,
}
