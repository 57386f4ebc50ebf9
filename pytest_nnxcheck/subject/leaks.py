"""Turn the tracers that a walk found into leaks: where each is, and in what kind of object."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import jax

from pytest_nnxcheck.compat import graph, variables
from pytest_nnxcheck.compat.arrays import describe
from pytest_nnxcheck.core.facts import Leak
from pytest_nnxcheck.core.nesting import Layer
from pytest_nnxcheck.subject.subject import Subject
from pytest_nnxcheck.walk.visit import Found
from pytest_nnxcheck.walk.walk import walk

__tracebackhide__ = True  # pytest shows the frames of the user, not these


def plain_leaves(state: Any) -> list[Any]:
    """The values that the modules hold beside Variables: arrays in a plain dict, say, which `nnx.jit` of flax 0.10 hands back as well."""
    return [leaf for _, value in graph.attributes(state) for leaf in jax.tree.leaves(value)]


def places_in(subject: Subject, state: Any) -> Callable[[Found], str]:
    """Make a function that locates a tracer: in a Variable or a plain value of a graph node, in another object that a node holds, outside of them, or in
    the output alone.
    """
    plain = {id(leaf) for leaf in plain_leaves(state)}
    output = subject.output_tree.roots()
    own = {id(leaked.tracer) for leaked in walk(subject.roots(state)).tracers}
    returned = {id(leaked.tracer) for leaked in walk(output).tracers} - own
    nodes_returned = filter(graph.is_graph_node, jax.tree.leaves(output, is_leaf=graph.is_graph_node))
    of_modules = {id(leaf) for node in nodes_returned for leaf in plain_leaves(node)}
    of_variables = {id(leaf) for _, value in graph.raw_leaves(state) for leaf in jax.tree.leaves(value)}
    nodes = "|".join(re.escape(name) for name, root in subject.roots(state) if graph.is_graph_node(root))

    def place(leaked: Found) -> str:
        if id(leaked.tracer) in plain:
            return "module"
        if id(leaked.tracer) in of_variables:
            return "variable"
        if id(leaked.tracer) in returned:
            return "returned module" if id(leaked.tracer) in of_modules else "returned"
        return "object" if nodes and re.match(rf"(?:list\()*(?:{nodes})(?!\w)", leaked.path) else "outside"

    return place


def leak(leaked: Found, layer: Layer | None, place: str = "") -> Leak:
    tracer = leaked.tracer
    return Leak(
        path=leaked.path,
        holder=leaked.holder,
        kind=variables.tracer_kind(tracer),
        type=describe(tracer.aval),
        line=variables.tracer_line(tracer),
        layer=str(layer or ""),
        place=place,
        keeper=leaked.keeper,
    )
