"""The programs that are compiled while a test runs: their peaks against the budget, and second copies of the state in them.

Nothing of a program is kept but what is said of it.
"""

from __future__ import annotations

import contextlib
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from types import FrameType
from typing import Any

from pytest_nnxcheck.core.evidence import FLOOR, Split
from pytest_nnxcheck.watch import donation, frames
from pytest_nnxcheck.watch.leftovers import MOST_OBJECTS
from pytest_nnxcheck.watch.roots import Root


@dataclass(frozen=True, slots=True)
class Program:
    """A program that holds too much: what it is called, its memory, the line that compiled it, the ``fixture`` that was set up then.

    It is over a ``budget`` or, without one, holds ``copied`` bytes of state again, of ``state`` in all: those of the ``leaves``.
    """

    name: str
    memory: Split
    line: str
    fixture: str = ""
    budget: int = 0
    copied: int = 0
    state: int = 0
    leaves: tuple[str, ...] = ()


class Programs:
    """Listens while tests run and fixtures are set up, and keeps what it has to say until it is taken."""

    def __init__(self, budget: int | None) -> None:
        self.budget = budget
        self.heard = 0
        self.unread = ""
        """Why a program could not be judged, of the last one."""
        self.unused: list[donation.Unused] = []
        self._wasteful: list[Program] = []
        self._fixture = ""
        self._roots: Callable[[], Iterable[Root]] = list
        self._listening = False

    @contextlib.contextmanager
    def of(self, roots: Callable[[], Iterable[Root]] = list, fixture: str = "") -> Iterator[None]:
        """Listen for a while, where jax was imported; ``roots`` are where a test keeps models, beside local variables."""
        outer = self._roots, self._fixture, self._listening
        self._roots, self._fixture = roots, fixture
        try:
            if self._listening or "jax" not in sys.modules:
                yield
            else:
                from pytest_nnxcheck import compat

                self._listening = True
                with compat.compiles(self._hear):
                    yield
        finally:
            self._roots, self._fixture, self._listening = outer

    def take(self) -> tuple[Program, ...]:
        """What was not taken before, the largest peak first."""
        self.unused = []
        wasteful, self._wasteful = self._wasteful, []
        return tuple(sorted(wasteful, key=lambda program: -program.memory.peak))

    def _hear(self, executable: Any, frame: FrameType) -> None:
        self.heard += 1
        try:
            self._wasteful.extend(self._judge(executable, frame))
        except Exception as error:  # noqa: BLE001 - it would end the user's call
            self.unread = f"{type(error).__name__}: {error}".splitlines()[0]

    def _judge(self, executable: Any, frame: FrameType) -> Iterator[Program]:
        from pytest_nnxcheck import compat

        users = [*frames.of_user(frame)]
        program = compat.traced_program(frame)
        # In calls alone, as with the warnings of jax.
        if not self._fixture and program is not None and any(program[1]):
            self.unused += donation.told(donation.widened(*program), users)
        if reason := compat.no_totals():
            self.unread = reason
            return
        totals = executable.memory_analysis()
        memory = Split(
            totals.argument_size_in_bytes,
            totals.output_size_in_bytes,
            totals.temp_size_in_bytes,
            totals.alias_size_in_bytes,
            0,
        )
        if self.budget is not None and memory.peak > self.budget:
            yield Program(executable.name(), memory, frames.line(users), self._fixture, self.budget)
        if memory.temporaries >= FLOOR:
            roots = [*frames.local_variables(users), *self._roots()]
            state = state_among(compat.arguments_of(frame), roots)
            copied, leaves = copies(executable, memory.temporaries, state, program)
            if copied:
                size = sum(leaf.bytes for leaf in state)
                yield Program(
                    executable.name(),
                    memory,
                    frames.line(users),
                    self._fixture,
                    copied=copied,
                    state=size,
                    leaves=leaves,
                )


@dataclass(frozen=True, slots=True)
class StateLeaf:
    """An argument of a program that is the array of a Variable; ``alone`` says that every argument of its type is one."""

    path: str
    type: str
    bytes: int
    alone: bool


