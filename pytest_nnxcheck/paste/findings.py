"""The looks that find each kind of finding: one line of a program for each."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from pytest_nnxcheck.compat.targets import effort_options, options_for, topology
from pytest_nnxcheck.core.catalogue import CALL_FIRST
from pytest_nnxcheck.core.chips import parse_target
from pytest_nnxcheck.core.nesting import Nesting
from pytest_nnxcheck.core.outcome import Finding, FindingOnTarget, Outcome, Violation
from pytest_nnxcheck.core.peak import FLOOR, OnTarget, Split
from pytest_nnxcheck.engine.reference import calls_of, meaning_of
from pytest_nnxcheck.invariants import donation, memory, parity, tracers
from pytest_nnxcheck.paste.call import Call
from pytest_nnxcheck.values.effects import Difference


@dataclass
class Looks:
    """The lines with which a program looks at the values that the call is handed, before and after it runs: each with the plugin's words."""

    on: OnTarget | None = None
    """The target that it compiles for: the first, where the CPU shows nothing."""
    first: dict[str, str] = field(default_factory=dict)
    before: dict[str, str] = field(default_factory=dict)
    after: dict[str, str] = field(default_factory=dict)
    search: dict[str, str] = field(default_factory=dict)
    """Types of tracers to look for when it has run."""
    own_arrays: bool = True
    """True if the run gets arrays of its own: not where something looks into the buffers of the user's."""

    @property
    def compiles(self) -> bool:
        return any("executable" in line for line in self.after)

    def __bool__(self) -> bool:
        return bool(self.first or self.after or self.search)


def looks_of(outcome: Outcome, call: Call) -> Looks:
    """The looks of a program; none where the nesting raised an exception of the user's code, and for findings that the plugin alone can see."""
    every = [(each, finding) for each in outcome.violations for finding in firsts(each) if any(look_for(finding, call))]
    there = [finding.on for _, finding in every if isinstance(finding, FindingOnTarget)]
    looks = Looks(there[0] if len(there) == len(every) > 0 else None)
    for violation, finding in every:
        if (finding.on if isinstance(finding, FindingOnTarget) else None) != looks.on:
            continue
        looks.own_arrays &= not isinstance(finding, donation.ViewedBuffer)
        rows = violation.details if violation.invariant == "donation" else ()  # a row a leaf
        words = ", ".join(ascii(text) for text in (violation.summary, *(text for _, text in rows)))
        for when, text in look_for(finding, call):
            looked = f"broken({violation.invariant!r}, {text}, {words})"
            getattr(looks, when)[looked if when in ("first", "after") else text] = violation.summary
    if looks.compiles:
        made = "STAGED[-1][0].compile(), STAGED[-1][0]"
        if looks.on is not None:
            target, effort = parse_target(looks.on.target), effort_options(looks.on.effort)
            made = f"on_target({topology(target)}, {effort}, {options_for(target.chip)}, *STAGED[-1])"
        looks.after = {f"executable, lowered = {made}": "", **looks.after}
    return looks


def firsts(violation: Violation) -> Iterable[Finding]:
    """The first finding of each kind, and every tracer."""
    return {
        each if isinstance(each, tracers.TracerLeft) else type(each): each for each in violation.findings[::-1]
    }.values()


