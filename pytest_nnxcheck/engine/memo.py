"""What is known of the calls of one test, by their signature: what decides it is the same for every nesting, and found out once."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain
from types import CodeType, FunctionType
from typing import Any, TypeVar

import jax
import numpy as np

from pytest_nnxcheck.compat import flax_modes
from pytest_nnxcheck.compat.arrays import describe
from pytest_nnxcheck.compat.graph import attributes, flat_state, is_key
from pytest_nnxcheck.compat.shared_programs import SharedPrograms
from pytest_nnxcheck.core.facts import Leak
from pytest_nnxcheck.core.nesting import Misfit
from pytest_nnxcheck.core.notes import CapturedBy, Fact, InMappedFile, MergedVariables
from pytest_nnxcheck.core.outcome import JitTracedAgain, UnNested
from pytest_nnxcheck.core.peak import Memory, OnTarget
from pytest_nnxcheck.engine.reference import Evaluated
from pytest_nnxcheck.subject.profile import Profile
from pytest_nnxcheck.subject.state_facts import is_array
from pytest_nnxcheck.subject.subject import Subject
from pytest_nnxcheck.walk.fingerprint import fingerprint, show
from pytest_nnxcheck.walk.raw_access import cell_content, top_package

__tracebackhide__ = True  # pytest shows the frames of the user, not these

V = TypeVar("V")


@dataclass(frozen=True, slots=True)
class Entry:
    """What was found out of a call, and what its key names by identity: held, so that no id is used again."""

    evaluated: Evaluated
    held: Any


@dataclass(slots=True)
class Memo:
    """One table for each kind of fact; a key starts with the `signature` of a call, or with what else decides the fact.

    ``remapped`` are profiles with the leaves that the call restores, ``gradients`` say why it has none, ``longer`` is the memory of
    programs of twice the length, ``captured`` the transforms inside the call that captured a module, ``merged`` what is wrong with the modules
    that it merged, ``mapped`` what lies in a mapped file, ``compared_by_value`` the first
    of the plain objects with arrays that were met under a path by a call of that number, ``own_jits`` the names of subjects whose plain object
    keeps a jitted function that captured what it holds, ``unrestored`` the tracers that a trace of a subject left for good.
    """

    profiles: dict[Any, Profile] = field(default_factory=dict)
    remapped: dict[Any, Profile] = field(default_factory=dict)
    gradients: dict[Any, Misfit | None] = field(default_factory=dict)
    baselines: dict[Any, Memory | None] = field(default_factory=dict)
    un_nested: dict[Any, UnNested] = field(default_factory=dict)
    longer: dict[Any, Memory | None] = field(default_factory=dict)
    notes: dict[Any, tuple[Fact, ...]] = field(default_factory=dict)
    """Notes on a call that its nestings bring up: lines that ask jax for its devices, programs on targets, tracers that nobody asserts."""
    captured: dict[Any, tuple[CapturedBy, ...]] = field(default_factory=dict)
    merged: dict[Any, tuple[Leak | MergedVariables, ...]] = field(default_factory=dict)
    jits_traced_again: dict[Any, tuple[JitTracedAgain, ...]] = field(default_factory=dict)
    evaluated: dict[Any, Entry] = field(default_factory=dict)
    mapped: dict[Any, InMappedFile | None] = field(default_factory=dict)
    compared_by_value: dict[Any, Any] = field(default_factory=dict)
    static_parts: dict[Any, dict[str, Any]] = field(default_factory=dict)
    """What jax compares of the objects that a call of that name and number was handed first."""
    made_anew: dict[Any, Fact] = field(default_factory=dict)
    same_arguments: bool = True
    """Whether the body is the same each time: no arguments of its own are drawn."""
    own_jits: set[str] = field(default_factory=set)
    unrestored: dict[Any, tuple[Leak, ...]] = field(default_factory=dict)
    shared_programs: SharedPrograms = field(default_factory=SharedPrograms)
    on_targets: dict[str, OnTarget] = field(default_factory=dict)
    body: object = None
    """The body with its arguments that ran last, where each has its own."""

    def run_of(self, body: object) -> None:
        """A body runs: forget what the calls of another one do, which has other arguments.

        No key tells all the ways by which a call may get at an argument, such as a global that the body sets.
        """
        if self.same_arguments or body is self.body:
            return
        self.body = body
        of_calls = (
            self.profiles,
            self.remapped,
            self.gradients,
            self.baselines,
            self.un_nested,
            self.longer,
            self.notes,
        )
        inside = (self.captured, self.merged, self.jits_traced_again, self.evaluated)
        for table in (*of_calls, *inside):
            table.clear()


def recall(table: dict[Any, V], key: Any, find_out: Callable[[], V]) -> V:
    """The entry of a key, found out where it is not there yet."""
    if key not in table:
        table[key] = find_out()
    return table[key]


@dataclass(frozen=True, slots=True, eq=False)
class ByValue:
    """A graph definition as part of a key: hashes collide (``hash(-1) == hash(-2)``), and ``==`` may be the user's code."""

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
    """What decides the profile of a call: code, graph, shapes, static arguments, and the mode of flax."""
    shapes = tuple((path, describe(leaf)) for path, leaf in flat_state(leaves))
    try:
        graph: Any = ByValue(graphdef, hash(graphdef))
    except TypeError:  # an attribute that has no hash, a plain dataclass say
        graph = tuple((path, fingerprint(value)) for path, value in attributes(subject.state))
    kind = (subject.abstract, flax_modes.mode_flags())
    return (subject.name, subject.code, graph, shapes, tuple(map(describe, subject.inputs)), *kind)


