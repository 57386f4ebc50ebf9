"""One execution of a test body under one nesting: wrapped objects report their calls to it, and it raises what they come to."""

from __future__ import annotations

import importlib
import inspect
import os
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pytest_nnxcheck.compat import compile_cache, flax_modes, refusals
from pytest_nnxcheck.core import expected_failures
from pytest_nnxcheck.core.errors import CheckError, InvariantViolation, NestingExcused, NestingRejected, error_for
from pytest_nnxcheck.core.nesting import Nesting
from pytest_nnxcheck.core.outcome import NO_FACTS, BodyStarted, CallFacts, Listener, Outcome, Verdict, nobody
from pytest_nnxcheck.core.settings import Settings
from pytest_nnxcheck.core.text import first_line
from pytest_nnxcheck.engine.example import Example, Handed, call_unchecked
from pytest_nnxcheck.reporting import report, tally, wording
from pytest_nnxcheck.runner.errors import passes_through
from pytest_nnxcheck.subject import uncomputed

if TYPE_CHECKING:
    from pytest_nnxcheck.engine.memo import Memo
    from pytest_nnxcheck.engine.outcomes import Checked
    from pytest_nnxcheck.reproducer.files import Programs

Body = Callable[[], object]


@dataclass(frozen=True, slots=True)
class Executed:
    """What one execution came to. Nothing of it is recorded yet.

    ``outcomes`` are those of the calls that it made, nearly always of its own nesting. ``error`` is what it raised, or what steers the test;
    ``own`` says that the body itself raised it, not a call. ``facts`` is what is known of its calls, ``called`` how many objects they were of in
    a body that came to its end.
    """

    outcomes: Mapping[Nesting, Outcome]
    error: BaseException | None = None
    own: bool = False
    facts: CallFacts = NO_FACTS
    called: int | None = None


def here() -> tuple[int, int]:
    """The process and the thread of the caller."""
    return os.getpid(), threading.get_ident()


@dataclass(slots=True, eq=False, kw_only=True)
class Running:
    """An execution of a test body that is going on."""

    home: tuple[int, int] = field(default_factory=here)
    """The process and the thread of the body: wrapped objects that are called elsewhere have no place in it."""
    calling: bool = False
    """Whether a call of a wrapped object is under way."""
    misuse: CheckError | None = None
    """A call of a wrapped object that could not be made at all."""


