"""One execution of a test body under one nesting: wrapped objects hand it their calls, and it keeps their outcomes.

Before it the exceptions of nestings: the ones that steer the test, the one that is shown, and our notes on them. `Executor.execute` runs a body,
again where a shortcut was too short, and `running_for` finds the execution that a call of a wrapped object belongs to.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import os
import sys
import threading
import unittest
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hypothesis

from pytest_nnxcheck.compat import compile_cache, flax_modes, refusals, staging
from pytest_nnxcheck.core import expected_failures
from pytest_nnxcheck.core.errors import CheckError, InvariantViolation, NestingExcused, NestingRejected, error_for
from pytest_nnxcheck.core.nesting import Nesting
from pytest_nnxcheck.core.outcome import NO_FACTS, BodyStarted, CallFacts, Listener, Outcome, Verdict, nobody
from pytest_nnxcheck.core.settings import DEFAULTS, Settings
from pytest_nnxcheck.core.text import first_line
from pytest_nnxcheck.engine.example import Example, Handed, Memo, call_unchecked
from pytest_nnxcheck.reporting import report, violations
from pytest_nnxcheck.subject.caches import MakeCold, RunFromCold
from pytest_nnxcheck.values import uncomputed

if TYPE_CHECKING:
    from pytest_nnxcheck.checks.check_call import Checked
    from pytest_nnxcheck.paste.program import Programs


def flatten(error: BaseException) -> Iterator[BaseException]:
    """The members of a group, and of the groups in it."""
    if isinstance(error, BaseExceptionGroup):
        for member in error.exceptions:
            yield from flatten(member)
    else:
        yield error


class OwnNote(str):
    """A note of ours; the type distinguishes it from notes of the user and of hypothesis."""

    __slots__ = ()


def add_notes(error: BaseException, texts: Iterable[str]) -> None:
    """Add the notes that are not empty to an exception."""
    for text in filter(None, texts):
        error.add_note(OwnNote(text))


def drop_notes(error: BaseException, unwanted: Callable[[str], bool]) -> None:
    """Take notes off an exception."""
    notes = getattr(error, "__notes__", None)
    if isinstance(notes, list):
        notes[:] = [note for note in notes if not unwanted(note)]


def drop_own_notes(error: BaseException) -> None:
    """Take our notes off an exception: jax raises the same object again, in other tests too."""
    drop_notes(error, lambda note: type(note) is OwnNote)


def plainest(errors: list[BaseException], nesting_of: Callable[[BaseException], Nesting]) -> BaseException:
    """The error to show: a violation first, of the most serious invariant, then the error of the smallest nesting."""

    def key(error: BaseException) -> tuple[bool, object]:
        if isinstance(error, InvariantViolation):
            return (False, error.outcome.rank)
        return (True, nesting_of(error).plainness)

    return min(errors, key=key)


def passes_through(error: BaseException) -> bool:
    """True if the exception steers the test instead of failing it: Ctrl-C, `pytest.exit`, skip, xfail, hypothesis' own."""
    if isinstance(error, unittest.SkipTest | hypothesis.errors.UnsatisfiedAssumption):
        return True
    pytest = sys.modules.get("pytest")
    if pytest is not None and isinstance(error, pytest.xfail.Exception | pytest.exit.Exception):
        return True
    if pytest is not None and isinstance(error, pytest.fail.Exception):
        return False
    return not isinstance(error, Exception)


Body = Callable[[], object]


def here() -> tuple[int, int]:
    """The process and the thread of the caller."""
    return os.getpid(), threading.get_ident()


