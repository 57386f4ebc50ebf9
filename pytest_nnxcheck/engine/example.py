"""The calls of one execution of a test's body, and the user's own objects: looked at before each call, which is checked on copies, and put back at the end."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Self, TypeVar

import jax

from pytest_nnxcheck.compat import graph
from pytest_nnxcheck.compat.arrays import copied
from pytest_nnxcheck.compat.graph import (
    set_variable_value,
    variable_value,
)
from pytest_nnxcheck.core.errors import CheckError
from pytest_nnxcheck.core.nesting import Nesting
from pytest_nnxcheck.core.notes import Fact, Note
from pytest_nnxcheck.core.outcome import Listener
from pytest_nnxcheck.core.settings import Settings
from pytest_nnxcheck.engine.memo import Known, Memo, recall
from pytest_nnxcheck.engine.stage import Values
from pytest_nnxcheck.subject.contents import write_back
from pytest_nnxcheck.subject.originals import Originals
from pytest_nnxcheck.subject.profile import Profile, profile
from pytest_nnxcheck.subject.subject import Subject, bind, copy_leaf
from pytest_nnxcheck.subject.traced_again import other_parts, static_parts
from pytest_nnxcheck.walk.snapshot import Places
from pytest_nnxcheck.walk.walk import walk

__tracebackhide__ = True  # pytest shows the frames of the user, not these

V = TypeVar("V")


@dataclass(slots=True)
class Example:
    """One execution of a test's body: inside it the user's objects change as the body expects; when it ends they are put back.

    So every nesting meets a module of a wider fixture scope, and a cache in its code, in the same state.
    """

    memo: Memo = field(default_factory=Memo)
    values: Values = field(default_factory=Values)
    """The arrays that the body was handed without a value."""
    places: list[Places] = field(default_factory=list)
    """The places that the calls may change."""
    compared: int = 0
    """The number of calls that were compared with a reference."""
    copies: list[tuple[Any, Any]] = field(default_factory=list)
    """Variables, each with what it held before a call that is not checked."""
    unrestored: tuple[Note, ...] = ()
    """Notes on places that could not be put back."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        while self.places:
            # The latest first: what two calls changed gets back what it held before the first of them.
            lost = self.places.pop().restore()
            self.unrestored += tuple(Fact("not put back", (place,)) for place in lost)
        for variable, copy in self.copies:
            value = variable_value(variable)
            if isinstance(value, jax.Array) and self.values.computed(value) and value.is_deleted():
                set_variable_value(variable, copy)


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
    originals: Originals = field(default_factory=Originals)
    known: Known = field(default_factory=Known)
    """The facts that this call, and earlier ones with its signature, have shown."""

    @property
    def memo(self) -> Memo:
        """The known facts of the calls of the test."""
        return self.example.memo

    def once(self, kind: str, find_out: Callable[[], V], *key: Any) -> V:
        """Find out a fact once for all calls with this signature; its kind and ``key`` identify it."""
        known: V = recall(self.known.found, (kind, *key), find_out)
        return known

    def tried(self, kind: str, find_out: Callable[[], V], *key: Any) -> V:
        """Find out a fact once by a run or a trace that the test did not ask for; every change is put back."""

        def undone() -> V:
            with self.subject.undone(self.subject.state):
                return find_out()

        return self.once(kind, undone, *key)

    def announce(self, profile: Profile | None) -> None:
        """Say that the nesting is about to run; without a profile, that the call is about to be traced for the first time."""
        self.publish(CallStarted(self.subject, profile, self.nesting, self.settings))


Handed = Literal["own", "inputs", "copy", "traced"]
"""The arguments of an unchecked call: the user's own objects and inputs; the inputs as arrays of jax; copies of both; or the user's own once the call was traced."""


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


def with_earlier(call: Call) -> Call:
    """The call with what its objects show beside those of earlier calls of the test. Raises `CheckError`, see `refuse_a_second`."""
    subject, seen, example = call.subject, call.originals, call.example
    if seen.walk is not None:
        example.places.append(seen.walk.places)
    refuse_a_second(subject, seen, example)
    anew = made_anew(subject, example) if "recompilation" in call.settings.invariants else None
    mapped = (
        recall(call.memo.mapped, (subject.label, len(example.places)), lambda: seen.mapped)
        if call.settings.asserts_donation
        else None
    )
    notes: list[Note | None] = [anew, mapped, *seen.notes]
    return replace(call, originals=replace(seen, notes=tuple(filter(None, notes))))


def refuse_a_second(subject: Subject, seen: Originals, example: Example) -> None:
    """Compare a second instance with the first, as jax does with values that it keeps. Raises `CheckError` where that raises."""
    number_of_call = len(example.places)
    for path, value in seen.compared_by_value:
        first = example.memo.compared_by_value.setdefault((path, number_of_call), value)
        try:
            bool(first is value or first == value)
        except Exception:  # noqa: BLE001 - the user's code may raise anything
            raise CheckError(
                f"{subject.path(path)} is a {type(value).__name__} with arrays, and == of two such objects raises. A jitted function "
                "that meets a second model compares them, and the body of this test makes a model for every nesting. Keep the arrays in Variables, "
                "write @dataclass(eq=False), or make the model in a fixture of a wider scope"
            ) from None


def made_anew(subject: Subject, example: Example) -> Fact | None:
    """A note on objects that the same code makes anew for each nesting, and that a jit tells apart. `None` where there are none.

    In a later call, or where the body has arguments of its own, values may differ between nestings: then only objects with equal fingerprints count.
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
