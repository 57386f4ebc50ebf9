"""The checks at the end of a pasted program: each raises an `AssertionError` whose first line is that of the plugin's own message.

Copied by `own_source`, as `long_form` is.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Any, NoReturn

import jax
import numpy as np
from flax import nnx

from pytest_nnxcheck import compat
from pytest_nnxcheck.compat.arrays import describe, nbytes
from pytest_nnxcheck.core.evidence import FLOOR
from pytest_nnxcheck.core.observation import Leaf
from pytest_nnxcheck.core.text import format_bytes
from pytest_nnxcheck.inspection.pointers import byte_ranges, read_leaf, resharded, without_successor
from pytest_nnxcheck.reproducer.runtime.long_form import Ran, Setup
from pytest_nnxcheck.reproducer.runtime.walk import reachable, remaining_tracers
from pytest_nnxcheck.subject.jaxpr_flow import constants
from pytest_nnxcheck.subject.profile import dropped_updates, numbered
from pytest_nnxcheck.transforms.layer import LENGTH

__tracebackhide__ = True  # pytest shows the frames of the user, not these


def broken(invariant: str, lines: list[str], cause: BaseException | None = None) -> NoReturn:
    """End the program as the plugin would."""
    raise AssertionError("\n  ".join([f"nnx invariant broken: {invariant}", *lines])) from cause


# --- tracers


def no_tracers_remain(ran: Ran, *dropped: str) -> None:
    """Tracers that outlived their trace, in the state or in anything that the call reaches.

    ``dropped`` are where the plugin saw those that were left in a module inside, and that the exception of jax is about.
    """
    ran.tracers += remaining_tracers(ran.call.roots(ran.state))
    lines = []
    for path, tracer in ran.tracers:
        lines.append(f"leaked {path}   {describe(tracer.aval)}   <- {type(tracer).__name__}")
    lines += [] if lines else [f"eval_shape changed {path}" for path in ran.touched]
    if lines:
        broken("tracers", lines, ran.error)
    if dropped and compat.is_tracer_error(ran.error):
        broken("tracers", [f"leaked {path}" for path in dropped], ran.error)


# --- memory


@dataclass(frozen=True)
class Used:
    """The parts of a peak: bytes a device."""

    arguments: int
    outputs: int
    temporaries: int
    constants: int
    aliased: int

    @property
    def peak(self) -> int:
        return self.arguments + self.outputs + self.temporaries + self.constants - self.aliased

    def __str__(self) -> str:
        named = ("arguments", "outputs", "temporaries", "constants")
        parts = " + ".join(f"{name} {format_bytes(getattr(self, name))}" for name in named)
        return f"peak {format_bytes(self.peak)} = {parts} - aliased {format_bytes(self.aliased)}"


def used_by(compiled: Any) -> Used:
    """What XLA sets aside for a program; captured constants are in no total, so they are counted in its text."""
    totals = compiled.memory_analysis()
    return Used(
        totals.argument_size_in_bytes,
        totals.output_size_in_bytes,
        totals.temp_size_in_bytes,
        sum(map(bytes_of_constant, re.findall(r"= (\w+)\[([\d,]*)\]\S* constant\(", compiled.as_text()))),
        totals.alias_size_in_bytes,
    )


def bytes_of_constant(found: tuple[str, str]) -> int:
    """The bytes of ``f32[4,8]``; a single number is part of the code."""
    kind, sizes = found
    elements = math.prod(int(size) for size in sizes.split(",") if size)
    bits = int((re.findall(r"\d+", kind) or ["8"])[0])
    return elements * bits // 8 if elements > 1 else 0


@dataclass(frozen=True)
class Rule:
    """What the peak is held against: a budget in bytes, or in multiples of the expected peak; None is the default rule.

    ``un_nested`` is the program that the expected peak is made of, ``kept`` how many calls keep their temporaries at once. ``captures``
    says whether constants are judged; ``copied`` are the bytes of state that XLA's buffer assignment held once more, in a peak of ``found``.
    """

    un_nested: Setup
    kept: int = 1
    budget: int | float | None = None
    captures: bool = False
    copied: int = 0
    found: int = 0


def memory_is_within(ran: Ran, rule: Rule) -> None:
    """Hold the peak of what the outermost jit compiled against the rule."""
    if not ran.compiled or ran.error is not None:
        return
    used = used_by(ran.compiled[0])
    limit, origin = limit_of(ran, rule)
    state = sum(nbytes(value) for _, value in compat.raw_leaves(ran.call.state))
    figures = [str(used), f"budget {format_bytes(limit)} ({origin})", f"state {format_bytes(state)}"]
    print(*figures, sep="\n")  # noqa: T201 - the program tells its figures, whether they hold or not
    wrong = []
    if used.peak > limit:
        wrong.append(f"peak {format_bytes(used.peak)} is over the budget of {format_bytes(limit)}")
    if rule.budget is None and rule.copied and used.peak > rule.found - rule.copied / 2:
        wrong.append(f"the program holds {rule.copied / max(state, 1):.1f} more copies of its state at the peak")
    if rule.budget is None and rule.captures and (size := captured(ran)) >= FLOOR:
        wrong.append(f"the call captures {format_bytes(size)} of constants")
    if wrong:
        broken("memory", [*wrong, *figures])


def limit_of(ran: Ran, rule: Rule) -> tuple[int, str]:
    axes = LENGTH**ran.setup.axes
    if isinstance(rule.budget, int) and axes == rule.kept == 1:
        return rule.budget, "memory_budget"
    expected, one_call = expected_peaks(ran, rule.un_nested, axes, rule.kept)
    if isinstance(rule.budget, int):
        more = expected - one_call
        own = f"memory_budget {format_bytes(rule.budget)} + {format_bytes(more)} for the nesting's own axes"
        return rule.budget + more, own
    factor = rule.budget or 2.0
    floor = FLOOR if rule.budget is None else 0
    return round(factor * expected) + floor, f"{factor:g}x the expected peak of {format_bytes(expected)}"


def captured(ran: Ran) -> int:
    """Bytes of the arrays that the call captures: they should be arguments."""
    graphdef, leaves = compat.split(ran.call.state)

    def pure(leaves: Any, *inputs: Any) -> Any:
        return ran.call.program(nnx.merge(graphdef, leaves), *inputs)

    return sum(map(nbytes, constants(jax.make_jaxpr(pure)(leaves, *ran.call.inputs))))


def expected_peaks(ran: Ran, un_nested: Setup, axes: int, kept: int) -> tuple[int, int]:
    """``R + (s-1)(i+o) + s(T+i+o+c)``: the un-nested program, and for each element of the axes one more call. The same for one call."""
    base = un_nested.runs(ran.call, ran.facts, un_nested)
    if base.error is not None:
        raise base.error
    used = used_by(base.compiled[0])
    written = ran.facts.changed | ran.facts.restored
    changed = [value for path, value in compat.raw_leaves(ran.call.state) if tuple(path) in written]
    moved = sum(map(nbytes, ran.call.inputs)) + sum(map(nbytes, jax.tree.leaves(base.output)))
    resident = used.arguments + used.outputs - used.aliased + used.constants
    call = used.temporaries + moved + sum(map(nbytes, changed))
    return int(resident + (axes - 1) * moved + kept * call), int(resident + call)


# --- donation


def donated_buffers_are_kept(ran: Ran) -> None:
    """Every donated leaf must come back in the buffer that it had."""
    if ran.error is not None or not (ran.before or ran.facts.updated):
        return
    lines = shared_or_viewed(ran)
    for leaf in without_successor(ran.before, ran.after, ran.reused):
        lines.append(f"{leaf.path}   {leaf.type}   {why_lost(leaf, ran.after.get(leaf.path))}")
    lines += not_written_back(ran)
    if lines:
        broken("donation", lines)


def not_written_back(ran: Ran) -> list[str]:
    """Leaves of an optimizer of which the call updates a copy; looked for only where the plugin found some."""
    if not ran.facts.updated:
        return []
    graphdef, before = compat.split(ran.call.state)

    def pure(leaves: Any, *inputs: Any) -> Any:
        module = nnx.merge(graphdef, leaves)
        return ran.call.program(module, *inputs), compat.state(module)

    jaxpr = compat.open_jaxpr(jax.make_jaxpr(pure)(before, *ran.call.inputs))
    paths = [key[0] for key, _ in numbered(before)]
    lost = dropped_updates(ran.call, jaxpr, paths, ran.facts.changed)
    return [f"{ran.call.path(path)}   not written back: the call updates a copy of the optimizer" for path in lost]


def why_lost(before: Leaf, after: Leaf | None) -> str:
    if after is None:
        return "not returned"
    if before.type != after.type:
        return f"became {after.type}"
    if resharded(before, after):
        return "its sharding changed"
    return f"not reused by XLA (pointers {before.pointers}, {after.pointers})"


def shared_or_viewed(ran: Ran) -> list[str]:
    """Leaves of the user's own state that share a buffer, and NumPy arrays that view one: neither can be donated."""
    donated = {leaf.path for leaf in ran.before}
    leaves = [(ran.call.path(path), value) for path, value in compat.raw_leaves(ran.call.state)]
    lines, first = [], dict[int, str]()
    for path, value in [*leaves, *zip(ran.call.input_names, ran.call.inputs, strict=False)]:
        for pointer in read_leaf(path, value).pointers:
            other = first.setdefault(pointer, path)
            if other != path and {other, path} & donated:
                lines.append(f"{other} and {path} share a buffer: XLA refuses to donate it twice")
    own = {id(value) for _, value in leaves}
    inputs = list(zip(ran.call.input_names, ran.call.inputs, strict=False))
    held = [*reachable([*ran.call.roots(ran.call.state), *inputs])]
    arrays = [(path, value) for path, value in held if isinstance(value, np.ndarray) and id(value) not in own]
    for path, value in leaves:
        for start, end in byte_ranges(value) if path in donated else ():
            views = [name for name, view in arrays for low, high in byte_ranges(view) if low < end and start < high]
            lines += [f"{path} is viewed by {name}: its buffer cannot be reused" for name in views]
    return lines