@dataclass(slots=True, eq=False)
class Execution:
    """One execution of a test body under one nesting: wrapped objects report their calls to it."""

    executor: Executor
    example: Example
    nesting: Nesting
    settings: Settings = DEFAULTS
    handed: Handed | None = None
    """The kind of arguments that a wrapped object hands to its subject, where nothing is checked; `None` where each call is checked."""
    home: tuple[int, int] = field(default_factory=here)
    """The process and the thread of the body: wrapped objects that are called elsewhere have no place in it."""
    calling: bool = False
    """A call of a wrapped object is under way."""

    facts: CallFacts = NO_FACTS
    outcomes: dict[Nesting, Outcome] = field(default_factory=dict)
    """The outcomes of its calls, nearly always of its own nesting."""
    called: dict[int, object] = field(default_factory=dict)
    """The objects that the body called, by their ids."""
    violation: InvariantViolation | None = None
    """The violation that a call raised last; the body may swallow it."""
    error: BaseException | None = None
    """The user's exception that a call raised last; the body may swallow it."""
    misuse: CheckError | None = None
    """A call of a wrapped object that could not be made at all."""

    ended: bool = False
    """The body ran to its end."""
    raised: BaseException | None = None
    """The exception that fails or steers the test; none for a nesting that was rejected, or fails as expected."""
    own: bool = False
    """The body itself raised it, not a call."""

    def call(self, subject: Any, args: tuple[Any, ...], kwargs: dict[str, Any], owner: str = "") -> Any:
        """Call the subject under the nesting; ``owner`` names the object that it is a method of.

        Raises a violation, a rejection, or the user's own exception.
        """
        __tracebackhide__ = True
        if self.handed is not None:
            return call_unchecked(subject, args, kwargs, owner, self.handed, self.example)
        # A bound method and a function of the body are made anew each time.
        held = subject.__self__ if inspect.ismethod(subject) else getattr(subject, "__code__", subject)
        self.called[id(held)] = held
        if staging.jits_are_off():
            raise CheckError(
                "jax_disable_jit is on, and nothing can be checked without a jit: take it off for this test"
            )
        self.calling = True
        try:
            with self.executor.watch.paused(), staging.without_leak_check():
                checked = engine().check_call(
                    subject,
                    args,
                    kwargs,
                    nesting=self.nesting,
                    settings=self.settings,
                    example=self.example,
                    publish=self.executor.publish,
                    owner=owner,
                )
        finally:
            self.calling = False
        self.facts += checked.facts
        self.settle(replace(checked, outcome=violations.worded(checked.outcome)))
        return checked.output

    def settle(self, checked: Checked) -> None:
        """Record the outcome of a call. Raises a violation, a rejection, or the user's own exception."""
        __tracebackhide__ = True
        outcome = checked.outcome
        strict = self.settings.on_rejection == "fail" and not outcome.unfit
        entries = self.settings.expected_failures
        # A rejection fails nothing, but an expected failure that names this very nesting has come true.
        named = strict or any(entry.nesting() == self.nesting for entry in entries)
        if outcome.verdict == "violated" or (outcome.verdict == "rejected" and named):
            outcome = expected_failures.excuse(outcome, entries)
        if outcome.verdict == "expected" and checked.error is not None and not self.nesting.layers:
            # A call that raises un-nested is the user's own error, whatever it leaves behind.
            outcome = replace(
                outcome,
                nesting=self.nesting,
                verdict="failed",
                reason=first_line(checked.error),
                error=type(checked.error).__name__,
            )
        outcome = self.executor.with_program(outcome)
        report.keep_worst(self.outcomes, outcome)
        leaks = any(violation.invariant == "tracers" for violation in checked.outcome.violations)
        if outcome.verdict == "expected" and (
            checked.error is not None or leaks or checked.outcome.verdict == "rejected"
        ):
            raise NestingExcused  # the call left no output that the body can go on with
        if outcome.verdict == "failed" and checked.error is not None:
            self.error = checked.error
            raise checked.error.with_traceback(checked.error.__traceback__)
        if outcome.verdict == "violated":
            self.violation = error_for(outcome, report.headline(outcome))
            raise self.violation from checked.error
        if outcome.verdict == "rejected":
            raise self._rejection(outcome)

    def _rejection(self, outcome: Outcome) -> BaseException:
        """The exception for a nesting that was rejected; a violation where the settings ask for it."""
        if outcome.unfit or self.settings.on_rejection == "report":
            return NestingRejected(outcome)
        self.violation = InvariantViolation(report.headline(outcome), outcome)
        return self.violation

    def end(self) -> None:
        """The body raised nothing; it may have swallowed an exception of a call."""
        self.ended = True
        if self.error is not None:
            # The body expected the exception: under this nesting as without any, it is what the test asks for.
            outcome = self.outcomes[self.nesting]
            verdict: Verdict = "expected" if outcome.expected else "held"
            self.outcomes[self.nesting] = replace(outcome, verdict=verdict, reason="", error="", notes=(), program="")
        # A body may swallow a violation too, in its own ``pytest.raises(Exception)`` say: that stays.
        self.raised = self.violation

    def end_with(self, error: BaseException) -> None:
        """The body raised an exception."""
        if passes_through(error):
            self.raised = error
        elif refusals.is_mode_refusal(error, self.nesting.mode):
            self._refuse(error)
        elif isinstance(error, InvariantViolation | CheckError):
            self.raised, self.own = error, error is not self.error
        else:
            self._fail(error)

    def _refuse(self, error: BaseException) -> None:
        """The body itself, not a call, did what the mode of flax cannot do: build a module with `nnx.StateAxes`, say."""
        outcome = Outcome(self.nesting, "rejected", reason=refusals.mode_words(error), by_mode=True)
        if self.settings.on_rejection == "fail":
            outcome = expected_failures.excuse(outcome, self.settings.expected_failures)
        report.keep_worst(self.outcomes, outcome)
        if outcome.verdict == "rejected" and not isinstance(rejection := self._rejection(outcome), NestingRejected):
            self.raised = rejection

    def _fail(self, error: BaseException) -> None:
        """An exception of the user's fails the nesting, unless it was expected, wherever in the body it was raised."""
        held = self.outcomes.get(self.nesting, Outcome(self.nesting, "held"))
        reason, name = first_line(error), type(error).__name__
        failed = replace(held, verdict="failed", violations=(), reason=reason, error=name)
        excused = expected_failures.excuse(failed, self.settings.expected_failures)
        if excused.verdict == "expected":
            self.outcomes[self.nesting] = excused
            return
        outcome = Outcome(
            self.nesting,
            "failed",
            reason=reason,
            error=name,
            peak=held.peak,
            budget=held.budget,
            program=held.program,
        )
        report.keep_worst(self.outcomes, self.executor.with_program(outcome))
        self.raised, self.own = error, error is not self.error


