"""Around a nesting that did not hold: the nearest that hold, and the first that fails on the way from the un-nested call.

Neighbours are run after hypothesis is done, with the same test body, and count as tried nowhere else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

from pytest_nnxcheck import strategies
from pytest_nnxcheck.nesting import CALL_FIRST, Layer, Nesting, impossible, styles_of
from pytest_nnxcheck.settings import Settings
from pytest_nnxcheck.strategies import Exclusions
from pytest_nnxcheck.verdicts import Outcome

SHOWN = 4
MOST = 12
"""Neighbours that are run at most: each may compile."""

HANDED = ("argument", "functional")
"""The styles that are tried whatever the settings name: they are what a closure is changed into."""

TryOut = Callable[[Nesting], Outcome | None]
"""Runs a nesting, or looks its outcome up; None where the test body raised before the call, or ran no call."""


def neighbours(nesting: Nesting, settings: Settings, known: Exclusions) -> tuple[Nesting, ...]:
    """Each layer in another style, each layer taken away; the plainest first, without those that cannot run."""
    found = [near for near in _every(nesting, settings) if near.layers and not impossible(near)]
    able = [near for near in found if strategies.workable(near, settings, known) == near]
    able = [near for near in able if all(known.allows(layer) for layer in near.layers)]
    return tuple(sorted(dict.fromkeys(able), key=lambda near: near.plainness))


def _every(nesting: Nesting, settings: Settings) -> Iterator[Nesting]:
    for number, layer in enumerate(nesting.layers):
        before, after = nesting.layers[:number], nesting.layers[number + 1 :]
        yield replace(nesting, layers=before + after)
        for style in dict.fromkeys([*HANDED, *settings.styles]):
            if style != layer.style and style in styles_of(layer.transform) and layer.transform != CALL_FIRST:
                yield replace(nesting, layers=(*before, Layer(layer.transform, style), *after))


def way(nesting: Nesting) -> tuple[Nesting, ...]:
    """From the un-nested call to the nesting, one layer more at a time, the innermost first."""
    layers = nesting.layers
    return tuple(replace(nesting, layers=layers[number:]) for number in range(len(layers), -1, -1))


@dataclass(frozen=True, slots=True)
class Around:
    """What was found around a nesting: the neighbours that hold, how many were tried, and the way with its verdicts."""

    holds: tuple[Nesting, ...]
    tried: int
    way: tuple[tuple[Nesting, str], ...]


def look_around(outcome: Outcome, settings: Settings, known: Exclusions, try_out: TryOut) -> Around:
    """Try the neighbours of a nesting that did not hold, and walk the way to it up to the first that fails."""
    tried = [(near, try_out(near)) for near in neighbours(outcome.nesting, settings, known)[:MOST]]
    holds = tuple(near for near, found in tried if found is not None and answers(outcome, found))
    return Around(holds, len(tried), tuple(_walk(outcome, try_out)))


def _walk(outcome: Outcome, try_out: TryOut) -> Iterator[tuple[Nesting, str]]:
    for step in way(outcome.nesting):
        found = outcome if step == outcome.nesting else try_out(step)
        verdict = found.verdict if found is not None else "failed"
        yield step, verdict
        if verdict in ("violated", "failed", "expected"):
            return


def answers(broken: Outcome, near: Outcome) -> bool:
    """Whether a neighbour that held shows a way out: what broke must have been measured there as well."""
    measured = {violation.invariant for violation in broken.violations} & {"memory", "donation"}
    return near.verdict == "held" and (not measured or near.peak is not None)


def rows(found: Around) -> tuple[tuple[str, str], ...]:
    """The rows of the message."""
    told = []
    if found.holds:
        more = f", and {len(found.holds) - SHOWN} more" if found.holds[SHOWN:] else ""
        told.append(("holds", f"{listed(found.holds[:SHOWN])}{more}   (nearest, of {found.tried} tried)"))
    elif found.tried:
        told.append(("holds", f"none of the {found.tried} nearest: a layer in another style, or taken away"))
    if len(found.way) > 1:
        told.append(("way", ", ".join(f"{step} {verdict}" for step, verdict in found.way)))
    return tuple(told)


def listed(nestings: Iterable[Nesting]) -> str:
    return ", ".join(map(str, nestings))
