"""The subject of a check: a callable, the graph nodes it touches (its state), and its inputs.

`bind` takes a call as the user wrote it apart, and `Subject.fresh` makes the state that every program gets.
"""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import numpy as np
from flax import nnx

from pytest_nnxcheck.compat import flax_modes, graph, variables
from pytest_nnxcheck.compat.arrays import NUMBERS, as_array, copied, is_array, is_ref
from pytest_nnxcheck.core.errors import CheckError, Unfit
from pytest_nnxcheck.core.facts import Path
from pytest_nnxcheck.core.nesting import Misfit
from pytest_nnxcheck.subject import plain_objects
from pytest_nnxcheck.subject.abstract_arrays import abstract_state
from pytest_nnxcheck.walk.visit import Found
from pytest_nnxcheck.walk.walk import Walk, tracers_since, walk, without_garbage

__tracebackhide__ = True  # pytest shows the frames of the user, not these


class Nodes(nnx.Module):
    """The graph nodes and references of a subject that has several, or none, as one node; shared Variables stay shared."""

    def __init__(self, nodes: Mapping[str, Any]) -> None:
        for name, node in nodes.items():
            setattr(self, name, node)


@dataclass(frozen=True, slots=True)
class Source:
    """The source of a leaf of the call's arguments: a graph node or a reference by name, or an input by number."""

    node: str | None = None
    input: int | None = None


@dataclass(slots=True)
class OutputTree:
    """The structure of what one program of the subject returned, whose arrays travel through the program. Filled in while that is traced or run."""

    names: tuple[str, ...] = ()
    """A name for each array: its place in the output."""
    arrays: tuple[Any, ...] = ()
    """The arrays; until the program has ended their types."""
    plain: bool = False
    """True if jax alone gives the output its structure: arrays and numbers, in containers that jax knows."""
    opened: tuple[tuple[str, Any], ...] = ()
    """The classes of the objects in it that were opened, with their fields."""
    rebuild: Callable[[tuple[Any, ...]], Any] = field(default=lambda arrays: arrays)
    """A function that gives arrays the structure of the output."""

    def roots(self) -> list[tuple[str, Any]]:
        """The roots of the walk over the output: a module, a static field of a tree, keep more than arrays."""
        # A tree of the user's own may refuse types in the place of arrays: it is looked at when the program has ended.
        with contextlib.suppress(Exception):
            return [("output", self.rebuild(self.arrays))]
        return []


