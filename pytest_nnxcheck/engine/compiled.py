"""The program of the outermost jit, compiled and read: its memory, the copies of the state in it, the buffers of an abstract one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import jax

from pytest_nnxcheck.compat import staging
from pytest_nnxcheck.compat.arrays import is_in_ref
from pytest_nnxcheck.compat.compile_cache import Compiled, SharedPrograms
from pytest_nnxcheck.compat.staging import StagedJit
from pytest_nnxcheck.core.facts import Leaf
from pytest_nnxcheck.core.peak import NO_COPIES, Copies, Memory, OnTarget, Split
from pytest_nnxcheck.jaxprs.copies import TracedProgram, copies_in
from pytest_nnxcheck.subject.abstract_arrays import abstract_leaf
from pytest_nnxcheck.transforms.root import Root
from pytest_nnxcheck.xla import buffers
from pytest_nnxcheck.xla.hlo import aliases
from pytest_nnxcheck.xla.pointers import read_leaf

__tracebackhide__ = True  # pytest shows the frames of the user, not these


@dataclass(frozen=True, slots=True)
class Program:
    """The program of a jit at the root, compiled and read."""

    staged: StagedJit
    traced: TracedProgram
    names: tuple[str, ...]
    """The names of its flat parameters, as far as they are known."""
    compiled: Compiled
    memory: Memory
    copies: Copies = NO_COPIES
    targets: tuple[OnTarget, ...] = ()
    outputs: Any = None
    """The types of the outputs of an abstract program, each an object of its own."""
    addresses: Mapping[int, int] = field(default_factory=dict)
    """A number for each argument and output of an abstract program, by their identity, in place of pointers.

    An output that XLA aliases with an argument has the number of that argument.
    """

    @property
    def in_refs(self) -> bool:
        """True if references are among its arguments: jax lists no outputs of such a program, and exports none."""
        return any(map(is_in_ref, jax.tree.leaves(self.staged.arguments)))

    def leaf(self, path: str, array: Any) -> Leaf:
        """A leaf with its pointers, or its address; empty arrays own no buffer."""
        leaf = read_leaf(path, array)
        has_address = id(array) in self.addresses and array.size > 0
        return replace(leaf, pointers=(self.addresses[id(array)],)) if has_address else leaf


def measured(
    root: Root,
    parameters: tuple[str, ...],
    staged: StagedJit,
    programs: SharedPrograms,
    *,
    alone: bool = False,
    copies: bool = False,
) -> Program:
    """Compile the program of a root, and read its memory: ``parameters`` names those that are the state; with the copies of the state in it where these ``copies`` are asked for.

    It may be one of ``programs`` that has the same text, unless it is to be ``alone``.
    """
    label = root.subject.label
    names = (*parameters, *root.subject.input_names)
    compiled = programs.compiled(staged.lowered, alone=alone)
    if label not in compiled.read:
        compiled.read[label] = buffers.read(compiled.program, subject=label)
    memory, arguments = compiled.read[label].with_names(names), jax.tree.leaves(staged.arguments)
    traced = TracedProgram.of(staged.traced.jaxpr, arguments, staged.donated, leaves=len(parameters))

    def split_of(jitted: Any) -> Split:
        return buffers.split_of(programs.program(jitted.lower(*traced.arguments)))

    held = copies_in(traced, memory, root.profile.copied_bytes, split_of) if copies else NO_COPIES
    return Program(staged, traced, names, compiled, memory, held)


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
