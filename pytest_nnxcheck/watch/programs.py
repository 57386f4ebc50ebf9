"""The programs that are compiled while a test runs: donated buffers that could not be reused, peaks over the budget, second copies of the state.

`WatchedPrograms` listens, and keeps nothing of a program but the report on it. Of donation JAX warns when it lowers a program, by types; the leaves are found
by their types. From jax 0.8 on it does not warn if an output has as many elements, whatever their size. `widened` finds the outputs that are wider,
such as a float32 that got into a bfloat16 step. A narrower one, such as a quantized one, is meant: its buffer was donated to be freed. The warning
goes on to pytest. A warning that the test expects (`pytest.warns`), turns into an error or ignores is not seen here.
"""

from __future__ import annotations

import contextlib
import re
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any, ClassVar

from pytest_nnxcheck.core.notes import other_dtype
from pytest_nnxcheck.core.outcome import Finding
from pytest_nnxcheck.core.peak import FLOOR, Split, least_copy
from pytest_nnxcheck.core.text import Row, format_bytes, some
from pytest_nnxcheck.reporting.memory_breakdown import formula
from pytest_nnxcheck.watch import leftovers
from pytest_nnxcheck.watch.leftovers import MOST_OBJECTS, Root

_TEXT = "Some donated buffers were not usable:"
_TYPE = re.compile(r"\b([\w<>]+)\[([^\]]*)\]")


@dataclass(frozen=True, slots=True, kw_only=True)
class UnusedBuffers(Finding):
    """Donated buffers of one type that no output could take over."""

    type: str
    count: int
    leaves: tuple[str, ...]
    """The arrays of that type that local variables lead to: these may be meant."""
    line: str
    """The line that called the program."""
    new: str = ""
    """The dtype of an output of as many elements, where there is one."""

    def names(self) -> tuple[str, ...]:
        """The leaves, where their types tell them."""
        return self.leaves if 0 < len(self.leaves) <= self.count else (self.type,)

    def rows(self) -> Iterable[Row]:
        which = f"{self.count} of " if len(self.leaves) > self.count else ""
        yield "donated", f"{self.type}   {which}{some(self.leaves) or 'no local variable holds it'}"

    def last_rows(self) -> Iterable[Row]:
        if self.line:
            yield "", f"to the program called at {self.line}, which has no output of that type for the buffer"

    def cure(self) -> str:
        if self.new:
            return other_dtype(self.type.partition("[")[0], self.new)
        from pytest_nnxcheck.invariants.donation import (
            NOT_RETURNED,  # it loads jax, which a run that donates has loaded
        )

        return NOT_RETURNED


@contextlib.contextmanager
def noted() -> Iterator[list[UnusedBuffers]]:
    """Gather the warnings of JAX. ``warnings.showwarning`` is documented as replaceable; the one before is called too."""
    unused: list[UnusedBuffers] = []
    before = warnings.showwarning

    def show(message: Warning | str, *args: Any, **more: Any) -> None:
        if str(message).startswith(_TEXT):
            types = Counter((kind, "") for kind in types_in(str(message)))
            users = [*leftovers.of_user(sys._getframe(1))]  # noqa: SLF001 - documented, and faster than `inspect`
            unused.extend(unused_buffers(types, users))
        before(message, *args, **more)

    warnings.showwarning = show
    try:
        yield unused
    finally:
        if warnings.showwarning is show:
            warnings.showwarning = before


def types_in(text: str) -> tuple[str, ...]:
    """The types in a warning, ``float32[4,8]``, without the axes of a mesh. jax 0.4 writes ``ShapedArray(...)`` around each."""
    listed = text.removeprefix(_TEXT).partition("\nSee ")[0]
    return tuple(f"{kind}[{re.sub(r'@[^,]*', '', shape)}]" for kind, shape in _TYPE.findall(listed))


def unused_buffers(types: Counter[tuple[str, str]], users: list[FrameType]) -> Iterator[UnusedBuffers]:
    """The buffers of each type, with the leaves that may be meant. A key of ``types`` is (type, dtype of an output or empty)."""
    if not types:
        return
    from pytest_nnxcheck.compat.arrays import describe
    from pytest_nnxcheck.walk.walk import walk

    found = walk(leftovers.local_variables(users), MOST_OBJECTS).arrays
    arrays = [(path, describe(array)) for path, array in found]
    for (kind, new), count in types.items():
        leaves = tuple(path for path, type_ in arrays if type_ == kind)
        yield UnusedBuffers(type=kind, count=count, leaves=leaves, line=leftovers.line(users), new=new)


