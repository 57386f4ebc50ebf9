"""One run of a marked test, or of a `check`: the outcome of each nesting, and the facts that the nestings have shown of the test."""

from __future__ import annotations

import time
from dataclasses import KW_ONLY, InitVar, dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

import hypothesis

from pytest_nnxcheck.compat import compile_cache
from pytest_nnxcheck.core.catalogue import MODES, TARGETED
from pytest_nnxcheck.core.errors import CheckError, InvariantViolation
from pytest_nnxcheck.core.nesting import Nesting
from pytest_nnxcheck.core.notes import Fact, Note
from pytest_nnxcheck.core.outcome import (
    NO_FACTS,
    BodyFinished,
    CallFacts,
    Listener,
    NestingFinished,
    NestingStarted,
    Outcome,
)
from pytest_nnxcheck.core.settings import Settings
from pytest_nnxcheck.engine.memo import Memo
from pytest_nnxcheck.reporting import hints, left_out, memory_breakdown, notes, report, tally
from pytest_nnxcheck.runner.errors import add_notes, drop_own_notes, passes_through
from pytest_nnxcheck.runner.execution import Body, Execution, Executor
from pytest_nnxcheck.runner.footprint import OF_PROCESS, held_back
from pytest_nnxcheck.runner.strategies import Exclusions

if TYPE_CHECKING:
    from pytest_nnxcheck.paste.files import Programs


