"""What one nesting shows of those to come: styles that flax refuses, layers that cannot take the call, modes that take no call."""

from __future__ import annotations

from dataclasses import replace

from pytest_nnxcheck.core.catalogue import MODES, STATE_BOUND
from pytest_nnxcheck.core.nesting import Layer, Nesting
from pytest_nnxcheck.core.notes import StateAdded
from pytest_nnxcheck.core.outcome import Outcome
from pytest_nnxcheck.core.settings import Settings
from pytest_nnxcheck.reporting import tally
from pytest_nnxcheck.runner import strategies
from pytest_nnxcheck.runner.strategies import Exclusions


def after(outcome: Outcome, exclusions: Exclusions, settings: Settings) -> Exclusions:
    """The exclusions once a nesting has been tried.

    A closure style is refused as a whole by its first nesting, which is its probe; a mode by its un-nested jit; a layer that alone
    cannot take the call is in no other nesting.
    """
    if outcome.verdict == "rejected" and tally.closes_mode(outcome):
        exclusions = replace(exclusions, closed=True)
    if outcome.verdict == "rejected" and (style := refused_style(outcome.nesting, settings)):
        exclusions = replace(exclusions, refused=exclusions.refused | {style})
    if outcome.unfit and len(outcome.nesting) == 1:
        exclusions = replace(exclusions, unfit=exclusions.unfit | {*outcome.nesting.layers})
    return exclusions


def refused_style(nesting: Nesting, settings: Settings) -> str:
    """The closure style that a nesting probes; empty for any other nesting."""
    if len(nesting) != 1 or not nesting.layers[0].style.endswith("closure"):
        return ""
    probes = set(strategies.probes(settings))
    return nesting.layers[0].style if replace(nesting, mode=MODES[0]) in probes else ""


def stuck(added: tuple[str, ...], settings: Settings) -> StateAdded | None:
    """The argument layers that cannot take a call which adds state; `None` where none is asked for, or each is named."""
    expected = set(strategies.expected_to_fail(settings))
    layers = tuple(Layer(name) for name in STATE_BOUND if name in settings.transforms)
    left_out = tuple(layer for layer in layers if Nesting((layer,)) not in expected)
    return StateAdded(added, left_out) if left_out and "argument" in settings.styles else None
