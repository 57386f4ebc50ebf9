"""The program of a nesting: the subject with its layers around it, and a guard around every layer.

A guard blames the layer that leaked. On entry it keeps the identities of the traces that are alive; right after its layer
returned or raised, a tracer of any other trace belongs to a trace that has ended. (Using a tracer to see whether it is dead does
not work inside an outer trace on jax >= 0.5.) Guards read and bind no primitive.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from pytest_nnxcheck.compat import arrays, flax_modes, graph, staging
from pytest_nnxcheck.core.catalogue import CALL_FIRST, REGISTERED
from pytest_nnxcheck.core.facts import Path
from pytest_nnxcheck.core.nesting import Layer, Nesting
from pytest_nnxcheck.subject.abstract_arrays import abstract_leaf
from pytest_nnxcheck.subject.contents import diff
from pytest_nnxcheck.subject.profile import UNKNOWN, Profile, successors
from pytest_nnxcheck.subject.subject import Subject
from pytest_nnxcheck.transforms import layers
from pytest_nnxcheck.transforms.custom import made_by
from pytest_nnxcheck.transforms.layers import LENGTH, Plan, Program, on_mesh
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
    return jax.ShapeDtypeStruct((*axes, *leaf.shape), leaf.dtype, sharding=arrays.in_type(leaf, len(axes)))


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


# --- the outermost jit: its arguments, and those that it donates


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

    def jit(self, run: Callable[[staging.StagedJit], Any]) -> Callable[..., Any]:
        """``jit(wrapper, f)`` that donates, and gives its program, traced and lowered, to ``run``.

        ``keep_unused`` makes a leaf that is written but never read a parameter, so that it is donated and keeps its pointer, and the numbers of
        parameters line up with those of leaves.
        """
        donated = self.donated_arguments
        options = {"donate_argnums": donated} if donated else {}

        def jit(wrapper: Callable[..., Any], f: Callable[..., Any]) -> Any:
            return staging.staged_jit(wrapper, marked(f), run, keep_unused=True, **options)

        return jit

    def handed(self, state: Any, copy_of: Callable[[Any], Any] = arrays.copied) -> tuple[Any, tuple[Any, ...]]:
        """The arguments of the program: the state, and inputs with an axis for every layer that takes one, made by ``copy_of``."""
        inputs = stack_inputs(self.nesting, self.subject.inputs)
        if self.takes_state and any(layer.row.on_mesh for layer in self.nesting.layers):
            # Elsewhere jax moves them unasked, and refuses to mix captured ones with those of the mesh.
            graphdef, leaves = flax_modes.split(state)
            state, inputs = nnx.merge(graphdef, on_mesh(leaves)), on_mesh(inputs)
        # Copies: what is donated here, or by a jit inside the call, must not be the user's own array.
        return state, tuple(map(abstract_leaf if self.subject.abstract else copy_of, inputs))

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
