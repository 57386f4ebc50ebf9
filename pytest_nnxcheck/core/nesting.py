"""Layers and nestings: parse, format, order. Pure data, no jax."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

TRANSFORMS = ("jit", "remat", "scan", "vmap", "while_loop", "eval_shape")
"""The transforms, plainest first: hypothesis shrinks towards earlier entries."""

STYLES = ("argument", "functional", "closure", "jax_closure")
"""How a layer gets the module, plainest first."""

CALL_FIRST = "call_first"
"""The layer that calls the subject once before the inner program, in the same trace. It has no styles."""

MODES = ("current", "graph", "graph_no_updates", "tree")
"""The modes of flax, plainest first; ``current`` is the one that flax is set to, and is not written."""

ITERATING = ("iterate_scan", "iterate_while_loop", "iterate_fori_loop")
"""Loops whose step takes the output of the one before it for its first inputs, ``h = block(h)``, and that keep the output of every step."""

FURTHER = ("fori_loop", *ITERATING, "cond", "switch", "grad", "custom_vjp", "shard_map")
"""Transforms that are in a nesting only where ``transforms`` names them."""

STATE_BOUND = ("scan", "vmap", "while_loop", "fori_loop", *ITERATING, "cond", "switch", "custom_vjp")
"""The transforms that, as argument layers, cannot take a call that adds state."""

UNCOUNTED = ("while_loop", "iterate_while_loop")
"""Loops that jax cannot differentiate."""

IN_ITSELF = {
    "grad": "grad inside grad differentiates twice, which is not what this layer is for",
    "shard_map": "shard_map cannot map the axis of its mesh again, inside a shard_map over it",
}
"""Why a transform is not put inside itself."""

UN_NESTED = "un-nested"
_LAYER = re.compile(r"\s*(?P<transform>[^\[\]\s>]+)\s*(?:\[\s*(?P<style>[^\[\]]*?)\s*\])?\s*")


class NestingError(ValueError):
    """A layer or nesting that cannot be read; the text names the nearest valid word."""


@dataclass(frozen=True, slots=True)
class Registered:
    """A transform of the user's own in one style: ``function(f)`` gives a layer; ``place`` is where it was defined."""

    function: Callable[[Callable[..., Any]], Callable[..., Any]]
    place: str


REGISTERED: dict[tuple[str, str], Registered] = {}
"""What `register_transform` was given, by transform and style."""


def layer_names() -> tuple[str, ...]:
    """Every word that a layer can be written with, plainest first."""
    own = dict.fromkeys(transform for transform, _ in REGISTERED)
    return (*TRANSFORMS, CALL_FIRST, *FURTHER, *own)


def styles_of(transform: str) -> tuple[str, ...]:
    """The styles that a transform has, plainest first."""
    if transform in TRANSFORMS:
        return STYLES
    if transform == CALL_FIRST:
        return STYLES[:1]
    if transform in FURTHER:
        # jax refuses a custom rule whose function captures what is differentiated.
        return STYLES[:2] if transform == "custom_vjp" else STYLES
    return tuple(style for style in STYLES if (transform, style) in REGISTERED)


@dataclass(frozen=True, slots=True)
class Layer:
    """One transform in one style, written ``scan`` (argument is the default) or ``scan[functional]``."""

    transform: str
    style: str = "argument"

    def __post_init__(self) -> None:
        one_of("transform", self.transform, layer_names())
        one_of("style", self.style, STYLES)
        if self.transform == CALL_FIRST and self.style != "argument":
            raise NestingError(f"{CALL_FIRST} has no styles, write {CALL_FIRST!r} instead of '{self}'")
        if self.style not in styles_of(self.transform):
            written = [str(Layer(self.transform, style)) for style in styles_of(self.transform)]
            raise NestingError(f"{self.transform} has no style {self.style!r}, write {' or '.join(map(repr, written))}")

    def __str__(self) -> str:
        return self.transform if self.style == "argument" else f"{self.transform}[{self.style}]"

    @property
    def captures(self) -> bool:
        """Whether the layer reaches the module by closure instead of being handed it."""
        return self.style.endswith("closure")

    @property
    def plainness(self) -> tuple[int, int]:
        """Sort key: earlier transforms and plainer styles first."""
        return (STYLES.index(self.style), layer_names().index(self.transform))

    @classmethod
    def parse(cls, text: str) -> Layer:
        """Read one layer. Raises `NestingError`."""
        match = _LAYER.fullmatch(text)
        if match is None:
            raise NestingError(f"{text.strip()!r} is not a layer, write 'scan' or 'scan[closure]'")
        return cls(match["transform"], "argument" if match["style"] is None else match["style"])


@dataclass(frozen=True, slots=True, repr=False)
class Nesting:
    """Layers from the outermost inwards, written ``jit > scan[closure] > remat``; none at all is ``un-nested``.

    A mode of flax that is not the current one stands before them: ``tree: jit > scan``.
    """

    layers: tuple[Layer, ...] = ()
    mode: str = MODES[0]

    def __post_init__(self) -> None:
        one_of("mode", self.mode, MODES)

    def __str__(self) -> str:
        layers = " > ".join(map(str, self.layers)) or UN_NESTED
        return layers if self.mode == MODES[0] else f"{self.mode}: {layers}"

    def __repr__(self) -> str:
        return f"Nesting.parse({str(self)!r})"

    def __len__(self) -> int:
        return len(self.layers)

    @property
    def plainness(self) -> tuple[int, int, int, tuple[tuple[int, int], ...]]:
        """Sort key: the plainer mode, then fewer layers, then plainer styles, then earlier transforms."""
        keys = tuple(layer.plainness for layer in self.layers)
        return (MODES.index(self.mode), len(keys), sum(style for style, _ in keys), keys)

    @classmethod
    def parse(cls, text: str) -> Nesting:
        """Read a nesting. Raises `NestingError`."""
        mode, colon, layers = text.partition(":")
        if not colon:
            mode, layers = MODES[0], text
        if not layers.strip():
            raise NestingError(f"an empty nesting, write {UN_NESTED!r} or layers such as 'jit > scan[closure]'")
        mode = one_of("mode", mode.strip(), MODES)
        if layers.strip() == UN_NESTED:
            return cls(mode=mode)
        return cls(tuple(Layer.parse(part) for part in layers.split(">")), mode)


def impossible(nesting: Nesting) -> str:
    """Why jax cannot run the nesting, whatever the subject; empty if it can."""
    outer: list[str] = []
    for layer in nesting.layers:
        if layer.transform in UNCOUNTED and "grad" in outer:
            return "grad cannot go backwards through a while_loop: its number of steps is not known beforehand"
        if layer.transform in ("grad", "shard_map") and layer.transform in outer:
            return IN_ITSELF[layer.transform]
        if layer.transform in (CALL_FIRST, "grad", *ITERATING) and (iterate := set(outer).intersection(ITERATING)):
            return f"{min(iterate)} feeds back what the call returns, and {layer.transform} inside it returns more"
        outer.append(layer.transform)
    return ""


def one_of(kind: str, word: str, valid: Iterable[str]) -> str:
    """Return the word if it is valid. Raises `NestingError` with the nearest valid word."""
    valid = tuple(valid)
    if word in valid:
        return word
    near = difflib.get_close_matches(word, valid, n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"write one of {', '.join(valid)}"
    raise NestingError(f"unknown {kind} {word!r}, {hint}")
