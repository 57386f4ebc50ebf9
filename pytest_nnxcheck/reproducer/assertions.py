"""The lines of a program that look for what is known of a broken nesting: before it runs, around its run, and after it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from pytest_nnxcheck.compat import targets
from pytest_nnxcheck.core.chips import parse_target
from pytest_nnxcheck.core.nesting import Nesting
from pytest_nnxcheck.core.outcome import (
    ConstantsCaptured,
    CopiedOnTarget,
    DoesNotFit,
    Finding,
    FindingOnTarget,
    LostBuffer,
    LostOnTarget,
    MadeInEndedTrace,
    MemoryWasted,
    Orphaned,
    Outcome,
    OverBudgetOnTarget,
    PeakOverBudget,
    SharedBuffer,
    StateCopied,
    StateTouched,
    TracerLeft,
    UpdateDropped,
    ValueDiffers,
    ViewedBuffer,
    Violation,
)
from pytest_nnxcheck.core.peak import FLOOR, OnTarget
from pytest_nnxcheck.reporting.target_rows import device
from pytest_nnxcheck.reproducer.nesting_text import Facts, meaning_text, primal_text

Kinds = dict[type[Finding], list[Any]]
"""The findings of a violation, by their class."""

SHOWN = 12
"""Findings that a program looks for; the first are enough to know it by."""
ASSERTED = frozenset(("tracers", "memory", "donation", "parity"))
"""The invariants that a program can look for without the plugin."""
TYPED = ("dtype", "shape", "not returned")
"""Causes of a lost buffer that a trace shows."""

INSIDE = "a jit inside the call donates it, and deletes both"
"""Why two leaves in one buffer are lost."""


@dataclass
class Assertions:
    """The lines, of functions of `runtime`, and ways in which the program runs.

    ``leaked`` are tracers to look for in the run, ``touched`` the leaves that no ``eval_shape`` may change. The outermost jit ``donates`` as the plugin's
    does, or ``compiles`` a program that the lines measure, or of which they ask what is ``aliased``. What is ``viewed`` must not be copied before. ``eager`` says that the same calls are made without
    the nesting, ``traced`` that a trace of an abstract call shows the finding. ``target`` is what the program compiles for, beside the CPU.
    """

    first: list[str] = field(default_factory=list)
    before: list[str] = field(default_factory=list)
    after: list[str] = field(default_factory=list)
    leaked: tuple[tuple[str, str], ...] = ()
    touched: str = ""
    donates: bool = True
    compiles: bool = False
    viewed: bool = False
    aliased: bool = False
    eager: bool = False
    traced: bool = False
    target: dict[str, Any] = field(default_factory=dict)


def can_look_for(violation: Violation) -> bool:
    """Whether a program can look for a violation without the plugin, which alone knows where the un-nested call wastes memory."""
    wasted = [isinstance(finding, MemoryWasted) for finding in violation.findings]
    return violation.invariant in ASSERTED and not (wasted and all(wasted))


def assertions(outcome: Outcome | None, nesting: Nesting, facts: Facts) -> Assertions:
    """What a program looks for; nothing before the nesting has run, and where it raised what the user's code raises."""
    made = Assertions()
    violations = outcome.violations if outcome is not None else ()
    if outcome is None or not violations:
        return made
    if on := judged_on(outcome):
        of_target(made, outcome, on, facts)
        return made
    made.donates = any(violation.invariant in ("donation", "memory") for violation in violations)
    for violation in violations:
        kinds: Kinds = {}
        for finding in violation.findings:
            kinds.setdefault(type(finding), []).append(finding)
        match violation.invariant:
            case "tracers":
                of_tracers(made, outcome, kinds, facts)
            case "memory":
                of_memory(made, outcome, kinds, facts)
            case "donation":
                of_donation(made, kinds, facts)
            case "parity":
                of_parity(made, kinds, nesting, facts)
    made.traced = made.traced and not (made.compiles or made.aliased or made.leaked)
    return made


