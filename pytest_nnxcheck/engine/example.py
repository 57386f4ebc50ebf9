"""The calls of one execution of a test's body, what the test knows of them by now, and the user's own objects: looked at before each call, which is
checked on copies, and put back at the end.

Facts of a call are the same under every nesting, so that each is found once, see `Memo`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Self, TypeVar

import jax

from pytest_nnxcheck.compat import graph
from pytest_nnxcheck.compat.arrays import copied
from pytest_nnxcheck.compat.compile_cache import SharedPrograms
from pytest_nnxcheck.core.errors import CheckError
from pytest_nnxcheck.core.facts import Leak
from pytest_nnxcheck.core.nesting import Nesting
from pytest_nnxcheck.core.notes import Fact, Note
from pytest_nnxcheck.core.on_target import OnTarget
from pytest_nnxcheck.core.outcome import Listener, UnNested, nobody
from pytest_nnxcheck.core.settings import DEFAULTS, Settings
from pytest_nnxcheck.engine.reference import Evaluated
from pytest_nnxcheck.kept import Kept
from pytest_nnxcheck.subject.contents import other_parts, static_parts, write_back
from pytest_nnxcheck.subject.originals import Originals
from pytest_nnxcheck.subject.profile import UNKNOWN, Profile, profile
from pytest_nnxcheck.subject.subject import Subject, bind, copy_leaf, identity
from pytest_nnxcheck.transforms.compose import first
from pytest_nnxcheck.values import uncomputed
from pytest_nnxcheck.walk.snapshot import Places
from pytest_nnxcheck.walk.walk import walk

__tracebackhide__ = True  # pytest shows the frames of the user, not these

V = TypeVar("V")


@dataclass(slots=True)
class Known:
    """The facts that are found out once for all calls with one signature, see `identity.signature`."""

    profile: Profile | None = None
    un_nested: UnNested | None = None
    notes: tuple[Note, ...] = ()
    """Notes that its nestings bring up: programs on targets, tracers that nobody asserts."""
    asked: tuple[str, ...] = ()
    """The lines that ask jax what they run on: ``model.py:12 asked jax.default_backend()``. Known where a target is named."""
    found: dict[Any, Any] = field(default_factory=dict)
    """Further facts, by their kind: see `Call.once`."""


@dataclass(slots=True)
class Memo:
    """The facts that the calls of one test have shown."""

    known: dict[Any, Known] = field(default_factory=dict)
    """Facts by the signatures of calls."""
    evaluated: dict[Any, Evaluated] = field(default_factory=dict)
    """References by the number of a call in the body and all that its result depends on, see `identity.identity`."""
    first: dict[Any, Any] = field(default_factory=dict)
    """Parts of the objects that the first call of a number was handed, by a word for their kind: those of later calls are compared with them."""
    same_arguments: bool = True
    """True if the body is the same each time: no arguments of its own are drawn."""
    own_jits: set[str] = field(default_factory=set)
    """The names of subjects whose plain object keeps a jitted function that captured what it holds."""
    unrestored: dict[Any, tuple[Leak, ...]] = field(default_factory=dict)
    """The tracers that a trace of a subject left for good."""
    shared_programs: SharedPrograms = field(default_factory=SharedPrograms)
    on_targets: Kept[OnTarget] = field(default_factory=Kept)
    body: object = None
    """The body with its arguments that ran last, where each has its own."""

    def run_of(self, body: object) -> None:
        """Forget the calls of a body with other arguments, before this one runs.

        No key tells all the ways by which a call may get at an argument, such as a global that the body sets.
        """
        if self.same_arguments or body is self.body:
            return
        self.body = body
        self.known.clear()
        self.evaluated.clear()


def recall(table: dict[Any, V], key: Any, find_out: Callable[[], V]) -> V:
    """The entry of a key, found out where it is not there yet."""
    if key not in table:
        table[key] = find_out()
    return table[key]


def evaluated_calls(table: dict[Any, Evaluated], subject: Subject, number: int) -> Evaluated:
    """Cached results of the ``number``-th call of an example; an empty cache if the call cannot be identified for certain."""
    content = identity(subject)
    if content is None:
        return Evaluated()
    return recall(table, (number, content), lambda: Evaluated(held=(subject.function, subject.program_of)))


@dataclass(slots=True)
class Example:
    """One execution of a test's body: inside it the user's objects change as the body expects; when it ends they are put back.

    So every nesting meets a module of a wider fixture scope, and a cache in its code, in the same state.
    """

    memo: Memo = field(default_factory=Memo)
    values_needed: bool = False
    """True if the body reads values, so that a nesting that is only traced has to compute them."""
    stand_ins: dict[int, Any] = field(default_factory=dict)
    """The arrays without values that the body was handed, by their identity."""
    places: list[Places] = field(default_factory=list)
    """The places that the calls may change."""
    compared: int = 0
    """The number of calls that were compared with a reference."""
    copies: list[tuple[Any, Any]] = field(default_factory=list)
    """Variables, each with what it held before a call that is not checked."""
    again: bool = False
    """True if the body can run again, see `caches.RunFromCold`."""
    caches: list[Callable[[], None]] = field(default_factory=list)
    """Functions that put back what was in caches before a call."""
    unrestored: tuple[Note, ...] = ()
    """Notes on places that could not be put back."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        while self.places:
            # The latest first: what two calls changed gets back what it held before the first of them.
            lost = self.places.pop().restore()
            self.unrestored += tuple(Fact("not put back", (place,)) for place in lost)
        for put_back in reversed(self.caches):
            put_back()
        for variable, copy in self.copies:
            value = graph.variable_value(variable)
            if isinstance(value, jax.Array) and id(value) not in self.stand_ins and value.is_deleted():
                graph.set_variable_value(variable, copy)

    def lacks(self, subject: Subject) -> bool:
        """True if something that the call is handed is a stand-in, and has no value."""
        if not self.stand_ins:
            return False
        held = [*graph.raw_leaves(subject.state), *graph.attributes(subject.state)]
        arrays = [*subject.inputs, *(leaf for _, value in held for leaf in jax.tree.leaves(value))]
        return any(id(array) in self.stand_ins for array in arrays)

    def copied(self, leaf: Any) -> Any:
        """A copy of a leaf; a stand-in itself, which has no value to copy."""
        return leaf if id(leaf) in self.stand_ins else copy_leaf(leaf)

    def stand_in(self, wanted: Any) -> Any:
        """A stand-in of the type of ``wanted``, an abstract value."""
        made = uncomputed.stand_in(wanted)
        self.stand_ins[id(made)] = made
        return made

    def first(self, leaf: Any) -> Any:
        """The first element of the leading axis; of a stand-in another."""
        return self.stand_in(leaf.aval.update(shape=leaf.shape[1:])) if id(leaf) in self.stand_ins else first(leaf)

    def require_values(self, subject: Subject) -> None:
        """Raise `uncomputed.ValuesNeeded` if something that the call is handed has no value."""
        if self.lacks(subject):
            raise uncomputed.ValuesNeeded


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
    settings: Settings = DEFAULTS
    example: Example = field(default_factory=Example)
    publish: Listener = nobody
    originals: Originals = field(default_factory=Originals)
    known: Known = field(default_factory=Known)
    """The facts that this call, and earlier ones with its signature, have shown."""
    profile: Profile = UNKNOWN
    """The facts of the un-nested call, where a trace takes it."""

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

    def announce(self, *, known: bool = True) -> None:
        """Say that the nesting is about to run; with no profile ``known``, that the call is about to be traced for the first time."""
        self.publish(CallStarted(self.subject, self.profile if known else None, self.nesting, self.settings))


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
        (variable, copy_leaf(graph.variable_value(variable))) for _, variable in graph.variables(subject.state)
    ]
    if handed == "traced":
        with contextlib.suppress(Exception), subject.undone(subject.state, before):
            profile(subject, before)
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
        recall(call.memo.first, ("mapped", subject.label, len(example.places)), lambda: seen.mapped)
        if call.settings.asserts_donation
        else None
    )
    notes: list[Note | None] = [anew, mapped, *seen.notes]
    return replace(call, originals=replace(seen, notes=tuple(filter(None, notes))))


def refuse_a_second(subject: Subject, seen: Originals, example: Example) -> None:
    """Compare a second instance with the first, as jax does with values that it keeps. Raises `CheckError` where that raises."""
    number_of_call = len(example.places)
    for path, value in seen.compared_by_value:
        first = example.memo.first.setdefault(("compared by value", path, number_of_call), value)
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
    if ("made anew", *key) not in memo.first:
        now = static_parts(subject)
        first = memo.first.setdefault(("static parts", *key), now)
        names = tuple(other_parts(first, now, by_value=memo.same_arguments and number_of_call == 1))
        if not names:
            return None
        memo.first["made anew", *key] = Fact("made anew", names)
    made: Fact = memo.first["made anew", *key]
    return made
