"""Keys of calls, under which facts about them are remembered: calls of one signature have one profile, equal calls one result."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pytest_nnxcheck.compat import flax_modes
from pytest_nnxcheck.compat.arrays import describe
from pytest_nnxcheck.compat.graph import attributes, flat_state
from pytest_nnxcheck.subject.subject import Subject
from pytest_nnxcheck.walk.fingerprint import Unknown, exact, fingerprint, show

__tracebackhide__ = True  # pytest shows the frames of the user, not these


@dataclass(frozen=True, slots=True, eq=False)
class ByValue:
    """A graph definition as part of a key."""

    # The hash alone is no key: hashes collide, ``hash(-1) == hash(-2)``.

    graphdef: Any
    hashed: int

    def __hash__(self) -> int:
        return self.hashed

    def __eq__(self, other: object) -> bool:
        try:
            return isinstance(other, ByValue) and bool(self.graphdef == other.graphdef)
        except Exception:  # noqa: BLE001 - the user's code may raise anything
            return False


def signature(subject: Subject, graphdef: Any, leaves: Any) -> Any:
    """Everything that the profile of a call depends on: code, graph, shapes, static arguments, and the mode of flax."""
    shapes = tuple((path, describe(leaf)) for path, leaf in flat_state(leaves))
    try:
        graph: Any = ByValue(graphdef, hash(graphdef))
    except TypeError:  # an attribute that has no hash, a plain dataclass say
        graph = tuple((path, fingerprint(value)) for path, value in attributes(subject.state))
    kind = (subject.abstract, subject.in_refs, flax_modes.mode_flags())
    return (subject.name, subject.code, graph, shapes, tuple(map(describe, subject.inputs)), *kind)


def identity(subject: Subject) -> Any:
    """Everything that the result of a call depends on; None if that is uncertain."""
    graphdef, leaves = flax_modes.split(subject.state)
    try:
        content = tuple((path, exact(leaf)) for path, leaf in flat_state(leaves))
        inputs = tuple(map(exact, subject.inputs))
        static = tuple((label, show(value)) for label, value in subject.static)
        graph = exact(graphdef, in_graph=True)
        key = (exact(subject.function), graph, content, inputs, static, flax_modes.mode_flags())
        hash(key)
    except (Unknown, TypeError):
        return None
    return key