def judged_on(outcome: Outcome | None) -> OnTarget | None:
    """The first target of which a program has to show something: where the CPU shows nothing."""
    violations = outcome.violations if outcome is not None else ()
    found = [each for violation in violations if violation.invariant in ASSERTED for each in violation.findings]
    on = [finding.on for finding in found if isinstance(finding, FindingOnTarget)]
    return on[0] if on and len(on) == len(found) else None


def of_target(made: Assertions, outcome: Outcome, on: OnTarget, facts: Facts) -> None:
    """A program that does not fit a target, is over its budget there, or holds copies of its state; donated leaves that lose their buffer there."""
    target = parse_target(on.target)
    made.target = {
        "name": on.target,
        "device": device(on),
        "limit": on.limit,
        "topology": targets.topology(target),
        "effort": on.effort,
        "options": targets.options_for(target.chip),
    }
    for finding in (each for violation in outcome.violations for each in violation.findings):
        match finding:
            case DoesNotFit() if finding.on == on:
                made.after.append("fits_target()")
            case OverBudgetOnTarget(bound=bound) if finding.on == on:
                made.after.append(f"fits_target({bound.budget})")
            case CopiedOnTarget() if finding.on == on and on.split is not None:
                copies = f"state={on.state}, copied={on.copies}, seen={on.split.peak}"
                made.after.append(f"fits_target({copies})")
            case LostOnTarget() if finding.on == on:
                named = {path: facts.value(path) for path in on.lost[:SHOWN]}
                leaves = dict_text({path: text for path, text in named.items() if text is not None})
                made.before.append(f"donated = {leaves}")
                made.after.append("keeps_buffers_on_target(donated)")


def of_tracers(made: Assertions, outcome: Outcome, kinds: Kinds, facts: Facts) -> None:
    """Tracers that are left, Variables that cannot be written, leaves that an ``eval_shape`` changed."""
    held = [finding for finding in kinds.get(TracerLeft, ()) if finding.leak.before][:SHOWN]
    if held:
        made.first.append(f"holds_no_tracers({tuple((each.path, each.leak.type) for each in held)!r})")
    elif outcome.evidence is not None:
        made.leaked = tuple((leak.path, leak.type) for leak in outcome.evidence.leaks[:SHOWN])
    if pinned := kinds.get(MadeInEndedTrace):
        made.first.append(f"may_be_written(state, {keys_of(pinned, facts)!r})")
    if touched := kinds.get(StateTouched):
        made.touched = f"lambda state: touches_nothing(state, {keys_of(touched, facts)!r})"


def of_memory(made: Assertions, outcome: Outcome, kinds: Kinds, facts: Facts) -> None:
    """A peak over its budget, copies of the state, what the call captures."""
    evidence = outcome.evidence
    if evidence is not None and evidence.split is not None and {PeakOverBudget, StateCopied} & kinds.keys():
        copied = sum(finding.bytes for finding in kinds.get(StateCopied, ()))
        copies = f", state={facts.state_bytes}, copied={copied}, seen={evidence.split.peak}"
        made.compiles = True
        made.after.append(f"peak_is_within({outcome.budget}{copies if StateCopied in kinds else ''})")
    if ConstantsCaptured in kinds:
        made.first.append(f"captures_little(program, state, inputs, {FLOOR})")


