"""One call as text: the lines that take it apart, and the expressions for its parts.

`bind` has taken the call apart for the check, so that the place of each node and each array among the arguments is known here, and written out.
"""

from __future__ import annotations

import functools
import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from jax.tree_util import keystr, tree_leaves_with_path

from pytest_nnxcheck.compat import graph
from pytest_nnxcheck.core.nesting import Nesting
from pytest_nnxcheck.core.settings import Settings
from pytest_nnxcheck.subject.plain_objects import Bare, Opened
from pytest_nnxcheck.subject.profile import UNKNOWN, Profile
from pytest_nnxcheck.subject.subject import Nodes, Source, Subject
from pytest_nnxcheck.transforms.root import Root

UNWRAPPED = {
    "partial": "function, args, kwargs = {0}.func, (*{0}.args, *args), {{**{0}.keywords, **kwargs}}",
    "cached partial": "function, args = (lambda f, held: (f, (*held, *args)))(*cached_partial({0}))",
    "method": "function, args = {0}.__func__, ({0}.__self__, *args)",
    "object": "function, args = type({0}).__call__, ({0}, *args)",
}
"""The line that puts what a callable holds among the arguments of the function behind it."""


@dataclass(frozen=True)
class Call:
    """One call under a nesting, and what is known of it."""

    subject: Subject
    profile: Profile
    nesting: Nesting
    settings: Settings
    flags: tuple[bool, bool]
    """The flags of flax's mode: its graph, and graph updates."""

    @property
    def root(self) -> Root:
        """The outermost jit."""
        return Root(self.subject, self.profile, self.nesting, self.settings.donate)

    @property
    def plain(self) -> bool:
        """True if the output is made of arrays alone, as far as is known."""
        return self.profile is UNKNOWN or self.profile.output.plain

    @functools.cached_property
    def places(self) -> Places:
        """The places of its nodes and arrays among its arguments."""
        return Places.of(self.subject)

    @property
    def function(self) -> str:
        """The name of the function that the program calls."""
        return "function" if self.subject.unwrapped else "subject"

    @property
    def short(self) -> bool:
        """True if a line is enough to call it: each node and array is an argument of its own, and its output is one array."""
        return self.places.alone and self.profile.output.plain and self.profile.output.names == ("",)

    def apart(self) -> Iterator[str]:
        """The lines that take the call apart: its state, its inputs, and a program of these, which calls the test's own subject on its own arguments."""
        subject, places = self.subject, self.places
        for number, kind in enumerate(subject.unwrapped):
            yield UNWRAPPED[kind].format("function" if number else "subject")
        held = ""
        if places.fields:
            yield f"fields = [{', '.join(places.fields)}]"
            held = ", [read_field(*field) for field in fields]"
        if not places.alone:
            yield f"leaves, tree = jax.tree.flatten((args, kwargs{held}), is_leaf=is_node)"
        nodes = ", ".join(f"{name!r}: {place}" for name, place in places.nodes.items())
        state = f"Nodes({{{nodes}}})" if isinstance(subject.state, Nodes) else places.nodes[subject.names[0]]
        inputs = ", ".join(place for _, place in sorted(places.inputs.items())) or "0.0"
        yield f"state, inputs = {state}, " + (f"[{inputs}]" if subject.abstract else f"[*map(jnp.asarray, [{inputs}])]")
        if self.short:
            yield f"program = lambda state, *inputs: ({self.function}({places.given}),)"
            return
        lines = [f"output = {self.function}({places.given if places.alone else '*args, **kwargs'})"]
        if self.plain:
            yield "made = []"
            lines += ["made[:] = [jax.tree.structure(output)]", "return arrays_of(output)"]
        else:
            names = dict.fromkeys(f"output{name}" for name in self.profile.output.names)
            lines.append(f"return arrays_of({', '.join(names)})")
        if places.fields:
            lines = ["with filled(fields, values):", *(f"    {line}" for line in lines)]
        if not places.alone:
            own = "args, kwargs, values" if places.fields else "args, kwargs"
            lines.insert(0, f"{own} = jax.tree.unflatten(tree, [{places.given}])")
        yield "\ndef program(state, *inputs):\n" + textwrap.indent("\n".join(lines), "    ") + "\n"

    def keys(self, path: str) -> str:
        """The keys that lead to a leaf, as arguments; empty where it is not in the state."""
        for name, label in sorted(self.subject.labels.items(), key=lambda item: len(item[1]), reverse=True):
            rest = path.removeprefix(label)
            if path.startswith(label) and rest[:1] in ("", ".", "["):
                steps = [repr(word) if word else key for word, key in re.findall(r"\.(\w+)|\[('[^']*'|[^\]]*)\]", rest)]
                return ", ".join([*([repr(name)] if isinstance(self.subject.state, Nodes) else []), *steps])
        return ""

    def value(self, path: str, state: str = "state") -> str:
        """The expression for a leaf or an input by its path; empty for what is neither."""
        if path in self.subject.input_names:
            return f"inputs[{self.subject.input_names.index(path)}]"
        return f"value_at({state}, {keys})" if (keys := self.keys(path)) else ""