def widened(closed: Any, donated: tuple[bool, ...]) -> Counter[tuple[str, str]]:
    """Count the donated inputs for which a program has an output of as many elements only in a wider dtype.

    It completes jax's own warning, which goes by types alone. So does this: not by `successors`, which asks what an output is made of.
    A key is (type of the input, wider dtype).
    """
    from pytest_nnxcheck.compat import staging
    from pytest_nnxcheck.compat.arrays import describe

    jaxpr = staging.open_jaxpr(closed)
    outputs = [var.aval for var in jaxpr.outvars if hasattr(var.aval, "dtype")]
    left = []
    for var, is_donated in zip(jaxpr.invars, donated, strict=True):
        if not is_donated or not hasattr(var.aval, "dtype"):
            continue
        same = next((out for out in outputs if (out.shape, out.dtype) == (var.aval.shape, var.aval.dtype)), None)
        if same is None:
            left.append(var.aval)
        else:
            outputs.remove(same)
    types: Counter[tuple[str, str]] = Counter()
    for aval in left:
        as_many = next((out for out in outputs if out.size == aval.size), None)
        if as_many is not None:
            outputs.remove(as_many)
            if as_many.dtype.itemsize > aval.dtype.itemsize:
                types[describe(aval), str(as_many.dtype)] += 1
    return types


def merged(warned: Iterable[UnusedBuffers], seen: Iterable[UnusedBuffers]) -> tuple[UnusedBuffers, ...]:
    """The warnings of jax and what `widened` saw. Of one type, the latter says more."""
    warned, seen = [*warned], [*seen]
    if not (warned or seen):  # a suite without jax stays without it
        return ()
    from pytest_nnxcheck.compat import compile_cache

    types = {buffers.type for buffers in warned}
    more = [buffers for buffers in seen if buffers.type in types or not compile_cache.warns_of_widened()]
    types = {buffers.type for buffers in more}
    return tuple(dict.fromkeys([*(buffers for buffers in warned if buffers.type not in types), *more]))


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramFinding(Finding):
    """A finding about one compiled program."""

    name: str
    memory: Split
    line: str
    """The line that compiled it."""
    fixture: str = ""
    """The fixture that was set up then, if no test ran."""

    def names(self) -> tuple[str, ...]:
        """Its words in a headline."""
        return (self.name,)

    def compiled(self) -> Row:
        """The row that says where it was compiled."""
        there = f"compiled at {self.line}" if self.line else "compiled by a library"
        return "", there + (f", for the fixture {self.fixture}" if self.fixture else "")


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramOverBudget(ProgramFinding):
    """A program whose peak is over a budget."""

    budget: int
    """Bytes."""
    SHOWN: ClassVar[int] = 1

    def names(self) -> tuple[str, ...]:
        """A sentence: the program has no leaves."""
        return (f"{self.name} peaks at {format_bytes(self.memory.peak)}, over {format_bytes(self.budget)}",)

    def rows(self) -> Iterable[Row]:
        # Without the constants, which nobody has named here: their bytes are unknown.
        terms = formula({name: size for name, size in self.memory.parts.items() if name != "constants"})
        peak, budget = format_bytes(self.memory.peak), format_bytes(self.budget)
        yield "peak", f"{peak} of {self.name}, memory_budget {budget}: {terms}"
        yield self.compiled()


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramCopies(ProgramFinding):
    """A program that holds state once more."""

    copied: int
    """The bytes of state that it holds once more."""
    state: int
    """The bytes of all state that it takes."""
    leaves: tuple[str, ...]
    """The paths of the state that it hands back."""

    def names(self) -> tuple[str, ...]:
        """The leaves."""
        return self.leaves

    def rows(self) -> Iterable[Row]:
        held = f"temporaries of {self.name} hold {format_bytes(self.copied)} of it a second time"
        yield "copied", f"{some(self.leaves)}: {held}, {self.copied / self.state:.2f} copies of the state"
        yield self.compiled()


