"""The check of parity in a pasted program: what the nesting returns and leaves is what the same calls return and leave without it.

Copied by `own_source`, as `long_form` is: the short form of `engine.reference` and `engine.parity`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

from pytest_nnxcheck import compat
from pytest_nnxcheck.engine.causes import profiled
from pytest_nnxcheck.engine.dropped_updates import Watch, differ
from pytest_nnxcheck.engine.reference import nudge, nudge_leaf
from pytest_nnxcheck.invariants.parity import NOISE, compare, distance
from pytest_nnxcheck.reproducer.runtime.checks import broken
from pytest_nnxcheck.reproducer.runtime.long_form import Ran, stacked
from pytest_nnxcheck.reproducer.runtime.taken_apart import Call, copied
from pytest_nnxcheck.subject.state_facts import frozen
from pytest_nnxcheck.transforms.layer import Program

__tracebackhide__ = True  # pytest shows the frames of the user, not these

Left = tuple[Any, dict[str, Any], dict[str, Any]]
"""What calls returned, the leaves of the state after them, and its Python attributes."""


def same_as_un_nested(ran: Ran, calls: Callable[[Program], Program], own: Callable[[Any], Any]) -> None:
    """Hold a run against the same ``calls`` made eagerly; ``own`` takes the gradients off an output."""
    if ran.error is not None or ran.call.abstract:
        return
    call, axes = ran.call, ran.setup.axes
    program, inputs = calls(call.program), stacked(call.inputs, axes)
    wanted = left_by(call, copied(call.state), lambda state: program(state, *inputs))
    shaken = left_by(call, nudge(copied(call.state)), lambda state: program(state, *map(nudge_leaf, inputs)))
    found = (own(ran.output), leaves_of(call, ran.state), attributes_of(call, ran.state))
    lines = [*differences(ran, wanted, found, shaken)]
    if lines:
        broken("parity", lines)


def left_by(call: Call, state: Any, program: Callable[[Any], Any]) -> Left:
    output = program(state)
    return output, leaves_of(call, state), attributes_of(call, state)


def leaves_of(call: Call, state: Any) -> dict[str, Any]:
    return {call.path(path): value for path, value in compat.raw_leaves(state)}


def attributes_of(call: Call, state: Any) -> dict[str, Any]:
    """Python attributes as values that compare; arrays among them are leaves of the state elsewhere."""
    every = compat.attributes(state)
    return {call.path(path): frozen(value) for path, value in every if not isinstance(value, jax.Array | np.ndarray)}


def differences(ran: Ran, wanted: Left, found: Left, shaken: Left) -> Iterator[str]:
    """What is not as it should be, the state first. Floats may differ by what a start a few roundings away makes of them."""
    before, kinds = leaves_of(ran.call, ran.call.state), kinds_of(ran.call)
    for path in dict.fromkeys([*wanted[1], *found[1]]):
        if path not in found[1] or path not in wanted[1]:
            yield f"{path} is {'missing' if path in wanted[1] else 'added'}"
            continue
        kind = kinds.get(path, "")
        if not (ran.facts.drawn and not kind.startswith("Rng")):
            yield from different(path, wanted[1][path], found[1][path], before.get(path), shaken[1].get(path), kind)
    for path in dict.fromkeys([*wanted[2], *found[2]]):
        if wanted[2].get(path) != found[2].get(path):
            yield f"{path}: {wanted[2].get(path, 'missing')} expected, {found[2].get(path, 'missing')} after"
    if ran.facts.drawn:
        return
    outputs = [jax.tree.leaves(each[0]) for each in (wanted, found, shaken)]
    for number, (want, have, other) in enumerate(zip(*outputs, strict=False)):
        name = ran.call.names[number % max(len(ran.call.names), 1)]
        yield from different(f"output{name}", want, have, None, other, "")


def kinds_of(call: Call) -> dict[str, str]:
    return {call.path(path): type(variable).__name__ for path, variable in compat.variables(call.state)}


def different(path: str, want: Any, have: Any, old: Any, other: Any, kind: str) -> Iterator[str]:
    if want is have:
        return
    found = compare(path, want, have, old, None, kind)
    if found is not None and found.rounding and other is not None and (spread := distance(want, other)) is not None:
        found = compare(path, want, have, old, 2 * NOISE * spread, kind)
    if found is not None:
        kept = " kept its old value: the update was dropped" if found.label == "dropped" else ""
        yield f"{found.path}{kept}   {found.text}"


# --- inside the call


def nothing_is_dropped_inside(ran: Ran) -> None:
    """Updates that a transform inside the call itself makes to a copy, and never hands back."""
    if ran.error is not None or ran.call.abstract:
        return
    call, state = ran.call, copied(ran.call.state)
    watch: Any = Watch(call, state)  # type: ignore[arg-type] # it asks for paths only
    with jax.disable_jit(), profiled(watch):
        output = call.program(state, *call.inputs)
    before, after = leaves_of(call, call.state), leaves_of(call, state)
    lines = []
    for drop in watch.drops.values():
        written = drop.path in after and differ(before.get(drop.path), after[drop.path])
        if not written and not any(differ(drop.new.value, array) is False for array in output):
            lines.append(f"{drop.path} is updated in the body of {drop.where}: the update is dropped")
    if not lines:
        wanted = (output, after, attributes_of(call, state))
        with jax.disable_jit():
            inputs = [*map(nudge_leaf, call.inputs)]
            shaken = left_by(call, nudge(copied(call.state)), lambda state: call.program(state, *inputs))
        found = (ran.output, leaves_of(call, ran.state), attributes_of(call, ran.state))
        lines = [*differences(ran, wanted, found, shaken)]
    if lines:
        broken("parity", lines)
