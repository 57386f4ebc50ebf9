"""Tracers that graph nodes, or code outside of the test's file, hold after a test, and Variables of a trace that has ended."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from pytest_nnxcheck.core.facts import Leak
from pytest_nnxcheck.invariants.tracers import MadeInEndedTrace, TracerLeft
from pytest_nnxcheck.watch.roots import Root, code_by_file

MOST_OBJECTS = 20_000
"""The fuse of one walk: a fixture may hold a data set. The largest of 48 real models has 874 objects."""


Leftover = TracerLeft | MadeInEndedTrace
"""A tracer that a graph node holds, or a Variable that was made in a trace which has ended: findings of every check."""


@dataclass(frozen=True, slots=True)
class Look:
    """The leftovers that one walk came to, with the very objects, and whether it saw everything."""

    leftovers: tuple[tuple[object, Leftover], ...] = ()
    complete: bool = True


class Reported:
    """The leftovers that were reported. Weak references wherever a type takes one: a run keeps no arrays of its tests alive."""

    def __init__(self) -> None:
        self._references: dict[int, Callable[[], object]] = {}

    def holds(self, value: object) -> bool:
        """True if this very object was reported."""
        reference = self._references.get(id(value))
        return reference is not None and reference() is value

    def new(self, look: Look) -> tuple[Leftover, ...]:
        """The leftovers that were not reported before. A tracer stays in its place, and every later test meets it."""
        unreported = []
        for value, leftover in look.leftovers:
            if not self.holds(value):
                self._references[id(value)] = _reference(value)
                unreported.append(leftover)
        return tuple(unreported)


def _reference(value: object) -> Callable[[], object]:
    try:
        return weakref.ref(value)
    except TypeError:  # Variables of flax 0.12 have slots
        return lambda: value


def can_be_there() -> bool:
    """True if there may be graph nodes: somebody has imported flax."""
    return "flax.nnx" in sys.modules


def look(
    roots: Iterable[Root],
    left_out: tuple[object, ...] = (),
    reported: Reported | None = None,
    files: frozenset[str] | None = None,
) -> Look:
    """Walk from the roots, while no trace is under way: every tracer in a graph node is then one of a trace that has ended.

    ``files`` are the modules of the test: what the code of other modules keeps is looked at too. `None` looks at graph nodes alone.
    Garbage is collected only where something was not ``reported`` yet: in a large process that takes a second.

    A suite without flax has no graph nodes: nothing is imported for it. Of a model that is gone the class is there still, with what its code
    keeps. A tracer that only the test itself keeps, in a list beside the model, is the test's own business.
    """
    if not can_be_there():
        return Look()
    from pytest_nnxcheck.walk.walk import OLD, without_garbage

    roots, reported = tuple(roots), reported or Reported()

    def has_new(seen: Look) -> bool:
        return not all(reported.holds(value) for value, _ in seen.leftovers)

    return without_garbage(lambda: _look(roots, left_out, files), has_new, OLD)


def _look(roots: tuple[Root, ...], left_out: tuple[object, ...], files: frozenset[str] | None) -> Look:
    from pytest_nnxcheck.compat import graph
    from pytest_nnxcheck.walk.walk import walk

    seen = walk(roots, MOST_OBJECTS, left_out)
    kinds = {path: graph.kind_of(type(node)) for path, node in seen.nodes}
    leftovers: list[tuple[object, Leftover]] = []
    # From the nodes and the code of other files alone: what else leads to a tracer is the test's own.
    tracers = [*walk(seen.nodes, MOST_OBJECTS, left_out).tracers] if seen.tracers else []
    if seen.tracers and files is not None:
        own, others = code_by_file(seen.seen.values(), files)
        known = {id(leaked.tracer) for leaked in tracers}
        kept = walk(others, MOST_OBJECTS, (*left_out, *own, *(value for _, value in roots))).tracers
        tracers += [leaked for leaked in kept if id(leaked.tracer) not in known]
    for leaked in tracers:
        leak = Leak(
            path=leaked.path,
            holder=leaked.holder,
            kind=graph.tracer_kind(leaked.tracer),
            type=_type_of(leaked.tracer.aval),
            line=graph.tracer_line(leaked.tracer),
            layer="",
            place=_place(leaked.path, kinds),
            keeper=leaked.keeper,
        )
        leftovers.append((leaked.tracer, TracerLeft(leaked.path, leak=leak)))
    for path, node in seen.nodes:
        if graph.is_variable(node):
            value = graph.variable_value(node)
            if not graph.is_tracer(value) and graph.is_pinned(node):
                type_ = f"{graph.variable_kind(node)} {_type_of(value)}"
                leftovers.append((node, MadeInEndedTrace(path, type=type_)))
    return Look(tuple(leftovers), seen.complete)


def _place(path: str, nodes: Mapping[str, str]) -> str:
    """The place of a value: in a Variable, in an attribute of another graph node, in an object that a node holds, or outside of them."""
    owner = path
    while owner not in nodes and (cut := max(owner.rfind("."), owner.rfind("["))) > 0:
        owner = owner[:cut]
    if owner not in nodes:
        return "outside"
    if nodes[owner] == "variable":
        return "variable"
    return "module" if path[len(owner) :].count(".") <= 1 else "object"


def _type_of(value: Any) -> str:
    from pytest_nnxcheck.compat.arrays import describe

    try:
        return describe(value)
    except AttributeError:  # a type of the user's own: such a tracer has a type of array only if that says so
        return type(value).__name__
