"""One run of a marked test, or of a `check`: the outcome of each nesting, the facts that the nestings have shown of the test, and the sweep.

`Run` runs one nesting after the other and remembers. `Sweep` is the part that always runs first: the un-nested call, probes, single layers, chains,
in this order, up to the point where the message already has its nesting.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import KW_ONLY, InitVar, dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import hypothesis

from pytest_nnxcheck.compat import compile_cache, frames
from pytest_nnxcheck.core.catalogue import JIT, MODES, TARGETED
from pytest_nnxcheck.core.errors import CheckError, InvariantViolation
from pytest_nnxcheck.core.nesting import Layer, Nesting, in_mode
from pytest_nnxcheck.core.notes import Fact, Note, StateAdded, texts
from pytest_nnxcheck.core.outcome import (
    NO_FACTS,
    BodyFinished,
    CallFacts,
    Listener,
    NestingFinished,
    NestingRuledOut,
    NestingStarted,
    Outcome,
)
from pytest_nnxcheck.core.settings import Settings
from pytest_nnxcheck.engine.example import Memo
from pytest_nnxcheck.reporting import left_out, memory_breakdown, report
from pytest_nnxcheck.runner import strategies
from pytest_nnxcheck.runner.execution import (
    Body,
    Execution,
    Executor,
    add_notes,
    drop_own_notes,
    passes_through,
    plainest,
)
from pytest_nnxcheck.runner.footprint import OF_PROCESS, held_back

if TYPE_CHECKING:
    from pytest_nnxcheck.paste.program import Programs


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
    exclusions: dict[str, strategies.Exclusions] = field(
        default_factory=lambda: dict.fromkeys(MODES, strategies.Exclusions())
    )
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
        known = texts((*self.notes, *self._without_target(), *self.facts.notes))
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
            advice=tuple(dict.fromkeys(text for call in calls for text in texts(call.advice))),
            un_nested=tuple(row for call in calls for row in memory_breakdown.of_un_nested(call.name, call.evidence)),
            without_arrays=self.facts.without_arrays,
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
            hypothesis.event(report.word(outcome))

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
            report.keep_worst(self.outcomes, outcome)
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
            fault = frames.raised_by_us(error)
            rows = report.failed_note(self.report(), self.outcomes[nesting], own=execution.own)
            add_notes(error, [report.fault_note(fault) if fault else rows])


Errors = Iterator[BaseException | None]
"""The exception that each nesting raised; `None` where it held."""


@dataclass(frozen=True, slots=True)
class Sweep:
    """An explicit example of hypothesis: in every mode the un-nested call, then the nestings of the settings; in a replay its nesting alone."""

    settings: Settings

    def __repr__(self) -> str:
        return f"<the {self.settings.sweep if self.settings.nesting is None else 'replay'} sweep>"

    def _repr_pretty_(self, printer: Any, _cycle: object) -> None:
        """Show it in an example of hypothesis, which shows it field by field without this."""
        printer.text(repr(self))


def sweep(run: Run, case: Sweep, body: Body) -> None:
    """Run the nestings of a sweep. Raises the plainest of their exceptions."""
    __tracebackhide__ = True
    modes = case.settings.chosen_modes
    errors = [error for mode in modes for error in _errors(run, case, mode, body) if error is not None]
    if run.remember:
        # With the user's own arguments, what held was held for one value of them only.
        for mode in modes:
            run.exclusions[mode] = replace(run.exclusions[mode], swept=strategies.swept_layers(run.settings))
    if errors:
        error = plainest(errors, run.nesting_of)
        raise error.with_traceback(error.__traceback__)


def _errors(run: Run, case: Sweep, mode: str, body: Body) -> Errors:
    """Run the sweep in one mode of flax."""
    __tracebackhide__ = True
    if case.settings.nesting is not None:
        yield from (_try(run, nesting, body) for nesting in in_mode([case.settings.nesting], mode))
        return
    error = _raised(run, Nesting(mode=mode), body)
    run.uncalled = run.uncalled or (error is None and not run.outcomes)
    _exclude_layers_that_carry(run, mode)
    _exclude_what_is_shown(run, Nesting(mode=mode))
    yield error
    # With a cause, the violation comes of a call that raises un-nested: nothing more to learn in this mode, either way.
    if run.uncalled or (error is not None and not (isinstance(error, InvariantViolation) and error.__cause__ is None)):
        return
    runs_all = case.settings.all == "on"
    broke = ends = error is not None
    # What is expected to fail is not ruled out: it must be seen to fail.
    expected = tuple(in_mode(strategies.expected_to_fail(case.settings), mode))
    for stage in (_singles, _several):
        if ends and not runs_all:
            break
        for error in stage(run, case, mode, body, expected):
            broke = broke or error is not None
            # A module that is captured breaks of that alone: it says nothing of nestings that hand the module over.
            ends = ends or (error is not None and not run.nesting_of(error).captures)
            yield error
    if broke and not runs_all:
        # The rest would not change the message, and draws never follow a sweep that broke.
        rest = in_mode(strategies.sweep(case.settings, run.exclusions[mode]), mode)
        run.not_run += sum(nesting not in run.outcomes for nesting in rest)
        return
    yield from (_try(run, nesting, body) for nesting in expected if nesting not in run.outcomes)


def _singles(run: Run, case: Sweep, mode: str, body: Body, expected: tuple[Nesting, ...]) -> Errors:
    """The probes, and every layer alone; up to the plainest that breaks an invariant, or to a plain jit that raises."""
    probed: dict[Nesting, BaseException | None] = {}
    for nesting in _workable(run, strategies.probes(case.settings), mode, expected):
        probed[nesting] = _try(run, nesting, body)
        yield probed[nesting]
    if case.settings.sweep == "probes":
        return
    for nesting in _workable(run, strategies.singles(case.settings), mode, expected):
        error = probed[nesting] if nesting in probed else _try(run, nesting, body)
        yield error
        is_named = isinstance(error, InvariantViolation) or (error is not None and nesting.layers == (Layer(JIT),))
        if is_named and case.settings.all == "off":
            return


def _several(run: Run, case: Sweep, mode: str, body: Body, expected: tuple[Nesting, ...]) -> Errors:
    """Nestings of several layers; where one breaks, the smallest that does is looked for, and the rest is left."""
    for nesting in _workable(run, strategies.second_stage(case.settings, run.exclusions[mode]), mode, expected):
        error = _try(run, nesting, body)
        yield error
        if error is not None:
            yield from _smaller(run, case, nesting, error, body)
            if case.settings.all == "off":
                return


def _smaller(run: Run, case: Sweep, nesting: Nesting, broken: BaseException, body: Body) -> Errors:
    """The plainest nesting that breaks as well, among its parts with fewer layers and the pairs of all layers.

    Nothing runs beyond one that is known to break.
    """
    as_bad = {"violated"} if isinstance(broken, InvariantViolation) else {"violated", "failed"}
    pairs = in_mode(strategies.pairs(case.settings, run.exclusions[nesting.mode]), nesting.mode)
    candidates = sorted({*strategies.parts(nesting), *pairs}, key=lambda candidate: candidate.plainness)
    for candidate in candidates:
        if candidate.plainness >= nesting.plainness or _rules_out(run, candidate):
            continue
        if candidate not in run.outcomes:
            yield _try(run, candidate, body)
        if candidate in run.outcomes and run.outcomes[candidate].verdict in as_bad:
            return


def _try(run: Run, nesting: Nesting, body: Body) -> BaseException | None:
    """Run a nesting, and leave out from here on the styles and layers that it has shown to be refused or unfit. Returns its exception."""
    __tracebackhide__ = True
    raised = _raised(run, nesting, body)
    _exclude_what_is_shown(run, nesting)
    return raised


def _raised(run: Run, nesting: Nesting, body: Body) -> BaseException | None:
    """Run a nesting. Returns its exception."""
    __tracebackhide__ = True
    try:
        run.execute(nesting, body)
    except CheckError:
        raise
    except BaseException as error:
        if passes_through(error):
            raise
        return error
    return None


def _exclude_what_is_shown(run: Run, nesting: Nesting) -> None:
    """Leave out from here on the styles and layers that a nesting has shown to be refused or unfit."""
    if (outcome := run.outcomes.get(nesting)) is None:
        return
    before = run.exclusions[nesting.mode]
    now = run.exclusions[nesting.mode] = before.after(outcome, run.settings)
    run.refusals |= dict.fromkeys(now.refused - before.refused, outcome)
    if now.closed and not before.closed:
        run.notes.append(Fact("mode closed", (nesting.mode,), f"{nesting}: {outcome.reason}"))


def _exclude_layers_that_carry(run: Run, mode: str) -> None:
    """Leave out the argument layers that carry the state, where the call adds state, and say so once."""
    if not run.facts.added or run.exclusions[mode].adds_state:
        return
    run.exclusions[mode] = replace(run.exclusions[mode], adds_state=True)
    layers = strategies.stuck_layers(run.settings)
    note = StateAdded(run.facts.added, layers)
    if layers and note not in run.notes:
        run.notes.append(note)


def _workable(run: Run, nestings: Iterator[Nesting], mode: str, expected: tuple[Nesting, ...]) -> Iterator[Nesting]:
    return (nesting for nesting in in_mode(nestings, mode) if nesting in expected or not _rules_out(run, nesting))


def _rules_out(run: Run, nesting: Nesting) -> bool:
    """True if the nesting cannot work; a refused style and an unfit layer are recorded as rejected, without running."""
    excluded = run.exclusions[nesting.mode]
    shown = next(filter(excluded.rejects, nesting.layers), None)
    if shown is not None and not excluded.closed and nesting not in run.outcomes:
        unfit = any(layer in excluded.unfit for layer in nesting.layers)
        words = left_out.not_run(shown, left_out=shown in excluded.unfit)
        run.outcomes[nesting] = Outcome(nesting, "rejected", reason=words, unfit=unfit)
        run.publish(NestingRuledOut(run.outcomes[nesting]))
    return excluded.closed or not all(map(excluded.allows, nesting.layers))