def look_for(finding: Finding, call: Call) -> Iterator[tuple[str, str]]:  # noqa: C901, PLR0912 - one case a kind
    """The moment when a program looks for a finding, and the expression that is true where it is there."""
    keys, value = call.keys(finding.path), call.value(finding.path)
    match finding:
        case tracers.TracerLeft(leak=leak) if leak.before:
            yield "first", f"{leak.type!r} in living_tracers().values()"
        case tracers.TracerLeft(leak=leak):
            yield "search", leak.type
        case tracers.MadeInEndedTrace():
            yield "first", f"refuses_writes(state, {keys})"
        case memory.PeakOverBudget(figures=figures):
            yield "after", over(figures.split, figures.bound.budget)
        case memory.StateCopied(figures=figures, bytes=size):
            yield "after", over(figures.split, figures.split.peak - size // 2)
        case memory.ConstantsCaptured():
            yield "first", f"captured_bytes(program, state, inputs) >= {FLOOR}"
        case donation.SharedBuffer(other=other) if value and call.value(other):
            yield "first", f"pointers({value}) & pointers({call.value(other)})"
        case donation.Orphaned() if value:
            yield "after", f"{value}.is_deleted()"
        case donation.LostBuffer(cause="reference", abstract=False) if value:
            yield "before", f"pointer = {value}.unsafe_buffer_pointer()"
            yield "after", f"{value}.unsafe_buffer_pointer() != pointer"
        case donation.ViewedBuffer() | donation.LostBuffer(cause="sharding", abstract=False) if value:
            yield "before", f"donated = pointers({value})"
            yield "after", "donated - pointers(state, output)"
        case donation.LostBuffer() | donation.LostOnTarget():
            yield "after", "lost_by_program(executable, lowered)"
        case donation.UpdateDropped():
            yield "first", f"is_handed_on(program, state, inputs, {keys})"
        case parity.ValueDiffers(difference=Difference(size=size)):
            numbers, calls = calls_of(meaning_of(call.nesting))
            axes = sum(bool(layer.row.axis) for layer in call.nesting.layers)
            wanted = f"calls = [call(eager, *(leaf[{(0,) * axes}] for leaf in inputs)) for _ in range({calls})]"
            # An array, and a new reference in the place of one, take this as well.
            read = "[...]" if finding.path in map(call.subject.path, call.profile.state.references) else ""
            if call.profile.state.references:
                yield "before", "call, eager = program, with_refs(state, ref=False)"
            else:
                yield "before", "call, eager = program, nnx.clone(state)"
                yield "before", "nnx.update(eager, jax.tree.map(jnp.copy, nnx.state(eager)))"
            yield "before", wanted if call.nesting.layers else f"with jax.disable_jit():\n        {wanted}"
            yield "before", f"wanted = {call.value(finding.path, 'eager') + read if value else calls_text(numbers)}"
            yield "after", f"differs(wanted, {value + read or primal_text(call.nesting)}, {min(size / 2, 1e300)!r})"
        case memory.DoesNotFit(on=on):
            yield "after", f"peak_on_target(executable, {bool(parse_target(on.target).chip.gpu)}) > {on.limit}"
        case memory.OverBudgetOnTarget(on=on, bound=bound):
            yield "after", f"peak_on_target(executable, {bool(parse_target(on.target).chip.gpu)}) > {bound.budget}"
        case memory.CopiedOnTarget(on=on) if on.split is not None:
            yield "after", f"peak(executable) > {on.split.peak - on.copies // 2}"


def over(split: Split, most: int) -> str:
    """The expression that is true if the peak is over so many bytes.

    No total of XLA's counts constants: where they decide, they are taken off the bound.
    """
    decide = split.peak - split.constants <= most
    return f"peak(executable) > {most - split.constants * decide}"


def calls_text(numbers: Any) -> str:
    """The outputs of calls, which are in the list ``calls``, in the structure of their numbers."""
    if isinstance(numbers, int):
        return f"calls[{numbers}]"
    parts = ", ".join(map(calls_text, numbers))
    return f"stacked({parts})" if isinstance(numbers, list) else f"({parts})"


def primal_text(nesting: Nesting, out: str = "output", start: int = 0) -> str:
    """The expression for an output without gradients."""
    for number, layer in enumerate(nesting.layers[start:], start):
        if layer.transform == CALL_FIRST:
            return f"({out}[0], {primal_text(nesting, f'{out}[1]', number + 1)})"
        out = f"{out}[0]" if layer.row.pair == "gradients" else out
    return out
