"""Programs that are compiled and never run: a subject whose state or inputs are `jax.ShapeDtypeStruct`, of any size.

Where the outermost layer is a jit, XLA's own input-output aliasing tells which donated leaves keep their buffer. Any other
program is traced as a whole, and nothing of it is compiled.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax
from flax import nnx

from pytest_nnxcheck.compat import flax_modes, graph, staging, variables
from pytest_nnxcheck.core.facts import Leaf
from pytest_nnxcheck.subject.abstract_arrays import abstract_leaf
from pytest_nnxcheck.subject.subject import Subject
from pytest_nnxcheck.transforms.compose import Guards
from pytest_nnxcheck.walk.visit import Found
from pytest_nnxcheck.xla.hlo import aliases
from pytest_nnxcheck.xla.pointers import read_leaf

__tracebackhide__ = True  # pytest shows the frames of the user, not these


@dataclass(slots=True)
class Addresses:
    """Numbers in the place of pointers: a parameter has one, and an output that XLA aliases with it has the same."""

    parameters: int = 0
    of: dict[int, int] = field(default_factory=dict)
    kept: list[Any] = field(default_factory=list)

    def assign(self, compiled: Any, arguments: Any, outputs: Any) -> Any:
        """The abstract outputs of a compiled program, each an object of its own with an address."""
        parameters = jax.tree.leaves(arguments)
        self.parameters = len(parameters)
        shardings = jax.tree.leaves(compiled.output_shardings)
        infos, treedef = jax.tree.flatten(outputs)
        made = [
            abstract_leaf(jax.ShapeDtypeStruct(info.shape, info.dtype, sharding=sharding))
            for info, sharding in zip(infos, shardings, strict=True)
        ]
        module = staging.serialized_hlo_module(compiled)
        if module is None:
            return jax.tree.unflatten(treedef, made)
        aliased = aliases(module)
        for number, leaf in enumerate(parameters):
            self.of[id(leaf)] = number + 1
        for number, leaf in enumerate(made):
            # An output that is no parameter's has an address behind all of theirs.
            self.of[id(leaf)] = aliased.get(number, len(parameters) + number) + 1
        self.kept += [*parameters, *made]
        return jax.tree.unflatten(treedef, made)

    def leaf(self, path: str, array: Any) -> Leaf:
        """A leaf with its address for a pointer; none for empty arrays, which own no buffer."""
        leaf = read_leaf(path, array)
        has_address = id(array) in self.of and array.size > 0
        return Leaf(leaf.path, leaf.type, leaf.sharding, (self.of[id(array)],) if has_address else ())


def trace(program: Callable[..., Any], state: Any, inputs: tuple[Any, ...], look: Callable[[Any], Any]) -> Any:
    """The abstract output of a program; the state gets its abstract values.

    ``look(state)`` is called at the end of the trace, also where the program raised, and says whether tracers of other
    traces remain: then the state keeps its values.
    """
    graphdef, leaves = flax_modes.split(state)
    paths: list[Any] = []

    def pure(leaves: Any, *inputs: Any) -> Any:
        module = nnx.merge(graphdef, leaves)
        remain = False
        try:
            out = program(module, *inputs)
        finally:
            remain = look(module)
        after = [] if remain else graph.raw_leaves(module)
        paths.extend(path for path, _ in after)
        return out, [value for _, value in after]

    out, values = jax.eval_shape(pure, leaves, *inputs)
    value_at = dict(zip(paths, values, strict=True))
    for path, variable in graph.variables(state):
        if path in value_at:
            variables.set_variable_value(variable, value_at[path])
    return out


def traced(
    program: Callable[..., Any],
    subject: Subject,
    guards: Guards,
    state: Any,
    inputs: tuple[Any, ...],
    *,
    un_nested: bool = False,
) -> tuple[Any, Exception | None, tuple[Found, ...]]:
    """Trace an abstract program whose outermost layer is no jit: output, exception, and the tracers that remain.

    The trace around it is ours: its tracers in the subject's code are what the concrete call would have put there. Where it is ``un_nested``,
    they are to flax what the arrays of that call would be.
    """
    dead: list[Found] = []

    def look(module: Any) -> bool:
        dead.extend(guards.dead(module, ours))
        return bool(dead)

    def watched(module: Any, *inputs: Any) -> Any:
        ours.update(guards.traces_of(module, inputs))
        with graph.taken_for_arrays(ours.keys()) if un_nested else contextlib.nullcontext():
            return program(module, *inputs)

    ours: dict[tuple[int, int], Any] = {}
    with subject.leaks_undone(state, guards.earlier):
        try:
            output, error = trace(watched, state, inputs, look), None
        except Exception as raised:  # noqa: BLE001 - the user's code may raise anything
            output, error = None, raised
    if dead or guards.reports:
        jax.clear_caches()
    return output, error, tuple(dead)