# --- the calls that a nesting is compared with


def evaluated_calls(table: dict[Any, Entry], subject: Subject, number: int) -> Evaluated:
    """What was found out of a call, the manieth of its example; nothing yet where one of what decides that cannot be told for sure.

    The key holds all that does: the number, the code with what it captured, the graph, the content of state and inputs.
    """
    content = identity(subject)
    if content is None:
        return Evaluated()
    entry = recall(table, (number, content), lambda: Entry(Evaluated(), (subject.function, subject.program_of)))
    return entry.evaluated


class Unknown(Exception):
    """A value whose content cannot be told for sure."""


def identity(subject: Subject) -> Any:
    """What decides the result of a call; None where that cannot be told."""
    graphdef, leaves = flax_modes.split(subject.state)
    try:
        content = tuple((path, digest(leaf)) for path, leaf in flat_state(leaves))
        inputs = tuple(map(digest, subject.inputs))
        static = tuple((label, show(value)) for label, value in subject.static)
        key = (code(subject.function), parts(graphdef, {}), content, inputs, static, flax_modes.mode_flags())
        hash(key)
    except (Unknown, TypeError):
        return None
    return key


def parts(value: Any, seen: dict[int, int]) -> Any:
    """A graph definition, or what it holds, as one that compares and does not change. Raises `Unknown`, and `TypeError` for what has no hash.

    A Variable's metadata may hold a dict, and a list may be a plain attribute: neither has a hash, and a call may change either. One that is
    there twice is told from two that are alike. What a class of the user's own compares, it goes on comparing.
    """
    if is_array(value):
        return digest(value)
    if isinstance(value, tuple):
        return type(value), *(parts(item, seen) for item in value)
    if isinstance(value, FunctionType):
        return behaviour(value)
    is_definition = dataclasses.is_dataclass(type(value)) and top_package(type(value)) == "flax"
    if not (is_definition or isinstance(value, Mapping | list | set | frozenset)):
        hash(value)
        return type(value), repr(value) if isinstance(value, float | complex) else value
    if id(value) in seen:
        return "again", seen[id(value)]
    seen[id(value)] = len(seen)
    if is_definition:
        items: Any = (getattr(value, field.name) for field in dataclasses.fields(value))
    else:
        items = value.items() if isinstance(value, Mapping) else value
    held = [parts(item, seen) for item in items]
    return type(value), frozenset(held) if isinstance(value, set | frozenset) else tuple(held)


def behaviour(function: FunctionType) -> Any:
    """A function as what it does; itself, where that cannot be told, or where it has attributes."""
    try:
        return function if vars(function) else code(function)
    except Unknown:
        return function


def digest(value: Any) -> Any:
    """The content of an array, as a hash that collides for nobody."""
    if not is_array(value):
        return atom(value)
    array = np.asarray(jax.random.key_data(value) if is_key(value) else value)
    if array.dtype == object:
        raise Unknown
    return describe(value), hashlib.blake2b(np.ascontiguousarray(array).view(np.uint8).data, digest_size=20).digest()


def atom(value: Any) -> Any:
    """A plain value, told apart by type: ``1 == True == 1.0``."""
    if value is None or isinstance(value, bool | int | float | complex | str | bytes):
        return type(value), repr(value)
    if isinstance(value, tuple):
        return tuple(map(atom, value))
    if is_array(value):
        return digest(value)
    if isinstance(value, type) or type(value).__name__ in ("module", "builtin_function_or_method"):
        return value
    return code(value)


def code(function: Any, seen: frozenset[int] = frozenset()) -> Any:
    """A function as the code it runs, with all that the code captured. Raises `Unknown`, as for what holds an object: a bound method."""
    if not isinstance(function, FunctionType):
        raise Unknown
    own = function.__code__
    if id(function) in seen:
        return own
    seen |= {id(function)}
    cells = map(cell_content, function.__closure__ or ())
    defaults = [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
    held = [*cells, *defaults, *chain.from_iterable(vars(function).items())]
    captured = tuple(code(value, seen) if isinstance(value, FunctionType) else atom(value) for value in held)
    return own, captured, tuple(plain_globals(own, function.__globals__))


def plain_globals(own: CodeType, names: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """The numbers and strings among the globals that code names: a test may set them."""
    for name in own.co_names:
        if isinstance(names.get(name), bool | int | float | complex | str | bytes):
            yield name, atom(names[name])
    for inner in own.co_consts:
        if isinstance(inner, CodeType):
            yield from plain_globals(inner, names)