@dataclass(eq=False)
class Run:
    """The state of one marked test, or one `check`, while its nestings run."""

    settings: Settings
    _: KW_ONLY
    test_id: str = ""
    argument: str = ""
    options: str = ""
    remember: bool = True
    """A nesting runs once. Off for a test with its own ``@given``: there a nesting is not the whole example."""
    programs: Programs | None = None
    """Writes the programs that show outcomes without the plugin."""
    compiles: InitVar[Path | None] = None
    """The folder that keeps compiled programs."""

    outcomes: dict[Nesting, Outcome] = field(default_factory=dict)
    facts: CallFacts = NO_FACTS
    notes: list[Note] = field(default_factory=list)
    exclusions: dict[str, Exclusions] = field(default_factory=lambda: dict.fromkeys(MODES, Exclusions()))
    """The nestings that the sweep ruled out, by mode of flax."""
    refusals: dict[str, Outcome] = field(default_factory=dict)
    """The closure styles that flax refused, each with the outcome that showed it."""
    not_run: int = 0
    """Nestings of the sweep that were left out, since an earlier one broke."""
    silent: list[Nesting] = field(default_factory=list)
    """Nestings under which the body called fewer of the wrapped objects than un-nested."""
    called: int = 0
    """Wrapped objects that the body calls un-nested."""
    uncalled: bool = False
    """The body called no wrapped object un-nested: no other nesting is run."""
    repeats: bool = False
    """The drawn nestings are the same ones in every run."""
    listeners: list[Listener] = field(default_factory=list)

    memo: Memo = field(init=False)
    executor: Executor = field(init=False)
    bodies: dict[Nesting, Body] = field(default_factory=dict, init=False)
    """The body, with its arguments, of each nesting under which it raised."""
    _memo: dict[Nesting, tuple[BaseException, TracebackType | None] | None] = field(default_factory=dict, init=False)
    """The exception that the body raised under each nesting that has run."""
    _raised: dict[int, Nesting] = field(default_factory=dict, init=False)
    """The nesting to name for an exception, by its identity."""

    def __post_init__(self, compiles: Path | None) -> None:
        shared = compile_cache.SharedPrograms(on=self.settings.shortcuts == "on")
        self.memo = Memo(shared_programs=shared, same_arguments=self.remember)
        self.executor = Executor(self.memo, self.programs, self.publish, compiles)
        if self.programs is not None:
            self.listeners.append(self.programs.listen)
        OF_PROCESS.begin()

    def report(self) -> report.Report:
        """The results so far, as data."""
        outcomes = tuple(self.outcomes.values())
        known = notes.texts((*self.notes, *self._without_target(), *self.facts.notes))
        calls = self.facts.un_nested
        return report.Report(
            outcomes,
            self.settings,
            (*known, *left_out.refused_styles(self.refusals), *left_out.layers_left_out(outcomes)),
            self.test_id,
            self.argument,
            self.options,
            {} if self.programs is None else self.programs.texts,
            self.not_run,
            advice=tuple(dict.fromkeys(hints.advice(piece) for call in calls for piece in call.advice)),
            un_nested=tuple(row for call in calls for row in memory_breakdown.of_un_nested(call.name, call.evidence)),
        )

    def _without_target(self) -> tuple[Note, ...]:
        """A note that says why no program was compiled for a target, where nothing failed."""
        words, outcomes = self.settings.target, self.outcomes.values()
        failed = any(outcome.verdict in ("violated", "failed") for outcome in outcomes)
        compiled = any(outcome.evidence and outcome.evidence.targets for outcome in outcomes)
        if not words or not outcomes or failed or compiled:
            return ()
        asserted = TARGETED & {*self.settings.invariants}
        why = "no nesting with an outer jit was run" if asserted else "neither memory nor donation is asserted"
        return (Fact("nothing on target", words, why),)

    def forget(self) -> None:
        """Drop the memo, and the programs that jax keeps, if they are many.

        The exceptions in the memo hold frames, and the frames hold tracers.
        """
        self._memo.clear()
        self._raised.clear()
        self.bodies.clear()
        self.memo.shared_programs.known.forget()
        OF_PROCESS.end()

    def publish(self, event: object) -> None:
        """Hand an event to the listeners. An answer from the memo makes no event."""
        for listener in self.listeners:
            listener(event)

    def example(self, nesting: Nesting, body: Body) -> None:
        """Run a nesting that hypothesis drew; a rejected one shows in hypothesis' statistics."""
        __tracebackhide__ = True
        self.execute(nesting, body, drawn=True)
        outcome = self.outcomes.get(nesting)
        if outcome is not None and outcome.verdict == "rejected":
            hypothesis.event(tally.word(outcome))

    def execute(self, nesting: Nesting, body: Body, *, drawn: bool = False) -> None:
        """Run the body under the nesting, or answer from the memo. Raises the body's exception, a rejection aside."""
        __tracebackhide__ = True
        if not self.remember or nesting not in self._memo:
            error = self._timed(nesting, body, drawn=drawn)
            self._memo[nesting] = None if error is None else (error, error.__traceback__)
            if error is not None:
                self.bodies[nesting] = body
        answer = self._memo[nesting]
        if answer is not None:
            # Each raise prepends frames: from a fresh start, hypothesis sees the same error every time.
            raise answer[0].with_traceback(answer[1])

    def raised(self, nesting: Nesting) -> BaseException | None:
        """The exception that the body raised under a nesting; `None` where it held, or has not run."""
        answer = self._memo.get(nesting)
        return None if answer is None else answer[0]

    def nesting_of(self, error: BaseException) -> Nesting:
        """The nesting under which an exception was raised; un-nested if it is none of ours."""
        return self._raised.get(id(error), Nesting())

    def _timed(self, nesting: Nesting, body: Body, *, drawn: bool) -> BaseException | None:
        """Run the body under the nesting, and record its outcome. Raises the exceptions that steer the test."""
        self.publish(NestingStarted(nesting, drawn))
        started = time.perf_counter()
        try:
            with held_back():
                execution = self.executor.execute(nesting, body, self.settings)
                self._record(execution)
        finally:
            self.publish(BodyFinished(dict(self.outcomes)))
            seconds, outcome = time.perf_counter() - started, self.outcomes.get(nesting)
            if outcome is not None:
                outcome = self.outcomes[nesting] = replace(outcome, seconds=outcome.seconds + seconds)
            self.publish(NestingFinished(nesting, outcome, seconds, drawn))
        error = execution.raised
        if error is not None and passes_through(error):
            raise error.with_traceback(error.__traceback__)
        return error

    def _record(self, execution: Execution) -> None:
        """Keep the outcome of an execution; an exception of the user's gets a note that names its nesting."""
        self.facts += execution.facts
        for outcome in execution.outcomes.values():
            tally.record(self.outcomes, outcome)
        error, nesting = execution.raised, execution.nesting
        # With arguments of the user's own, a body may have no use for some of them.
        if error is None and execution.ended and self.remember:
            called = len(execution.called)
            if not nesting.layers:
                self.called = max(self.called, called)
            if called < max(self.called, 1):
                self.silent.append(nesting)
        if error is None or passes_through(error):
            return
        # jax raises some exceptions again, object for object: the plainest nesting is the one to name.
        earlier = self.nesting_of(error)
        if self.raised(earlier) is error and earlier.plainness < nesting.plainness:
            return
        self._raised[id(error)] = nesting
        if not isinstance(error, InvariantViolation | CheckError):
            drop_own_notes(error)
            add_notes(error, [report.failed_note(self.report(), self.outcomes[nesting], own=execution.own)])
