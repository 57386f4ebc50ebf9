"""Outputs and state after a nesting are the same as after the same calls without it; those of an un-nested call as without its jits."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

import jax

from pytest_nnxcheck.compat import flax_modes, graph
from pytest_nnxcheck.compat.arrays import buffer_of, describe
from pytest_nnxcheck.core.catalogue import CALL_FIRST, GRAD, REMAT, ROWS, InvariantRow
from pytest_nnxcheck.core.nesting import Nesting
from pytest_nnxcheck.core.notes import Fact, FactKind
from pytest_nnxcheck.core.outcome import Finding, InProgram, Moment
from pytest_nnxcheck.core.text import Row, first_line
from pytest_nnxcheck.engine.observe import unfused
from pytest_nnxcheck.engine.ran import Ran
from pytest_nnxcheck.engine.reference import Reference, Start, calls_of, effect_against, meaning_of
from pytest_nnxcheck.subject.profile import Profile
from pytest_nnxcheck.subject.subject import Subject
from pytest_nnxcheck.values.effects import TIMES, Difference, Effect, Nudged, differences, distance, scalars

__tracebackhide__ = True  # pytest shows the frames of the user, not these

ROW = InvariantRow("parity", order=60, severity=40, values=True, runs=True, error="ParityLost")

BROADCASTING = tuple(row.name for row in ROWS if row.axis and not row.pair)
Cause = Literal["attribute", "broadcast", "copy", "reference", "replaced", ""]
"""The cause of a difference: it is of a plain attribute, the state was broadcast, a transform of jax was handed a copy, a transform copied a
reference or wrote to it twice, or the call put another Variable in the place of one in a reference; empty where it is unknown.
"""
Found = tuple[Difference, ...]
DIRECTIONS = 8
"""Nudged starts. Of 127 steps of Adam with a bias before batch normalization one start was too few for two; five were enough."""
THREEFRY = "threefry2x32"
"""The only implementation of random numbers that draws the same for a key alone and for a key in a batch."""
LOST = Difference("", label="dropped", want="the value of the same call on arrays", have="the old one")
"""A reference that a transform of flax inside the call copied: the call writes to the copy."""
AGAIN = Start(again=True)
"""Tried before all nudged starts: where the very same calls give something else, those say nothing of rounding."""


def judge(ran: Ran) -> Iterator[Finding | Fact]:
    """Compare a run that ended, and leaked no tracer, with its reference: the same calls without the nesting, or an un-nested call without its jits."""
    if ran.reference is None:
        return
    nesting, wanted = ran.observation.nesting, ran.reference.wanted
    if wanted.error is not None:
        kind: FactKind = "raises un-nested" if nesting.layers else "raises without jit"
        yield Fact(kind, ("parity",), first_line(wanted.error))
    else:
        yield from compared(ran, ran.reference)
    if not nesting.layers:
        for path in ran.profile.state.lost:
            lost = replace(LOST, path=ran.call.subject.path(path))
            yield ValueDiffers(lost.path, difference=lost, cause="reference")


def compared(ran: Ran, reference: Reference) -> Iterator[Finding | Fact]:
    """The differences that neither rounding nor fusion explains, of all that every layer promises to hand out; notes on the others."""
    subject, nesting = ran.call.subject, ran.observation.nesting
    got = effect_against(subject, ran.observation, reference.wanted)
    draws = other_draws(subject, nesting)
    handed_out = promised(subject, nesting, got)
    comparison = Comparison(subject, ran.profile, nesting, reference, handed_out, drawn=draws is not None)
    every, judged = comparison.every(got), comparison.judged(got)
    moved = comparison.beyond_nudge(got, judged)
    fused = comparison.beyond_fusion(moved)
    for each in fused:
        # The state after an un-nested call lacks an update that a transform inside the call made to a copy: one that it returns is no loss.
        if nesting.layers or not is_returned(each, reference.wanted, got):
            variable = graph.variable_name(each.of) if each.of else ""
            yield ValueDiffers(each.path, difference=each, cause=cause(each, ran), variable=variable)
    # The notes of an un-nested call begin with the numbers: the call itself sets them, whatever the reference does.
    numbers = scalars(got.after, got.before)
    yield from () if nesting.layers else numbers
    yield from [draws] if draws else ()
    yield from note_on("decided by rounding", judged, moved)
    yield from note_on("decided by fusion", moved, fused)
    yield from note_on("added, functional", [each for each in every if each.of != "attribute"], judged)
    yield from numbers if nesting.layers else ()
    yield from note_on(
        "attributes, functional", [each for each in every if each.of == "attribute"], judged, of_call=True
    )


def note_on(kind: FactKind, every: Iterable[Difference], left: Found, *, of_call: bool = False) -> Iterator[Fact]:
    """A note on the differences that are in ``every`` and not in ``left``."""
    paths = {difference.path for difference in left}
    if names := tuple(difference.path for difference in every if difference.path not in paths):
        yield Fact(kind, names, of_call=of_call)


def promised(subject: Subject, nesting: Nesting, got: Effect) -> frozenset[str] | None:
    """The names of the state that every layer hands out, see `Layer.hands_out`; None for all that the call makes of it."""
    if all(layer.hands_out == "all" for layer in nesting.layers):
        return None
    leaves = {subject.path(path) for path, _ in graph.flat_state(flax_modes.split(subject.state)[1])}
    return frozenset(leaves | {name for name, leaf in got.before.leaves.items() if leaf.kind != "attribute"})


@dataclass(frozen=True, slots=True)
class Comparison:
    """A call with its reference."""

    subject: Subject
    facts: Profile
    nesting: Nesting
    reference: Reference
    promised: frozenset[str] | None
    """The names of the state that every layer hands out; None for all."""
    drawn: bool
    """True if random numbers may differ: values that depend on them are not compared."""

    def promises(self, each: Difference) -> bool:
        """True if every layer has to hand out what differs: an output always, and whatever of the state came out all the same."""
        return (
            self.promised is None
            or each.path in self.promised
            or not (each.of == "attribute" or each.label == "missing")
        )

    def every(self, got: Effect, nudged: Nudged = ()) -> Found:
        """The differences from the reference that nudged starts do not explain; for an un-nested call in the state alone."""
        state_only = not self.nesting.layers
        return differences(self.reference.wanted, got, nudged, drawn=self.drawn, state_only=state_only)

    def judged(self, got: Effect, nudged: Nudged = ()) -> Found:
        """The differences in what every layer promises."""
        return tuple(filter(self.promises, self.every(got, nudged)))

    def beyond_nudge(self, got: Effect, every: Found) -> Found:
        """The differences that no start a few roundings away explains.

        One start can leave a value where it was by chance: a second moment of Adam is the square of a gradient, which may be noise on both
        sides of zero. So there are several, in opposite directions.
        """
        different, nudged = every, list[Effect]()
        precision = self.facts.program.precision
        nudges = [Start(nudged=True, precision=precision, direction=direction) for direction in range(DIRECTIONS)]
        for start in (AGAIN, *nudges):
            if not any(difference.rounding for difference in different):
                break
            effect = self.reference.evaluated.effect(self.subject, self.reference.meaning, start)
            if start == AGAIN and (effect.error or self.every(replace(effect, before=got.before))):
                # The calls do not repeat, so that no other start tells what rounding does: a number that Python counts up, say.
                break
            if effect.error is None:
                nudged.append(effect)
                different = self.judged(got, tuple(nudged))
        return different

    def beyond_fusion(self, different: Found) -> Found:
        """The differences that remain where XLA fuses no operations of the same program.

        Where two terms cancel to the bit (a published graph network: the `GCN` of jraphx), every start gives zero, and a fused operation, which
        rounds once in place of twice, gives noise, which may lie on the other side of a relu.
        """
        if not (self.nesting.layers and any(map(may_be_fusion, different))):
            return different
        without_fusion = unfused(self.subject, self.facts, self.nesting)
        if without_fusion is None:
            return different
        got = effect_against(self.subject, without_fusion, self.reference.wanted)
        left = {difference.path for difference in self.beyond_nudge(got, self.judged(got))}
        return tuple(each for each in different if each.path in left or not may_be_fusion(each))


def may_be_fusion(difference: Difference) -> bool:
    """True if rounding by the compiler may explain a difference: never a dropped update, NaN or infinity."""
    return difference.rounding and difference.label != "dropped"


def other_draws(subject: Subject, nesting: Nesting) -> Fact | None:
    """A note on random numbers that differ under vmap: only threefry draws the same for a key alone and for a key in a batch."""
    if not any(layer.row.axis == "elements" for layer in nesting.layers):
        return None
    leaves = [(subject.path(path), value) for path, value in graph.raw_leaves(subject.state)]
    for name, held in [*leaves, *zip(subject.input_names, subject.inputs, strict=False)]:
        leaf = buffer_of(held)
        if hasattr(leaf, "dtype") and graph.is_key(leaf) and str(jax.random.key_impl(leaf)) not in (THREEFRY, "fry"):
            return Fact("other draws", (name,), describe(leaf))
    default = str(jax.config.jax_default_prng_impl)
    return None if default == THREEFRY else Fact("other draws", ("jax_default_prng_impl",), default)


def is_returned(difference: Difference, wanted: Effect, got: Effect) -> bool:
    """True if the call returns the new value of a leaf, as one in functional style does: an output lies far nearer to it than the old value."""
    leaf, old = wanted.after.leaves.get(difference.path), got.before.leaves.get(difference.path)
    if leaf is None or old is None:
        return False
    moved = distance(leaf.value, old.value)
    outputs = (array for array in got.output if describe(array) == describe(leaf.value))
    return any(TIMES * distance(leaf.value, array) <= moved for array in outputs)


def cause(each: Difference, ran: Ran) -> Cause:
    """Name the cause of a difference; empty where that is unknown.

    Transforms carry no attribute out. A layer that broadcasts the state drops its updates. A transform inside the call changed a copy. A
    transform of flax's graph mode writes to copies of references, and a gradient of what is made again writes twice.
    """
    layers, state = ran.observation.nesting.layers, ran.profile.state
    path = next((path for path in state.references if ran.call.subject.path(path) == each.path), None)
    if path is not None and each.label == "dropped":
        if path in state.replaced:
            return "replaced"
        to_copies = any(layer.style == "argument" and not (layer.row.compiles or layer.row.loop) for layer in layers)
        if to_copies and flax_modes.mode_flags()[1]:
            return "reference"
    names = [layer.transform for layer in layers]
    if path is not None and each.label == "differs" and GRAD in names and REMAT in names[names.index(GRAD) :]:
        return "reference"
    if not layers:
        return "copy"
    if each.of == "attribute" and each.label in ("dropped", "attribute"):
        return "attribute"
    broadcasts = any(layer.transform in BROADCASTING for layer in layers)
    return "broadcast" if each.label == "dropped" and broadcasts else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueDiffers(Finding):
    """A leaf, an attribute or an output that is not as it should be."""

    difference: Difference
    cause: Cause = ""
    """The cause of a dropped update."""
    variable: str = ""
    """The type of the Variable, as its user writes it."""

    def sentence(self) -> str:
        path, off = self.path, self.difference
        match off.label:
            case "dropped" | "attribute" if off.of == "attribute":
                return f"{path}: expected {off.want}, as after the same calls one by one (a loop makes one call in each step), got {off.have}"
            case "dropped" if self.cause == "reference":
                return f"{path}, a reference, kept its old value: a transform of flax wrote to a copy of it"
            case "dropped" if self.cause == "copy":
                return f"{path} kept its old value: a transform inside the call updated a copy of it"
            case "dropped":
                return f"{path} kept its old value: the update was dropped"
            case "differs" if self.cause == "copy":
                return f"{path} differs from what the same call leaves without its jits"
            case "deleted":
                return f"{path} was donated, and no new value took its place"
            case "missing":
                return f"{path} is missing: the call adds it"
            case "added":
                return f"{path} was added: the call adds no such leaf"
        return f"{path} differs from that of the un-nested call"

    def rows(self) -> list[Row]:
        return [(self.difference.label, f"{self.path}   {self.figures()}")]

    def figures(self) -> str:
        """The value that was expected, and the one that is there."""
        off = self.difference
        match off.label:
            case "missing":
                return f"{off.of} after the run"
            case "added":
                return f"{off.of} that the call does not add"
            case "deleted":
                return f"{off.of} {off.type} was donated, and no new value took its place"
        if not off.elements:
            return f"expected {off.want}, got {off.have}"
        heading, wrong = f"{off.of} {off.type}".strip(), f"{off.wrong} of {off.elements} elements differ"
        if off.allowed is None:
            return f"{heading}   expected {off.want}, got {off.have}; {wrong}"
        values = f"expected {off.want:.5g}, got {off.have:.5g}; {wrong}"
        return f"{heading}   largest difference {off.size:.3g} ({off.allowed:.2g} allowed): {values}"

    def look(self, call: InProgram) -> Iterator[tuple[Moment, str]]:
        numbers, calls = calls_of(meaning_of(call.nesting))
        axes = sum(bool(layer.row.axis) for layer in call.nesting.layers)
        wanted = f"calls = [program(eager, *(leaf[{(0,) * axes}] for leaf in inputs)) for _ in range({calls})]"
        # An array, and a new reference in the place of one, take this as well.
        read = "[...]" if self.path in call.references else ""
        value, eager = (call.value(self.path, state) for state in ("state", "eager"))
        if call.references:
            yield "before", "eager = with_refs(state, ref=False)"
        else:
            yield "before", "eager = nnx.clone(state)"
            yield "before", "nnx.update(eager, jax.tree.map(jnp.copy, nnx.state(eager)))"
        yield "before", wanted if call.nesting.layers else f"with jax.disable_jit():\n    {wanted}"
        yield "before", f"wanted = {eager + read if eager else calls_text(numbers)}"
        yield (
            "after",
            f"differs(wanted, {value + read or primal_text(call.nesting)}, {min(self.difference.size / 2, 1e300)!r})",
        )

    def cure(self) -> str:
        """Empty where no cure was tried."""
        off, word = self.difference, str(self.cause)
        if word == "attribute" and off.type not in ("int", "float"):
            word = "flag" if off.type == "bool" else ""
        if word == "reference":
            word = "lost in a copy" if off.label == "dropped" else "written twice"
        return CURES[word].format(path=self.path, kind=self.variable) if word else ""


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


CURES = {
    "attribute": "keep the value in an nnx.Variable. {path} is a plain Python attribute: a loop traces its body once, so that"
    " it changes once, and most other transforms lose the change",
    "flag": "keep the flag in an nnx.Variable and choose with jnp.where, since no Python if can read it there: {path} is a plain"
    " Python bool: a loop traces its body once, so that it changes once, and most other transforms lose the change",
    "broadcast": "a layer that broadcasts the state (None) drops its updates, carry it: in_axes=(nnx.StateAxes({{{kind}: nnx.Carry, ...: None}}), 0), with the other axes that yours has, or nnx.Carry for"
    " the whole module",
    "replaced": "write into the reference that is there, variable[...] = value, and hand nnx.update no arrays for it: in place it keeps its buffer",
    "lost in a copy": "write the transform with graph=False or graph_updates=False, or that of jax: nnx.remat, nnx.cond, nnx.vmap, nnx.scan and"
    " nnx.grad of flax's graph mode write to copies of the references",
    "written twice": "read and write the reference outside of what jax.checkpoint makes again, or make it with jax.new_ref(value,"
    " kind='no_grad_no_remat'): a gradient runs the write a second time, and differentiates that run",
    "copy": "a transform of jax updates a copy of a module: write nnx.jit(f)(model, x) instead of jax.jit(f)(model, x), and nnx.cond or"
    " nnx.switch instead of that of jax.lax",
}
"""The change to make for each cause; code fills in the braces."""