def state_among(arguments: Iterable[Any], roots: Iterable[Root]) -> tuple[StateLeaf, ...]:
    """Those arguments that are the very arrays of Variables which the roots lead to. An equal type alone makes no state of a batch."""
    from pytest_nnxcheck import compat
    from pytest_nnxcheck.compat.arrays import describe, nbytes
    from pytest_nnxcheck.inspection.walk import walk

    arrays = {id(array): array for array in arguments if hasattr(array, "shape") and hasattr(array, "dtype")}
    if sum(map(nbytes, arrays.values())) < FLOOR:
        return ()
    nodes = walk(roots, MOST_OBJECTS).nodes
    paths = {id(compat.variable_value(node)): path for path, node in nodes if compat.kind_of(type(node)) == "variable"}
    others = Counter(describe(array) for key, array in arrays.items() if key not in paths)
    return tuple(
        StateLeaf(paths[key], describe(array), nbytes(array), alone=not others[describe(array)])
        for key, array in arrays.items()
        if key in paths
    )


def copies(
    executable: Any,
    temporaries: int,
    state: tuple[StateLeaf, ...],
    program: tuple[Any, tuple[bool, ...]] | None = None,
) -> tuple[int, tuple[str, ...]]:
    """Bytes of temporaries that are whole leaves of the state once more, and the leaves, where that is a second copy of it by the default rule.

    Of a backward pass nothing is said: jax saves what it needs of each step of a loop, parameters included. Nor of what XLA inserts for a leaf
    that it widens, or that the ``program``, a jaxpr with what it donates, gives another value.
    """
    from pytest_nnxcheck.inspection import buffers
    from pytest_nnxcheck.invariants.memory import COPY_SHARE, inserted_whole, widened

    least = max(COPY_SHARE * sum(leaf.bytes for leaf in state), FLOOR)
    if not state or temporaries < least or executable.differentiates():
        return 0, ()
    memory = buffers.read(executable)
    types = {
        number: buffer.shape for buffer in memory.buffers if buffer.kind == "argument" for number in buffer.parameters
    }
    certain = {leaf.type for leaf in state if leaf.alone}
    parameters = {number for number, type_ in types.items() if type_ in certain}
    every = tuple(buffer for buffer in buffers.state_copies(memory, parameters) if buffer.kind == "temporary")
    given_another = types_given_another_value(*program) if program and every else set()
    excused = [*widened(memory, every), *(copy for copy in inserted_whole(every) if copy.shape in given_another)]
    copied = [copy for copy in every if copy not in excused]
    size = sum(buffer.bytes for buffer in copied)
    if size < least:
        return 0, ()
    shown = {types[number] for buffer in copied for number in buffer.parameters}
    return size, tuple(leaf.path for leaf in state if leaf.type in shown)


def types_given_another_value(jaxpr: Any, donated: tuple[bool, ...]) -> set[str]:
    """The types of which a program donates every input and gives each another value, by `jaxpr_flow.overwritten` or `jaxpr_flow.remade`, or by
    `jaxpr_flow.read_first` where nothing tells XLA what comes first.

    Which output takes whose place is not known: those of the type are asked, but for inputs that are handed out as they are.
    """
    from pytest_nnxcheck import compat
    from pytest_nnxcheck.subject.jaxpr_flow import overwritten, read_first, remade

    handed_out = {id(var) for var in jaxpr.invars}
    inputs: defaultdict[str, list[int]] = defaultdict(list)
    outputs: defaultdict[str, list[int]] = defaultdict(list)
    for number, var in enumerate(jaxpr.invars):
        inputs[_type_of(var)].append(number)
    for number, var in enumerate(jaxpr.outvars):
        if id(var) not in handed_out:
            outputs[_type_of(var)].append(number)

    def another_value(number: int, type_: str) -> bool:
        hows = (remade,) if compat.barriers_order() else (remade, read_first)
        return overwritten(jaxpr, number) or all(
            any(how(jaxpr, number, output) for how in hows) for output in outputs[type_]
        )

    return {
        type_
        for type_, numbers in inputs.items()
        if all(donated[number] and another_value(number, type_) for number in numbers)
    }


def _type_of(var: Any) -> str:
    """The type of a variable of a jaxpr; empty for one that is no array, a token."""
    from pytest_nnxcheck.compat.arrays import describe

    return describe(var.aval) if hasattr(var.aval, "dtype") else ""