_RUNNING: list[Execution] = []
"""The executions that are going on in all threads, the innermost last."""


@contextlib.contextmanager
def _running(execution: Execution) -> Iterator[None]:
    _RUNNING.append(execution)
    try:
        yield
    finally:
        _RUNNING.remove(execution)


@dataclass(slots=True)
class Executor:
    """Executes a test body under a nesting, and records nothing: the caller records the outcomes."""

    memo: Memo
    programs: Programs | None = None
    """Writes the program that shows an outcome."""
    publish: Listener = nobody
    """Hears what is under way."""
    compiles: Path | None = None
    """The folder that keeps compiled programs."""
    watch: uncomputed.Watch = field(default_factory=uncomputed.Watch)
    values_needed: bool = False
    """The body reads values of nestings that could be traced without running them."""
    cold: dict[str, MakeCold] = field(default_factory=dict)
    """The caches that the body fills, by their names: each execution starts with them as in a fresh process."""

    def execute(self, nesting: Nesting, body: Body, settings: Settings) -> Execution:
        """Run the body once; again where it reads values that nobody computed, or fills caches. Raises no exception of the body."""
        while True:
            with contextlib.ExitStack() as cold:
                for make_cold in self.cold.values():
                    cold.callback(make_cold())
                try:
                    return self._with_values(nesting, body, settings)
                except RunFromCold as again:
                    self.cold = {name: each for name, each in self.cold.items() if name not in again.warm}
                    self.cold.update(again.cold)

    def _with_values(self, nesting: Nesting, body: Body, settings: Settings) -> Execution:
        try:
            return self._watched(nesting, body, settings)
        except uncomputed.ValuesNeeded as need:
            of_body = need.of_body
        # Outside of the handler, or what the body raises now would show that exception as its context.
        self.values_needed = True
        try:
            return self._once(nesting, body, settings)
        finally:
            self.values_needed = of_body

    def unchecked(self, body: Body, mode: str, handed: Handed) -> BaseException | None:
        """Run the body once with nothing checked. Returns the exception that it raised."""
        with Example(self.memo) as example, _running(Execution(self, example, Nesting(mode=mode), handed=handed)):
            try:
                with flax_modes.flax_mode(mode):
                    body()
            except (KeyboardInterrupt, SystemExit):
                raise
            except BaseException as error:  # noqa: BLE001 - the user's code may raise anything
                return error
        return None

    def with_program(self, outcome: Outcome) -> Outcome:
        """The outcome with the program that shows it, if there is one."""
        return outcome if self.programs is None else self.programs.with_program(outcome)

    def _watched(self, nesting: Nesting, body: Body, settings: Settings) -> Execution:
        # A jit outside runs, but for programs that an earlier run knows.
        runs = bool(nesting.layers) and nesting.layers[0].row.compiles and self.compiles is None
        if self.values_needed or runs or settings.shortcuts == "off":
            return self._once(nesting, body, settings)
        with self.watch:
            self.values_needed = not self.watch.can_see
            return self._once(nesting, body, settings)

    def _once(self, nesting: Nesting, body: Body, settings: Settings) -> Execution:
        self.memo.run_of(body)
        example = Example(self.memo, self.values_needed, again=True)
        execution = Execution(self, example, nesting, settings)
        self.publish(BodyStarted(body))
        with _running(execution), example:
            self._run(execution, body)
        if execution.misuse is not None and not (execution.raised and passes_through(execution.raised)):
            # A thread keeps its exception to itself, and a body may swallow one.
            execution.raised = execution.misuse
        execution.facts += CallFacts(example.unrestored)
        return execution

    def _run(self, execution: Execution, body: Body) -> None:
        example = execution.example
        try:
            with flax_modes.flax_mode(execution.nesting.mode), compile_cache.compile_folder(self.compiles):
                body()
            self._require_values(example, None)
        except (NestingRejected, NestingExcused):
            return
        except (uncomputed.ValuesNeeded, RunFromCold):
            raise
        except BaseException as error:  # noqa: BLE001 - the user's code may raise anything
            self._require_values(example, error)
            execution.end_with(error)
        else:
            execution.end()

    def _require_values(self, example: Example, error: BaseException | None) -> None:
        """Raise `ValuesNeeded` if the body read a stand-in for a value, or got a stand-in and raised an exception of its own."""
        if example.values_needed or not example.stand_ins or isinstance(error, InvariantViolation):
            return
        if self.watch.saw or (error is not None and isinstance(error, Exception)):
            raise uncomputed.ValuesNeeded(of_body=True)


