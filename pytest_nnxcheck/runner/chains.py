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

    First the pairs without an idle layer (`Transform.idle`). A chain with one has at most one layer that is not: most of these then
    lower to the program of that layer alone, which is compiled once. The same layers give the same chains.
    """
    idle = {pair: any(layer.row.idle for layer in pair) for pair in pairs(layers)}
    for with_idle in (False, True):
        yield from _walk(
            [pair for pair in idle if idle[pair] == with_idle], layers, longest, 1 if with_idle else longest
        )


def _walk(unwalked: Sequence[Pair], layers: Sequence[Layer], longest: int, most: int) -> Iterator[Chain]:
    """An Eulerian walk over the pairs, cut where a chain is full, where it has the ``most`` layers that are not idle, and where jax cannot run it.

    Each chain goes on where the one before ended, and always to the layer that has most pairs left, so that none is left over.
    """
    unused = dict.fromkeys(unwalked)
    rank = {layer: number for number, layer in enumerate(layers)}
    end: Layer | None = None
    while unused and longest > 1:
        open_pairs = Counter(outer for outer, _ in unused)
        fullest = min(open_pairs, key=lambda layer: (-open_pairs[layer], rank[layer]))
        chain: Chain = (end if end in open_pairs else fullest,)  # type: ignore[assignment]
        while len(chain) < longest and (step := _next(chain, unused, rank, most)) is not None:
            del unused[chain[-1], step]
            chain = (*chain, step)
        end = chain[-1]
        yield chain


def _next(chain: Chain, unused: dict[Pair, None], rank: dict[Layer, int], most: int) -> Layer | None:
    open_pairs = Counter(outer for outer, _ in unused)
    busy = sum(not layer.row.idle for layer in chain)
    steps = [inner for outer, inner in unused if outer == chain[-1]]
    steps = [inner for inner in steps if inner.row.idle or busy < most]
    steps = [inner for inner in steps if not impossible(Nesting((*chain, inner)))]
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
