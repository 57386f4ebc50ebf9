"""The modes of flax that a test runs in: which are asked for, which nestings run in one, and the verdict on it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from pytest_nnxcheck.core.catalogue import JIT, MODES
from pytest_nnxcheck.core.nesting import Nesting
from pytest_nnxcheck.core.outcome import Outcome, Verdict
from pytest_nnxcheck.core.settings import Settings


def chosen(settings: Settings) -> tuple[str, ...]:
    """The modes that a test runs in: a replayed nesting may name its own."""
    nesting = settings.nesting
    return settings.modes if nesting is None or nesting.mode == MODES[0] else (nesting.mode,)


def in_mode(nestings: Iterable[Nesting], mode: str) -> Iterator[Nesting]:
    """The nestings in a mode, each once, less those that name another."""
    yield from dict.fromkeys(replace(nesting, mode=mode) for nesting in nestings if nesting.mode in (MODES[0], mode))


def by_mode(outcomes: Iterable[Outcome]) -> dict[str, list[Outcome]]:
    """The outcomes of each mode, in the order in which they ran."""
    outcomes_of: dict[str, list[Outcome]] = {}
    for outcome in outcomes:
        outcomes_of.setdefault(outcome.nesting.mode, []).append(outcome)
    return outcomes_of


def verdict(outcomes: list[Outcome]) -> Verdict:
    """The verdict on a mode: the worst one; ``rejected`` where flax does not take the call."""
    bad: tuple[Verdict, ...] = ("violated", "failed")
    worst = next((word for word in bad if any(outcome.verdict == word for outcome in outcomes)), None)
    return worst or ("rejected" if rejection(outcomes) else "held")


def ends(outcome: Outcome) -> bool:
    """Whether flax refused, for its mode, the call itself or its plain jit: no nesting can run in that mode."""
    layers = [(layer.transform, layer.captures) for layer in outcome.nesting.layers]
    return refuses(outcome) and layers in ([], [(JIT, False)])


def refuses(outcome: Outcome) -> bool:
    """Whether flax refused the nesting for what its mode cannot do."""
    return outcome.by_mode and outcome.verdict == "rejected"


def rejection(outcomes: list[Outcome]) -> str:
    """Why flax does not take the call in a mode; empty if it does. What a closure keeps from flax proves nothing."""
    without_closure = [o for o in outcomes if o.nesting.layers and not o.nesting.captures]
    refused = [outcome for outcome in outcomes if refuses(outcome)]
    final = [outcome for outcome in refused if ends(outcome)]
    if final or (refused and all(outcome.verdict == "rejected" for outcome in without_closure)):
        return (final or refused)[0].reason
    return ""
