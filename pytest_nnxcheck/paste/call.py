"""What is known of one call under a nesting, as far as a program needs it: plain data, and text."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import jax

from pytest_nnxcheck.compat import flax_modes, graph
from pytest_nnxcheck.compat.sharding import in_type
from pytest_nnxcheck.core.nesting import Nesting
from pytest_nnxcheck.core.settings import Settings
from pytest_nnxcheck.subject.plain_objects import fields_by_class
from pytest_nnxcheck.subject.profile import UNKNOWN, Profile
from pytest_nnxcheck.subject.subject import Nodes, Subject
from pytest_nnxcheck.transforms.compose import donated_inputs, output_shapes
from pytest_nnxcheck.transforms.layer import LENGTH

GIVEN = {
    (False, False): "(subject, args, kwargs)",
    (False, True): "(subject.__func__, (subject.__self__, *args), kwargs)",
    (True, False): "unwrapped(subject, args, kwargs)",
}
"""How the function of a subject is written with all of its arguments: of a plain one, a method, a partial."""


@dataclass(frozen=True)
class Call:
    """What is known of one call under a nesting."""

    names: tuple[str, ...]
    """Of its graph nodes."""
    labels: Mapping[str, tuple[Any, ...]]
    """The user's words for those, with the keys that lead to each: none where the call has one module alone."""
    inputs: tuple[str, ...]
    donated: tuple[int, ...]
    """The numbers of the inputs that are donated."""
    plans: tuple[Mapping[str, str], ...]
    """What each layer must know, as text."""
    plain: bool
    """Whether jax alone takes the output apart."""
    given: str
    """The function, and all of its arguments: a method or a partial holds some of them."""
    opened: Mapping[str, Any]
    """Classes of which jax knows nothing, with their fields that hold state."""
    abstract: bool
    subject: str
    """Of a call of one module with arrays alone, that gives one array: how the module is called. Nothing needs to be taken apart."""

    @classmethod
    def of(cls, subject: Subject, profile: Profile, nesting: Nesting, settings: Settings) -> Call:
        several = isinstance(subject.state, Nodes)
        return cls(
            names=subject.names,
            labels={label: (name,) if several else () for name, label in subject.labels.items()},
            inputs=subject.input_names,
            donated=donated_inputs(subject, nesting, settings.donate),
            plans=tuple(plans_of(subject, profile, nesting)),
            plain=profile.plain or (profile is UNKNOWN and bool(nesting.layers)),
            given=GIVEN[subject.partial, subject.method],
            opened=fields_by_class([value for _, value in subject.opened]) | dict(profile.opened),
            abstract=subject.abstract,
            subject=whole(subject, profile),
        )

    @property
    def given_by_name(self) -> tuple[str, ...]:
        """The names of the arguments of a whole call, which may be given by keyword."""
        return (*(self.labels if self.subject == "subject" else ()), *self.inputs) if self.subject else ()

    def keys(self, path: str) -> str:
        """The keys that lead to a leaf, as arguments; empty where it is not in the state."""
        for label in sorted(self.labels, key=len, reverse=True):
            rest = path.removeprefix(label)
            if path.startswith(label) and rest[:1] in ("", ".", "["):
                steps = [repr(name) if name else key for name, key in re.findall(r"\.(\w+)|\[('[^']*'|[^\]]*)\]", rest)]
                return ", ".join([*map(repr, self.labels[label]), *steps])
        return ""

    def value(self, path: str, state: str = "state") -> str:
        """The expression for a leaf or an input by its path; empty for what is neither."""
        if path in self.inputs:
            return f"inputs[{self.inputs.index(path)}]"
        return f"value_at({state}, {keys})" if (keys := self.keys(path)) else ""


def whole(subject: Subject, profile: Profile) -> str:
    """How a call of one module with arrays alone is written, whose output is one array; empty for any other."""
    labels, parameters = (
        [*subject.labels.values(), *subject.input_names],
        inspect.signature(subject.function).parameters,
    )
    given = [name for name, each in parameters.items() if each.kind <= each.POSITIONAL_OR_KEYWORD]
    arrays_alone = subject.plain and not (
        subject.partial or subject.method or subject.static or isinstance(subject.state, Nodes)
    )
    if not arrays_alone or not subject.input_names or profile.out_names != ("",) or not profile.plain:
        return ""
    if getattr(subject.function, "__qualname__", "") == f"{type(subject.state).__qualname__}.__call__":
        return "type(subject).__call__" if given[1 : len(labels)] == labels[1:] and "subject" not in labels else ""
    return "subject" if given[: len(labels)] == labels and "subject" not in labels else ""


def plans_of(subject: Subject, profile: Profile, nesting: Nesting) -> Iterator[Mapping[str, str]]:
    """What each layer may read of its plan, but for its ``jit``."""
    for number in range(len(nesting.layers)):
        inner = nesting.layers[number + 1 :]
        axes = sum(bool(layer.row.axis) for layer in inner)
        yield {
            "changed": among(profile.changed),
            "written": among(profile.changed | profile.restored),
            "parameters": among(profile.parameters),
            "graph_updates": str(flax_modes.mode_flags()[1]),
            "length": str(LENGTH),
            "subject": "call",
            "element": f"lambda leaf: leaf[{(0,) * axes!r}]",
            "empty": f"lambda: {zeros(output_shapes(inner, profile, subject.inputs))}",
        }


def among(paths: frozenset[Any]) -> str:
    """A filter for these paths."""
    listed = ", ".join(sorted(map(repr, paths)))
    return f"lambda path, _: tuple(path) in {{{listed}}}" if paths else "lambda path, _: False"


def zeros(shapes: Any) -> str:
    """Arrays of zeros as text; of keys some."""
    if isinstance(shapes, tuple):
        return f"({', '.join(map(zeros, shapes))}{',' * (len(shapes) == 1)})"
    if graph.is_key(shapes):
        kinds = ("threefry2x32", "rbg", "unsafe_rbg")
        kind = next(kind for kind in kinds if jax.random.key(0, impl=kind).dtype == shapes.dtype)
        return f"jax.random.split(jax.random.key(0, impl={kind!r}), {tuple(shapes.shape)})"
    device = ""
    if (sharding := in_type(shapes)) is not None:
        spec = f"jax.sharding.PartitionSpec({', '.join(map(repr, sharding.spec))})"
        device = f", device=jax.sharding.NamedSharding(jax.sharding.get_abstract_mesh(), {spec})"
    return f"jnp.zeros({tuple(shapes.shape)}, {str(shapes.dtype)!r}{device})"
