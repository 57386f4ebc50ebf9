"""The calls of one execution of a test's body, and the user's own objects: looked at before each call, which is checked on copies, and put back at the end."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Self, TypeVar

import jax
import numpy as np

from pytest_nnxcheck.compat import graph
from pytest_nnxcheck.compat.arrays import copied, describe
from pytest_nnxcheck.compat.variables import (
    is_pinned,
    is_tracing,
    set_variable_value,
    variable_kind,
    variable_value,
)
from pytest_nnxcheck.core.catalogue import rows_of
from pytest_nnxcheck.core.errors import CheckError
from pytest_nnxcheck.core.facts import Leak
from pytest_nnxcheck.core.nesting import Nesting
from pytest_nnxcheck.core.notes import Fact, InMappedFile, Note
from pytest_nnxcheck.core.outcome import Listener
from pytest_nnxcheck.core.settings import Settings
from pytest_nnxcheck.core.text import near
from pytest_nnxcheck.engine.memo import Memo, recall
from pytest_nnxcheck.engine.stage import Values
from pytest_nnxcheck.invariants.case import Pairs
from pytest_nnxcheck.subject.bind import bind
from pytest_nnxcheck.subject.compared_by_jit import other_parts, static_parts
from pytest_nnxcheck.subject.leaks import leak, places_in
from pytest_nnxcheck.subject.profile import Profile, profile
from pytest_nnxcheck.subject.subject import Subject, copy_leaf
from pytest_nnxcheck.subject.write_back import compared_by_value, write_back
from pytest_nnxcheck.walk.snapshot import Places
from pytest_nnxcheck.walk.visit import MOST_OBJECTS
from pytest_nnxcheck.walk.walk import Walk, walk, without_garbage
from pytest_nnxcheck.xla.pointers import (
    byte_ranges,
    foreign_views,
    in_mapped_files,
    is_numpys_own,
    read_leaf,
    shared_buffers,
    spans_of_process,
)

__tracebackhide__ = True  # pytest shows the frames of the user, not these

V = TypeVar("V")


@dataclass(slots=True)
class Example:
    """One execution of a test's body: inside it the user's objects change as the body expects; when it ends they are put back.

    So every nesting meets a module of a wider fixture scope, and a cache in its code, in the same state.
    """

    memo: Memo = field(default_factory=Memo)
    values: Values = field(default_factory=Values)
    """Which arrays the body was handed without a value."""
    places: list[Places] = field(default_factory=list)
    """Those that the calls may change."""
    originals: Walk | None = None
    """The walk of what the latest call was handed."""
    compared: int = 0
    """How many calls were compared with a reference."""
    copies: list[tuple[Any, Any]] = field(default_factory=list)
    """Variables, each with what it held before a call that is not checked."""
    unrestored: tuple[Note, ...] = ()
    """Notes on places that could not be put back."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.originals = None
        while self.places:
            lost = self.places.pop().restore()
            self.unrestored += tuple(Fact("not put back", (place,)) for place in lost)
        for variable, copy in self.copies:
            value = variable_value(variable)
            if isinstance(value, jax.Array) and self.values.computed(value) and value.is_deleted():
                set_variable_value(variable, copy)


@dataclass(frozen=True, slots=True)
class Originals:
    """Facts of the user's own objects, found before they are copied: the copies share nothing, have no views, and may be written."""

    shared: Pairs = ()
    """Pairs of leaves in one buffer."""
    views: Pairs = ()
    """The holders of views, each with the leaf that it views."""
    pinned: Pairs = ()
    """Variables, path and type, that were made in a trace that has ended."""
    notes: tuple[Note, ...] = ()
    """Facts that are reported, not judged."""
    held: tuple[Leak, ...] = ()
    """Tracers that the objects held before; nothing else is known of them then."""


@dataclass(frozen=True, slots=True)
class CallStarted:
    """A call is about to run under a nesting: that may take the process with it."""

    subject: Subject
    profile: Profile | None
    """None where the call is about to be traced for the first time."""
    nesting: Nesting
    settings: Settings


