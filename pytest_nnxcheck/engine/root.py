"""The outermost jit: which arguments it gets and donates, and what its compiled program holds."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import jax
from flax import nnx

from pytest_nnxcheck.compat import flax_modes, graph, staging
from pytest_nnxcheck.compat.arrays import copied, is_in_ref
from pytest_nnxcheck.compat.compile_cache import Compiled, SharedPrograms
from pytest_nnxcheck.compat.staging import StagedJit
from pytest_nnxcheck.core.facts import Leaf, Path
from pytest_nnxcheck.core.nesting import Nesting
from pytest_nnxcheck.core.peak import Copies, Memory, OnTarget, Split
from pytest_nnxcheck.jaxprs.copies import TracedProgram, copies_in
from pytest_nnxcheck.subject.abstract_arrays import abstract_leaf
from pytest_nnxcheck.subject.profile import Profile
from pytest_nnxcheck.subject.subject import Subject
from pytest_nnxcheck.subject.use_of_state import successors
from pytest_nnxcheck.transforms.compose import donated_inputs, own_output, stack_inputs
from pytest_nnxcheck.transforms.layer import LENGTH
from pytest_nnxcheck.transforms.mapping import on_mesh
from pytest_nnxcheck.xla import buffers
from pytest_nnxcheck.xla.hlo import aliases
from pytest_nnxcheck.xla.origins import marked
from pytest_nnxcheck.xla.pointers import read_leaf

__tracebackhide__ = True  # pytest shows the frames of the user, not these


@dataclass(frozen=True, slots=True)
class Root:
    """The jit of the outermost layer of a nesting, if that is one."""

    subject: Subject
    profile: Profile
    nesting: Nesting
    donate: str
    references: frozenset[Path] = frozenset()
    """The leaves that are a `jax.Ref`: written in place, so that their buffers are judged; jax refuses to donate one."""

    @property
    def style(self) -> str | None:
        """Style of the outermost layer if that is a jit."""
        layers = self.nesting.layers
        return layers[0].style if layers and layers[0].row.compiles else None

    @property
    def takes_state(self) -> bool:
        """Whether it is handed the state, and captures none. An abstract one must be: a constant of a program has a value."""
        return self.state_arguments > 0

    @property
    def state_arguments(self) -> int:
        """How many of its arguments, from the first, are the state."""
        return {"argument": 1, "functional": 2}.get(self.style or "", 0)

    @property
    def donated_arguments(self) -> tuple[int, ...]:
        """The numbers of the arguments that it donates. A functional one donates the leaves that the call changes, which are its first argument."""
        first = self.state_arguments
        state = (0,) if first and self.donate != "none" and not (self.references and self.style == "argument") else ()
        return (*state, *(first + number for number in donated_inputs(self.subject, self.nesting, self.donate)))

    def jit(self, run: Callable[[StagedJit], Any]) -> Callable[..., Any]:
        """``jit(wrapper, f)`` that donates, and gives its program, traced and lowered, to ``run``.

        ``keep_unused`` makes a leaf that is written but never read a parameter, so that it is donated and keeps its pointer, and the numbers of
        parameters line up with those of leaves.
        """
        options = {"donate_argnums": self.donated_arguments} if self.donated_arguments else {}

        def jit(wrapper: Callable[..., Any], f: Callable[..., Any]) -> Any:
            return staging.staged_jit(wrapper, marked(f), run, keep_unused=True, **options)

        return jit

    def handed(self, state: Any, length: int = LENGTH) -> tuple[Any, tuple[Any, ...]]:
        """What the program is called with: the state, and inputs with an axis for every layer that takes one."""
        inputs = stack_inputs(self.nesting, self.subject.inputs, length)
        if self.takes_state and any(layer.row.on_mesh for layer in self.nesting.layers):
            # Elsewhere jax moves them by itself, and refuses to mix captured ones with those of the mesh.
            graphdef, leaves = flax_modes.split(state)
            state, inputs = nnx.merge(graphdef, on_mesh(leaves)), on_mesh(inputs)
        # Copies: what is donated here, or by a jit inside the call, must not be the user's own array.
        return state, tuple(map(abstract_leaf if self.subject.abstract else copied, inputs))

    def donated(self, went_in: Mapping[Path, Any], inputs: tuple[Any, ...]) -> list[tuple[str, Any]]:
        """Names and values of the leaves that it donates, before it does: of the state those that ``went_in``, and those that are written in place."""
        if self.style is None:
            return []
        donated = {*went_in} if self.style == "argument" else {*self.profile.changed}
        judged = self.references | (donated if 0 in self.donated_arguments and self.takes_state else set())
        leaves = [(self.subject.path(path), value) for path, value in went_in.items() if path in judged]
        numbers = donated_inputs(self.subject, self.nesting, self.donate)
        return leaves + [(self.subject.input_names[number], inputs[number]) for number in numbers]

    def parameters(self) -> tuple[str, ...]:
        """Names of the program's flat state parameters, in order."""
        if not self.takes_state:
            return ()
        paths: Iterable[Path] = self.profile.state_paths
        if self.style == "functional":
            paths = sorted(paths, key=lambda path: path not in self.profile.changed)
        elif not flax_modes.mode_flags()[0]:
            paths = graph.flattened_paths(self.subject.state)
        return tuple(self.subject.path(path) for path in paths)

    def new_values(self, output: Any) -> dict[str, tuple[str, Any]]:
        """By the names of the donated inputs the outputs that are their new values, each with its own name."""
        subject = self.subject
        own = jax.tree.leaves(own_output(self.nesting, output))
        given = donated_inputs(subject, self.nesting, self.donate)
        outputs = [(f"output{name}", leaf) for name, leaf in zip(self.profile.out_names, own, strict=False)]
        return {
            subject.input_names[number]: outputs[place]
            for number, place in successors(subject, self.profile, self.donate).items()
            if number in given and place < len(outputs)
        }


