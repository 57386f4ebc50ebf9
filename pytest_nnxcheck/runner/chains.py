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


def cover_pairs(layers: Sequence[Layer], longest: int) -> Iterator[Chain]:
    """Chains of at most ``longest`` layers, two or more, in which every pair of `pairs` stands side by side once.

    An Eulerian walk over the pairs, cut where a chain is full and where jax cannot run it: each chain goes on where the one before
    ended, and always to the layer that has most pairs left, so that none is left over. The same layers give the same chains.
    """
    unused = dict.fromkeys(pairs(layers))
    rank = {layer: number for number, layer in enumerate(layers)}
    end: Layer | None = None
    while unused and longest > 1:
        open_pairs = Counter(outer for outer, _ in unused)
        fullest = min(open_pairs, key=lambda layer: (-open_pairs[layer], rank[layer]))
        chain: Chain = (end if end in open_pairs else fullest,)  # type: ignore[assignment]
        while len(chain) < longest and (step := _next(chain, unused, rank)) is not None:
            del unused[chain[-1], step]
            chain = (*chain, step)
        end = chain[-1]
        yield chain


def _next(chain: Chain, unused: dict[Pair, None], rank: dict[Layer, int]) -> Layer | None:
    open_pairs = Counter(outer for outer, _ in unused)
    steps = [inner for outer, inner in unused if outer == chain[-1] and not impossible(Nesting((*chain, inner)))]
    return min(steps, key=lambda layer: (-open_pairs[layer], rank[layer]), default=None)


def cover_layers(layers: Sequence[Layer], longest: int) -> Iterator[Chain]:
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
    """The nestings that taking layers away from a nesting gives, the plainest first; the nesting itself comes last."""
    layers = nesting.layers
    subsets = {
        tuple(layer for number, layer in enumerate(layers) if mask >> number & 1) for mask in range(1, 2 ** len(layers))
    }
    nestings = (Nesting(subset, nesting.mode) for subset in subsets)
    yield from sorted((part for part in nestings if not impossible(part)), key=lambda part: part.plainness)