@dataclass
class Places:
    """The places of the parts of a call among its arguments, as text."""

    nodes: dict[str, str] = field(default_factory=dict)
    """By the name that each node has in the state."""
    inputs: dict[int, str] = field(default_factory=dict)
    """By their numbers; those of an `nnx.State` by the first one."""
    fields: list[str] = field(default_factory=list)
    """The fields of plain objects that hold some: (object, name, whether it is an item)."""
    given: str = ""
    """The arguments that the program calls with; their leaves, where they are not ``alone``."""
    alone: bool = True
    """True if each node and array is an argument of its own."""

    @classmethod
    def of(cls, subject: Subject) -> Places:
        """The places of a call."""
        made = cls()
        rest = iter(subject.sources)
        behind: list[list[tuple[str, Any, list[Any]]]] = []

        def file(tree: Any, place: str, leaves: list[tuple[str, Any, list[Any]]]) -> None:
            """File the leaves of an argument: the place of each, and what `bind` made of it. The fields of an opened object come behind all arguments."""
            for path, leaf in tree_leaves_with_path(tree, is_leaf=is_part):
                here = place + keystr(path)
                if not isinstance(leaf, Opened):
                    leaves.append(
                        (here, leaf, [next(rest) for _ in (leaf.values if isinstance(leaf, Bare) else (leaf,))])
                    )
                    continue
                leaves.append((here, leaf, []))
                for (kind, name), value in zip(leaf.fields, leaf.values, strict=True):
                    made.fields.append(f"({here}, {name!r}, {kind == 'item'})")
                    behind.append([])
                    file(value, f"{here}[{name!r}]" if kind == "item" else f"{here}.{name}", behind[-1])

        args, kwargs = subject.arguments
        roots = {f"args[{number}]": value for number, value in enumerate(args)}
        roots |= {f"kwargs[{name!r}]": kwargs[name] for name in sorted(kwargs)}
        leaves: list[tuple[str, Any, list[Any]]] = []
        for place, value in roots.items():
            file(value, place, leaves)
        made.alone = not behind and all(place in roots for place, *_ in leaves)
        if made.alone:
            known = {place: made.put(place, leaf, sources, subject) for place, leaf, sources in leaves}
            names = ["", *[""] * len(args)][1:] + [f"{name}=" for name in sorted(kwargs)]
            made.given = ", ".join(name + known.get(place, place) for name, place in zip(names, roots, strict=True))
        else:
            every = [*leaves, *(leaf for own in behind for leaf in own)]
            texts = [made.put(f"leaves[{number}]", *leaf[1:], subject) for number, leaf in enumerate(every)]
            made.given = ", ".join(texts)
        return made

    def put(self, place: str, leaf: Any, sources: list[Any], subject: Subject) -> str:
        """File the place of a leaf; the expression for it in the program, which has nodes and arrays of its own."""
        match sources:
            case [Source(node=str(name))]:
                self.nodes.setdefault(name, place)
                return f"state.{name}" if isinstance(subject.state, Nodes) else "state"
            case [Source(input=int(number)), *_] if isinstance(leaf, Bare):
                self.inputs[number] = f"*jax.tree.leaves({place})"
                return f"jax.tree.unflatten(jax.tree.structure({place}), inputs[{number}:{number + len(sources)}])"
            case [Source(input=int(number))]:
                self.inputs[number] = place
                return f"inputs[{number}]"
        return place


def is_part(value: Any) -> bool:
    """True if a program takes a value as a whole."""
    return isinstance(value, Opened | Bare) or graph.is_graph_node(value)