@dataclass(frozen=True, slots=True)
class Program:
    """The program of a jit at the root, compiled and read."""

    staged: StagedJit
    traced: TracedProgram
    names: tuple[str, ...]
    """The names of its flat parameters, as far as they are known."""
    compiled: Compiled
    memory: Memory
    copies: Copies = field(default_factory=Copies)
    targets: tuple[OnTarget, ...] = ()
    outputs: Any = None
    """The types of the outputs of an abstract program, each an object of its own."""
    addresses: Mapping[int, int] = field(default_factory=dict)
    """What takes the place of pointers for an abstract program: a number for each argument and output, by their identity.

    An output that XLA aliases with an argument has the number of that argument.
    """

    @property
    def in_refs(self) -> bool:
        """Whether references are among its arguments: jax lists no outputs of such a program, and exports none."""
        return any(map(is_in_ref, jax.tree.leaves(self.staged.arguments)))

    def leaf(self, path: str, array: Any) -> Leaf:
        """A leaf with its pointers, or its address; empty arrays own no buffer."""
        leaf = read_leaf(path, array)
        has_address = id(array) in self.addresses and array.size > 0
        return replace(leaf, pointers=(self.addresses[id(array)],)) if has_address else leaf


def measured(root: Root, staged: StagedJit, programs: SharedPrograms, *, alone: bool = False) -> Program:
    """Compile the program of a root, and read its memory; one of ``programs`` that has the same text, unless it is to be ``alone``."""
    compiled, label = programs.compiled(staged.lowered, alone=alone), root.subject.label
    if label not in compiled.read:
        compiled.read[label] = buffers.read(compiled.program, subject=label)
    parameters = root.parameters()
    names = (*parameters, *root.subject.input_names)
    traced = TracedProgram.of(staged, len(parameters))
    return Program(staged, traced, names, compiled, compiled.read[label].with_names(names))


def with_copies(program: Program, root: Root, programs: SharedPrograms) -> Program:
    """The program with the copies of the state that it holds."""

    def split_of(jitted: Any) -> Split:
        return buffers.split_of(programs.program(jitted.lower(*program.traced.arguments)))

    return replace(program, copies=copies_in(program.traced, program.memory, root.profile.copied_bytes, split_of))


def with_addresses(program: Program) -> Program:
    """The abstract program with its outputs, and what XLA's own aliasing tells of their buffers."""
    compiled, parameters = program.compiled.program, program.traced.arguments
    infos, treedef = jax.tree.flatten(program.staged.traced.out_info)
    shardings = [None] * len(infos) if program.in_refs else jax.tree.leaves(compiled.output_shardings)
    made = [
        abstract_leaf(jax.ShapeDtypeStruct(info.shape, info.dtype, sharding=sharding))
        for info, sharding in zip(infos, shardings, strict=True)
    ]
    outputs = jax.tree.unflatten(treedef, made)
    module = staging.serialized_hlo_module(compiled)
    if module is None:
        return replace(program, outputs=outputs)
    aliased = aliases(module)
    # An output that is no parameter's has an address behind all of theirs.
    numbers = [*range(len(parameters)), *(aliased.get(number, len(parameters) + number) for number in range(len(made)))]
    addresses = {id(leaf): number + 1 for leaf, number in zip([*parameters, *made], numbers, strict=True)}
    return replace(program, outputs=outputs, addresses=addresses)
