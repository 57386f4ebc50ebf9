"""Which looks find what was found in a call: one line of a program for each kind of finding."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from pytest_nnxcheck.compat.targets import effort_options, options_for, topology
from pytest_nnxcheck.core import outcome as found
from pytest_nnxcheck.core.catalogue import CALL_FIRST, row_of
from pytest_nnxcheck.core.chips import parse_target
from pytest_nnxcheck.core.nesting import Nesting
from pytest_nnxcheck.core.outcome import Finding, FindingOnTarget, Outcome
from pytest_nnxcheck.core.peak import FLOOR, OnTarget, Split
from pytest_nnxcheck.engine.reference import MEANINGS, meaning_of
from pytest_nnxcheck.paste.call import Call

ASSERTED = frozenset(("tracers", "memory", "donation", "parity"))
"""The invariants that a program can look for without the plugin."""


def judged_on(outcome: Outcome | None) -> OnTarget | None:
    """The first target of which a program has to show something: where the CPU shows nothing."""
    violations = outcome.violations if outcome is not None else ()
    every = [each for violation in violations if violation.invariant in ASSERTED for each in violation.findings]
    on = [finding.on for finding in every if isinstance(finding, FindingOnTarget)]
    return on[0] if on and len(on) == len(every) else None


@dataclass
class Looks:
    """What a program looks for, each line with what the plugin said: at what the call is handed, before and after it runs."""

    first: dict[str, str] = field(default_factory=dict)
    before: dict[str, str] = field(default_factory=dict)
    after: dict[str, str] = field(default_factory=dict)
    search: dict[str, str] = field(default_factory=dict)
    """Types of tracers to look for when it has run."""
    own_arrays: bool = True
    """Whether the run gets arrays of its own: not where something looks into the buffers of the user's."""

    @property
    def compiles(self) -> bool:
        return any("executable" in line for line in self.after)

    def __bool__(self) -> bool:
        return bool(self.first or self.after or self.search)


def looks_of(outcome: Outcome | None, call: Call) -> Looks:
    """What a program looks for; nothing before the nesting has run, where it raised what the user's code raises, and for what the plugin alone can see."""
    looks, on = Looks(), judged_on(outcome)
    for violation in outcome.violations if outcome is not None else ():
        rows = violation.details if violation.invariant == "donation" else ()  # a row a leaf
        words = ", ".join(ascii(text) for text in (violation.summary, *(text for _, text in rows)))
        # Of each kind the first, and every tracer.
        firsts = {each if isinstance(each, found.TracerLeft) else type(each): each for each in violation.findings[::-1]}
        for finding in firsts.values():
            if isinstance(finding, FindingOnTarget) == (on is not None):
                looks.own_arrays &= not isinstance(finding, found.ViewedBuffer)
                for when, text in look_for(finding, call):
                    looked = f"broken({violation.invariant!r}, {text}, {words})"
                    getattr(looks, when)[looked if when in ("first", "after") else text] = violation.summary
    if looks.compiles:
        made = "STAGED[-1][0].compile(), STAGED[-1][0]"
        if on is not None:
            target = parse_target(on.target)
            made = (
                f"on_target({topology(target)}, {effort_options(on.effort)}, {options_for(target.chip)}, *STAGED[-1])"
            )
        looks.after = {f"executable, lowered = {made}": "", **looks.after}
    return looks


def look_for(finding: Finding, call: Call) -> Iterator[tuple[str, str]]:  # noqa: C901, PLR0912 - one case a kind
    """When a program looks for a finding, and the expression that is true where it is there."""
    keys, value = call.keys(finding.path), call.value(finding.path)
    match finding:
        case found.TracerLeft(leak=leak) if leak.before:
            yield "first", f"{leak.type!r} in living_tracers().values()"
        case found.TracerLeft(leak=leak):
            yield "search", leak.type
        case found.MadeInEndedTrace():
            yield "first", f"refuses_writes(state, {keys})"
        case found.PeakOverBudget(figures=figures):
            yield "after", over(figures.split, figures.bound.budget)
        case found.StateCopied(figures=figures, bytes=size):
            yield "after", over(figures.split, figures.split.peak - size // 2)
        case found.ConstantsCaptured():
            yield "first", f"captured_bytes(program, state, inputs) >= {FLOOR}"
        case found.SharedBuffer(other=other) if value and call.value(other):
            yield "first", f"pointers({value}) & pointers({call.value(other)})"
        case found.Orphaned() if value:
            yield "after", f"{value}.is_deleted()"
        case found.ViewedBuffer() | found.LostBuffer(cause="sharding", abstract=False) if value:
            yield "before", f"donated = pointers({value})"
            yield "after", "donated - pointers(state, output)"
        case found.LostBuffer() | found.LostOnTarget():
            yield "after", "lost_by_program(executable, lowered)"
        case found.UpdateDropped():
            yield "first", f"is_handed_on(program, state, inputs, {keys})"
        case found.ValueDiffers(size=size):
            wanted = f"wanted = ({meaning_text(call.nesting)})(eager, *inputs)"
            yield "before", "call, eager = program, nnx.clone(state)"
            yield "before", "nnx.update(eager, jax.tree.map(jnp.copy, nnx.state(eager)))"
            yield "before", wanted if call.nesting.layers else f"with jax.disable_jit():\n        {wanted}"
            if value:
                yield "before", f"wanted = {call.value(finding.path, 'eager')}"
            yield "after", f"differs(wanted, {value or primal_text(call.nesting)}, {min(size / 2, 1e300)!r})"
        case found.DoesNotFit(on=on):
            yield "after", f"peak_on_target(executable, {bool(parse_target(on.target).chip.gpu)}) > {on.limit}"
        case found.OverBudgetOnTarget(on=on, bound=bound):
            yield "after", f"peak_on_target(executable, {bool(parse_target(on.target).chip.gpu)}) > {bound.budget}"
        case found.CopiedOnTarget(on=on) if on.split is not None:
            yield "after", f"peak(executable) > {on.split.peak - on.copies // 2}"


def over(split: Split, most: int) -> str:
    """Whether the peak is over so many bytes. No total of XLA's counts constants: where they decide, they are taken off the bound."""
    decide = split.peak - split.constants <= most
    return f"peak(executable) > {most - split.constants * decide}"


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
