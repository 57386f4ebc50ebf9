"""Snapshots of the body, and attributes, that hold the arrays which a call donates. A part of `donation`."""

from __future__ import annotations

import dis
import inspect
import re
from collections.abc import Iterator
from dataclasses import dataclass
from types import CodeType, FrameType
from typing import ClassVar

import jax
import numpy as np
from flax import nnx

from pytest_nnxcheck.compat import graph
from pytest_nnxcheck.compat.owner import of_frame
from pytest_nnxcheck.core.text import counted, some
from pytest_nnxcheck.engine.ran import Ran
from pytest_nnxcheck.subject.copies import variables_in
from pytest_nnxcheck.walk import snapshot
from pytest_nnxcheck.walk.walk import walk
from pytest_nnxcheck.xla.pointers import foreign_views, is_numpys_own

__tracebackhide__ = True  # pytest shows the frames of the user, not these

JUMPS = frozenset((*dis.hasjrel, *dis.hasjabs))
"""The instructions that go on elsewhere."""


@dataclass(frozen=True, slots=True)
class SnapshotHeld:
    """A value beside the state that holds arrays which a donating call deletes: a note."""

    holder: str
    paths: tuple[str, ...]
    of_call: ClassVar[bool] = True

    def words(self) -> str:
        return (
            f"{self.holder} holds {counted(len(self.paths), 'array')} of the state that the call donates and writes ({some(self.paths)}): a jit that donates the"
            " state deletes them; keep a copy, jax.tree.map(jnp.copy, ...)"
        )


@dataclass(frozen=True, slots=True)
class SnapshotViewed:
    """A view of NumPy of arrays which a donating call cannot reuse then: a note."""

    holder: str
    paths: tuple[str, ...]
    of_call: ClassVar[bool] = True

    def words(self) -> str:
        return (
            f"{self.holder} views the buffers of {some(self.paths)}, which the call donates and writes: as long as it is there, a jit copies what it cannot"
            " donate, and says nothing; keep a copy, np.array(...) in place of np.asarray(...)"
        )


@dataclass(frozen=True, slots=True)
class SnapshotShared:
    """An `nnx.State` that has the Variables of the caller's own module: a note."""

    holder: str
    paths: tuple[str, ...]
    of_call: ClassVar[bool] = True

    def words(self) -> str:
        return (
            f"{self.holder} is no snapshot: nnx.state and nnx.split share the Variables of the model, and after the call it has the new values of"
            f" {some(self.paths)}; keep a copy, jax.tree.map(jnp.copy, nnx.state(model))"
        )


def held_beside(ran: Ran) -> tuple[SnapshotHeld | SnapshotViewed | SnapshotShared, ...]:
    """The leaves, written by the call and donated by the program, that the body or an object which the call reaches holds as well.

    Only the user's own arrays can be told: it is a copy of the state that runs.
    """
    subject, donated = ran.call.subject, {move.before.path for move in ran.observation.moves}
    changed = {path for path in ran.profile.state.changed if subject.path(path) in donated}
    arrays = {id(value): subject.path(path) for path, value in graph.raw_leaves(subject.state) if path in changed}
    for array in subject.inputs:
        arrays.pop(id(array), None)  # of an input the donation is judged
    if not arrays:
        return ()
    variables = dict(graph.variables(subject.state))
    # A tree in a Variable, such as an average, is opened: no leaf of it is judged.
    judged = [variable for variable in variables.values() if isinstance(graph.variable_value(variable), jax.Array)]
    found = walk([*locals_of_body(inspect.currentframe()), *subject.roots(subject.state)], left_out=judged)
    held: dict[str, list[str]] = {}
    for path, array in found.arrays:
        if id(array) in arrays:
            held.setdefault(variable_of(path), []).append(arrays[id(array)])
    leaves = [(arrays[id(value)], value) for value in map(graph.variable_value, judged) if id(value) in arrays]
    viewed: dict[str, list[str]] = {}
    of_numpy = [each for each in found.arrays if isinstance(each[1], np.ndarray) and not is_numpys_own(each[1])]
    for holder, path in foreign_views(leaves, of_numpy):
        viewed.setdefault(variable_of(holder), []).append(path)
    states = {
        str(name): value for name, (value, _), _ in found.places.of(snapshot.ATTRIBUTES) if isinstance(value, nnx.State)
    }
    # A Variable that no more than a state holds is its own.
    others = walk(subject.roots(subject.state), left_out=states.values()).nodes if states else []
    written = {id(variables[path]) for path in changed}
    names = {id(node): str(name) for name, node in others if id(node) in written}
    shared = {
        name: tuple(names[id(variable)] for variable in variables_in(state) if id(variable) in names)
        for name, state in states.items()
    }
    return (
        *(SnapshotHeld(name, tuple(paths)) for name, paths in held.items()),
        *(SnapshotViewed(name, tuple(dict.fromkeys(paths))) for name, paths in viewed.items()),
        *(SnapshotShared(name, paths) for name, paths in shared.items() if paths),
    )


def variable_of(path: str) -> str:
    """The variable that a path of the walk starts at: ``KEPT`` of ``KEPT['best'].kernel``, ``f (closure of g.h: teacher)`` of ``f (closure of g.h: teacher.kernel)``."""
    if not path.endswith(")"):
        return first(path)
    keeper, _, note = path.partition(" (")
    origin, named, base = note.removesuffix(")").partition(": ")
    return f"{keeper} ({origin}: {first(base)})" if named else f"{first(keeper)} ({origin})"


def first(path: str) -> str:
    """A path without its keys."""
    return re.split(r"[.\[]", path, maxsplit=1)[0]


def locals_of_body(frame: FrameType | None) -> Iterator[tuple[str, object]]:
    """The local variables of the user's functions that made the call, and that they may read after it: those of the body, the innermost first.

    The temporary values of an ``assert`` that pytest rewrote have names that no one can write.
    """
    while frame is not None and str(frame.f_globals.get("__name__")).partition(".")[0] not in ("_pytest", "pluggy"):
        if of_frame(frame) == "user" and frame.f_code.co_name != "<module>":
            read = read_later(frame.f_code, frame.f_lasti)
            yield from (each for each in frame.f_locals.items() if each[0].isidentifier() and each[0] in read)
        frame = frame.f_back


def read_later(code: CodeType, now: int) -> set[str]:
    """The local variables that a function may read after the instruction at ``now``: on a later line, or in the next turn of a loop around it.

    Its arguments belong to its caller, and what an inner function captured to that.
    """
    instructions = [*dis.get_instructions(code)]
    turns = [each.argval for each in instructions if each.opcode in JUMPS and each.offset > now]
    first = min([now, *turns])
    loaded = [each.argval for each in instructions if each.offset > first and "LOAD_FAST" in each.opname]
    arguments = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    # Newer Python loads two at once.
    return {*arguments, *code.co_cellvars, *code.co_freevars}.union(
        *([each] if isinstance(each, str) else each for each in loaded)
    )