@dataclass(frozen=True, slots=True)
class Subject:
    """One call of the user's object, taken apart."""

    name: str
    function: Callable[..., Any]
    """The function that the user calls."""
    program: Callable[..., tuple[Any, ...]]
    """``program(state, *inputs)`` calls it and returns a flat tuple of arrays. Every run and every trace takes a program of its own, see `for_run`."""
    program_of: Callable[[Callable[..., Any], OutputTree], Callable[..., tuple[Any, ...]]]
    """A function that makes such a program of another function."""
    state: Any
    """The user's graph nodes, as one node."""
    names: tuple[str, ...]
    """The attribute of ``state`` for each of the user's graph nodes."""
    inputs: tuple[Any, ...]
    """The arrays among the arguments that no graph node holds."""
    input_names: tuple[str, ...]
    static: tuple[tuple[str, Any], ...]
    """The other values among the arguments."""
    output_tree: OutputTree
    """The structure that the user returned, for the arrays of ``program``."""
    abstract: bool
    """True if its arrays have no values: nothing is run."""
    labels: Mapping[str, str]
    """The user's words for ``names``."""
    opened: tuple[tuple[str, Any], ...]
    """The plain objects that hold graph nodes or arrays."""
    code: Any
    """A key of the code and the static values of this call, to tell them from another's."""
    plain: bool = False
    """True if jax alone takes the arguments apart."""
    in_refs: bool = False
    """True if the Variables of its copies are references."""
    partial: bool = False
    """True if some of the arguments are in a `functools.partial` or an `nnx.cached_partial`."""

    def split(self) -> tuple[Any, Any]:
        """The definition of the graph, and its leaves. Raises `CheckError` for what flax has no place for, an array outside a Variable before 0.12: it works eagerly only; and for a reference in two places."""
        first: dict[int, Path] = {}
        # Before flax splits it, which takes such a reference out of the user's second Variable.
        for path, value in graph.raw_leaves(self.state):
            if is_ref(value) and (other := first.setdefault(id(value), path)) != path:
                raise CheckError(
                    f"{self.path(other)} and {self.path(path)} are one mutable array of jax (jax.Ref), and a program takes it once: put one Variable into both places"
                )
        try:
            graphdef, leaves = flax_modes.split(self.state)
        except (TypeError, ValueError) as error:
            raise CheckError(
                f"flax cannot split {', '.join(self.labels.values())}, so no transform can take it: {error!s:.200}"
            ) from None
        return graphdef, leaves

    def for_run(self, function: Callable[..., Any] | None = None) -> Subject:
        """The same call with a program of its own, or one of another function, whose output no other run or trace can touch."""
        tree = OutputTree()
        return replace(self, program=self.program_of(function or self.function, tree), output_tree=tree)

    @property
    def label(self) -> str:
        """The name of the frames of its program."""
        return str(self.program.__code__.co_qualname)

    def fresh(self) -> Any:
        """The same graph with arrays of its own: a donated copy leaves the user's arrays alone. All abstract, or none."""
        copy = abstract_state if self.abstract else functools.partial(jax.tree.map, copy_leaf)
        graphdef, leaves = flax_modes.split(flax_modes.with_refs(self.state, ref=True) if self.in_refs else self.state)
        return nnx.merge(graphdef, copy(leaves))

    def donated(self, donate: str) -> tuple[int, ...]:
        """The numbers of the inputs that are donated. Raises `CheckError` for the name of no argument that holds arrays."""
        if donate == "all":
            return tuple(range(len(self.input_names)))
        names = [re.match(r"\w*", label)[0] for label in self.input_names]  # type: ignore[index]
        first, *wanted = donate.split(",")
        if wanted and first in names:  # an argument of the name that means the state of the modules
            wanted.append(first)
        for word in wanted:
            if word not in names:
                valid = ", ".join(dict.fromkeys(names)) or "none"
                raise CheckError(
                    f"donate={donate!r}: {self.name} takes no array argument named {word!r}; its array arguments are: {valid}"
                )
        return tuple(number for number, name in enumerate(names) if name in wanted)

    def path(self, path: Path) -> str:
        """A path of the state as the user would write it: ``model.layers[0].kernel``."""
        if isinstance(self.state, Nodes):
            return spell(self.labels.get(path[0], str(path[0])), path[1:])
        return spell(self.labels[self.names[0]], path)

    def roots(self, state: Any) -> list[tuple[str, Any]]:
        """The roots of the walk over a copy of the state: the graph nodes under the user's names, other arguments (a callback, a configuration), then the code."""
        # Flax, which raises for an abstract reference, takes the attributes off before.
        nodes = (
            [(self.labels[name], getattr(state, name)) for name in self.names if hasattr(state, name)]
            if isinstance(state, Nodes)
            else [(self.labels[self.names[0]], state)]
        )
        return [*nodes, *self.opened, *self.static, (function_name(self.function), self.function)]

    def tracers(
        self, state: Any, earlier: Walk | None = None, matters: Callable[[Found], bool] = lambda _: True
    ) -> tuple[Found, ...]:
        """The tracers that matter, and are reachable from a copy of the state, other arguments, the code, or the output; ``earlier`` is a walk that found none."""
        roots = [*self.roots(state), *self.output_tree.roots()]
        return without_garbage(lambda: tracers_since(earlier, roots, matters))

    @contextlib.contextmanager
    def undone(self, state: Any, before: Walk | None = None) -> Iterator[list[Found]]:
        """Put back the places that a run or a trace changes, where the test did not ask for it, and empty the caches of jax if it leaks tracers.

        The places get what they held at a walk ``before``. The caches compare static attributes: a dead tracer among these makes every later
        call raise. The list that this gives holds, at the end, the tracers that nobody could put back.
        """
        before = before or walk(self.roots(state))
        left: list[Found] = []
        try:
            yield left
        finally:
            leaked = self.tracers(state, before)
            before.places.restore()
            if leaked:
                jax.clear_caches()
                left += self.tracers(state, before)


def ref_refused(path: str) -> str:
    """Why a mutable array of jax cannot be checked: outside a Variable, or before jax 0.10 and flax 0.12.7."""
    without = "with" if flax_modes.takes_refs() else "without"
    return f"{path} is a mutable array of jax (jax.Ref), which is not supported: keep the array in an nnx.Variable {without} ref=True"


