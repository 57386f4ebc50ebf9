"""Chains of layers in which every ordered pair of them is side by side: few programs that judge all pairs. Pure data, no jax."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import pairwise

from pytest_nnxcheck.core.nesting import Layer, Nesting, impossible

Chain = tuple[Layer, ...]
Pair = tuple[Layer, Layer]


def pairs(layers: Sequence[Layer]) -> Iterator[Pair]:
    """Every ordered pair that jax can run, a layer with itself among them, in the order of the layers."""
    yield from ((outer, inner) for outer in layers for inner in layers if not impossible(Nesting((outer, inner))))


def cover_pairs(layers: Sequence[Layer], longest: int) -> Iterator[Chain]:
    """Chains of at most ``longest`` layers, two or more, in which every pair of `pairs` is side by side once.

    An idle layer (`Transform.idle`) does not change the compiled program, which is shared by all chains with the same other layers. So
    idle layers are put between the two layers of a few pairs alone: those of a ring through the other layers, in which each has one
    neighbour before it and one after it. The same layers give the same chains.
    """
    idle = [layer for layer in layers if layer.row.idle]
    busy = [layer for layer in layers if not layer.row.idle]
    ring = [pair for pair in zip(busy, [*busy[-1:], *busy[:-1]], strict=True) if not impossible(Nesting(pair))]
    rings = [chain for pair in ring for chain in _around(pair, idle)] if longest > 2 and idle else []
    in_rings = {pair for chain in rings for pair in pairwise(chain)}
    left = [pair for pair in pairs(layers) if pair not in in_rings]
    with_idle = [pair for pair in left if any(layer.row.idle for layer in pair)]
    yield from _walk([pair for pair in left if pair not in with_idle], layers, longest)
    yield from rings
    yield from _walk(with_idle, layers, longest)


def _around(pair: Pair, idle: Sequence[Layer]) -> Iterator[Chain]:
    """A pair, and the chains with an idle layer in between, which compile to the program of the pair."""
    outer, inner = pair
    yield pair
    yield from (chain for layer in idle if not impossible(Nesting(chain := (outer, layer, inner))))


def _walk(unwalked: Sequence[Pair], layers: Sequence[Layer], longest: int) -> Iterator[Chain]:
    """An Eulerian walk over the pairs, cut where a chain is full, and where jax cannot run it.

    Each chain starts where the last one ended, and goes on to the layer that has most pairs left, so that few short chains remain.
    """
    unused = dict.fromkeys(unwalked)
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
    steps = [inner for outer, inner in unused if outer == chain[-1]]
    steps = [inner for inner in steps if not impossible(Nesting((*chain, inner)))]
    return min(steps, key=lambda layer: (-open_pairs[layer], rank[layer]), default=None)


def cover_layers(layers: Sequence[Layer], longest: int) -> Iterator[Chain]:
    """Chains of at most ``longest`` layers in which every layer occurs once."""
    chain: Chain = ()
    for layer in layers:
        if len(chain) == longest or impossible(Nesting((*chain, layer))):
            yield chain
            chain = ()
        chain = (*chain, layer)
    if chain:
        yield chain


def parts(nesting: Nesting) -> Iterator[Nesting]:
    """The nestings without some of the layers of a nesting, the plainest first; the nesting itself comes last."""
    layers = nesting.layers
    subsets = {
        tuple(layer for number, layer in enumerate(layers) if mask >> number & 1) for mask in range(1, 2 ** len(layers))
    }
    nestings = (Nesting(subset, nesting.mode) for subset in subsets)
    yield from sorted((part for part in nestings if not impossible(part)), key=lambda part: part.plainness)