class WatchedPrograms:
    """Listens for programs while tests run and fixtures are set up, and keeps those that hold too much until they are taken."""

    def __init__(self, budget: int | None) -> None:
        self.budget = budget
        self.heard = 0
        """The number of programs that were compiled."""
        self.unread = ""
        """Why a program could not be judged, of the last one."""
        self.unused: list[UnusedBuffers] = []
        self._wasteful: list[ProgramFinding] = []
        self._fixture = ""
        self._roots: Callable[[], Iterable[Root]] = list
        self._listening = False
        self._judging = False

    @contextlib.contextmanager
    def of(self, roots: Callable[[], Iterable[Root]] = list, fixture: str = "") -> Iterator[None]:
        """Listen for a while, where jax was imported; ``roots`` are where a test keeps models, beside local variables."""
        outer = self._roots, self._fixture, self._listening
        self._roots, self._fixture = roots, fixture
        try:
            if self._listening or "jax" not in sys.modules:
                yield
            else:
                from pytest_nnxcheck.compat import compile_cache

                self._listening = True
                with compile_cache.compiles(self._hear):
                    yield
        finally:
            self._roots, self._fixture, self._listening = outer

    def take(self) -> tuple[ProgramFinding, ...]:
        """Return the programs that were not taken before, the largest peak first."""
        self.unused = []
        wasteful, self._wasteful = self._wasteful, []
        return tuple(sorted(wasteful, key=lambda program: -program.memory.peak))

    def _hear(self, executable: Any, frame: FrameType) -> None:
        if self._judging:  # `copies` compiles the forwarded program
            return
        self.heard += 1
        self._judging = True
        try:
            self._wasteful.extend(self._judge(executable, frame))
        except Exception as error:  # noqa: BLE001 - it would end the user's call
            self.unread = f"{type(error).__name__}: {error}".splitlines()[0]
        finally:
            self._judging = False

    def _judge(self, executable: Any, frame: FrameType) -> Iterator[ProgramFinding]:
        from pytest_nnxcheck.compat import compile_cache
        from pytest_nnxcheck.xla.buffers import split_of

        users = [*leftovers.of_user(frame)]
        traced = compile_cache.traced_program(frame)
        # In calls alone, as with the warnings of jax.
        if not self._fixture and traced is not None and any(traced[1]):
            self.unused += unused_buffers(widened(*traced), users)
        if reason := compile_cache.no_totals():
            self.unread = reason
            return
        memory = split_of(executable)
        of_program: dict[str, Any] = {
            "name": executable.name(),
            "memory": memory,
            "line": leftovers.line(users),
            "fixture": self._fixture,
        }
        if self.budget is not None and memory.peak > self.budget:
            yield ProgramOverBudget(**of_program, budget=self.budget)
        if traced is None or memory.temporaries < FLOOR:
            return
        arguments = taken_by_program(compile_cache.arguments_of(frame), len(traced[1]))
        state = state_among(arguments, [*leftovers.local_variables(users), *self._roots()])
        copied, size, leaves = copies(traced, arguments, memory, state)
        if copied:
            yield ProgramCopies(**of_program, copied=copied, state=size, leaves=leaves)


def taken_by_program(arguments: Sequence[Any], count: int) -> list[Any]:
    """The arguments of a call without the static ones; none if that is not certain. ``count`` is the number that its program takes."""
    arrays = [value for value in arguments if hasattr(value, "shape") and hasattr(value, "dtype")]
    own = {*map(id, arrays)}
    values = [value for value in arguments if id(value) in own or isinstance(value, bool | int | float | complex)]
    return next((each for each in (values, arrays) if len(each) == count), [])


def state_among(arguments: Sequence[Any], roots: Iterable[Root]) -> dict[int, str]:
    """Find the arguments that are the very arrays of Variables which the roots lead to: the path of each, by its number.

    A batch of the same type as a Variable is no state.
    """
    from pytest_nnxcheck.compat.arrays import nbytes
    from pytest_nnxcheck.compat.graph import is_variable, variable_value
    from pytest_nnxcheck.walk.walk import walk

    if sum(map(nbytes, arguments)) < FLOOR:
        return {}
    nodes = walk(roots, MOST_OBJECTS).nodes
    paths = {id(variable_value(node)): path for path, node in nodes if is_variable(node)}
    return {number: paths[id(array)] for number, array in enumerate(arguments) if id(array) in paths}


def copies(
    traced: tuple[Any, tuple[bool, ...]], arguments: Sequence[Any], memory: Split, state: Mapping[int, str]
) -> tuple[int, int, tuple[str, ...]]:
    """Measure the state that a program holds once more, by the rule of every check.

    Gives those bytes, the bytes of all state, and the leaves that the program hands back.
    """
    from pytest_nnxcheck.compat import staging
    from pytest_nnxcheck.compat.arrays import nbytes
    from pytest_nnxcheck.jaxprs.copies import TracedProgram, copies_in, handed_inputs
    from pytest_nnxcheck.xla.buffers import split_of

    closed, is_donated = traced
    program = TracedProgram.of(closed, arguments, is_donated, keep_unused=False)
    handed = handed_inputs(staging.open_jaxpr(program.jaxpr))
    leaves = tuple(path for number, path in state.items() if number in handed)
    size = sum(nbytes(arguments[number]) for number in state)
    if not leaves:
        return 0, size, ()
    copied = copies_in(
        program, memory, size, lambda jitted: split_of(jitted.lower(*program.arguments).compile())
    ).handed_back
    return (copied if copied >= least_copy(size) else 0), size, leaves