@dataclass(frozen=True, slots=True)
class Call:
    """One call of the user's under one nesting, taken apart, with the settings of its check and the example that makes it."""

    subject: Subject
    nesting: Nesting
    settings: Settings
    example: Example
    publish: Listener
    originals: Originals = Originals()
    key: Any = None
    """The signature of the call, taken before it is made: its own state is written when it has been judged."""

    @property
    def memo(self) -> Memo:
        """What is known of the calls of the test."""
        return self.example.memo

    @property
    def compares_values(self) -> bool:
        """Whether an invariant is asked for that compares the values with those of the same calls without the nesting."""
        return any(row.values and row.function is None for row in rows_of(self.settings.invariants))

    def once(self, kind: str, find_out: Callable[[], V], *key: Any) -> V:
        """What is found out once of all calls with this signature, by its kind and by what else decides it."""
        known: V = recall(self.memo.known, (kind, self.key, *key), find_out)
        return known

    def announce(self, profile: Profile | None) -> None:
        """Say that the nesting is about to run; without a profile, that the call is about to be traced, where it never was."""
        if profile is not None or self.key not in self.memo.profiles:
            self.publish(CallStarted(self.subject, profile, self.nesting, self.settings))


Handed = Literal["own", "inputs", "copy", "traced"]
"""What a call that is not checked is handed: the user's own objects and inputs; the inputs as arrays of jax; copies of both; or the user's own once the call was traced."""


def call_unchecked(
    function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], owner: str, handed: Handed, example: Example
) -> Any:
    """Call a subject, and check nothing. Raises what it raises, and `CheckError`."""
    subject = bind(function, args, kwargs, owner)
    before = walk(subject.roots(subject.state))
    example.places.append(before.places)
    # A jit inside the call may donate what the places hold on to.
    example.copies += [
        (variable, copy_leaf(variable_value(variable))) for _, variable in graph.variables(subject.state)
    ]
    if handed == "traced":
        with contextlib.suppress(Exception), subject.undone(subject.state, before):
            profile(subject)
    if handed in ("own", "traced"):
        return function(*args, **kwargs)
    outputs: list[Any] = []

    def keeping(*args: Any, **kwargs: Any) -> Any:
        outputs.append(subject.function(*args, **kwargs))
        return outputs[0]

    program = subject.for_run(keeping).program
    if handed == "inputs":
        program(subject.state, *subject.inputs)
        return outputs[0]
    state = subject.fresh()
    program(state, *map(copied, subject.inputs))
    write_back(subject, state)
    return outputs[0]


