"""Check a call where it is made, before it runs, and leave the test's objects, counters and random numbers as they were."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple

from pytest_nnxcheck.api import wrap
from pytest_nnxcheck.compat import refusals
from pytest_nnxcheck.core.catalogue import JIT
from pytest_nnxcheck.core.errors import CheckError, InvariantViolation
from pytest_nnxcheck.core.nesting import Layer, Nesting
from pytest_nnxcheck.core.text import first_line
from pytest_nnxcheck.runner import conclude, execution
from pytest_nnxcheck.runner.run import Run, Sweep, sweep
from pytest_nnxcheck.subject.on_purpose import of_frames, prepared_by
from pytest_nnxcheck.watch.calls import SuiteCall
from pytest_nnxcheck.watch.surroundings import unchanged

CallVerdict = Literal["checked", "eager", "raises", "makes Variables", "not checked"]


class CheckedCall(NamedTuple):
    """The result of a call that was looked at."""

    verdict: CallVerdict
    why: str = ""
    """Why it was not checked."""
    error: BaseException | None = None
    """The exception of a check that failed, with its complete message."""


def check(call: SuiteCall, run: Run, may_go_on: Callable[[bool], str]) -> CheckedCall:
    """Check a call. ``may_go_on`` gets whether it is jitted or changes state, and returns why it is not checked; empty if it is."""
    with unchanged(call) as read_once, prepared_by(of_frames(call.caller)):
        if read_once:
            return CheckedCall("not checked", f"it leads to a {read_once}, which can be read once")
        subject = wrap(call.subject)

        def body() -> None:
            subject(*call.args, **call.kwargs)

        mode = run.settings.chosen_modes[0]
        plain = raised(run, Nesting(mode=mode), body)
        if plain is not None and not isinstance(plain, InvariantViolation):
            return raised_alone(run, plain, body)
        states = [known.profile.state for known in run.memo.known.values() if known.profile is not None]
        if run.facts.added or any(state.added or state.removed for state in states):
            return CheckedCall("makes Variables", "no later call of it was made, whose structure stays")
        if why := may_go_on(call.jitted or any(state.changed for state in states)):
            return CheckedCall("not checked", why)
        error = raised(run, Nesting((Layer(JIT),), mode), body) if plain is None else None
        if error is not None and is_eager(error):
            return CheckedCall("eager", first_line(error))
        try:
            # Without hypothesis, which refuses a test inside of a test of its own: a sweep is all that is asked for.
            sweep(run, Sweep(run.settings), body)
        except BaseException as error:
            if execution.passes_through(error):
                raise
            return CheckedCall("checked", error=conclude.conclude(error, run))
        why = conclude.proves_nothing(run)
        return CheckedCall("not checked" if why else "checked", why)


def raised_alone(run: Run, error: BaseException, body: Callable[[], None]) -> CheckedCall:
    """Give the result of a call that raised without any nesting."""
    if isinstance(error, CheckError):
        return CheckedCall("not checked", first_line(error))
    # Flax may refuse what the call leaves in its module, where the user's own call raises nothing.
    if run.executor.unchecked(body, run.settings.chosen_modes[0], "own") is not None:
        return CheckedCall("raises", first_line(error))
    if is_eager(error):  # a call that gets an abstract model is always traced
        return CheckedCall("eager", first_line(error))
    return CheckedCall("checked", error=conclude.conclude(error, run))


def is_eager(error: BaseException) -> bool:
    """True if a call reads values, or captures a module that was made outside: nobody said that it can be traced."""
    return refusals.asks_for_value(error) or refusals.is_refusal(error)


def raised(run: Run, nesting: Nesting, body: Callable[[], None]) -> BaseException | None:
    """The exception of the call under a nesting. The run remembers it, and does not run the nesting again."""
    try:
        run.execute(nesting, body)
    except BaseException as error:
        if execution.passes_through(error):
            raise
        return error
    return None
