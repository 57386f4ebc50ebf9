"""One run of a marked test, or of a `check`: its nestings one after the other, the memo of verdicts, what was excluded and why."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import hypothesis

from pytest_nnxcheck.compat import compile_cache
from pytest_nnxcheck.core.catalogue import MODES, TARGETED, rows_of
from pytest_nnxcheck.core.errors import CheckError, InvariantViolation
from pytest_nnxcheck.core.nesting import Nesting
from pytest_nnxcheck.core.notes import Fact, Note
from pytest_nnxcheck.core.outcome import (
    NO_FACTS,
    BodyFinished,
    Listener,
    NestingFinished,
    NestingRuledOut,
    NestingStarted,
    Outcome,
    nobody,
)
from pytest_nnxcheck.core.settings import Settings
from pytest_nnxcheck.core.text import counted, some
from pytest_nnxcheck.engine.memo import Memo
from pytest_nnxcheck.reporting import memory_breakdown, notes, report, tally
from pytest_nnxcheck.runner import exclusions, neighbours, strategies, sweep
from pytest_nnxcheck.runner.errors import add_notes, drop_own_notes, passes_through, plainest
from pytest_nnxcheck.runner.execution import Body, Executed, Executor
from pytest_nnxcheck.runner.footprint import OF_PROCESS, held_back
from pytest_nnxcheck.runner.sweep import Sweep

if TYPE_CHECKING:
    from pytest_nnxcheck.paste.files import Programs


class Run:
    """Everything that one marked test, or one `check`, learns while its nestings run.

    ``remember`` is off for tests with their own ``@given``: there a nesting is not the whole example. ``sweeping`` says that the explicit
    examples run, ``repeats`` that the drawn nestings are the same ones in every run; ``compiles`` is the folder that keeps compiled programs.
    """

    def __init__(
        self,
        settings: Settings,
        *,
        test_id: str = "",
        argument: str = "",
        options: str = "",
        remember: bool = True,
        programs: Programs | None = None,
        compiles: Path | None = None,
    ) -> None:
        self.settings = settings
        self.memo = Memo(
            shared_programs=compile_cache.SharedPrograms(on=settings.shortcuts == "on"), same_arguments=remember
        )
        self.executor = Executor(self.memo, programs, self.publish, compiles)
        OF_PROCESS.begin()
        self.programs = programs
        self.facts = NO_FACTS
        self.outcomes: dict[Nesting, Outcome] = {}
        self.exclusions = dict.fromkeys(MODES, strategies.Exclusions())
        self.notes: list[Note] = []
        self.refusals: dict[str, Outcome] = {}
        self.not_run = 0
        self.silent: list[Nesting] = []
        self.called = 0
        self.problem = ""
        self.listeners: list[Listener] = [] if programs is None else [programs.listen]
        self.sweeping = False
        self.repeats = False
        self._identity = (test_id, argument, options)
        self.remembers = remember
        self._memo: dict[Nesting, tuple[BaseException, TracebackType | None] | None] = {}
        self._raised: dict[int, Nesting] = {}
        self._bodies: dict[Nesting, Body] = {}

    def report(self) -> report.Report:
        """What is known so far, as data."""
        test_id, argument, options = self._identity
        outcomes = tuple(self.outcomes.values())
        known = notes.texts((*self.notes, *self._without_target(), *self.facts.notes))
        texts = {} if self.programs is None else self.programs.texts
        calls = self.facts.un_nested
        return report.Report(
            outcomes,
            self.settings,
            (*known, *report.refused(self.refusals), *report.left_out(outcomes)),
            test_id,
            argument,
            options,
            texts,
            self.not_run,
            advice=tuple(dict.fromkeys(memory_breakdown.advice(piece) for call in calls for piece in call.advice)),
            un_nested=tuple(row for call in calls for row in memory_breakdown.of_un_nested(call.name, call.evidence)),
        )

    def _without_target(self) -> tuple[Note, ...]:
        """A note where nothing failed, and no program was compiled for a target: why."""
        words, outcomes = self.settings.target, self.outcomes.values()
        failed = any(outcome.verdict in ("violated", "failed") for outcome in outcomes)
        compiled = any(outcome.evidence and outcome.evidence.targets for outcome in outcomes)
        if not words or not outcomes or failed or compiled:
            return ()
        asserted = TARGETED & {*self.settings.invariants}
        why = "no nesting with a jit outside was run" if asserted else "neither memory nor donation is asserted"
        return (Fact("nothing on target", words, why),)

    def _unasserted(self) -> str:
        """What is wrong where no invariant could have been broken: only compiled programs break them, and there is none, or nothing is donated; empty if nothing is."""
        rows = rows_of(self.settings.invariants)
        programs = [each.evidence.split for each in self.outcomes.values() if each.evidence and each.evidence.split]
        nothing_reused = bool(programs) and not any(program.aliased for program in programs)
        if all(row.name == "donation" for row in rows) and (self.settings.donate == "none" or nothing_reused):
            return (
                f"{report.NOTHING}: donation is asserted of what the outermost jit donates, and no program reused a buffer"
                f" (donate is {self.settings.donate}): donate what the call changes, or add tracers to the invariants"
            )
        if not all(row.compiled for row in rows):
            return ""
        judged = (outcome.nesting.layers for outcome in self.outcomes.values() if outcome.verdict != "rejected")
        if any(layers and layers[0].row.compiles for layers in judged):
            return ""
        names = " and ".join(row.name for row in rows)
        return (
            f"{report.NOTHING}: {names} can be asserted of compiled programs alone, and no nesting has a jit outside: add jit to the"
            " transforms, or tracers to the invariants"
        )

    def forget(self) -> None:
        """Drop the memo, whose exceptions hold frames and those tracers, and what jax keeps of the run if that is much."""
        self._memo.clear()
        self._raised.clear()
        self._bodies.clear()
        self.memo.shared_programs.known.clear()
        OF_PROCESS.end()

    def nesting_of(self, error: BaseException) -> Nesting:
        """The nesting under which an exception was raised; un-nested if it is none of ours."""
        return self._raised.get(id(error), Nesting())

    def execute(self, nesting: Nesting, body: Body) -> None:
        """Run the body under the nesting, or answer from the memo. Raises what the body raised, a rejection aside."""
        __tracebackhide__ = True
        if not self.remembers or nesting not in self._memo:
            error = self._timed(nesting, body)
            if error is not None and not self._raised_before(error, nesting):
                self._raised[id(error)] = nesting
            self._memo[nesting] = None if error is None else (error, error.__traceback__)
            if error is not None:
                self._bodies[nesting] = body
        answer = self._memo[nesting]
        if answer is not None:
            # Each raise prepends frames: from a fresh start, hypothesis sees the same error every time.
            raise answer[0].with_traceback(answer[1])

    def _raised_before(self, error: BaseException, nesting: Nesting) -> bool:
        """Whether a plainer nesting raised the same object, as jax does with some: it is the one to name."""
        earlier = self._raised.get(id(error), nesting)
        kept = self._memo.get(earlier)
        return kept is not None and kept[0] is error and earlier.plainness < nesting.plainness

    def explain(self, nesting: Nesting) -> None:
        """Add to the outcome of a nesting that did not hold what holds around it; a replay runs no other."""
        body, outcome = self._bodies.get(nesting), self.outcomes.get(nesting)
        if body is None or outcome is None:
            return
        ours = isinstance((self._memo.get(nesting) or (None,))[0], CheckError)
        if not nesting.layers and outcome.verdict == "failed" and not ours:
            rows = neighbours.unlike_own(lambda handed: self.executor.unchecked(body, nesting.mode, handed))
            self.outcomes[nesting] = replace(outcome, explained=(*outcome.explained, *rows))
        if not nesting.layers or self.settings.nesting is not None:
            return
        on_targets = outcome.evidence is not None and outcome.evidence.targets
        # By default targets compile the plain jit alone: a way out must have been compiled for them too.
        settings = replace(self.settings, effort="thorough") if on_targets else self.settings
        around = neighbours.look_around(
            outcome,
            settings,
            self.exclusions[nesting.mode],
            lambda near, settings: self._try_out(near, settings, body),
        )
        self.outcomes[nesting] = neighbours.explain(outcome, around)

    def _try_out(self, nesting: Nesting, settings: Settings, body: Body) -> Outcome | None:
        """The outcome of a neighbour, run if it must be, and recorded nowhere; `None` where the test body itself did not come so far."""
        if settings == self.settings and nesting in self.outcomes:
            return self.outcomes[nesting]
        executor = self.executor
        if settings != self.settings:
            # It is the nesting that broke: its program stays as it is.
            executor = replace(executor, programs=None, publish=nobody)
        try:
            executed = executor.execute(nesting, body, settings)
        finally:
            executor.publish(BodyFinished({}))
        self.facts += executed.facts
        if executed.error is not None and not isinstance(executed.error, Exception):
            raise executed.error
        return executed.outcomes.get(nesting)

    def publish(self, event: object) -> None:
        """Tell the listeners of what is under way; what the memo answers is not."""
        for listener in self.listeners:
            listener(event)

    def _timed(self, nesting: Nesting, body: Body) -> BaseException | None:
        """Run the body under the nesting, and record what came of it. Raises what steers the test."""
        drawn = not self.sweeping
        self.publish(NestingStarted(nesting, drawn))
        started = time.perf_counter()
        try:
            with held_back():
                executed = self.executor.execute(nesting, body, self.settings)
                self._record(nesting, executed)
        finally:
            self.publish(BodyFinished(dict(self.outcomes)))
            seconds, outcome = time.perf_counter() - started, self.outcomes.get(nesting)
            if outcome is not None:
                outcome = self.outcomes[nesting] = replace(outcome, seconds=outcome.seconds + seconds)
            whole, repeats = not drawn or self.remembers, not drawn or self.repeats
            self.publish(NestingFinished(nesting, outcome, seconds, drawn, whole, repeats))
        if executed.error is not None and passes_through(executed.error):
            raise executed.error.with_traceback(executed.error.__traceback__)
        return executed.error

    def _record(self, nesting: Nesting, executed: Executed) -> None:
        """Keep what an execution came to; an exception of the user's gets a note that names its nesting."""
        self.facts += executed.facts
        for outcome in executed.outcomes.values():
            tally.record(self.outcomes, outcome)
        error = executed.error
        # With arguments of the user's own, a body may have no use for some of them.
        if error is None and executed.called is not None and self.remembers:
            if not nesting.layers:
                self.called = max(self.called, executed.called)
            if executed.called < max(self.called, 1):
                self.silent.append(nesting)
        if error is None or passes_through(error) or isinstance(error, InvariantViolation | CheckError):
            return
        if self._raised_before(error, nesting):
            return
        drop_own_notes(error)
        add_notes(error, [report.failed_note(self.report(), self.outcomes[nesting], own=executed.own)])

    def example(self, case: Nesting | Sweep, body: Body) -> None:
        """Run one example of hypothesis: a drawn nesting, or the sweep."""
        __tracebackhide__ = True
        if self.problem:
            return
        if isinstance(case, Sweep):
            self._sweep(case, body)
            return
        self.execute(case, body)
        outcome = self.outcomes.get(case, Outcome(case, "held"))
        if outcome.verdict == "rejected":
            hypothesis.event(tally.word(outcome))

    def _sweep(self, case: Sweep, body: Body) -> None:
        __tracebackhide__ = True
        self.sweeping = True
        try:
            errors = [error for error in sweep.errors(self, case, body) if error is not None]
        finally:
            self.sweeping = False
        if self.remembers:
            # With the user's own arguments, what held was held for one value of them only.
            for mode in case.modes:
                self._exclude(mode, swept=strategies.swept_layers(self.settings))
        if errors:
            error = plainest(errors, self.nesting_of)
            raise error.with_traceback(error.__traceback__)

    def stop(self, case: Sweep, mode: str) -> None:
        """Leave out the rest of a sweep: it would not change the message. Draws never follow a sweep that broke."""
        self.not_run += sum(nesting not in self.outcomes for nesting in case.nestings(mode, self.exclusions[mode]))

    def try_un_nested(self, mode: str, body: Body) -> BaseException | None:
        """Run the un-nested call in a mode of flax; what it raised."""
        __tracebackhide__ = True
        error = self._error(Nesting(mode=mode), body)
        if error is None and not self.outcomes:
            self.problem = f"{report.NOTHING}: the test never called an object that nnx_wrap returned"
        if self.facts.added and not self.exclusions[mode].adds_state:
            self._exclude(mode, adds_state=True)
            note = exclusions.stuck(self.facts.added, self.settings)
            self.notes += [note] if note and note not in self.notes else []
        self._learn_from(Nesting(mode=mode))
        return error

    def try_nesting(self, nesting: Nesting, body: Body) -> BaseException | None:
        """Run a nesting of the sweep, and learn from it which layers fit; what it raised."""
        __tracebackhide__ = True
        error = self._error(nesting, body)
        self._learn_from(nesting)
        return error

    def _exclude(self, mode: str, **excluded: Any) -> None:
        self.exclusions[mode] = replace(self.exclusions[mode], **excluded)

    def _error(self, nesting: Nesting, body: Body) -> BaseException | None:
        try:
            self.execute(nesting, body)
        except CheckError:
            raise
        except BaseException as error:
            if passes_through(error):
                raise
            return error
        return None

    def _learn_from(self, nesting: Nesting) -> None:
        """Leave out, from here on, what this nesting has shown to be refused or unfit."""
        outcome = self.outcomes.get(nesting)
        if outcome is None:
            return
        before = self.exclusions[nesting.mode]
        now = exclusions.after(outcome, before, self.settings)
        self.exclusions[nesting.mode] = now
        self.refusals.update(dict.fromkeys(now.refused - before.refused, outcome))
        if now.closed and not before.closed:
            self.notes.append(Fact("mode closed", (nesting.mode,), f"{nesting}: {outcome.reason}"))

    def rules_out(self, nesting: Nesting) -> bool:
        """Whether the nesting cannot work; a refused style and an unfit layer are answered as rejected, without running."""
        excluded = self.exclusions[nesting.mode]
        shown = next(filter(excluded.rejects, nesting.layers), None)
        if shown is not None and not excluded.closed and nesting not in self.outcomes:
            unfit = any(layer in excluded.unfit for layer in nesting.layers)
            words = report.not_run(shown, left_out=shown in excluded.unfit)
            outcome = Outcome(nesting, "rejected", reason=words, unfit=unfit, excluded=True)
            self.outcomes[nesting] = outcome
            self.publish(NestingRuledOut(outcome))
        return excluded.closed or not all(excluded.allows(layer) for layer in nesting.layers)

    def finish(self) -> str:
        """What is wrong with a run in which nothing failed; empty if nothing is."""
        if self.problem:
            return self.problem
        if not self.outcomes:
            return f"{report.NOTHING}: the test never called an object that nnx_wrap returned"
        if self.silent:
            every = counted(len({*self.silent, *self.outcomes}), "nesting")
            missed = "no call" if self.called < 2 else f"no call of some of the {self.called} objects that it wraps"
            return (
                f"nnx test made {missed} under {len(self.silent)} of {every}, {some(map(str, self.silent))}: call the object that"
                " nnx_wrap returned in every run of the body, and keep no result of it in a global, a cache or a fixture"
            )
        if unasserted := self._unasserted():
            return unasserted
        if tally.nothing_checked(self.outcomes.values()) and not report.rejected_modes(self.report()):
            first = next(outcome for outcome in self.outcomes.values() if outcome.verdict == "rejected")
            if first.unfit:
                return f"{report.NOTHING}: no nesting can be run ({first.reason}): mend that, or name other transforms, or replay another nesting"
            styles = "add 'argument' or 'functional' to the styles, or replay another nesting"
            return f"{report.NOTHING}: every nesting was rejected ({first.reason}), {styles}"
        return ""
