"""The choice of nestings to run: the stages of the sweep, and the hypothesis strategy for the nestings drawn after it.

The chains of several layers come first: pure data, in which every ordered pair of layers is side by side once, so that few programs judge all pairs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from hypothesis import strategies as st

from pytest_nnxcheck.core.catalogue import CALL_FIRST, GRAD, JIT, MODES, REMAT, styles_of
from pytest_nnxcheck.core.nesting import Layer, Nesting, impossible, in_mode
from pytest_nnxcheck.core.outcome import Outcome
from pytest_nnxcheck.core.settings import Settings
from pytest_nnxcheck.reporting import report

Chain = tuple[Layer, ...]
Pair = tuple[Layer, Layer]


def ordered_pairs(layers: Sequence[Layer]) -> Iterator[Pair]:
    """Every ordered pair that jax can run, a layer with itself among them, in the order of the layers."""
    yield from ((outer, inner) for outer in layers for inner in layers if not impossible(Nesting((outer, inner))))


def cover_pairs(layers: Sequence[Layer], longest: int) -> Iterator[Chain]:
    """Chains of at most ``longest`` layers, two or more, in which every pair of `ordered_pairs` is side by side once.

    An idle layer (`Transform.idle`) does not change the compiled program, which is shared by all chains with the same other layers. So
    idle layers are put between the two layers of a few pairs alone: those of a ring through the other layers, in which each has one
    neighbour before it and one after it. The same layers give the same chains.
    """
    idle = [layer for layer in layers if layer.row.idle]
    busy = [layer for layer in layers if not layer.row.idle]
    ring = [pair for pair in zip(busy, [*busy[-1:], *busy[:-1]], strict=True) if not impossible(Nesting(pair))]
    # A pair, and the chains with an idle layer in between, which compile to the program of the pair.
    around = [chain for one, other in ring for chain in ((one, other), *((one, layer, other) for layer in idle))]
    rings = [chain for chain in around if not impossible(Nesting(chain))] if longest > 2 and idle else []
    in_rings = {pair for chain in rings for pair in pairwise(chain)}
    left = [pair for pair in ordered_pairs(layers) if pair not in in_rings]
    with_idle = [pair for pair in left if any(layer.row.idle for layer in pair)]
    yield from _walk([pair for pair in left if pair not in with_idle], layers, longest)
    yield from rings
    yield from _walk(with_idle, layers, longest)


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


@dataclass(frozen=True, slots=True)
class Exclusions:
    """The nestings that the sweep ruled out in one mode of flax."""

    refused: frozenset[str] = frozenset()
    """Closure styles that flax refused."""
    unfit: frozenset[Layer] = frozenset()
    """Layers that alone cannot take the call, and so are in no other nesting."""
    adds_state: bool = False
    """The call adds state, which argument layers that carry the state cannot take."""
    closed: bool = False
    """The call does not run at all in this mode."""
    swept: int = -1
    """The sweep ran all nestings of so many layers, so that only longer ones are drawn."""

    def rejects(self, layer: Layer) -> bool:
        """True if the sweep has shown that the layer is not to be tried again."""
        return layer in self.unfit or layer.style in self.refused

    def allows(self, layer: Layer) -> bool:
        """True if the layer can work at all."""
        stuck = self.adds_state and layer.style == "argument" and layer.row.fixes_state
        return not (stuck or self.rejects(layer))

    def after(self, outcome: Outcome, settings: Settings) -> Exclusions:
        """Add the exclusions that follow from the outcome of a nesting.

        The un-nested call or its plain jit closes a mode. The probe of a closure style decides for the whole style. A layer that alone
        cannot take the call is in no other nesting.
        """
        nesting, rejected = outcome.nesting, outcome.verdict == "rejected"
        alone = nesting.layers if len(nesting) == 1 else ()
        is_probe = replace(nesting, mode=MODES[0]) in probes(settings)
        return replace(
            self,
            closed=self.closed or (rejected and report.closes_mode(outcome)),
            refused=self.refused | {layer.style for layer in alone if rejected and is_probe},
            unfit=self.unfit | {layer for layer in alone if outcome.unfit},
        )


def stuck_layers(settings: Settings) -> tuple[Layer, ...]:
    """The argument layers that are left out where the call adds state; one that is expected to fail is run all the same."""
    expected = {*expected_to_fail(settings)}
    layers = map(Layer, settings.transforms if "argument" in settings.styles else ())
    return tuple(layer for layer in layers if layer.row.fixes_state and Nesting((layer,)) not in expected)


def layers_of(transform: str, settings: Settings) -> list[Layer]:
    """A transform in each of its styles that the settings name, the plainest first."""
    return [Layer(transform, style) for style in styles_of(transform) if style in settings.styles]


def probes(settings: Settings) -> Iterator[Nesting]:
    """One nesting a closure style, the cheapest: where flax refuses it, the style is drawn no more."""
    layers = [layer for transform in settings.transforms for layer in layers_of(transform, settings) if layer.captures]
    for style in settings.styles:
        in_style = sorted(
            (layer for layer in layers if layer.style == style), key=lambda layer: not layer.row.runs_nothing
        )
        yield from (Nesting((layer,)) for layer in in_style[:1])


def singles(settings: Settings) -> Iterator[Nesting]:
    """Every layer alone, the plainest first."""
    every = [layer for transform in settings.transforms for layer in layers_of(transform, settings)]
    if CALL_FIRST in settings.transforms:
        every.append(Layer(CALL_FIRST))  # in any style: how it gets the module is no question
    yield from sorted({Nesting((layer,)) for layer in every}, key=lambda nesting: nesting.plainness)


def plainest_layers(settings: Settings, exclusions: Exclusions) -> list[Layer]:
    """Each transform that can work, in its plainest style of those that are on and hand the state over."""
    handed = ([layer for layer in layers_of(name, settings) if not layer.captures] for name in settings.transforms)
    return [layers[0] for layers in handed if layers and exclusions.allows(layers[0])]


def several_in_jit(settings: Settings, exclusions: Exclusions) -> Iterator[Nesting]:
    """Jits over several layers, which are judged for memory and donation: ``jit > call_first``, and the chains of the sweep.

    Random draws do not find pairs: 20 draws found a broken ``jit > scan`` in 1 of 40 seeds.
    """
    fitting = plainest_layers(settings, exclusions)
    root = next((layer for layer in fitting if layer.transform == JIT), None)
    if root is None or settings.max_depth < 2:
        return
    yield Nesting((root, Layer(CALL_FIRST)))
    inner = [layer for layer in fitting if layer.transform != JIT]
    cover = cover_layers if settings.sweep == "short" else cover_pairs
    yield from (Nesting((root, *chain)) for chain in cover(inner, settings.max_depth))
    if {GRAD, REMAT} <= {*settings.transforms}:
        # Only under a gradient can a remat lower the peak: ``jit > grad`` without one inside, and with one.
        layers = tuple(Layer(transform, root.style) for transform in (JIT, GRAD, REMAT))
        yield from (Nesting(layers[:2]), Nesting(layers))


def pairs(settings: Settings, exclusions: Exclusions) -> Iterator[Nesting]:
    """Every ordered pair of the plainest layers."""
    if settings.max_depth > 1:
        yield from (Nesting(pair) for pair in ordered_pairs(plainest_layers(settings, exclusions)))


def expected_to_fail(settings: Settings) -> Iterator[Nesting]:
    """The nestings that expected failures name, as far as the settings allow them: no draw decides whether they run."""
    for entry in settings.expected_failures:
        nesting = entry.nesting("argument" if "argument" in settings.styles else settings.styles[0])
        if nesting is None or not nesting.layers:
            continue
        # As deep as the chains of the sweep: a jit at the root is not counted.
        if len(nesting) - nesting.layers[0].row.compiles > settings.max_depth:
            continue
        plain = [layer for layer in nesting.layers if layer.transform != CALL_FIRST]
        if all(layer.transform in settings.transforms and layer.style in settings.styles for layer in plain):
            nesting = workable(nesting, settings, Exclusions())
            if entry.is_exactly(nesting):
                yield nesting


def second_stage(settings: Settings, exclusions: Exclusions) -> Iterator[Nesting]:
    """Nestings of several layers, made of the layers that fit."""
    if settings.sweep in ("short", "chains", "pairs"):
        yield from several_in_jit(settings, exclusions)
    if settings.sweep == "pairs":
        yield from pairs(settings, exclusions)


def sweep(settings: Settings, exclusions: Exclusions = Exclusions()) -> Iterator[Nesting]:
    """All that follows the un-nested call, each nesting once: nestings whose layers all fit, and those that are expected to fail."""
    alone = () if settings.sweep == "probes" else singles(settings)
    every = (*probes(settings), *alone, *second_stage(settings, exclusions))
    allowed = [nesting for nesting in every if all(map(exclusions.allows, nesting.layers))]
    yield from dict.fromkeys((*allowed, *expected_to_fail(settings)))


def planned(settings: Settings) -> tuple[dict[Nesting, int], int]:
    """The place of every nesting that always runs, in their order, and how many nestings there are with the drawn ones."""
    always = (settings.nesting,) if settings.nesting is not None else (Nesting(), *sweep(settings))
    every = dict.fromkeys(nesting for mode in settings.chosen_modes for nesting in in_mode(always, mode))
    drawn = settings.max_examples if settings.nesting is None and draws_any(settings) else 0
    return {nesting: number for number, nesting in enumerate(every)}, len(every) + drawn


def swept_layers(settings: Settings) -> int:
    """Every nesting of at most this many layers has run, or differs from one that has in its styles only."""
    return 0 if settings.sweep == "probes" else 1


def draws_any(settings: Settings) -> bool:
    """True if anything is left to draw after the sweep."""
    return settings.max_examples > 0 and settings.max_depth > swept_layers(settings)


@st.composite
def nestings(draw: st.DrawFn, settings: Settings, exclusions_in: Callable[[str], Exclusions]) -> Nesting:
    """Nestings of up to ``max_depth`` layers, shrinking to fewer layers, earlier modes and transforms, and plainer styles.

    A layer is two draws: a flat list of layers, or an index, does not shrink to the smallest. ``exclusions_in(mode)``
    is called when a nesting is drawn, since the sweep runs first.
    """
    open_modes = [mode for mode in settings.modes if not exclusions_in(mode).closed] or [settings.modes[0]]
    mode = draw(st.sampled_from(open_modes)) if open_modes[1:] else open_modes[0]
    exclusions = exclusions_in(mode)
    layer = _layer(settings, exclusions)
    if exclusions.closed or layer is None or exclusions.refused.issuperset(settings.styles):
        return Nesting(mode=mode)
    smallest = min(exclusions.swept + 1, settings.max_depth)
    layers = draw(st.lists(layer, min_size=smallest, max_size=settings.max_depth))
    return workable(Nesting(tuple(layers), mode), settings, exclusions)


def _layer(settings: Settings, exclusions: Exclusions) -> st.SearchStrategy[Layer] | None:
    """A layer in two draws, transform and style; `None` where there is none to draw."""
    styles = {
        name: [layer.style for layer in layers_of(name, settings) if not exclusions.rejects(layer)]
        for name in settings.transforms
        if name != CALL_FIRST
    }
    transforms = [name for name in styles if styles[name]]

    @st.composite
    def plain(draw: st.DrawFn) -> Layer:
        transform = draw(st.sampled_from(transforms))
        return Layer(transform, draw(st.sampled_from(styles[transform])))

    kinds = ([plain()] if transforms else []) + ([st.just(Layer(CALL_FIRST))] * (CALL_FIRST in settings.transforms))
    return st.one_of(kinds) if kinds else None


def workable(nesting: Nesting, settings: Settings, exclusions: Exclusions) -> Nesting:
    """The nesting in which layers that cannot work have another style, or are left out.

    An argument layer inside a closure layer would be handed a module that the closure captured; argument scan, vmap and while_loop
    cannot carry a call that adds state. Both become functional, where that style is on. A layer that jax cannot run in any style, a
    while_loop inside a grad, is left out.
    """
    layers: list[Layer] = []
    for layer in nesting.layers:
        capturing = [outer.style for outer in reversed(layers) if outer.captures][:1]
        styles = [layer.style, *(["functional"] if "functional" in settings.styles else capturing)]
        candidates = (replace(layer, style=style) for style in styles if style in styles_of(layer.transform))
        first = next((candidate for candidate in candidates if _fits(candidate, layers, exclusions)), None)
        layers += [] if first is None else [first]
    return replace(nesting, layers=tuple(layers))


def _fits(layer: Layer, outer: list[Layer], exclusions: Exclusions) -> bool:
    if impossible(Nesting((*outer, layer))):
        return False
    captured = any(outer_layer.captures for outer_layer in outer) and layer.style == "argument"
    return layer.transform == CALL_FIRST or (exclusions.allows(layer) and not captured)
