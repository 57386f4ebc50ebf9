"""Outputs and state after a nesting are the same as after the same calls without it; those of an un-nested call as without its jits."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from pytest_nnxcheck.compat import graph
from pytest_nnxcheck.core.catalogue import CALL_FIRST, ROWS, InvariantRow
from pytest_nnxcheck.core.nesting import Nesting
from pytest_nnxcheck.core.notes import Fact
from pytest_nnxcheck.core.outcome import Finding, InProgram, Moment
from pytest_nnxcheck.core.text import Row
from pytest_nnxcheck.engine.comparison import Cause, compared
from pytest_nnxcheck.engine.ran import Ran
from pytest_nnxcheck.engine.reference import calls_of, meaning_of
from pytest_nnxcheck.values.differences import Difference

__tracebackhide__ = True  # pytest shows the frames of the user, not these

ROW = InvariantRow("parity", order=60, severity=40, values=True, runs=True, error="ParityLost")

BROADCASTING = tuple(row.name for row in ROWS if row.axis and not row.pair)


def judge(ran: Ran) -> Iterator[Finding | Fact]:
    """Judge the values that differ, the first with its cause where that is known."""
    if ran.reference is None:
        return
    found = compared(ran.call.subject, ran.profile, ran.observation, ran.reference)
    for number, (each, known) in enumerate(found.left):
        why = known if number else cause(each, known, ran.observation.nesting)
        yield ValueDiffers(
            each.path, difference=each, cause=why, variable=graph.variable_name(each.of) if each.of else ""
        )
    yield from found.notes


def cause(first: Difference, known: Cause, nesting: Nesting) -> Cause:
    """Name the cause that dropped the update of the first value that differs; empty where that is unknown.

    Transforms carry no attribute out. A layer that broadcasts the state drops its updates. A transform inside the call changed a copy.
    """
    if known or not nesting.layers:
        return known or "copy"
    if first.of == "attribute" and first.label in ("dropped", "attribute"):
        return "attribute"
    broadcasts = any(layer.transform in BROADCASTING for layer in nesting.layers)
    return "broadcast" if first.label == "dropped" and broadcasts else ""


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
