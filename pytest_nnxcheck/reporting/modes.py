"""The verdict on a mode of flax, of the outcomes of the nestings that ran in it. Nothing here imports pytest, hypothesis, jax or flax."""

from __future__ import annotations

from collections.abc import Iterable

from pytest_nnxcheck.core.catalogue import JIT
from pytest_nnxcheck.core.outcome import Outcome, Verdict


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