def look_at_originals(subject: Subject, settings: Settings, example: Example) -> Originals:
    """Facts of the user's own objects. Raises `CheckError` where they hold arrays that are deleted, or tracers of a trace that may be under way."""
    inputs = list(zip(subject.input_names, subject.inputs, strict=False))
    seen = without_garbage(lambda: walk([*subject.roots(subject.state), *inputs]), lambda seen: seen.tracers)
    if seen.tracers:
        if not subject.abstract and not is_tracing():
            place_of = places_in(subject, subject.state)
            return Originals(
                held=tuple(replace(leak(left, None, place_of(left)), before=True) for left in seen.tracers)
            )
        paths = ", ".join(tracer.path for tracer in seen.tracers[:3])
        from_elsewhere = "the call is made inside a transform. Build the module in the test and call it there, outside of any transform: nnx_wrap applies them"
        from_eval_shape = (
            "nnx.eval_shape leaves what the constructor puts there and not in a Variable. Let the constructor not keep it, "
            "or take it away from the abstract module before nnx_wrap gets it"
        )
        reason = from_eval_shape if subject.abstract else from_elsewhere
        raise CheckError(f"{subject.name} holds tracers before the call, in {paths}: {reason}")
    variables = [(subject.path(path), variable) for path, variable in graph.variables(subject.state)]
    leaves = [(path, variable_value(variable)) for path, variable in variables]
    computed = example.values.computed
    for path, array in [*leaves, *seen.arrays]:
        if isinstance(array, jax.Array) and computed(array) and array.is_deleted():
            raise CheckError(
                f"{path} is deleted before the call: an earlier step donated it, or its delete() was called. Build the module inside"
                " the test"
            )
    example.places.append(seen.places)
    example.originals = seen
    leaves = [leaf for leaf in leaves if computed(leaf[1])]
    inputs = [leaf for leaf in inputs if computed(leaf[1])]
    arrays = [
        (path, array) for path, array in seen.arrays if isinstance(array, jax.Array | np.ndarray) and computed(array)
    ]
    of_numpy = [(path, array) for path, array in arrays if is_numpys_own(array)]
    views = [(path, array) for path, array in arrays if not is_numpys_own(array)]
    notes: list[Note | None] = [] if seen.complete else [Fact("walked in part", (subject.name,), count=MOST_OBJECTS)]
    refuse_a_second(subject, example)
    if "recompilation" in settings.invariants:
        notes.append(made_anew(subject, example))
    without_values = tuple(path for path, value in leaves if isinstance(value, jax.ShapeDtypeStruct))
    if 0 < len(without_values) < len(leaves):
        notes.append(Fact("partly abstract", without_values, of=subject.name))
    if "donation" in settings.invariants and settings.donate != "none":
        notes.append(
            recall(
                example.memo.mapped, (subject.label, len(example.places)), lambda: in_mapped_file(subject.name, leaves)
            )
        )
        notes += [Fact("in memory of NumPy", (leaf,), of=holder) for holder, leaf in foreign_views(leaves, of_numpy)]
    shared = shared_buffers([read_leaf(*leaf) for leaf in [*leaves, *inputs]])
    pinned = [
        (path, f"{variable_kind(variable)} {describe(variable_value(variable))}")
        for path, variable in variables
        if is_pinned(variable)
    ]
    return Originals(shared, foreign_views(leaves, views), tuple(pinned), tuple(filter(None, notes)))


def refuse_a_second(subject: Subject, example: Example) -> None:
    """Jax keeps what it met, and compares a second instance with that, as is tried here. Raises `CheckError` where that raises."""
    number_of_call = len(example.places)
    for path, value in compared_by_value(subject.state):
        first = example.memo.compared_by_value.setdefault((path, number_of_call), value)
        try:
            bool(first is value or first == value)
        except Exception:  # noqa: BLE001 - the user's code may raise anything
            raise CheckError(
                f"{subject.path(path)} is a {type(value).__name__} with arrays, and == of two such raises: so does a jitted function "
                "that meets a second model, and the body of this test makes one for every nesting. Keep the arrays in Variables, "
                "write @dataclass(eq=False), or make the model in a fixture of a wider scope"
            ) from None


def made_anew(subject: Subject, example: Example) -> Fact | None:
    """What the body makes anew for each nesting, by the same code, and a jit that meets both tells apart. `None` where there is nothing.

    Of a later call of the body values may be others under another nesting, and so they may where the body has arguments of its own: only what is alike counts.
    """
    memo, number_of_call = example.memo, len(example.places)
    key = (subject.name, number_of_call)
    if key not in memo.made_anew:
        now = static_parts(subject)
        first = memo.static_parts.setdefault(key, now)
        names = tuple(other_parts(first, now, by_value=memo.same_arguments and number_of_call == 1))
        if not names:
            return None
        memo.made_anew[key] = Fact("made anew", names)
    return memo.made_anew[key]


def in_mapped_file(name: str, leaves: list[tuple[str, Any]]) -> InMappedFile | None:
    """The leaves that lie in a mapped file: a copy is checked, which does not. `None` where none does."""
    starts = [(path, start) for path, array in leaves for start, _ in byte_ranges(array)]
    mapped = in_mapped_files(starts, spans_of_process() if starts else [])
    if not mapped:
        return None
    paths, files = zip(*mapped, strict=True)
    return InMappedFile(paths, name, near(files[0]))