def spell(root: str, path: Path) -> str:
    """Join a path onto its root: attributes after a dot, numbers and other keys in brackets."""
    parts = [f".{key}" if isinstance(key, str) and key.isidentifier() else f"[{key!r}]" for key in path]
    return (root + "".join(parts)).removeprefix(".")


def function_name(function: Any) -> str:
    """The name of the user's code in messages."""
    return getattr(function, "__qualname__", None) or type(function).__qualname__


def is_plain(output: Any) -> bool:
    """True if an output is made of arrays and numbers, in containers that jax knows."""
    leaves = jax.tree.leaves(output, is_leaf=graph.is_graph_node)
    return all(is_array(leaf) or isinstance(leaf, NUMBERS) for leaf in leaves)


def flatten_output(
    output: Any, state: Any = None, home: Any = None
) -> tuple[tuple[Any, ...], Callable[[tuple[Any, ...]], Any], tuple[str, ...]]:
    """The arrays of an output, the function that gives them back its structure, and their names: ``[1].mu['kernel']``.

    Numbers become arrays, as under `jax.jit`. A graph node of the state comes back as the user's own, at the same path of ``home``;
    others are split and merged again; other leaves (strings, say) stay as they are. Raises `CheckError` where jax has no structure
    for the output, and `Unfit` where a leaf hides arrays from it.
    """
    try:
        leaves, treedef = jax.tree_util.tree_flatten_with_path(
            plain_objects.open_up(output), is_leaf=graph.is_graph_node
        )
    except (TypeError, ValueError) as error:
        raise CheckError(
            f"jax cannot flatten what the call returns, so no transform can hand it out: {error}"
        ) from None
    own = paths_of_nodes(state) if any(graph.is_graph_node(leaf) for _, leaf in leaves) else {}
    parts: list[tuple[int, Callable[[tuple[Any, ...]], Any]]] = []
    arrays: list[Any] = []
    names: list[str] = []
    for path, leaf in leaves:
        held, rebuild = flatten_leaf(leaf) if id(leaf) not in own else ((), at_home(home, own[id(leaf)]))
        parts.append((len(held), rebuild))
        arrays.extend(held)
        names.extend([jax.tree_util.keystr(path)] * len(held))

    def rebuild_all(arrays: tuple[Any, ...]) -> Any:
        rest, values = list(arrays), []
        for count, rebuild in parts:
            values.append(rebuild(tuple(rest[:count])))
            del rest[:count]
        return plain_objects.rebuilt(jax.tree_util.tree_unflatten(treedef, values))

    return tuple(arrays), rebuild_all, tuple(names)


def paths_of_nodes(state: Any) -> dict[int, Path]:
    """Every graph node of the state by its identity."""
    paths: dict[int, Path] = {}
    if state is not None:
        for path, node in flax_modes.iter_graph(state):
            if graph.is_graph_node(node):
                paths.setdefault(id(node), tuple(path))
    return paths


def at_home(home: Any, path: Path) -> Callable[[tuple[Any, ...]], Any]:
    """The user's own node at a path, looked up when the call is over: it may have come with the call."""
    return lambda _: next((node for there, node in flax_modes.iter_graph(home) if tuple(there) == path), None)


def flatten_leaf(leaf: Any) -> tuple[tuple[Any, ...], Callable[[tuple[Any, ...]], Any]]:
    """The arrays of one leaf of an output, and how to build the leaf from them."""
    if graph.is_graph_node(leaf):
        graphdef, state = flax_modes.split(Nodes({"node": leaf}))
        values, treedef = jax.tree_util.tree_flatten(state)

        def rebuild(arrays: tuple[Any, ...]) -> Any:
            holder: Any = nnx.merge(graphdef, jax.tree_util.tree_unflatten(treedef, arrays))
            return holder.node

        return tuple(values), rebuild
    # A reference too: jax says in its own words that no program returns one.
    if is_array(leaf) or is_ref(leaf) or isinstance(leaf, NUMBERS):
        return (as_array(leaf),), lambda arrays: arrays[0]
    # Where no transform has to hand it out, the walk looks at its content as at that of a module.
    if variables.is_tracing() and walk([("", leaf)]).tracers:
        raise Unfit(Misfit("hidden arrays", type(leaf).__name__))
    return (), lambda _: leaf


def copy_leaf(leaf: Any) -> Any:
    if isinstance(leaf, jax.Array) or is_ref(leaf):
        return copied(leaf)
    return np.array(leaf) if isinstance(leaf, np.ndarray) else leaf
