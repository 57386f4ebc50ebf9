"""The program of a nesting: the subject with its layers around it, and a guard around every layer.

A guard blames the layer that leaked. On entry it keeps the identities of the traces that are alive; right after its layer
returned or raised, a tracer of any other trace belongs to a trace that has ended. (Using a tracer to see whether it is dead does
not work inside an outer trace on jax >= 0.5.) Guards read and bind no primitive.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp

from pytest_nnxcheck.compat import arrays, flax_modes, graph
from pytest_nnxcheck.compat.arrays import in_type
from pytest_nnxcheck.core.catalogue import CALL_FIRST, REGISTERED
from pytest_nnxcheck.core.nesting import Layer, Nesting
from pytest_nnxcheck.subject.contents import diff
from pytest_nnxcheck.subject.profile import UNKNOWN, Profile
from pytest_nnxcheck.subject.subject import Subject
from pytest_nnxcheck.transforms import layers
from pytest_nnxcheck.transforms.custom import made_by
from pytest_nnxcheck.transforms.layers import LENGTH, Plan, Program
from pytest_nnxcheck.walk.visit import FoundTracer
from pytest_nnxcheck.walk.walk import Walk

__tracebackhide__ = True  # pytest shows the frames of the user, not these


@dataclass(frozen=True, slots=True)
class Blame:
    """The finding of a guard right after its layer: tracers of traces that have ended."""

    layer: Layer
    leaks: tuple[FoundTracer, ...]


@dataclass(slots=True)
class Guards:
    """The guards of one run of a program."""

    subject: Subject
    earlier: Walk | None = None
    """A walk from before the run, which found no tracers."""
    live: list[dict[tuple[int, int], Any]] = field(default_factory=lambda: [{}])
    """The traces that are alive in each layer that is running, the innermost last."""
    reports: list[Blame] = field(default_factory=list)
    """The findings, from the innermost layer outwards."""
    mutated: list[tuple[Layer, str]] = field(default_factory=list)
    """The leaves that an ``eval_shape`` put into the state, each with its layer."""

    def around(self, layer: Layer, program: Program) -> Program:
        """Run the program of a layer, then look for tracers that it leaked."""

        def guarded(state: Any, *inputs: Any) -> Any:
            outer = self.live[-1]
            self.live.append({**outer, **self.traces_of(state, inputs)})
            try:
                return program(state, *inputs)
            finally:
                if dead := self.subject.tracers(state, self.earlier, alive=self.live.pop()):
                    self.reports.append(Blame(layer, dead))

        return guarded

    def traces_of(self, state: Any, inputs: Any) -> dict[tuple[int, int], Any]:
        """Identities of the traces whose tracers arrive, with the traces themselves so that no id is used again."""
        arriving = [*inputs, *(value for _, value in graph.raw_leaves(state))]
        traces = [graph.trace_identity(leaf) for leaf in jax.tree.leaves(arriving) if graph.is_tracer(leaf)]
        return {graph.trace_key(trace): trace for trace in traces}

    @contextmanager
    def unchanged(self, layer: Layer, state: Any) -> Iterator[None]:
        """Note the leaves of the state that an ``eval_shape`` put there, and the places it added or took away: by the identity of the arrays."""
        before = dict(graph.raw_leaves(state))
        yield
        after = dict(graph.raw_leaves(state))
        moved = sorted((path for path, *_ in diff(before, after, operator.is_)), key=str)
        self.mutated += [(layer, self.subject.path(path)) for path in moved]

    def left(self) -> tuple[FoundTracer, ...]:
        """All that the guards found."""
        return tuple(leak for report in self.reports for leak in report.leaks)

    def culprit(self, leak: FoundTracer) -> Layer | None:
        """The innermost layer that leaked this tracer, or one of its trace."""
        of_trace = (report.layer for report in self.reports if any(leak.trace == left.trace for left in report.leaks))
        return next(of_trace, None)


def compose(
    subject: Subject,
    profile: Profile,
    nesting: Nesting,
    guards: Guards,
    jit: Callable[..., Any],
) -> Program:
    """The program of a nesting. ``jit`` applies the jit of the outermost layer."""
    program: Program = subject.program
    inner: tuple[Layer, ...] = ()
    for index, layer in reversed(list(enumerate(nesting.layers))):
        plan = make_plan(subject, profile, layer, inner, guards, jit if index == 0 else plain_jit)
        function = layer_function(layer, in_refs=bool(profile.state.references))
        program = guards.around(layer, function(program, plan))
        inner = (layer, *inner)
    return program


def donated_inputs(subject: Subject, nesting: Nesting, donate: str) -> tuple[int, ...]:
    """The numbers of the inputs that the jit at the root donates.

    None with ``call_first``, which takes two calls' inputs out of one array and returns their outputs apart: no buffer of an input can be kept.
    """
    apart = any(layer.row.pair == "first call" for layer in nesting.layers)
    return () if apart else subject.donated(donate)


MAPPING = Layer("vmap")
"""The layer that maps leaves that the call writes and restores."""


def maps_written(nesting: Nesting) -> bool:
    """True if a layer maps leaves that the call writes and restores."""
    return MAPPING in nesting.layers


def layer_function(layer: Layer, *, in_refs: bool = False) -> Callable[[Program, Plan], Program]:
    """The function of a layer, as `layer_name` names those of ours."""
    if (registered := REGISTERED.get((layer.transform, layer.style))) is not None:
        return made_by(layer.transform, registered)
    function: Callable[[Program, Plan], Program] = getattr(layers, layer_name(layer, in_refs=in_refs))
    return function


def layer_name(layer: Layer, *, in_refs: bool) -> str:
    """The name of the function of a layer; ``in_refs``, of the one that maps references as well, where there is one."""
    name = layer.transform if layer.transform == CALL_FIRST else f"{layer.transform}_{layer.style}"
    return f"{name}_in_refs" if in_refs and hasattr(layers, f"{name}_in_refs") else name


def plain_jit(wrapper: Callable[..., Any], f: Program) -> Program:
    jitted: Program = wrapper(f)
    return jitted


def make_plan(
    subject: Subject,
    profile: Profile,
    layer: Layer,
    inner: tuple[Layer, ...],
    guards: Guards,
    jit: Callable[..., Any],
) -> Plan:
    axes = sum(bool(layer.row.axis) for layer in inner)
    shapes = output_shapes(inner, profile, subject.inputs)
    return Plan(
        changed=lambda path, value: (
            tuple(path) in profile.state.changed and not arrays.is_in_ref(graph.variable_value(value))
        ),
        written=lambda path, _: tuple(path) in profile.state.written,
        subject=subject.program,
        element=lambda leaf: leaf[(0,) * axes],
        shapes=None if profile is UNKNOWN else shapes,
        empty=lambda: jax.tree.map(graph.zeros, shapes),
        parameters=lambda path, _: tuple(path) in profile.training.parameters,
        jit=jit,
        unchanged=lambda state: guards.unchanged(layer, state),
        graph_updates=flax_modes.mode_flags()[1],
    )


def output_shapes(layers: tuple[Layer, ...], profile: Profile, inputs: tuple[Any, ...]) -> Any:
    """The abstract output of a program.

    Every scan and vmap adds a leading axis, ``call_first`` and ``grad`` make a pair: of two calls, of the output and the gradients.
    """
    shapes: Any = profile.output.types
    axes: tuple[int, ...] = ()
    for layer in reversed(layers):
        if layer.transform == CALL_FIRST:
            shapes = (profile.output.types, shapes)
        elif layer.row.pair == "gradients":
            shapes = (shapes, gradient_types(layer, profile, [stacked(leaf, *axes) for leaf in inputs]))
        elif layer.row.axis:
            shapes = jax.tree.map(lambda leaf: stacked(leaf, LENGTH), shapes)
        if layer.row.axis:
            axes = (LENGTH, *axes)
    return shapes


def stacked(leaf: Any, *axes: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((*axes, *leaf.shape), leaf.dtype, sharding=in_type(leaf, len(axes)))


def gradient_types(layer: Layer, profile: Profile, inputs: Iterable[Any]) -> tuple[Any, ...]:
    """The abstract gradients of a ``grad`` layer: by the parameters, or by the inputs where it captures the module."""
    if layer.captures:
        return tuple(leaf for leaf in inputs if jnp.issubdtype(leaf.dtype, jnp.inexact))
    return profile.training.gradients


def primal(layers: tuple[Layer, ...], out: Any) -> Any:
    """The output of the subject itself, out of the output of a program: no gradients."""
    for number, layer in enumerate(layers):
        if layer.transform == CALL_FIRST:
            return out[0], primal(layers[number + 1 :], out[1])
        if layer.row.pair == "gradients":
            out = out[0]
    return out


def stack_inputs(nesting: Nesting, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    """Inputs of the program: one leading axis for every layer that takes one, the outermost layer's in front."""
    for layer in reversed(nesting.layers):
        if layer.row.axis:
            inputs = tuple(map(stack, inputs))
    return inputs


def stack(leaf: Any) -> Any:
    """The leaf many times over, along a new leading axis; of an abstract leaf its shape and sharding."""
    if not isinstance(leaf, jax.ShapeDtypeStruct):
        return arrays.stacked(leaf, LENGTH)
    sharding = leaf.sharding
    if isinstance(sharding, jax.sharding.NamedSharding):
        sharding = jax.sharding.NamedSharding(sharding.mesh, jax.sharding.PartitionSpec(None, *sharding.spec))
    return jax.ShapeDtypeStruct((LENGTH, *leaf.shape), leaf.dtype, sharding=sharding)


def un_nest(nesting: Nesting, out: Any, element: Callable[[Any], Any] | None = None) -> Any:
    """The un-nested output: the first element of every axis (the call on the state as it was handed in), or another of your choice."""
    for layer in nesting.layers:
        if layer.transform == CALL_FIRST:
            out = out[1]
        elif layer.row.pair == "gradients":
            out = out[0]
        elif layer.row.axis:
            out = jax.tree.map(element or first, out)
    return out


def first(leaf: Any) -> Any:
    """The first element of the leading axis, abstract where the leaf is."""
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype)
    return arrays.first(leaf)