@dataclass(slots=True, eq=False)
class Execution(Running):
    """One execution of a test body under one nesting; wrapped objects report to it.

    ``violation`` and ``error`` are what a call raised last: the body may swallow either. ``called`` are the objects that it called, by their ids.
    """

    executor: Executor
    example: Example
    nesting: Nesting
    settings: Settings
    facts: CallFacts = NO_FACTS
    outcomes: dict[Nesting, Outcome] = field(default_factory=dict)
    violation: InvariantViolation | None = None
    error: BaseException | None = None
    called: dict[int, object] = field(default_factory=dict)

    def call(self, subject: Any, args: tuple[Any, ...], kwargs: dict[str, Any], owner: str = "") -> Any:
        """Call the subject under the nesting; ``owner`` names the object that it is a method of.

        Raises a violation, a rejection, or the user's own exception.
        """
        __tracebackhide__ = True
        # A bound method and a function of the body are made anew each time.
        held = subject.__self__ if inspect.ismethod(subject) else getattr(subject, "__code__", subject)
        self.called[id(held)] = held
        self.calling = True
        try:
            with self.executor.watch.paused():
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
        self.settle(replace(checked, outcome=wording.worded(checked.outcome)))
        return checked.output

    def settle(self, checked: Checked) -> None:
        """Record what a call came to, and raise what it has to."""
        __tracebackhide__ = True
        outcome = checked.outcome
        strict = self.settings.on_rejection == "fail" and not outcome.unfit
        entries = self.settings.expected_failures
        # A rejection fails nothing, but what names this very nesting has come true.
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
        tally.record(self.outcomes, outcome)
        if outcome.verdict == "expected" and _without_output(checked):
            raise NestingExcused
        if outcome.verdict == "failed" and checked.error is not None:
            self.error = checked.error
            raise checked.error.with_traceback(checked.error.__traceback__)
        if outcome.verdict == "violated":
            self.violation = error_for(outcome, report.headline(outcome))
            raise self.violation from checked.error
        if outcome.verdict == "rejected":
            raise self.rejection(outcome)

    def rejection(self, outcome: Outcome) -> BaseException:
        """The exception for a nesting that was rejected: a violation where the settings ask for it."""
        if outcome.unfit or self.settings.on_rejection == "report":
            return NestingRejected(outcome)
        self.violation = InvariantViolation(report.headline(outcome), outcome)
        return self.violation

    def refused(self, error: BaseException) -> Executed:
        """The end of a body that itself, not by the call, did what the mode cannot do: build a module with `nnx.StateAxes`, say."""
        outcome = Outcome(self.nesting, "rejected", reason=refusals.mode_words(error), by_mode=True)
        if self.settings.on_rejection == "fail":
            outcome = expected_failures.excuse(outcome, self.settings.expected_failures)
        tally.record(self.outcomes, outcome)
        rejection = self.rejection(outcome) if outcome.verdict == "rejected" else None
        return Executed(self.outcomes, None if isinstance(rejection, NestingRejected) else rejection)

    def excuses(self, error: BaseException) -> bool:
        """Whether an exception under the nesting was expected, wherever in the body it was raised; then it is recorded as that."""
        if isinstance(error, InvariantViolation | CheckError):
            return False
        held = self.outcomes.get(self.nesting, Outcome(self.nesting, "held"))
        failed = replace(held, verdict="failed", violations=(), reason=first_line(error), error=type(error).__name__)
        outcome = expected_failures.excuse(failed, self.settings.expected_failures)
        if outcome.verdict == "expected":
            self.outcomes[self.nesting] = outcome
        return outcome.verdict == "expected"

    def failed(self, error: BaseException) -> Executed:
        """The end of a body that raised."""
        if not isinstance(error, InvariantViolation | CheckError):
            held = self.outcomes.get(self.nesting, Outcome(self.nesting, "held"))
            outcome = Outcome(
                self.nesting,
                "failed",
                reason=first_line(error),
                error=type(error).__name__,
                peak=held.peak,
                budget=held.budget,
                program=held.program,
            )
            tally.record(self.outcomes, self.executor.with_program(outcome))
        return Executed(self.outcomes, error, own=error is not self.error)

    def ended(self) -> Executed:
        """The end of a body that raised nothing; it may have swallowed what a call raised."""
        if self.error is not None:
            # The body expected the exception: under this nesting as without any, it is what the test asks for.
            outcome = self.outcomes[self.nesting]
            verdict: Verdict = "expected" if outcome.expected else "held"
            self.outcomes[self.nesting] = replace(outcome, verdict=verdict, reason="", error="", notes=(), program="")
        # A body may swallow a violation too, in its own ``pytest.raises(Exception)`` say: that stays.
        return Executed(self.outcomes, self.violation, called=len(self.called))


@dataclass(slots=True, eq=False)
class Unchecked(Running):
    """An execution of a test body in which nothing is checked: wrapped objects call what they wrap, with what they are ``handed``."""

    example: Example
    handed: Handed

    def call(self, subject: Any, args: tuple[Any, ...], kwargs: dict[str, Any], owner: str = "") -> Any:
        """Call the subject. Raises what it raises."""
        __tracebackhide__ = True
        return call_unchecked(subject, args, kwargs, owner, self.handed, self.example)


_RUNNING: list[Execution | Unchecked] = []
"""The executions that are going on in all threads, the innermost last."""


