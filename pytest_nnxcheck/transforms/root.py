"""The outermost jit: its arguments, and those that it donates."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
from flax import nnx

from pytest_nnxcheck.compat import flax_modes, graph, staging
from pytest_nnxcheck.compat.arrays import copied
from pytest_nnxcheck.compat.staging import StagedJit
from pytest_nnxcheck.core.facts import Path
from pytest_nnxcheck.core.nesting import Nesting
from pytest_nnxcheck.subject.abstract_arrays import abstract_leaf
from pytest_nnxcheck.subject.profile import Profile, successors
from pytest_nnxcheck.subject.subject import Subject
from pytest_nnxcheck.transforms.compose import donated_inputs, output_shapes, stack_inputs, un_nest
from pytest_nnxcheck.transforms.layers import on_mesh

__tracebackhide__ = True  # pytest shows the frames of the user, not these


@dataclass(frozen=True, slots=True)
class Root:
    """The jit of the outermost layer of a nesting, if that is one."""

    subject: Subject
    profile: Profile
    nesting: Nesting
    donate: str

    @property
    def style(self) -> str | None:
        """Style of the outermost layer if that is a jit."""
        layers = self.nesting.layers
        return layers[0].style if layers and layers[0].row.compiles else None

    @property
    def takes_state(self) -> bool:
        """True if it is handed the state, and captures none. An abstract one must be handed: a constant of a program has a value."""
        return self.state_arguments > 0

    @property
    def state_arguments(self) -> int:
        """The number of its arguments, from the first, that are the state."""
        return {"argument": 1, "functional": 2}.get(self.style or "", 0)

    @property
    def donated_arguments(self) -> tuple[int, ...]:
        """The numbers of the arguments that it donates. A functional one donates the leaves that the call changes, which are its first argument."""
        first = self.state_arguments
        holds_references = self.style == "argument" and self.profile.state.references
        state = (0,) if first and self.donate != "none" and not holds_references else ()
        return (*state, *(first + number for number in donated_inputs(self.subject, self.nesting, self.donate)))

    def jit(self, run: Callable[[StagedJit], Any]) -> Callable[..., Any]:
        """``jit(wrapper, f)`` that donates, and gives its program, traced and lowered, to ``run``.

        ``keep_unused`` makes a leaf that is written but never read a parameter, so that it is donated and keeps its pointer, and the numbers of
        parameters line up with those of leaves.
        """
        donated = self.donated_arguments
        options = {"donate_argnums": donated} if donated else {}

        def jit(wrapper: Callable[..., Any], f: Callable[..., Any]) -> Any:
            return staging.staged_jit(wrapper, marked(f), run, keep_unused=True, **options)

        return jit

    def handed(self, state: Any) -> tuple[Any, tuple[Any, ...]]:
        """The arguments of the program: the state, and inputs with an axis for every layer that takes one."""
        inputs = stack_inputs(self.nesting, self.subject.inputs)
        if self.takes_state and any(layer.row.on_mesh for layer in self.nesting.layers):
            # Elsewhere jax moves them unasked, and refuses to mix captured ones with those of the mesh.
            graphdef, leaves = flax_modes.split(state)
            state, inputs = nnx.merge(graphdef, on_mesh(leaves)), on_mesh(inputs)
        # Copies: what is donated here, or by a jit inside the call, must not be the user's own array.
        return state, tuple(map(abstract_leaf if self.subject.abstract else copied, inputs))

    def donated(self, went_in: Mapping[Path, Any], inputs: tuple[Any, ...]) -> list[tuple[str, Any]]:
        """Names and values of the leaves that it donates, before it does: of the state those that ``went_in``, and those that are written in place."""
        if self.style is None:
            return []
        judged = self.profile.state.references
        if self.takes_state and 0 in self.donated_arguments:
            judged |= {*went_in} if self.style == "argument" else self.profile.state.changed
        leaves = [(self.subject.path(path), value) for path, value in went_in.items() if path in judged]
        numbers = donated_inputs(self.subject, self.nesting, self.donate)
        return leaves + [(self.subject.input_names[number], inputs[number]) for number in numbers]

    def parameters(self) -> tuple[str, ...]:
        """Names of the program's flat state parameters, in order."""
        if not self.takes_state:
            return ()
        paths: Iterable[Path] = self.profile.state.paths
        if self.style == "functional":
            paths = sorted(paths, key=lambda path: path not in self.profile.state.changed)
        elif not flax_modes.mode_flags()[0]:
            paths = graph.flattened_paths(self.subject.state)
        return tuple(self.subject.path(path) for path in paths)

    def outputs(self, count: int) -> tuple[range, dict[int, int]]:
        """The numbers of the outputs that the call returns, among ``count`` of the program, and the bytes of those that are the value of a leaf.

        Every style returns the state first.
        """
        shapes = output_shapes(self.nesting.layers, self.profile, self.subject.inputs)
        leaves, treedef = jax.tree.flatten(shapes)
        numbers = range(count - len(leaves), count)
        own = jax.tree.leaves(un_nest(self.nesting, jax.tree.unflatten(treedef, numbers), lambda leaf: leaf))
        pairs = zip(own, self.profile.output.leaves, strict=False)
        return numbers, {number: self.profile.state.sizes[leaf] for number, leaf in pairs if leaf is not None}

    def new_values(self, output: Any) -> dict[str, tuple[str, Any]]:
        """The outputs that are new values of the donated inputs, each with its own name, by the names of the inputs."""
        subject = self.subject
        # With the axes that the nesting gave it.
        own = jax.tree.leaves(un_nest(self.nesting, output, lambda leaf: leaf))
        given = donated_inputs(subject, self.nesting, self.donate)
        outputs = [(f"output{name}", leaf) for name, leaf in zip(self.profile.output.names, own, strict=False)]
        return {
            subject.input_names[number]: outputs[place]
            for number, place in successors(subject, self.profile, self.donate).items()
            if number in given and place < len(outputs)
        }


def marked(f: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap the function that the jit of a program traces: every stack inside the program ends at the frame of the wrapper."""

    @functools.wraps(f)
    def root(*args: Any) -> Any:
        return f(*args)

    return root