def of_donation(made: Assertions, kinds: Kinds, facts: Facts) -> None:
    """Leaves that lost their buffer, that share it, or of which a copy is updated."""
    shares = kinds.get(SharedBuffer, [])
    within = [finding for finding in shares if facts.value(finding.other) is not None]
    if shared := expressions(within, facts):
        why = f", {INSIDE!r}" if any(finding.inside for finding in within) else ""
        made.first.append(f"shares_no_buffer(state, inputs, {dict_text(shared)}{why})")
    if Orphaned in kinds or len(within) < len(shares):
        made.after.append("leaves_no_deleted_arrays()")
    if lost := expressions([*kinds.get(ViewedBuffer, ()), *kinds.get(LostBuffer, ())], facts):
        made.viewed = ViewedBuffer in kinds
        after = dict(expressions_after(lost, facts))
        kept = "is_aliased(new)" if facts.abstract else "pointers(new) <= places"
        typed = all(finding.cause in TYPED for finding in kinds.get(LostBuffer, ()))
        made.traced, made.aliased = typed, facts.abstract and not typed
        kept = "True" if facts.abstract and typed else kept
        if any(finding.cause == "sharding" for finding in kinds.get(LostBuffer, ())):
            kept = f"in_same_shards(old, new) and {kept}"
        made.before.append(f"donated = {dict_text(lost)}")
        made.before += [] if facts.abstract else ["places = pointers(*jax.tree.leaves(nnx.state(state)), *inputs)"]
        made.after.append(f"keeps_donated_buffers(donated, {dict_text(after)}, lambda old, new: {kept})")
    if dropped := kinds.get(UpdateDropped):
        if facts.abstract:
            made.traced = True
            made.first.append(f"is_written(program, state, inputs, {keys_of(dropped, facts)!r})")
        else:
            must_change(made, "donation", dropped, facts)


def must_change(made: Assertions, invariant: str, dropped: list[Any], facts: Facts) -> None:
    """Leaves of which an update is dropped."""
    leaves = dict_text(expressions(dropped, facts)).replace("value_at", "anything_at")
    made.before.append(f"old = own({leaves})")
    made.after.append(f"changes({invariant!r}, old, {leaves})")


def of_parity(made: Assertions, kinds: Kinds, nesting: Nesting, facts: Facts) -> None:
    """Values that are others than those of the same calls without the nesting, or without the call's own jits."""
    if differ := kinds.get(ValueDiffers, [])[:SHOWN]:
        made.eager = True
        text = dict_text({each.path: facts.value(each.path) or "output" for each in differ}).replace(
            "value_at", "anything_at"
        )
        least = {each.path: min(each.size / 2, 1e300) for each in differ}
        call = f"({meaning_text(nesting)})(eager, *inputs)" if nesting.layers else "call(eager, *inputs)"
        made.before += [
            "call, eager = program, nnx.clone(state)",
            "nnx.update(eager, own(nnx.state(eager)))",
            *([] if nesting.layers else ["with jax.disable_jit():", f"    output = {call}"]),
            *([f"output = {call}"] if nesting.layers else []),
            f"wanted = own({text.replace('anything_at(state', 'anything_at(eager')})",
        ]
        primal = primal_text(nesting, "output")
        found = text.replace(": output", f": {primal}") if primal != "output" else text
        reference = "the un-nested call" if nesting.layers else "the same call without its jits"
        made.after.append(f"agree(wanted, {found}, {least!r}, {reference!r})")


def keys_of(findings: list[Any], facts: Facts) -> dict[str, Any]:
    named = {finding.path: facts.keys(finding.path) for finding in findings[:SHOWN]}
    return {path: keys for path, keys in named.items() if keys is not None}


def expressions(findings: Any, facts: Facts) -> dict[str, str]:
    """The expression for each leaf that findings name."""
    named = {finding.path: facts.value(finding.path) for finding in [*findings][:SHOWN]}
    return {path: text for path, text in named.items() if text is not None}


def expressions_after(lost: Mapping[str, str], facts: Facts) -> Iterator[tuple[str, str]]:
    """The same after the run: for an input the output that is its new value."""
    for path, text in lost.items():
        if path not in facts.inputs:
            yield path, text
        elif (number := facts.inputs.index(path)) in facts.returned:
            yield path, f"jax.tree.leaves(output)[{facts.returned[number]}]"
        else:
            every = ", ".join(f"inputs[{each}]" for each in facts.donated)
            yield path, f"counterpart(inputs[{number}], [{every}], output)"


def dict_text(texts: Mapping[str, str]) -> str:
    return f"{{{', '.join(f'{name!a}: {text}' for name, text in texts.items())}}}"