@dataclass(slots=True)
class Executor:
    """Executes a test body under a nesting. What comes of it is handed back, and recorded by whom it concerns.

    ``programs`` writes the program that shows an outcome, ``publish`` hears what is under way; ``compiles`` is the folder that keeps
    compiled programs. ``values_needed`` says that the body reads the values of nestings that a trace could tell of.
    """

    memo: Memo
    programs: Programs | None = None
    publish: Listener = nobody
    compiles: Path | None = None
    watch: uncomputed.Watch = field(default_factory=uncomputed.Watch)
    values_needed: bool = False

    def execute(self, nesting: Nesting, body: Body, settings: Settings) -> Executed:
        """Run the body once; a second time where it reads values that nobody computed. Raises nothing that the body raised."""
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
        """Run the body once with nothing checked; what it raised."""
        with Example(self.memo) as example:
            execution = Unchecked(example, handed)
            _RUNNING.append(execution)
            try:
                with flax_modes.flax_mode(mode):
                    body()
            except (KeyboardInterrupt, SystemExit):
                raise
            except BaseException as error:  # noqa: BLE001 - the user's code may raise anything
                return error
            finally:
                _RUNNING.remove(execution)
        return None

    def with_program(self, outcome: Outcome) -> Outcome:
        """The outcome with the program that shows it, if there is one."""
        return outcome if self.programs is None else self.programs.with_program(outcome)

    def _watched(self, nesting: Nesting, body: Body, settings: Settings) -> Executed:
        jitted = bool(nesting.layers) and nesting.layers[0].row.compiles
        if self.values_needed or jitted or settings.shortcuts == "off":
            return self._once(nesting, body, settings)
        with self.watch:
            self.values_needed = not self.watch.can_see
            return self._once(nesting, body, settings)

    def _once(self, nesting: Nesting, body: Body, settings: Settings) -> Executed:
        self.memo.run_of(body)
        example = Example(self.memo, uncomputed.Values(self.values_needed))
        execution = Execution(self, example, nesting, settings)
        self.publish(BodyStarted(body))
        _RUNNING.append(execution)
        try:
            with example:
                executed = self._run(execution, body)
        finally:
            _RUNNING.remove(execution)
        if execution.misuse is not None and not (executed.error and passes_through(executed.error)):
            # A thread keeps its exception to itself, and a body may swallow one.
            executed = replace(executed, error=execution.misuse)
        return replace(executed, facts=execution.facts + CallFacts(example.unrestored))

    def _run(self, execution: Execution, body: Body) -> Executed:
        mode, values = execution.nesting.mode, execution.example.values
        try:
            with flax_modes.flax_mode(mode), compile_cache.compile_folder(self.compiles):
                body()
            self._require_values(values, None)
        except (NestingRejected, NestingExcused):
            return Executed(execution.outcomes)
        except BaseException as error:
            self._require_values(values, error)
            if isinstance(error, uncomputed.ValuesNeeded):
                raise
            if passes_through(error):
                return Executed(execution.outcomes, error)
            if refusals.is_mode_refusal(error, mode):
                return execution.refused(error)
            return Executed(execution.outcomes) if execution.excuses(error) else execution.failed(error)
        return execution.ended()

    def _require_values(self, values: uncomputed.Values, error: BaseException | None) -> None:
        """Raises `ValuesNeeded` where the body was handed stand-ins for values and read one, or raised anything of its own."""
        if values.needed or not values.stand_ins or isinstance(error, InvariantViolation | uncomputed.ValuesNeeded):
            return
        if self.watch.saw or (error is not None and isinstance(error, Exception)):
            raise uncomputed.ValuesNeeded(of_body=True)


def _without_output(checked: Checked) -> bool:
    """Whether a call that did not hold gave nothing to go on with."""
    leaks = any(violation.invariant == "tracers" for violation in checked.outcome.violations)
    return checked.error is not None or leaks or checked.outcome.verdict == "rejected"


def running_for(name: str) -> Execution | Unchecked:
    """The execution that a call of a wrapped object belongs to. Raises `CheckError` for a call that belongs to none.

    Where an execution is going on all the same, the call fails it, whatever becomes of the exception.
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
    """Where a call is made that no execution sees; pytest says which part of a test it runs."""
    phase = os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" ")[2]
    if phase == "(setup)":
        return "in a fixture or a setup method, which runs once and under no nesting: call it in the body of the test"
    if phase == "(teardown)":
        return "after the body of its test had ended, where nothing is checked: call it in the body"
    return "outside of a test with @pytest.mark.nnx_invariants: mark the test, or use pytest_nnxcheck.check(subject, *args)"


def engine() -> Any:
    """The module that runs one call, asked for late: tests have another in its place."""
    return importlib.import_module("pytest_nnxcheck.engine.check_call")
