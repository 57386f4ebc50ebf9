"""Which looks find what was found in a call: one line of a program for each kind of finding."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from pytest_nnxcheck.compat import targets
from pytest_nnxcheck.core import outcome as found
from pytest_nnxcheck.core.catalogue import CALL_FIRST, row_of
from pytest_nnxcheck.core.chips import parse_target
from pytest_nnxcheck.core.nesting import Nesting
from pytest_nnxcheck.core.outcome import Finding, FindingOnTarget, Outcome, Violation
from pytest_nnxcheck.core.peak import FLOOR, OnTarget, Split
from pytest_nnxcheck.engine.reference import MEANINGS, meaning_of
from pytest_nnxcheck.paste.call import Call

ASSERTED = frozenset(("tracers", "memory", "donation", "parity"))
"""The invariants that a program can look for without the plugin."""
KNOWN_HERE_ALONE = found.MemoryWasted | found.StateTouched
"""What only the plugin can see: where the un-nested call wastes memory, and that a layer which asks for shapes wrote a value."""


def can_look_for(violation: Violation) -> bool:
    """Whether a program can look for a violation without the plugin."""
    hidden = [isinstance(finding, KNOWN_HERE_ALONE) for finding in violation.findings]
    return violation.invariant in ASSERTED and not (hidden and all(hidden))


def judged_on(outcome: Outcome | None) -> OnTarget | None:
    """The first target of which a program has to show something: where the CPU shows nothing."""
    violations = outcome.violations if outcome is not None else ()
    every = [each for violation in violations if violation.invariant in ASSERTED for each in violation.findings]
    on = [finding.on for finding in every if isinstance(finding, FindingOnTarget)]
    return on[0] if on and len(on) == len(every) else None


@dataclass
class Looks:
    """What a program looks for: lines at what the call is handed, before and after it runs."""

    first: dict[str, None] = field(default_factory=dict)
    before: dict[str, None] = field(default_factory=dict)
    after: dict[str, None] = field(default_factory=dict)
    search: dict[str, None] = field(default_factory=dict)
    """Types of tracers to look for when it has run."""
    broken: dict[str, str] = field(default_factory=dict)
    """What the plugin said, by invariant."""
    own_arrays: bool = True
    """Whether the run gets arrays of its own: not where something looks into the buffers of the user's."""

    @property
    def compiles(self) -> bool:
        return any("COMPILED" in line for line in self.after)

    @property
    def donates(self) -> bool:
        return not self.broken or bool(self.broken.keys() & {"memory", "donation"})


def looks_of(outcome: Outcome | None, call: Call) -> Looks:
    """What a program looks for; nothing before the nesting has run, and where it raised what the user's code raises."""
    looks = Looks()
    if on := judged_on(outcome):
        target = parse_target(on.target)
        how = f"{targets.topology(target)}, {targets.effort_options(on.effort)}, {targets.options_for(target.chip)}"
        looks.after[f"program, there = on_target({how}, COMPILED[-1])"] = None
    for violation in outcome.violations if outcome is not None else ():
        seen = set[type[Finding]]()
        rows = violation.details if violation.invariant == "donation" else ()  # a row a leaf
        looks.broken[violation.invariant] = violation.summary
        words = ", ".join(ascii(text) for text in (violation.summary, *(text for _, text in rows)))
        for finding in violation.findings:
            looks.own_arrays &= not isinstance(finding, found.ViewedBuffer)
            if isinstance(finding, FindingOnTarget) == (on is not None) and type(finding) not in seen:
                seen |= {type(finding)} - {found.TracerLeft}
                for when, text in look_for(finding, call):
                    says = f"broken({violation.invariant!r}, {text}, {words})"
                    getattr(looks, when)[says if when in ("first", "after") else text] = None
    return looks


