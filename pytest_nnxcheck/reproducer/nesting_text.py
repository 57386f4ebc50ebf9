"""A nesting as the text of a program to paste: its layers by name, the expression that puts them together, and those for its output."""

from __future__ import annotations

from pytest_nnxcheck.core.catalogue import CALL_FIRST, REGISTERED, row_of
from pytest_nnxcheck.core.nesting import Layer, Nesting
from pytest_nnxcheck.engine.reference import MEANINGS, meaning_of
from pytest_nnxcheck.reproducer.own_source import place
from pytest_nnxcheck.transforms.compose import home
from pytest_nnxcheck.transforms.layer import Plan


def layers_of(nesting: Nesting) -> list[tuple[str, str]]:
    return [place(Plan), *(layer_name(layer) for layer in nesting.layers if not is_registered(layer))]


def inside(nesting: Nesting) -> tuple[int, ...]:
    """Of each layer how many leading axes those further in take off the inputs."""
    stacked = [bool(layer.row.axis) for layer in nesting.layers]
    return tuple(sum(stacked[number + 1 :]) for number in range(len(stacked)))


def axes(nesting: Nesting) -> int:
    """How many leading axes all layers take off the inputs."""
    return sum(bool(layer.row.axis) for layer in nesting.layers)


def is_registered(layer: Layer) -> bool:
    return (layer.transform, layer.style) in REGISTERED


def layer_name(layer: Layer) -> tuple[str, str]:
    """Room and name of the function of a layer."""
    name = layer.transform if layer.transform == CALL_FIRST else f"{layer.transform}_{layer.style}"
    return home(name).__name__, name


def own_name(layer: Layer) -> str:
    """The name of a registered transform's function."""
    return str(getattr(REGISTERED[layer.transform, layer.style].function, "__name__", layer.transform))


def places(nesting: Nesting) -> bool:
    """Whether state and inputs are put on every device before the program starts."""
    return bool(root_of(nesting)) and any(layer.row.on_mesh for layer in nesting.layers)


def root_of(nesting: Nesting) -> int | None:
    """How many arguments of the outermost jit are state; None where the outermost layer is no jit."""
    layers = nesting.layers
    if not layers or not layers[0].row.compiles:
        return None
    return {"argument": 1, "functional": 2}.get(layers[0].style, 0)


def composed(nesting: Nesting) -> str:
    """The nesting as one expression."""
    text = "call"
    for number, layer in reversed(list(enumerate(nesting.layers))):
        function = f"registered({own_name(layer)})" if is_registered(layer) else layer_name(layer)[1]
        text = f"{function}({text}, plans[{number}])"
    return text


def un_nested(nesting: Nesting, text: str = "out") -> str:
    """The expression for the call's own output in that of the nesting."""
    for layer in nesting.layers:
        if layer.transform == CALL_FIRST:
            text += "[1]"
        elif layer.row.pair == "gradients":
            text += "[0]"
        elif layer.row.stacks:
            text = f"first_of({text})"
    return text


def meaning_text(nesting: Nesting) -> str:
    """The eager calls that a nesting means."""
    text, axes = "call", 0
    for name in reversed(meaning_of(nesting)):
        text = f"{MEANINGS[name].__name__}({text}, call, {axes})"
        axes += bool(row_of(name).axis)
    return text


def primal_text(nesting: Nesting, out: str = "out", start: int = 0) -> str:
    """The expression for an output without gradients."""
    for number, layer in enumerate(nesting.layers[start:], start):
        if layer.transform == CALL_FIRST:
            return f"({out}[0], {primal_text(nesting, f'{out}[1]', number + 1)})"
        out = f"{out}[0]" if layer.row.pair == "gradients" else out
    return out
