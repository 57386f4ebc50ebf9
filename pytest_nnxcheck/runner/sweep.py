"""The sweep: what always runs first, in which order, and where it stops because what broke is what the message will name."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

from pytest_nnxcheck.core.catalogue import JIT, MODES
from pytest_nnxcheck.core.errors import InvariantViolation
from pytest_nnxcheck.core.nesting import Layer, Nesting, in_mode
from pytest_nnxcheck.core.outcome import Outcome
from pytest_nnxcheck.core.settings import Settings
from pytest_nnxcheck.runner import chains, strategies

Body = Callable[[], object]
Errors = Iterator[BaseException | None]


@dataclass(frozen=True, slots=True)
class Sweep:
    """An explicit example: in every mode the un-nested call, then the nestings of the settings, or those that are ``replayed``."""

    settings: Settings
    modes: tuple[str, ...] = MODES[:1]
    replayed: tuple[Nesting, ...] = ()

    def __repr__(self) -> str:
        return f"<the {'replay' if self.replayed else self.settings.sweep} sweep>"

    def _repr_pretty_(self, printer: Any, _cycle: object) -> None:
        """How hypothesis shows it in an example: field by field without this."""
        printer.text(repr(self))

    def nestings(self, mode: str, exclusions: strategies.Exclusions) -> tuple[Nesting, ...]:
        """The nestings that follow the un-nested call: those whose layers all fit, and those that are expected to fail."""
        expected = tuple(strategies.expected_to_fail(self.settings))
        every = (*strategies.first_stage(self.settings), *strategies.second_stage(self.settings, exclusions))
        allowed = [nesting for nesting in every if all(map(exclusions.allows, nesting.layers))]
        return tuple(in_mode(self.replayed or (*allowed, *expected), mode))


class Executor(Protocol):
    """What runs the nestings of a sweep, and learns from each which layers fit."""

    problem: str
    outcomes: dict[Nesting, Outcome]
    exclusions: dict[str, strategies.Exclusions]

    def nesting_of(self, error: BaseException) -> Nesting:
        """The nesting that raised an exception."""

    def try_un_nested(self, mode: str, body: Body) -> BaseException | None:
        """Run the un-nested call in a mode of flax; what it raised."""

    def try_nesting(self, nesting: Nesting, body: Body) -> BaseException | None:
        """Run a nesting; what it raised."""

    def rules_out(self, nesting: Nesting) -> bool:
        """Whether the nesting cannot work."""

    def stop(self, case: Sweep, mode: str) -> None:
        """Leave out the rest of a sweep."""


def errors(run: Executor, case: Sweep, body: Body) -> Errors:
    """Run the sweep, and hand out what each nesting raised; `None` where it held."""
    __tracebackhide__ = True
    for mode in case.modes:
        yield from _replay(run, case, mode, body) if case.replayed else _sweep(run, case, mode, body)


def _replay(run: Executor, case: Sweep, mode: str, body: Body) -> Errors:
    yield None
    yield from (run.try_nesting(nesting, body) for nesting in case.nestings(mode, run.exclusions[mode]))


def _sweep(run: Executor, case: Sweep, mode: str, body: Body) -> Errors:
    error = run.try_un_nested(mode, body)
    yield error
    # With a cause, the violation comes of a call that raises un-nested: nothing more to learn in this mode, either way.
    if run.problem or (error is not None and not (isinstance(error, InvariantViolation) and error.__cause__ is None)):
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
        run.stop(case, mode)
        return
    yield from (run.try_nesting(nesting, body) for nesting in expected if nesting not in run.outcomes)


def _workable(
    run: Executor, nestings: Iterator[Nesting], mode: str, expected: tuple[Nesting, ...]
) -> Iterator[Nesting]:
    return (nesting for nesting in in_mode(nestings, mode) if nesting in expected or not run.rules_out(nesting))


def _singles(run: Executor, case: Sweep, mode: str, body: Body, expected: tuple[Nesting, ...]) -> Errors:
    """The probes, and every layer alone; up to the plainest that breaks an invariant, or to a plain jit that raises."""
    probed: dict[Nesting, BaseException | None] = {}
    for nesting in _workable(run, strategies.probes(case.settings), mode, expected):
        probed[nesting] = run.try_nesting(nesting, body)
        yield probed[nesting]
    if case.settings.sweep == "probes":
        return
    for nesting in _workable(run, strategies.singles(case.settings), mode, expected):
        error = probed[nesting] if nesting in probed else run.try_nesting(nesting, body)
        yield error
        is_named = isinstance(error, InvariantViolation) or (error is not None and nesting.layers == (Layer(JIT),))
        if is_named and case.settings.all == "off":
            return


def _several(run: Executor, case: Sweep, mode: str, body: Body, expected: tuple[Nesting, ...]) -> Errors:
    """Nestings of several layers; where one breaks, the smallest that does is looked for, and the rest is left."""
    for nesting in _workable(run, strategies.second_stage(case.settings, run.exclusions[mode]), mode, expected):
        error = run.try_nesting(nesting, body)
        yield error
        if error is not None:
            yield from _smaller(run, case, nesting, error, body)
            if case.settings.all == "off":
                return


def _smaller(run: Executor, case: Sweep, nesting: Nesting, broken: BaseException, body: Body) -> Errors:
    """The plainest nesting that breaks as well, among what is left where layers are taken away and the pairs of all layers.

    Nothing runs beyond one that is known to break.
    """
    as_bad = {"violated"} if isinstance(broken, InvariantViolation) else {"violated", "failed"}
    pairs = in_mode(strategies.pairs(case.settings, run.exclusions[nesting.mode]), nesting.mode)
    candidates = sorted({*chains.parts(nesting), *pairs}, key=lambda candidate: candidate.plainness)
    for candidate in candidates:
        if candidate.plainness >= nesting.plainness or run.rules_out(candidate):
            continue
        if candidate not in run.outcomes:
            yield run.try_nesting(candidate, body)
        if candidate in run.outcomes and run.outcomes[candidate].verdict in as_bad:
            return
