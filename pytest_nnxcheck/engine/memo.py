"""What is known of the calls of one test, by their signature: what decides it is the same for every nesting, and found out once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from pytest_nnxcheck import compat
from pytest_nnxcheck.compat.arrays import describe
from pytest_nnxcheck.core.observation import Memory
from pytest_nnxcheck.core.outcome import UnNested
from pytest_nnxcheck.engine.reference import Entry
from pytest_nnxcheck.subject.profile import Profile
from pytest_nnxcheck.subject.subject import Subject

__tracebackhide__ = True  # pytest shows the frames of the user, not these

V = TypeVar("V")


@dataclass(slots=True)
class Memo:
    """One table for each kind of fact; a key starts with the `signature` of a call, or with what else decides the fact.

    ``remapped`` are profiles with the leaves that the call restores, ``gradients`` say why it has none, ``longer`` is the memory of
    programs of twice the length, ``mapped`` a note on what lies in mapped files, ``compared_by_value`` the first
    of the plain objects with arrays that were met under a path by a call of that number.
    """

    profiles: dict[Any, Profile] = field(default_factory=dict)
    remapped: dict[Any, Profile] = field(default_factory=dict)
    gradients: dict[Any, str] = field(default_factory=dict)
    baselines: dict[Any, Memory | None] = field(default_factory=dict)
    un_nested: dict[Any, UnNested] = field(default_factory=dict)
    longer: dict[Any, Memory | None] = field(default_factory=dict)
    references: dict[Any, Entry] = field(default_factory=dict)
    mapped: dict[str, str] = field(default_factory=dict)
    compared_by_value: dict[Any, Any] = field(default_factory=dict)
    shared_programs: compat.SharedPrograms = field(default_factory=compat.SharedPrograms)


def recall(table: dict[Any, V], key: Any, find_out: Callable[[], V]) -> V:
    """The entry of a key, found out where it is not there yet."""
    if key not in table:
        table[key] = find_out()
    return table[key]


def signature(subject: Subject) -> Any:
    """What decides the profile of a call: code, graph, shapes, static arguments, and the mode of flax."""
    graphdef, leaves = compat.split(subject.state)
    shapes = tuple((path, describe(leaf)) for path, leaf in compat.flat_state(leaves))
    try:
        graph: Any = hash(graphdef)
    except TypeError:
        # An unhashable attribute: such a module cannot enter nnx.jit either, so that no profile is worth keeping.
        graph = object()
    kind = (subject.abstract, compat.mode_flags())
    return (subject.name, subject.code, graph, shapes, tuple(map(describe, subject.inputs)), *kind)
