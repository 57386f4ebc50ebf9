"""Which nestings run: the stages of the sweep, and the hypothesis strategy for the nestings drawn after it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from hypothesis import strategies as st

from pytest_nnxcheck.nesting import CALL_FIRST, STATE_BOUND, TRANSFORMS, Layer, Nesting
from pytest_nnxcheck.settings import Settings


@dataclass(frozen=True, slots=True)
class Exclusions:
    """What the sweep ruled out in one mode: styles that flax refused, and a call that adds state; ``swept`` layers are done.

    ``closed`` is a mode in which the call does not run at all.
    """

    refused: frozenset[str] = frozenset()
    adds_state: bool = False
    swept: int = -1
    closed: bool = False

    @property
    def min_layers(self) -> int:
        """Layers of the smallest nesting that the sweep left to be drawn."""
        return self.swept + 1

    def allows(self, layer: Layer) -> bool:
        """Whether the layer can work at all."""
        stuck = self.adds_state and layer.style == "argument" and layer.transform in STATE_BOUND
        return layer.style not in self.refused and not stuck


def probes(settings: Settings) -> Iterator[Nesting]:
    """One nesting a closure style: where flax refuses it, the style is drawn no more."""
    plain = [transform for transform in settings.transforms if transform != CALL_FIRST]
    transform = "eval_shape" if "eval_shape" in plain else next(iter(plain), None)
    for style in settings.styles:
        if transform and style.endswith("closure"):
            yield Nesting((Layer(transform, style),))


def singles(settings: Settings) -> Iterator[Nesting]:
    """Every layer alone, plain styles first."""
    for style in settings.styles:
        for transform in settings.transforms:
            if transform != CALL_FIRST:
                yield Nesting((Layer(transform, style),))
    if CALL_FIRST in settings.transforms:
        yield Nesting((Layer(CALL_FIRST),))


def pairs(settings: Settings) -> Iterator[Nesting]:
    """``jit > call_first``, and every ordered pair of argument layers.

    Random draws do not find them: 20 draws found a broken ``jit > scan`` in 1 of 40 seeds.
    """
    if settings.max_depth < 2:
        return
    if "jit" in settings.transforms and not Layer("jit", settings.styles[0]).captures:
        yield Nesting((Layer("jit", settings.styles[0]), Layer(CALL_FIRST)))
    if "argument" in settings.styles:
        layers = [Layer(transform) for transform in settings.transforms]
        yield from (Nesting((outer, inner)) for outer in layers for inner in layers)


def named(settings: Settings) -> Iterator[Nesting]:
    """The nestings that expected failures name, as far as the settings allow them: no draw decides whether they run."""
    for entry in settings.expected_failures:
        nesting = entry.nesting("argument" if "argument" in settings.styles else settings.styles[0])
        if nesting is None or not 0 < len(nesting) <= settings.max_depth:
            continue
        plain = [layer for layer in nesting.layers if layer.transform != CALL_FIRST]
        if all(layer.transform in settings.transforms and layer.style in settings.styles for layer in plain):
            nesting = workable(nesting, settings, Exclusions())
            if entry.is_exactly(nesting):
                yield nesting


def sweep(settings: Settings) -> Iterator[Nesting]:
    """What follows the un-nested call, each nesting once."""
    stages = {"probes": (probes,), "singles": (probes, singles), "pairs": (probes, singles, pairs)}[settings.sweep]
    stages = (*stages, named)
    yield from dict.fromkeys(nesting for stage in stages for nesting in stage(settings))


def swept_layers(settings: Settings) -> int:
    """Every nesting of at most this many layers has run, or differs from one that has in its styles only."""
    return 0 if settings.sweep == "probes" else 1


def draws_any(settings: Settings) -> bool:
    """Whether anything is left to draw after the sweep."""
    return settings.max_examples > 0 and settings.max_depth > swept_layers(settings)


@st.composite
def nestings(
    draw: st.DrawFn, settings: Settings, exclusions: Callable[[str], Exclusions] = lambda _: Exclusions()
) -> Nesting:
    """Nestings of up to ``max_depth`` layers, shrinking to fewer layers, earlier modes and transforms, and plainer styles.

    Two draws a layer: a flat list of layers, or an index, does not shrink to the smallest. ``exclusions`` is asked
    when a nesting is drawn, since the sweep runs first.
    """
    open_modes = [mode for mode in settings.modes if not exclusions(mode).closed] or [settings.modes[0]]
    mode = draw(st.sampled_from(open_modes)) if open_modes[1:] else open_modes[0]
    known = exclusions(mode)
    if known.closed or known.refused.issuperset(settings.styles):
        return Nesting(mode=mode)
    smallest = min(known.min_layers, settings.max_depth)
    layers = draw(st.lists(_layers(settings, known), min_size=smallest, max_size=settings.max_depth))
    return workable(Nesting(tuple(layers), mode), settings, known)


def _layers(settings: Settings, known: Exclusions) -> st.SearchStrategy[Layer]:
    styles = [style for style in settings.styles if style not in known.refused]
    transforms = [transform for transform in settings.transforms if transform != CALL_FIRST]
    plain = st.builds(Layer, st.sampled_from(transforms or TRANSFORMS[:1]), st.sampled_from(styles))
    if CALL_FIRST not in settings.transforms:
        return plain
    return st.one_of(plain, st.just(Layer(CALL_FIRST))) if transforms else st.just(Layer(CALL_FIRST))


def workable(nesting: Nesting, settings: Settings, known: Exclusions) -> Nesting:
    """The nesting with the layers that cannot work made to, or left out.

    An argument layer inside a closure layer would be handed a module that the closure captured; a call that adds state
    cannot be carried by argument scan, vmap and while_loop. Both become functional, where that style is on.
    """
    made: list[Layer] = []
    for layer in nesting.layers:
        captured = any(outer.captures for outer in made)
        if layer.transform == CALL_FIRST or (known.allows(layer) and not (captured and layer.style == "argument")):
            made.append(layer)
        elif "functional" in settings.styles:
            made.append(replace(layer, style="functional"))
        elif captured:
            made.append(replace(layer, style=next(outer.style for outer in reversed(made) if outer.captures)))
    return replace(nesting, layers=tuple(made))
