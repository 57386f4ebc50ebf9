"""The programs that are compiled while a test runs: their peaks against the budget, and second copies of the state in them.

Nothing of a program is kept but the report on it.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any

from pytest_nnxcheck.core.peak import FLOOR, Split, least_copy
from pytest_nnxcheck.watch import donation, frames
from pytest_nnxcheck.watch.leftovers import MOST_OBJECTS
from pytest_nnxcheck.watch.roots import Root


@dataclass(frozen=True, slots=True)
class WastefulProgram:
    """A program that holds too much: it is over a budget, or holds state once more."""

    name: str
    memory: Split
    line: str
    """The line that compiled it."""
    fixture: str = ""
    """The fixture that was set up then, if no test ran."""
    budget: int = 0
    """The bytes that it is over; 0 where it is not."""
    copied: int = 0
    """The bytes of state that it holds once more."""
    state: int = 0
    """The bytes of all state that it takes."""
    leaves: tuple[str, ...] = ()
    """The paths of the state that it hands back."""


class Programs:
    """Listens for programs while tests run and fixtures are set up, and keeps those that hold too much until they are taken."""

    def __init__(self, budget: int | None) -> None:
        self.budget = budget
        self.heard = 0
        """The number of programs that were compiled."""
        self.unread = ""
        """Why a program could not be judged, of the last one."""
        self.unused: list[donation.UnusedBuffers] = []
        self._wasteful: list[WastefulProgram] = []
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
                from pytest_nnxcheck.compat import compile_events

                self._listening = True
                with compile_events.compiles(self._hear):
                    yield
        finally:
            self._roots, self._fixture, self._listening = outer

    def take(self) -> tuple[WastefulProgram, ...]:
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

    def _judge(self, executable: Any, frame: FrameType) -> Iterator[WastefulProgram]:
        from pytest_nnxcheck.compat import compile_events
        from pytest_nnxcheck.xla.buffers import split_of

        users = [*frames.of_user(frame)]
        traced = compile_events.traced_program(frame)
        # In calls alone, as with the warnings of jax.
        if not self._fixture and traced is not None and any(traced[1]):
            self.unused += donation.unused_buffers(donation.widened(*traced), users)
        if reason := compile_events.no_totals():
            self.unread = reason
            return
        memory, name, line = split_of(executable), executable.name(), frames.line(users)
        if self.budget is not None and memory.peak > self.budget:
            yield WastefulProgram(name, memory, line, self._fixture, self.budget)
        if traced is None or memory.temporaries < FLOOR:
            return
        arguments = taken_by_program(compile_events.arguments_of(frame), len(traced[1]))
        state = state_among(arguments, [*frames.local_variables(users), *self._roots()])
        copied, size, leaves = copies(traced, arguments, memory, state)
        if copied:
            yield WastefulProgram(name, memory, line, self._fixture, copied=copied, state=size, leaves=leaves)


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
    from pytest_nnxcheck.compat.variables import is_variable, variable_value
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
    from pytest_nnxcheck.jaxprs.copies import TracedProgram, copies_in
    from pytest_nnxcheck.jaxprs.forwarding import handed_inputs
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