def look_for(finding: Finding, call: Call) -> Iterator[tuple[str, str]]:  # noqa: C901, PLR0912 - one case a kind
    """When a program looks for a finding, and the expression that is true where it is there."""
    keys, value = call.keys(finding.path), call.value(finding.path)
    match finding:
        case found.TracerLeft(leak=leak):
            yield ("first", f"any_tracers({{{leak.type!r}}})") if leak.before else ("search", leak.type)
        case found.MadeInEndedTrace():
            yield "first", f"refuses_writes(state, {keys})"
        case found.PeakOverBudget(figures=figures):
            yield "after", over(figures.split, figures.bound.budget)
        case found.StateCopied(figures=figures, bytes=size):
            yield "after", over(figures.split, figures.split.peak - size // 2)
        case found.ConstantsCaptured():
            yield "first", f"captured_bytes(program, state, inputs) >= {FLOOR}"
        case found.SharedBuffer(other=other) if value and call.value(other):
            yield "first", f"is_shared({value}, state, inputs)"
        case found.SharedBuffer() | found.Orphaned():
            yield "after", "any_deleted()"
        case found.LostBuffer() if call.subject.abstract:
            yield "after", "lost_by_program(*COMPILED[-1][:2])"
        case found.LostBuffer(cause="reference"):
            yield "before", f"pointer = {value}.unsafe_buffer_pointer()"
            yield "after", f"{value}.unsafe_buffer_pointer() != pointer"
        case found.LostBuffer() | found.ViewedBuffer():
            kind = repr(str(finding.type)) if isinstance(finding, found.LostBuffer) else f"describe({value})"
            yield (
                "before",
                f"donated = places({', '.join(['state', *(f'inputs[{number}]' for number in call.donated)])})",
            )
            yield "after", f"is_lost(donated, {kind}, state, output)"
        case found.UpdateDropped():
            yield "first", f"is_handed_on(program, state, inputs, {keys})"
        case found.ValueDiffers(size=size):
            eager = f"({meaning_text(call.nesting)})(eager, *inputs)"
            wanted = f"wanted = {eager}"
            if call.references:
                value = f"{value}[...]" if value else ""
                yield "before", "call, eager = program, nnx.with_vars(state, ref=False, allow_duplicates=True)"
            else:
                yield "before", "call, eager = program, nnx.clone(state)"
                yield "before", "nnx.update(eager, jax.tree.map(jnp.copy, nnx.state(eager)))"
            yield "before", wanted if call.nesting.layers else f"with jax.disable_jit():\n        {wanted}"
            if value:
                yield "before", f"wanted = {call.value(finding.path, 'eager')}"
            yield "after", f"differs(wanted, {value or primal_text(call.nesting)}, {min(size / 2, 1e300)!r})"
        case found.DoesNotFit(on=on):
            yield "after", f"peak_on_target(program, {bool(parse_target(on.target).chip.gpu)}) > {on.limit}"
        case found.OverBudgetOnTarget(on=on, bound=bound):
            yield "after", f"peak_on_target(program, {bool(parse_target(on.target).chip.gpu)}) > {bound.budget}"
        case found.CopiedOnTarget(on=on) if on.split is not None:
            yield "after", f"peak(program) > {on.split.peak - on.copies // 2}"
        case found.LostOnTarget():
            yield "after", "lost_by_program(program, there)"


def over(split: Split, most: int) -> str:
    """Whether the peak is over so many bytes. No total of XLA's counts constants: where they decide, they are taken off the bound."""
    decide = split.peak - split.constants <= most
    return f"peak(COMPILED[-1][0]) > {most - split.constants * decide}"


def meaning_text(nesting: Nesting) -> str:
    """The eager calls that a nesting means."""
    text, axes = "call", 0
    for name in reversed(meaning_of(nesting)):
        text = f"{MEANINGS[name].__name__}({text}, call, {axes})"
        axes += bool(row_of(name).axis)
    return text


def primal_text(nesting: Nesting, out: str = "output", start: int = 0) -> str:
    """The expression for an output without gradients."""
    for number, layer in enumerate(nesting.layers[start:], start):
        if layer.transform == CALL_FIRST:
            return f"({out}[0], {primal_text(nesting, f'{out}[1]', number + 1)})"
        out = f"{out}[0]" if layer.row.pair == "gradients" else out
    return out
