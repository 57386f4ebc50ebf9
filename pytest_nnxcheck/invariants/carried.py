"""Inputs that a call returns in another dtype, to be handed in again: the state of an optimizer, a cache. A part of `donation`."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from pytest_nnxcheck.compat.arrays import array_type
from pytest_nnxcheck.compat.graph import equation_line
from pytest_nnxcheck.core.facts import ArrayType
from pytest_nnxcheck.core.notes import other_dtype
from pytest_nnxcheck.core.text import some
from pytest_nnxcheck.engine.ran import Ran
from pytest_nnxcheck.jaxprs import flow
from pytest_nnxcheck.subject.profile import common, keys
from pytest_nnxcheck.values.effects import inexact

__tracebackhide__ = True  # pytest shows the frames of the user, not these

Twins = list[tuple[int, int]]
"""Arguments of a traced program, each with the result that has its name and shape."""


@dataclass(frozen=True, slots=True)
class CarriedInput:
    """Inputs of one type that come back in another dtype: a note."""

    names: tuple[str, ...]
    before: ArrayType
    after: ArrayType
    line: str
    """The line at which the first gets that dtype; empty where no equation shows it."""
    of_call: ClassVar[bool] = True

    def words(self) -> str:
        at = f" at {self.line}" if self.line else ""
        return (
            f"{some(self.names)} {'goes' if len(self.names) == 1 else 'go'} in as {self.before} and"
            f" {'comes' if len(self.names) == 1 else 'come'} back as {self.after}{at}: handed in again, it makes jax trace and compile the call a second"
            f" time, and its buffer cannot be donated; {other_dtype(self.before.dtype, self.after.dtype)}"
        )


def retyped(ran: Ran) -> tuple[CarriedInput, ...]:
    """The inputs that come back in another dtype, and that the settings do not donate: of those the donation is judged.

    A tree comes back if an output has its names and shapes, each leaf is a new value of the one in its place, and something else goes into them: a tree
    that is only cast is meant so, and so is a leaf that the call casts to a wider type before all else. A leaf beside one that comes back as it was is
    an entry of a batch. Where nothing has a name, the call writes into a part of the array, or it returns a new leaf twice, as the carry and as the
    result, as the cells of recurrent networks do.
    """
    subject, profile = ran.call.subject, ran.profile
    jaxpr, first = profile.program.jaxpr, len(profile.state.paths)
    if jaxpr is None or not subject.input_names:
        return ()
    donated = {*subject.donated(ran.call.settings.donate)}
    inputs = {name: first + n for n, name in enumerate(subject.input_names) if n not in donated}
    outputs = {name: number for number, name in enumerate(profile.output.names)}
    before, after = ([var.aval for var in variables] for variables in (jaxpr.invars, jaxpr.outvars))
    pairs = [*pairs_of(inputs, outputs, before, after)]
    changes = [pair for pair in pairs if any(before[one].dtype != after[other].dtype for one, other in pair)]
    if not changes:
        return ()
    over, made_of = flow.new_values(jaxpr), flow.origins(jaxpr)
    inside = flow.new_values(jaxpr, flow.IN_PLACE | flow.CONVERTED)
    names = {number: name for name, number in inputs.items()}
    steps = {
        (one, other): common(keys(names[one]), keys(profile.output.names[other]))
        for pair in pairs
        for one, other in pair
    }
    longest = {other: max(n for (_, each), n in steps.items() if each == other) for _, other in steps}
    # An output in the dtypes of one argument is the new value of that one, and of no other with as much of its path; what else it returns of that is a copy.
    kept = [
        both
        for pair in pairs
        if pair not in changes
        for both in pair
        if over[both[1]] >> both[0] & 1 and steps[both] == longest[both[1]]
    ]
    seen, taken = {one for one, _ in kept}, {other for _, other in kept}
    count = Counter(map(id, jaxpr.outvars[: len(outputs)]))
    told: dict[tuple[ArrayType, ArrayType], list[tuple[int, int]]] = {}
    for pair in changes:
        if taken & {other for _, other in pair} or seen & {one for one, _ in pair}:
            continue
        own = sum(1 << one for one, _ in pair)
        moved = [(one, other) for one, other in pair if before[one].dtype != after[other].dtype]
        decoded = any(before[one].shape and not inexact(before[one]) for one, _ in moved)
        handed_on = {parent(names[one]) for one, other in pair if profile.output.handed_out[other] == one - first}
        meant = decoded or any(flow.cast_first(jaxpr, one) or parent(names[one]) in handed_on for one, _ in moved)
        if all(has_name(names[one]) for one, _ in pair):
            is_new = all(over[other] >> one & 1 for one, other in pair)
        else:
            is_twice = any(count[id(jaxpr.outvars[other])] > 1 for _, other in pair)
            is_new = is_twice and all(made_of[other] >> one & 1 for one, other in pair)
        within = all(inside[other] >> one & 1 and made_of[other] & ~(1 << one) for one, other in moved)
        if within or (is_new and not meant and any(made_of[other] & ~own for _, other in pair)):
            seen |= {one for one, _ in pair}
            taken |= {other for _, other in pair}
            for one, other in moved:
                told.setdefault((array_type(before[one]), array_type(after[other])), []).append((one, other))
    return tuple(
        CarriedInput(tuple(names[one] for one, _ in found), old, new, line(jaxpr, *found[0], before))
        for (old, new), found in told.items()
    )


def parent(path: str) -> str:
    """The path without its last step."""
    return path.removesuffix("".join(keys(path)[-1:]))


def has_name(path: str) -> bool:
    """True if a step of a path is more than a number."""
    return any(not re.fullmatch(r"\[\d+\]", key) for key in keys(path))


def line(jaxpr: Any, one: int, other: int, before: Sequence[Any]) -> str:
    """The line at which a result gets another dtype than its argument."""
    eqn = flow.retyped_at(jaxpr, other, before[one].dtype)
    return equation_line(eqn) if eqn is not None else ""


def pairs_of(
    inputs: Mapping[str, int], outputs: Mapping[str, int], before: Sequence[Any], after: Sequence[Any]
) -> Iterator[Twins]:
    """Each argument with the parts of the output that have its names and shapes; where there are none, the parts of the argument."""
    roots = dict.fromkeys(re.match(r"\w*", name)[0] for name in inputs)  # type: ignore[index]
    ahead = [*roots]
    for root in ahead:
        names = [name for name in inputs if name.startswith(root) and (name[len(root) :] or "[")[0] in ".["]
        rests = [name[len(root) :] for name in names]
        starts = (
            dict.fromkeys(name.removesuffix(rests[0]) for name in outputs if name.endswith(rests[0])) if rests else ()
        )
        found = False
        for start in starts:
            pair = [(inputs[root + rest], outputs.get(start + rest, -1)) for rest in rests]
            if all(other >= 0 and before[one].shape == after[other].shape for one, other in pair):
                found = True
                yield pair
        if not found:
            ahead += dict.fromkeys(root + keys(rest)[0] for rest in rests if keys(rest))
