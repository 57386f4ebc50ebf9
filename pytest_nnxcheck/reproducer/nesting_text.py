"""A nesting as the text of a program to paste, and what is known of a call under it: how it is taken apart, what its layers must know."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pytest_nnxcheck.compat import flax_modes, graph
from pytest_nnxcheck.compat.sharding import in_type
from pytest_nnxcheck.core.catalogue import CALL_FIRST, REGISTERED, row_of
from pytest_nnxcheck.core.nesting import Layer, Nesting
from pytest_nnxcheck.core.settings import Settings
from pytest_nnxcheck.engine.reference import MEANINGS, meaning_of
from pytest_nnxcheck.reproducer.literals import key_kind
from pytest_nnxcheck.subject.plain_objects import fields_by_class
from pytest_nnxcheck.subject.profile import UNKNOWN, Profile
from pytest_nnxcheck.subject.subject import Nodes, Subject
from pytest_nnxcheck.subject.use_of_state import successors
from pytest_nnxcheck.transforms.compose import donated_inputs, home, output_shapes
from pytest_nnxcheck.transforms.layer import LENGTH

Keys = tuple[Any, ...]
"""The keys that lead from the state to a leaf."""


@dataclass(frozen=True)
class Facts:
    """What is known of one call.

    ``names`` are those of its graph nodes, ``labels`` the user's words for them, with the keys that lead to each. ``inputs`` names its arrays,
    ``donated`` are the numbers of those that are donated, ``returned`` says of which the new value is what output. ``values`` are the attributes of each
    layer's plan as text. Its output is ``plain_output`` where jax alone takes that apart; ``partial`` says that arguments are in a partial, ``opened``
    are the classes, and their fields, of which jax knows nothing.
    """

    names: tuple[str, ...]
    labels: Mapping[str, Keys]
    inputs: tuple[str, ...]
    donated: tuple[int, ...]
    returned: Mapping[int, int]
    state_bytes: int
    values: tuple[Mapping[str, str], ...]
    plain_output: bool
    partial: bool
    opened: Mapping[str, Any]
    abstract: bool

    def value(self, path: str) -> str | None:
        """The expression for a leaf or an input by its path; None for what is neither."""
        if path in self.inputs:
            return f"inputs[{self.inputs.index(path)}]"
        keys = self.keys(path)
        return None if keys is None else f"value_at(state, {', '.join(map(repr, keys))})"

    def keys(self, path: str) -> Keys | None:
        """The keys that lead to a leaf; None where it is not in the state."""
        for label in sorted(self.labels, key=len, reverse=True):
            rest = path.removeprefix(label)
            if path.startswith(label) and rest[:1] in ("", ".", "["):
                return (*self.labels[label], *steps(rest))
        return None


def steps(path: str) -> Iterator[Any]:
    """The keys in ``.layers[0]['x']``."""
    for name, key in re.findall(r"\.(\w+)|\[('[^']*'|[^\]]*)\]", path):
        try:
            yield name or ast.literal_eval(key)
        except (SyntaxError, ValueError):
            yield key


def facts_of(subject: Subject, profile: Profile, nesting: Nesting, settings: Settings) -> Facts:
    """What is known of a call that runs under a nesting. Of one that no trace takes the output is not known."""
    several = isinstance(subject.state, Nodes)
    return Facts(
        names=subject.names,
        labels={label: (name,) if several else () for name, label in subject.labels.items()},
        inputs=subject.input_names,
        donated=donated_inputs(subject, nesting, settings.donate),
        returned=successors(subject, profile, settings.donate),
        state_bytes=profile.copied_bytes,
        values=tuple(plan_values(subject, profile, nesting)),
        plain_output=profile.plain or (profile is UNKNOWN and bool(nesting.layers)),
        partial=subject.partial,
        opened=fields_by_class([value for _, value in subject.opened]) | dict(profile.opened),
        abstract=subject.abstract,
    )


def plan_values(subject: Subject, profile: Profile, nesting: Nesting) -> Iterator[Mapping[str, str]]:
    """What the plan of each layer says, as text, but for its ``jit``."""
    for number, axes in enumerate(inside(nesting)):
        shapes = output_shapes(nesting.layers[number + 1 :], profile, subject.inputs)
        yield {
            "changed": among(profile.changed),
            "written": among(profile.changed | profile.restored),
            "parameters": among(profile.parameters),
            "graph_updates": str(flax_modes.mode_flags()[1]),
            "length": str(LENGTH),
            "subject": "call",
            "element": f"lambda leaf: leaf[{(0,) * axes!r}]",
            "empty": f"lambda: {zeros(shapes)}",
        }


def among(paths: frozenset[Any]) -> str:
    """A filter for these paths."""
    if not paths:
        return "lambda path, _: False"
    return f"lambda path, _: tuple(path) in {{{', '.join(sorted(map(repr, paths)))}}}"


def zeros(shapes: Any) -> str:
    """Arrays of zeros as text; of keys some."""
    if isinstance(shapes, tuple):
        return f"({', '.join(map(zeros, shapes))}{',' * (len(shapes) == 1)})"
    if graph.is_key(shapes):
        return f"jax.random.split(jax.random.key(0, impl={key_kind(shapes.dtype)!r}), {tuple(shapes.shape)})"
    sharding = in_type(shapes)
    if sharding is None:
        return f"jnp.zeros({tuple(shapes.shape)}, {str(shapes.dtype)!r})"
    spec = ", ".join(map(repr, sharding.spec))
    device = f"jax.sharding.NamedSharding(jax.sharding.get_abstract_mesh(), jax.sharding.PartitionSpec({spec}))"
    return f"jnp.zeros({tuple(shapes.shape)}, {str(shapes.dtype)!r}, device={device})"


# --- the nesting


def layers_of(nesting: Nesting) -> list[tuple[str, str]]:
    return [layer_name(layer) for layer in nesting.layers if not is_registered(layer)]


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


def un_nested(nesting: Nesting, text: str, *, abstract: bool) -> str:
    """The expression for the call's own output in that of the nesting."""
    for layer in nesting.layers:
        if layer.transform == CALL_FIRST:
            text += "[1]"
        elif layer.row.pair == "gradients":
            text += "[0]"
        elif layer.row.axis:
            text = f"jax.eval_shape(first, {text})" if abstract else f"first({text})"
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
