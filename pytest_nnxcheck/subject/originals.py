"""The user's own objects, looked at before they are copied, since copies share nothing and have no views. Tracers that a walk found, as leaks."""

from __future__ import annotations

import re
from collections.abc import Callable, Container, Iterable
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np
from flax import nnx

from pytest_nnxcheck.compat import graph, staging
from pytest_nnxcheck.compat.arrays import describe
from pytest_nnxcheck.core.errors import CheckError
from pytest_nnxcheck.core.facts import Leak, Pairs
from pytest_nnxcheck.core.nesting import Layer
from pytest_nnxcheck.core.notes import Fact, InMappedFile, Note
from pytest_nnxcheck.core.text import near
from pytest_nnxcheck.subject.contents import compared_by_value
from pytest_nnxcheck.subject.subject import Subject
from pytest_nnxcheck.walk.visit import MOST_OBJECTS, FoundTracer
from pytest_nnxcheck.walk.walk import Walk, walk, walk_anew
from pytest_nnxcheck.xla.pointers import (
    byte_ranges,
    foreign_views,
    in_mapped_files,
    is_numpys_own,
    read_leaf,
    shared_buffers,
    spans_of_process,
)

__tracebackhide__ = True  # pytest shows the frames of the user, not these


@dataclass(frozen=True, slots=True)
class Originals:
    """The known facts of the user's own objects."""

    held: tuple[Leak, ...] = ()
    """Tracers that they held before the call; nothing else is known of them then."""
    walk: Walk | None = None
    """The walk that found no tracers."""
    split: tuple[Any, Any] = (None, None)
    """The definition of the graph, and its leaves."""
    compared_by_value: tuple[tuple[tuple[Any, ...], Any], ...] = ()
    """(path, value) of the plain objects with arrays that jax compares with those of a second instance, most likely."""
    shared: Pairs = ()
    """Pairs of leaves in one buffer."""
    views: Pairs = ()
    """The holders of views, each with the leaf that it views."""
    pinned: Pairs = ()
    """Variables, path and type, that were made in a trace that has ended."""
    mapped: InMappedFile | None = None
    """The leaves that lie in a mapped file."""
    notes: tuple[Note, ...] = ()
    """Facts that are reported, not judged."""


def look_at(subject: Subject, uncomputed: Container[int], *, donates: bool, maps: bool) -> Originals:
    """Look at the user's own objects; ``uncomputed`` has the ids of arrays without a value.

    Arrays in memory that is not jax' own are reported where the call ``donates``, those in mapped files only if ``maps``.
    Raises `CheckError` for arrays that are deleted, tracers of a trace that may be under way, and objects that flax cannot split.
    """
    inputs = list(zip(subject.input_names, subject.inputs, strict=False))
    roots = [*subject.roots(subject.state), *inputs]
    seen = walk_anew(roots)
    # A constructor leaves them in the objects that it made. The abstract module has others, and may lead to these.
    of_eval_shape = seen.tracers if subject.abstract and not graph.is_tracing() else []
    if of_eval_shape:
        seen = walk_anew(roots, [left.tracer for left in of_eval_shape])
        if reads_what_is_left(subject, seen):
            paths = ", ".join(left.path for left in of_eval_shape[:3])
            raise CheckError(
                f"{subject.name} reads an array that a constructor keeps outside of any Variable, where nnx.eval_shape left a tracer,"
                f" in {paths}: let the constructor keep it in a Variable, or compute it in the call"
            )
    if seen.tracers:
        return Originals(held=held_before(subject, seen.tracers))
    variables = [(subject.path(path), variable) for path, variable in graph.variables(subject.state)]

    def computed(arrays: Iterable[tuple[str, Any]]) -> list[tuple[str, Any]]:
        return [(path, array) for path, array in arrays if id(array) not in uncomputed]

    leaves = computed((path, graph.variable_value(variable)) for path, variable in variables)
    met = computed(seen.arrays)
    refuse_deleted([*leaves, *met])
    without_values = tuple(path for path, value in leaves if has_no_value(value))
    partly = without_values if len(without_values) < len(leaves) else ()
    split, compared = subject.split(), tuple(compared_by_value(subject.state))
    mapped = in_mapped_file(subject.name, leaves) if donates and maps else None
    arrays = [(path, array) for path, array in met if isinstance(array, jax.Array | np.ndarray)]
    of_numpy = [(path, array) for path, array in arrays if is_numpys_own(array)]
    views = [(path, array) for path, array in arrays if not is_numpys_own(array)]
    taken_over = foreign_views(leaves, of_numpy) if donates else ()
    return Originals(
        walk=seen,
        split=split,
        compared_by_value=compared,
        shared=shared_buffers([read_leaf(*leaf) for leaf in [*leaves, *computed(inputs)]]),
        views=foreign_views(leaves, views),
        pinned=tuple(
            (path, f"{graph.variable_kind(variable)} {describe(graph.variable_value(variable))}")
            for path, variable in variables
            if graph.is_pinned(variable)
        ),
        mapped=mapped,
        notes=(
            *([] if seen.complete else [Fact("walked in part", (subject.name,), count=MOST_OBJECTS)]),
            *([Fact("partly abstract", partly, of=subject.name)] if partly else []),
            *([Fact("left by eval_shape", tuple(left.path for left in of_eval_shape))] if of_eval_shape else []),
            *(Fact("in memory of NumPy", (leaf,), of=holder) for holder, leaf in taken_over),
        ),
    )