def running_for(name: str) -> Execution:
    """The execution that a call of a wrapped object belongs to. Raises `CheckError` for a call that belongs to none.

    Where an execution is going on elsewhere, the call fails it, even if the exception is swallowed.
    """
    __tracebackhide__ = True
    own = [execution for execution in _RUNNING if execution.home == here()]
    if own and not own[-1].calling:
        return own[-1]
    if not _RUNNING:
        raise CheckError(f"{name} was called {_outside_of_a_body()}")
    execution = own[-1] if own else _RUNNING[-1]
    if own:
        text = "inside the call of another wrapped object: let that one call the module itself, or wrap this one alone"
    elif execution.home[0] == os.getpid():
        text = "in another thread than the body of its test: call it in the body itself, and let the thread use what it returned"
    else:
        text = "in another process than the body of its test: call it in the body itself"
    execution.misuse = CheckError(f"{name} was called {text}")
    raise execution.misuse


def _outside_of_a_body() -> str:
    """The place of a call outside of any execution; pytest says in the environment which part of a test it runs."""
    phase = os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" ")[2]
    if phase == "(setup)":
        return "in a fixture or a setup method, which runs once and under no nesting: call it in the body of the test"
    if phase == "(teardown)":
        return "after the body of its test had ended, where nothing is checked: call it in the body"
    return "outside of a test with @pytest.mark.nnx_invariants: mark the test, or use pytest_nnxcheck.check(subject, *args)"


def engine() -> Any:
    """The module that runs one call. Imported at each call: tests put another in its place."""
    return importlib.import_module("pytest_nnxcheck.checks.check_call")
