"""A covering array: few long nestings for each healthy model, which together hold each pair of what may not get on at least once.

That is: a transform right inside another, a transform around a model, a mode of flax with a model, a style inside a style.
Each transform inside each other around each model, alone, runs in ``nox -s calibrate``.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from itertools import pairwise, product

from checking import LACKING
from healthy import FLAX, HEALTHY

from pytest_nnxcheck import Layer, Nesting
from pytest_nnxcheck.core.catalogue import CALL_FIRST, FURTHER, TRANSFORMS, styles_of
from pytest_nnxcheck.core.nesting import impossible

NAMES = (*TRANSFORMS, CALL_FIRST, *FURTHER)
STYLES = ("argument", "functional")
"""A closure around state that changes is refused by flax, or leaks in truth (google/flax#4520): other tests have those styles."""
LAYERS = tuple(
    layer
    for name in NAMES
    for style in STYLES
    if style in styles_of(name) and str(layer := Layer(name, style)) not in LACKING
)
MODES = ("graph", "graph_no_updates", "tree") if FLAX >= (0, 12, 7) else ("current",)
NEED_UPDATES = {"grad", "custom_vjp"}
"""The transforms whose argument style no mode takes but graph mode with its updates."""
DEPTH = 4
"""Layers inside the jit."""

LONG = {"attention", "attention_decoding", "gru_rnn", "scan_over_layers"}
"""The models that take long to compile: they come last, when the pairs of transforms are covered."""

REFUSED = {("shared_weights", "graph_no_updates"), ("shared_weights", "tree")}
"""The models that flax does not take in a mode."""


def unfit(model: str) -> dict[str, str]:
    """The transforms that cannot take a call of the model, with the words that say why."""
    return {"grad": "the state holds no floating point nnx.Param"} if model == "dropout" else {}


def modes_of(model: str) -> list[str]:
    """The modes that take the model."""
    return [mode for mode in MODES if (model, mode) not in REFUSED]


def pairs_of(names: Iterable[str]) -> set[tuple[str, str]]:
    """What stands right inside what, outer first."""
    return set(pairwise(names))


def possible(names: Iterable[str]) -> bool:
    """Whether jax can run the transforms inside one another."""
    return not impossible(Nesting(tuple(map(Layer, names))))


def takes(mode: str, layer: Layer) -> bool:
    """Whether a mode takes a transform in this style."""
    return mode == MODES[0] or layer.style == "functional" or layer.transform not in NEED_UPDATES


LAYER_PAIRS = [
    (outer, inner) for outer, inner in product(LAYERS, LAYERS) if possible((outer.transform, inner.transform))
]
PAIRS = {pair for pair in product(NAMES, NAMES) if possible(pair)}


def covering_array() -> dict[str, list[Nesting]]:
    """The nestings of each model, by a search that draws the same in every process."""
    draw, uncovered = random.Random(3), set(PAIRS)
    used = dict.fromkeys(LAYERS, 0)
    array: dict[str, list[Nesting]] = {}
    for model in sorted(HEALTHY, key=lambda name: (name in LONG, name)):
        missing, modes = set(NAMES) - {*unfit(model)}, modes_of(model)
        array[model] = []
        while missing or len(array[model]) < len(modes):
            names = walk(("jit",), model, missing, uncovered, draw)
            missing -= {*names}
            uncovered -= pairs_of(names)
            array[model].append(styled(names, modes[len(array[model]) % len(modes)], used))
    for pair in sorted(uncovered):
        if pair in uncovered:
            names = walk(("jit", *pair), "layer_norm", set(), uncovered, draw)
            uncovered -= pairs_of(names)
            array["layer_norm"].append(styled(names, MODES[0], used))
    return array


def walk(
    names: tuple[str, ...], model: str, missing: set[str], uncovered: set[tuple[str, str]], draw: random.Random
) -> tuple[str, ...]:
    """The transforms, and inside them one after another: each of those that cover most of what is left."""
    while len(names) <= DEPTH:
        gains = {
            name: ((names[-1], name) in uncovered - pairs_of(names)) + 2 * (name in missing.difference(names))
            for name in NAMES
            if name not in unfit(model) and possible((*names, name))
        }
        most = max(gains.values())
        if not most:
            break
        names = (*names, draw.choice([name for name in gains if gains[name] == most]))
    return names


def styled(names: Iterable[str], mode: str, used: dict[Layer, int]) -> Nesting:
    """The nesting with each transform in the style that was used least, of those that the mode has for it."""
    layers = []
    for name in names:
        fitting = [layer for layer in LAYERS if layer.transform == name and takes(mode, layer)]
        layers.append(min(fitting, key=lambda layer: used[layer]))
        used[layers[-1]] += 1
    return Nesting(tuple(layers), mode)


ARRAY = covering_array()