def has_no_value(value: Any) -> bool:
    """True for the value of a Variable, an array or a pytree of some, that has a shape and nothing else somewhere."""
    return any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(value))


def reads_what_is_left(subject: Subject, before: Walk) -> bool:
    """True if a trace of the call takes tracers of another trace: jax raises, or makes them parameters that nobody passes."""
    graphdef, leaves = subject.split()

    def call(leaves: Any, inputs: Any) -> Any:
        return subject.program(nnx.merge(graphdef, leaves), *inputs)

    with subject.undone(subject.state, before):
        try:
            traced = jax.jit(call).trace(leaves, subject.inputs)
        except jax.errors.UnexpectedTracerError:
            return True
        except Exception:  # noqa: BLE001 - the nestings say what the call raises
            return False
        return len(staging.open_jaxpr(traced.jaxpr).invars) > len(jax.tree.leaves((leaves, subject.inputs)))


def held_before(subject: Subject, tracers: list[FoundTracer]) -> tuple[Leak, ...]:
    """The tracers that the user's objects hold. Raises `CheckError` where the call may be inside the trace that they are of."""
    if not graph.is_tracing():
        place_of = places_in(subject, subject.state)
        return tuple(replace(leak(left, None, place_of(left)), before=True) for left in tracers)
    paths = ", ".join(tracer.path for tracer in tracers[:3])
    reason = "the call is made inside a transform. Build the module in the test and call it there, outside of any transform: nnx_wrap applies them"
    raise CheckError(f"{subject.name} holds tracers before the call, in {paths}: {reason}")


def refuse_deleted(arrays: Iterable[tuple[str, Any]]) -> None:
    """Raise `CheckError` for an array that is deleted."""
    for path, array in arrays:
        if isinstance(array, jax.Array) and array.is_deleted():
            raise CheckError(
                f"{path} is deleted before the call: an earlier step donated it, or its delete() was called. Build the module inside"
                " the test"
            )


def in_mapped_file(name: str, leaves: Iterable[tuple[str, Any]]) -> InMappedFile | None:
    """The leaves that lie in a mapped file; the copies that are checked do not. `None` where none does."""
    starts = [(path, start) for path, array in leaves for start, _ in byte_ranges(array)]
    mapped = in_mapped_files(starts, spans_of_process() if starts else [])
    if not mapped:
        return None
    paths, files = zip(*mapped, strict=True)
    return InMappedFile(paths, name, near(files[0]))


# --- leaks: where a tracer is, and in what kind of object


def plain_leaves(state: Any) -> list[Any]:
    """The values that the modules hold beside Variables: arrays in a plain dict, say, which `nnx.jit` of flax 0.10 hands back as well."""
    return [leaf for _, value in graph.attributes(state) for leaf in jax.tree.leaves(value)]


def places_in(subject: Subject, state: Any) -> Callable[[FoundTracer], str]:
    """Make a function that locates a tracer: in a Variable or a plain value of a graph node, in another object that a node holds, outside of them, or in
    the output alone.
    """
    plain = {id(leaf) for leaf in plain_leaves(state)}
    output = subject.output_tree.roots()
    seen = walk(subject.roots(state))
    own = {id(leaked.tracer) for leaked in seen.tracers}
    variables = [("", graph.variable_value(node)) for _, node in seen.nodes if graph.is_variable(node)]
    of_others = {id(leaked.tracer) for leaked in walk(variables).tracers}
    returned = {id(leaked.tracer) for leaked in walk(output).tracers} - own
    nodes_returned = filter(graph.is_graph_node, jax.tree.leaves(output, is_leaf=graph.is_graph_node))
    of_modules = {id(leaf) for node in nodes_returned for leaf in plain_leaves(node)}
    of_variables = {id(leaf) for _, value in graph.raw_leaves(state) for leaf in jax.tree.leaves(value)}
    nodes = "|".join(re.escape(name) for name, root in subject.roots(state) if graph.is_graph_node(root))

    def place(leaked: FoundTracer) -> str:
        if id(leaked.tracer) in plain:
            return "module"
        if id(leaked.tracer) in of_variables:
            return "variable"
        if id(leaked.tracer) in returned:
            return "returned module" if id(leaked.tracer) in of_modules else "returned"
        if nodes and re.match(rf"(?:list\()*(?:{nodes})(?!\w)", leaked.path):
            return "object"
        return "variable outside" if id(leaked.tracer) in of_others else "outside"

    return place


def leak(leaked: FoundTracer, layer: Layer | None, place: str = "") -> Leak:
    tracer = leaked.tracer
    return Leak(
        path=leaked.path,
        holder=leaked.holder,
        kind=type(tracer).__name__,
        type=describe(tracer.aval),
        line=graph.tracer_line(tracer),
        layer=str(layer or ""),
        place=place,
        keeper=leaked.keeper,
    )
