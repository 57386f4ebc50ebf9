"""The sweep: the nestings that always run first, their order, and the end where the message already has its nesting."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from pytest_nnxcheck.core.catalogue import JIT
from pytest_nnxcheck.core.errors import CheckError, InvariantViolation
from pytest_nnxcheck.core.nesting import Layer, Nesting, in_mode
from pytest_nnxcheck.core.notes import Fact, StateAdded
from pytest_nnxcheck.core.outcome import NestingRuledOut, Outcome
from pytest_nnxcheck.core.settings import Settings
from pytest_nnxcheck.reporting import left_out
from pytest_nnxcheck.runner import chains, strategies
from pytest_nnxcheck.runner.errors import passes_through, plainest
from pytest_nnxcheck.runner.execution import Body
from pytest_nnxcheck.runner.run import Run

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
    candidates = sorted({*chains.parts(nesting), *pairs}, key=lambda candidate: candidate.plainness)
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
