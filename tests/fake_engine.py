"""A stand-in for the module that runs one call: verdicts by rule, in no time, so that what is around it can be tested."""

import sys
import types
from collections.abc import Callable
from dataclasses import dataclass, field

from pytest_nnxcheck import CheckError, Nesting, Outcome, Violation
from pytest_nnxcheck.core.catalogue import rows_of
from pytest_nnxcheck.core.facts import Evidence
from pytest_nnxcheck.core.on_target import OnTarget
from pytest_nnxcheck.core.outcome import NO_FACTS, CallFacts
from pytest_nnxcheck.core.peak import Buffer, Split

NEVER = lambda nesting: False  # noqa: E731
RUNS: list[str] = []
"""Every nesting that ran, as text, in order."""


def has(*words: str) -> Callable[[Nesting], bool]:
    """Whether all the layers occur, in this order, in a nesting."""

    def rule(nesting: Nesting) -> bool:
        layers = iter(map(str, nesting.layers))
        return all(word in layers for word in words)

    return rule


@dataclass
class Model:
    """A subject that breaks by rule."""

    tracers: Callable[[Nesting], bool] = NEVER
    memory: Callable[[Nesting], bool] = NEVER
    donation: Callable[[Nesting], bool] = NEVER
    rejected: Callable[[Nesting], bool] = NEVER
    failed: Callable[[Nesting], bool] = NEVER
    mine: Callable[[Nesting], bool] = NEVER
    adds_state: bool = False
    bad: str = ""
    causes: tuple[str, ...] = ()
    percent: int = 100
    """The peaks are this part of what they usually are: all of it in the temporaries."""
    on_target: int = 0
    """The peak of each program on a v5e, where there is one."""
    wheel: str = "libtpu 0.0.50.1"
    calls: list[Nesting] = field(default_factory=list)

    def __call__(self, x):
        # Where nothing is checked, it does as it did the last time.
        if self.calls and self.failed(self.calls[-1]):
            raise TypeError("scan body must return a carry")
        return x


@dataclass(frozen=True)
class Checked:
    output: object
    outcome: Outcome
    error: BaseException | None
    facts: CallFacts = NO_FACTS


def violation(invariant: str) -> Violation:
    rows = (("leaked", "model.kernel   Param float32[3,32,32]"),)
    return Violation(invariant, f"{invariant} is broken", rows, "do it otherwise")


def on_target(model: Model) -> tuple[OnTarget, ...]:
    peak = model.on_target
    return (OnTarget("v5e", limit=10 * peak, peak=peak, wheel=model.wheel),) if peak else ()


def check_call(subject, args, kwargs, *, nesting, settings, example, publish, owner=""):
    model = subject if isinstance(subject, Model) else getattr(subject, "model", Model())
    RUNS.append(str(nesting))
    model.calls.append(nesting)
    facts = CallFacts(added=("model.hidden",) if model.adds_state else ())
    if model.bad:
        raise CheckError(model.bad)
    peak, budget = (1000 * (len(nesting) + 1), 8000) if str(nesting).startswith("jit") else (None, None)
    if model.rejected(nesting):
        return Checked(None, Outcome(nesting, "rejected", reason="TraceContextError: other trace level"), None, facts)
    try:
        output = subject(*args, **kwargs)
        if model.failed(nesting):
            raise TypeError("scan body must return a carry")  # noqa: TRY301
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        outcome = Outcome(
            nesting, "failed", reason=reason, error=type(error).__name__, notes=model.causes, asserted=("tracers",)
        )
        return Checked(None, outcome, error, facts)
    names = [name for name in settings.invariants if getattr(model, name, NEVER)(nesting)]
    broken = tuple(violation(name) for name in names)
    known = None
    if peak is not None:
        peak = peak * model.percent // 100
        temporary = Buffer(peak - 300, f"uint8[{peak - 300}]", "temporary", "dot", ("model.py:7",))
        known = Evidence(Split(200, 200, peak - 300, 100, 0), buffers=(temporary,), targets=on_target(model))
    verdict = "violated" if broken else "held"
    asserted = tuple(
        row.name
        for row in rows_of(settings.invariants)
        if not row.compiled or (peak and (row.name, settings.donate) != ("donation", "none"))
    )
    outcome = Outcome(nesting, verdict, broken, asserted=asserted, peak=peak, budget=budget, evidence=known)
    return Checked(output, outcome, None, facts)


def install() -> None:
    """Take the place of the real module; pytester's snapshot of the modules, or the end of the process, puts it back."""
    module = types.ModuleType("pytest_nnxcheck.checks.check_call")
    module.Checked, module.check_call = Checked, check_call
    sys.modules["pytest_nnxcheck.checks.check_call"] = module
    RUNS.clear()
