"""A nesting traced as a whole. One without a jit outside, in place of being run: what leaves tracers or raises shows in a trace as well.

Only a clean trace counts, as ``held``; whatever else a trace shows, the nesting is run, and the run is judged. Outputs and the state that
the call changes are then stand-ins, or, where the test reads values, what the traced program itself computes.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Any

import jax
from flax import nnx

from pytest_nnxcheck.compat import compile_cache, flax_modes, staging
from pytest_nnxcheck.compat.graph import raw_leaves, taken_for_arrays
from pytest_nnxcheck.core.catalogue import CALL_FIRST, JIT, rows_of
from pytest_nnxcheck.core.facts import Observation
from pytest_nnxcheck.core.nesting import Nesting
from pytest_nnxcheck.core.settings import Settings
from pytest_nnxcheck.engine.observe import unmoved
from pytest_nnxcheck.jaxprs import flow
from pytest_nnxcheck.subject import uncomputed
from pytest_nnxcheck.subject.profile import Profile
from pytest_nnxcheck.subject.subject import Subject
from pytest_nnxcheck.subject.uncomputed import Values
from pytest_nnxcheck.transforms.compose import Guards, compose, plain_jit, stack_inputs, un_nest
from pytest_nnxcheck.walk.walk import Walk, holds_beside, walk

__tracebackhide__ = True  # pytest shows the frames of the user, not these


def tells(subject: Subject, facts: Profile, nesting: Nesting, settings: Settings) -> bool:
    """Whether a trace of the nesting can tell that it holds: not where values, the runtime, or donation inside the call may break it."""
    runs = (
        any(row.values for row in rows_of(settings.invariants))
        or settings.nesting is not None
        or settings.shortcuts == "off"
    )
    return not (
        runs
        or (nesting.layers and nesting.layers[0].row.compiles)
        or JIT not in settings.transforms
        or subject.abstract
        or facts.calls_back
        or facts.inner_donations
        or facts.devices > 1
        or any(layer.row.on_mesh for layer in nesting.layers)
        or staging.checks_values()
        or {layer.transform for layer in nesting.layers} == {CALL_FIRST}
    )


FEW = 8
"""Different operations that an un-nested call may make and still be run: XLA compiles each, in a hundredth of what a check takes."""


def is_small(subject: Subject, facts: Profile, values: Values) -> bool:
    """Whether an un-nested call is run although a trace tells that it holds: code may raise on arrays that passes in a trace, and to run it costs little.

    Not where it is handed stand-ins: their values would have to be computed first.
    """
    return facts.operations <= FEW and not values.lack(subject)


@dataclass(slots=True)
class Trace:
    """One trace: the program of arrays alone, what it was called with, and what came out beside arrays."""

    arguments: list[Any]
    staged: Any = None
    outputs: int = 0
    graphdef: Any = None
    treedef: Any = None
    dead: bool = False

    @property
    def hoisted(self) -> bool:
        """Whether the program has parameters that nobody passes: tracers that leaked out of a trace inside, which jax 0.5 finds out when it runs."""
        return len(staging.open_jaxpr(self.staged.jaxpr).invars) > len(self.arguments)


def observe(
    subject: Subject,
    facts: Profile,
    nesting: Nesting,
    values: Values,
    programs: compile_cache.SharedPrograms,
    originals: Walk,
) -> Observation | None:
    """The observation of a nesting by tracing it; `None` where that is not clean, or says too little: then it must be run.

    ``originals`` is a walk of what the call was handed that found no tracers.
    """
    subject = subject.for_run()
    guards = Guards(subject, originals)
    trace = stage(subject, facts, nesting, guards)
    spoiled = bool(subject.tracers(subject.state, originals))
    if spoiled:
        originals.places.restore()
    if spoiled or trace.dead or guards.reports:
        # The caches of jax compare static attributes: a dead tracer among them makes every later call raise.
        jax.clear_caches()
    # What the call puts into an object of the user's would hold a value, had it been run.
    if trace.staged is None or trace.hoisted or spoiled or trace.dead or guards.reports or guards.mutated:
        return None
    try:
        results = compute(trace, programs) if values.needed else hand_out(trace, values)
    except Exception:  # noqa: BLE001 - what a program without values cannot tell, a run does
        return None
    subject.output_tree.arrays = tuple(results[: trace.outputs])
    if walk(subject.output_tree.roots()).tracers:  # in a tree that refuses types, see `OutputTree.roots`
        return None
    state = nnx.merge(trace.graphdef, jax.tree.unflatten(trace.treedef, results[trace.outputs :]))
    still = unmoved(facts, dict(raw_leaves(subject.state)), dict(raw_leaves(state)))
    return Observation(
        nesting,
        state,
        output=tuple(results[: trace.outputs]),
        still=still,
        output_names=subject.output_tree.names,
        rebuild=subject.output_tree.rebuild,
    )


def unfused(subject: Subject, facts: Profile, nesting: Nesting) -> Observation | None:
    """What a nesting computes as one program in which XLA fuses no operations; `None` where it cannot be told.

    The trace is that of the nesting: only the order in which floats are rounded is another.
    """
    options = staging.unfused_options()
    if options is None or facts.devices > 1 or any(layer.row.on_mesh for layer in nesting.layers):
        return None
    subject = subject.for_run()
    graphdef, leaves = flax_modes.split(subject.state)
    program = compose(subject, facts, nesting, Guards(subject), plain_jit)
    graphs: list[Any] = []

    def whole(leaves: Any, *inputs: Any) -> Any:
        module = nnx.merge(graphdef, leaves)
        returned = program(module, *stack_inputs(nesting, inputs))
        graph, after = flax_modes.split(module)
        graphs.append(graph)
        return returned, after

    try:
        with subject.undone(subject.state):
            compiled = jax.jit(whole).lower(leaves, *subject.inputs).compile(compiler_options=options)
            returned, after = compiled(leaves, *subject.inputs)
    except Exception:  # noqa: BLE001 - what cannot be told so is told by the run
        return None
    return Observation(
        nesting,
        nnx.merge(graphs[-1], after),
        output=un_nest(nesting, returned),
        returned=returned,
        output_names=subject.output_tree.names,
        rebuild=subject.output_tree.rebuild,
    )


def stage(subject: Subject, facts: Profile, nesting: Nesting, guards: Guards) -> Trace:
    """Trace the program of a nesting; without ``staged`` where it raises."""
    graphdef, leaves = flax_modes.split(subject.state)
    state_leaves, treedef = jax.tree.flatten(leaves)
    program = compose(subject, facts, nesting, guards, plain_jit)
    trace = Trace([*state_leaves, *subject.inputs])
    ours: dict[tuple[int, int], Any] = {}

    def whole(*arguments: Any) -> list[Any]:
        module = nnx.merge(graphdef, jax.tree.unflatten(treedef, arguments[: len(state_leaves)]))
        inputs = stack_inputs(nesting, arguments[len(state_leaves) :])
        ours.update(guards.traces_of(module, inputs))
        try:
            with taken_for_arrays(ours.keys()) if not nesting.layers else contextlib.nullcontext():
                output = un_nest(nesting, program(module, *inputs))
        finally:
            trace.dead = bool(guards.dead(module, ours))
        trace.graphdef, after = flax_modes.split(module)
        changed, trace.treedef = jax.tree.flatten(after)
        # An attribute that a run would have given an array has a tracer of ours now.
        trace.dead = trace.dead or holds_beside(module, changed, guards.earlier)
        trace.outputs = len(output)
        return [*output, *changed]

    try:
        with staging.whole_stacks():
            trace.staged = jax.jit(whole, keep_unused=True).trace(*trace.arguments)
    except Exception:  # noqa: BLE001 - the user's code may raise anything, and raises it again where it is run
        trace.staged = None
    return trace


def hand_out(trace: Trace, values: Values) -> list[Any]:
    """What the program hands through as it is, and stand-ins for the rest. Raises `uncomputed.NoStandIn`."""
    jaxpr = staging.open_jaxpr(trace.staged.jaxpr)
    results = []
    for source, var in zip(flow.sources(jaxpr), jaxpr.outvars, strict=True):
        if source is None:
            result = uncomputed.stand_in(var.aval, trace.arguments)
            values.stand_ins[id(result)] = result
        else:
            result = trace.arguments[source]
        results.append(result)
    return results


def compute(trace: Trace, programs: compile_cache.SharedPrograms) -> list[Any]:
    """What the program computes, compiled once for every call of the same program. Raises what XLA raises."""
    with compile_cache.cached_compiles():
        return list(programs.compiled(trace.staged.lower())(*trace.arguments))
