"""The modes of flax that a test runs in: which are asked for, which nestings run in one, and the verdict on it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from pytest_nnxcheck.core.catalogue import JIT
from pytest_nnxcheck.core.nesting import MODES, Nesting
from pytest_nnxcheck.core.outcome import Outcome, Verdict
from pytest_nnxcheck.core.settings import Settings


def chosen(settings: Settings) -> tuple[str, ...]:
    """The modes that a test runs in: a replayed nesting may name its own."""
    replayed = settings.nesting
    return settings.modes if replayed is None or replayed.mode == MODES[0] else (replayed.mode,)


def in_mode(nestings: Iterable[Nesting], mode: str) -> Iterator[Nesting]:
    """The nestings in a mode, each once, less those that name another."""
    yield from dict.fromkeys(replace(each, mode=mode) for each in nestings if each.mode in (MODES[0], mode))


def by_mode(outcomes: Iterable[Outcome]) -> dict[str, list[Outcome]]:
    """The outcomes of each mode, in the order in which they ran."""
    found: dict[str, list[Outcome]] = {}
    for outcome in outcomes:
        found.setdefault(outcome.nesting.mode, []).append(outcome)
    return found


def verdict(outcomes: list[Outcome]) -> Verdict:
    """The verdict on a mode: the worst one; ``rejected`` where flax does not take the call."""
    worst: tuple[Verdict, ...] = ("violated", "failed")
    found = next((word for word in worst if any(outcome.verdict == word for outcome in outcomes)), None)
    return found or ("rejected" if rejection(outcomes) else "held")


def ends(outcome: Outcome) -> bool:
    """Whether flax refused, for its mode, the call itself or its plain jit: there is no nesting that could take it then."""
    layers = [(layer.transform, layer.captures) for layer in outcome.nesting.layers]
    return refuses(outcome) and layers in ([], [(JIT, False)])


def refuses(outcome: Outcome) -> bool:
    """Whether flax refused the nesting for what its mode cannot do."""
    return outcome.by_mode and outcome.verdict == "rejected"


def rejection(outcomes: list[Outcome]) -> str:
    """Why flax does not take the call in a mode; empty if it does. What a closure keeps from flax proves nothing."""
    plain = [o for o in outcomes if o.nesting.layers and not any(layer.captures for layer in o.nesting.layers)]
    refused = [outcome for outcome in outcomes if refuses(outcome)]
    ended = [outcome for outcome in refused if ends(outcome)]
    if ended or (refused and all(outcome.verdict == "rejected" for outcome in plain)):
        return (ended or refused)[0].reason
    return ""
