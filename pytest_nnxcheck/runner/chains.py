"""Chains of layers in which every ordered pair of them stands side by side: few programs that judge all pairs. Pure data, no jax."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from pytest_nnxcheck.core.nesting import Layer, Nesting, impossible

Chain = tuple[Layer, ...]
Pair = tuple[Layer, Layer]


def pairs(layers: Sequence[Layer]) -> Iterator[Pair]:
    """Every ordered pair that jax can run, a layer with itself among them, in the order of the layers."""
    yield from ((outer, inner) for outer in layers for inner in layers if not impossible(Nesting((outer, inner))))


def covering(layers: Sequence[Layer], longest: int) -> Iterator[Chain]:
    """Chains of at most ``longest`` layers, two or more, in which every pair of `pairs` stands side by side once.

    An Eulerian walk over the pairs, cut where a chain is full and where jax cannot run it: each chain goes on where the one before
    ended, and always to the layer that has most pairs left, so that none is left over. The same layers give the same chains.
    """
    left = dict.fromkeys(pairs(layers))
    rank = {layer: number for number, layer in enumerate(layers)}
    end: Layer | None = None
    while left and longest > 1:
        open_pairs = Counter(outer for outer, _ in left)
        fullest = min(open_pairs, key=lambda layer: (-open_pairs[layer], rank[layer]))
        chain: Chain = (end if end in open_pairs else fullest,)  # type: ignore[assignment]
        while len(chain) < longest and (step := _next(chain, left, rank)) is not None:
            del left[chain[-1], step]
            chain = (*chain, step)
        end = chain[-1]
        yield chain


def _next(chain: Chain, left: dict[Pair, None], rank: dict[Layer, int]) -> Layer | None:
    open_pairs = Counter(outer for outer, _ in left)
    steps = [inner for outer, inner in left if outer == chain[-1] and not impossible(Nesting((*chain, inner)))]
    return min(steps, key=lambda layer: (-open_pairs[layer], rank[layer]), default=None)


def short(layers: Sequence[Layer], longest: int) -> Iterator[Chain]:
    """Chains of at most ``longest`` layers in which every layer stands once."""
    chain: Chain = ()
    for layer in layers:
        if len(chain) == longest or impossible(Nesting((*chain, layer))):
            yield chain
            chain = ()
        chain = (*chain, layer)
    if chain:
        yield chain


def parts(nesting: Nesting) -> Iterator[Nesting]:
    """What is left of a nesting where layers are taken away, the plainest first; itself comes last."""
    layers = nesting.layers
    chosen = {
        tuple(layer for number, layer in enumerate(layers) if kept >> number & 1) for kept in range(1, 2 ** len(layers))
    }
    made = (Nesting(part, nesting.mode) for part in chosen)
    yield from sorted((part for part in made if not impossible(part)), key=lambda part: part.plainness)
