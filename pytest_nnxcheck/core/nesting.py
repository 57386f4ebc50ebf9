"""Layers and nestings: parse, format, order. Pure data, no jax."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from pytest_nnxcheck.core.catalogue import CALL_FIRST, MODES, STYLES, Transform, layer_names, row_of, styles_of
from pytest_nnxcheck.core.text import Unreadable, one_of

UN_NESTED = "un-nested"
_LAYER = re.compile(r"\s*(?P<transform>[^\[\]\s>]+)\s*(?:\[\s*(?P<style>[^\[\]]*?)\s*\])?\s*")


@dataclass(frozen=True, slots=True)
class Layer:
    """One transform in one style: ``scan`` is in the style ``argument``, ``scan[functional]`` in the style ``functional``."""

    transform: str
    """The name of the transform."""
    style: str = "argument"
    """The way in which the layer gets the module."""

    def __post_init__(self) -> None:
        one_of("transform", self.transform, layer_names())
        one_of("style", self.style, STYLES)
        if self.transform == CALL_FIRST and self.style != "argument":
            raise Unreadable(f"{CALL_FIRST} has no styles, write {CALL_FIRST!r} instead of '{self}'")
        if self.style not in styles_of(self.transform):
            written = [str(Layer(self.transform, style)) for style in styles_of(self.transform)]
            raise Unreadable(f"{self.transform} has no style {self.style!r}, write {' or '.join(map(repr, written))}")

    def __str__(self) -> str:
        return self.transform if self.style == "argument" else f"{self.transform}[{self.style}]"

    @property
    def row(self) -> Transform:
        """The row of the catalogue."""
        return row_of(self.transform)

    @property
    def captures(self) -> bool:
        """True if the layer captures the module by closure instead of taking it as an argument."""
        return self.style.endswith("closure")

    @property
    def hands_out(self) -> Literal["all", "leaves"]:
        """The part that leaves the layer of what the call does to its state: of a functional one the leaves that were handed in, and nothing else."""
        return "leaves" if self.style == "functional" else "all"

    @property
    def plainness(self) -> tuple[int, int]:
        """Sort key: earlier transforms and plainer styles first."""
        return (STYLES.index(self.style), layer_names().index(self.transform))

    @classmethod
    def parse(cls, text: str) -> Layer:
        """Read one layer. Raises `Unreadable`."""
        match = _LAYER.fullmatch(text)
        if match is None:
            raise Unreadable(f"{text.strip()!r} is not a layer, write 'scan' or 'scan[closure]'")
        return cls(match["transform"], "argument" if match["style"] is None else match["style"])


@dataclass(frozen=True, slots=True, repr=False)
class Nesting:
    """Layers from the outermost to the innermost, written ``jit > scan[closure] > remat``. Without layers it is ``un-nested``.

    A mode of flax other than the current one comes first: ``tree: jit > scan``.
    """

    layers: tuple[Layer, ...] = ()
    """The layers, the outermost first."""
    mode: str = MODES[0]
    """The mode of flax."""

    def __post_init__(self) -> None:
        one_of("mode", self.mode, MODES)

    def __str__(self) -> str:
        layers = " > ".join(map(str, self.layers)) or UN_NESTED
        return layers if self.mode == MODES[0] else f"{self.mode}: {layers}"

    def __repr__(self) -> str:
        return f"Nesting.parse({str(self)!r})"

    def _repr_pretty_(self, printer: Any, _cycle: object) -> None:
        """Show it in an example of hypothesis, which shows it field by field without this."""
        printer.text(repr(self))

    @property
    def captures(self) -> bool:
        """True if one of its layers captures the module."""
        return any(layer.captures for layer in self.layers)

    def __len__(self) -> int:
        return len(self.layers)

    @property
    def plainness(self) -> tuple[int, int, int, tuple[tuple[int, int], ...]]:
        """Sort key: the plainer mode, then fewer layers, then plainer styles, then earlier transforms."""
        keys = tuple(layer.plainness for layer in self.layers)
        return (MODES.index(self.mode), len(keys), sum(style for style, _ in keys), keys)

    @classmethod
    def parse(cls, text: str) -> Nesting:
        """Read a nesting. Raises `Unreadable`."""
        mode, colon, layers = text.partition(":")
        if not colon:
            mode, layers = MODES[0], text
        if not layers.strip():
            raise Unreadable(f"an empty nesting, write {UN_NESTED!r} or layers such as 'jit > scan[closure]'")
        mode = one_of("mode", mode.strip(), MODES)
        if layers.strip() == UN_NESTED:
            return cls(mode=mode)
        if (alone := _LAYER.fullmatch(layers)) and alone["style"] is None:
            one_of("transform", alone["transform"], (*layer_names(), UN_NESTED))
        return cls(tuple(Layer.parse(part) for part in layers.split(">")), mode)


MisfitKind = Literal[
    "backwards", "inside itself",
    "retyped", "retyped, twice", "relabelled", "added", "removed", "replaced", "attributes set", "sharded leaf",
    "no float input", "no parameter", "no float output", "no derivative",
    "no graph updates", "hidden arrays", "own jit", "no nnx.shard_map", "refused", "branch in a loop",
    "reference carried", "in references", "platform",
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class Misfit:
    """The reason why a nesting cannot take this call, or any call."""

    kind: MisfitKind
    of: str = ""
    """The leaf, object or version that the reason is about, or the words of a transform's row."""
    other: str = ""
    """The exception that is raised, in one line."""
    types: tuple[str, ...] = ()
    """The types before and after the call; of metadata its name, and its values before and after."""
    branches: bool = False
    """The layer may skip the call; other layers carry the state."""
    layer: Layer | None = field(default=None, compare=False)
    """The layer that cannot take it; `None` for the nesting as a whole."""


def impossible(nesting: Nesting) -> Misfit | None:
    """The reason why jax cannot run the nesting, whatever the subject; `None` if it can."""
    outer: list[Transform] = []
    for row in (layer.row for layer in nesting.layers):
        if row.loop == "uncounted" and any(outer_row.pair == "gradients" for outer_row in outer):
            return Misfit("backwards")
        if row.excludes_itself and row in outer:
            return Misfit("inside itself", row.excludes_itself)
        outer.append(row)
    return None


def in_mode(nestings: Iterable[Nesting], mode: str) -> Iterator[Nesting]:
    """The nestings in a mode, each once, less those that name another."""
    yield from dict.fromkeys(replace(nesting, mode=mode) for nesting in nestings if nesting.mode in (MODES[0], mode))
