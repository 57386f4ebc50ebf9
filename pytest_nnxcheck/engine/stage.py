"""Trace a call under a nesting, and compile nothing: without a jit outside, a clean trace proves that the nesting holds.

A trace shows leaked tracers and exceptions as a run does. Only a clean trace counts, as ``held``. After any other trace the plugin runs the nesting, and
judges the run. After a clean one, outputs and changed state are stand-ins; where the test reads values, the traced program computes them.
The program of a subject without values cannot run: its trace is judged.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
from flax import nnx

from pytest_nnxcheck.compat import flax_modes, staging
from pytest_nnxcheck.compat.arrays import is_held_ref, value_of
from pytest_nnxcheck.compat.compile_cache import SharedPrograms, cached_compiles
from pytest_nnxcheck.compat.graph import attributes, raw_leaves, taken_for_arrays
from pytest_nnxcheck.core.catalogue import CALL_FIRST, JIT, rows_of
from pytest_nnxcheck.core.facts import Observation, Path
from pytest_nnxcheck.core.nesting import Nesting
from pytest_nnxcheck.core.settings import Settings
from pytest_nnxcheck.jaxprs import flow
from pytest_nnxcheck.subject.profile import Profile
from pytest_nnxcheck.subject.subject import Subject, on_arrays
from pytest_nnxcheck.transforms.compose import Guards, compose, plain_jit, stack_inputs, un_nest
from pytest_nnxcheck.values import uncomputed
from pytest_nnxcheck.walk.visit import Found
from pytest_nnxcheck.walk.walk import Walk, holds_beside, walk

__tracebackhide__ = True  # pytest shows the frames of the user, not these


@dataclass(frozen=True, slots=True)
class Staged:
    """One call under one nesting, traced as a whole."""

    arguments: tuple[Any, ...]
    """The leaves of the state, and the inputs."""
    traced: Any = None
    """The trace by jax: a function of ``arguments`` that gives the output and the new leaves of the state. None where the trace raised."""
    error: Exception | None = None
    graph: Any = None
    """The graph of the state after the call; None where flax cannot take that apart, or where it holds tracers."""
    leaks: tuple[Found, ...] = ()
    """The tracers of traces that had ended when this one did."""
    clean: bool = False
    """True if the trace leaked no tracer, and changed no module that a layer must not touch."""

    @property
    def types(self) -> tuple[Any, Any]:
        """The output and the leaves of the state, as types."""
        return jax.tree.map(  # type: ignore[no-any-return]
            lambda info: jax.ShapeDtypeStruct(info.shape, info.dtype, sharding=info.sharding), self.traced.out_info
        )


def stage(
    subject: Subject, facts: Profile, nesting: Nesting, guards: Guards, state: Any = None, *, axes: bool = False
) -> Staged:
    """Trace a call under a nesting, and put back what leaked.

    The trace starts from the call's own state, or from another ``state``. With ``axes`` the output keeps the axes of the nesting.
    """
    program = compose(subject, facts, nesting, guards, plain_jit)
    state = (subject.fresh() if subject.in_refs else subject.state) if state is None else state
    ours: dict[tuple[int, int], Any] = {}
    leaks: list[Found] = []
    ended: list[tuple[Any, bool]] = []

    def whole(module: Any, *inputs: Any) -> Any:
        inputs = stack_inputs(nesting, inputs)
        ours.update(guards.traces_of(module, inputs))
        try:
            # To flax our tracers are what the arrays of a plain call are.
            with contextlib.nullcontext() if nesting.layers else taken_for_arrays(ours.keys()):
                output = program(module, *inputs)
        finally:
            leaks.extend(guards.dead(module, ours))
        after = None
        with contextlib.suppress(TypeError, ValueError):  # flax has no place for what the call put there
            graph, after = (None, None) if leaks else flax_modes.split(module)
            after = jax.tree.map(value_of, after)  # no program returns a reference
            # An attribute that a run would have given an array has a tracer of ours now.
            ended.append((graph, holds_beside(module, jax.tree.leaves(after), guards.earlier)))
        return output if axes else un_nest(nesting, output), after

    function, arguments = on_arrays(whole, subject, state)
    traced, error = None, None
    try:
        with staging.whole_stacks():
            traced = jax.jit(function, keep_unused=True).trace(*arguments)
    except Exception as raised:  # noqa: BLE001 - the user's code may raise anything
        error = raised
    spoiled = bool(subject.tracers(state, guards.earlier))
    if spoiled and guards.earlier is not None:
        guards.earlier.places.restore()
    graph, beside = ended[0] if ended else (None, False)
    if spoiled or leaks or beside or guards.reports:
        # The caches of jax compare static attributes: a dead tracer among them makes every later call raise.
        jax.clear_caches()
    # A program may have parameters that nobody passes: tracers that leaked out of a trace inside, which jax 0.5 finds out when it runs.
    parameters = [] if traced is None else staging.open_jaxpr(traced.jaxpr).invars
    hoisted = len(parameters) > len(jax.tree.leaves(arguments))
    # In a run the call would have put a value into an object of the user's.
    touched = spoiled or leaks or beside or guards.reports or guards.mutated
    graph = graph if error is None else None
    return Staged(arguments, traced, error, graph, tuple(leaks), clean=graph is not None and not (touched or hoisted))


# --- in place of a run


@dataclass(slots=True)
class Values:
    """The values of nestings that are only traced: those that a test has, and needs."""

    needed: bool = False
    """True if the test reads values, so that they have to be computed."""
    stand_ins: dict[int, Any] = field(default_factory=dict)
    """The arrays without values that the present example was handed, by their identity."""

    def computed(self, array: Any) -> bool:
        """True if an array is none of the stand-ins."""
        return id(array) not in self.stand_ins

    def lack(self, subject: Subject) -> bool:
        """True if something that the call is handed has no value."""
        if not self.stand_ins:
            return False
        held = [*raw_leaves(subject.state), *attributes(subject.state)]
        arrays = [*subject.inputs, *(leaf for _, value in held for leaf in jax.tree.leaves(value))]
        return not all(map(self.computed, arrays))

    def require(self, subject: Subject) -> None:
        """Raise `uncomputed.ValuesNeeded` if something that the call is handed has no value."""
        if self.lack(subject):
            raise uncomputed.ValuesNeeded


def tells(subject: Subject, facts: Profile, nesting: Nesting, settings: Settings) -> bool:
    """True if a trace of the nesting can show that it holds: not where values, the runtime, or donation inside the call may break it."""
    runs = (
        any(row.values for row in rows_of(settings.invariants))
        or settings.nesting is not None
        or settings.shortcuts == "off"
    )
    return not (
        runs
        # The memory and the donation of a jit outside are those of its compiled program.
        or (nesting.layers and nesting.layers[0].row.compiles)
        # The trace is that of a jit of ours, which the call need not survive where the test leaves jit out.
        or JIT not in settings.transforms
        # Without values nothing is run anyway: `run.observe` judges the trace.
        or subject.abstract
        # Code of the user's, a donation, and a write to a reference take place when the program runs, and not in a trace.
        or facts.program.calls_back
        or facts.program.inner_donations
        or facts.program.in_references
        # The runtime decides about moves between devices.
        or facts.devices > 1
        or any(layer.row.on_mesh for layer in nesting.layers)
        # Options such as `jax_debug_nans` look at values.
        or staging.checks_values()
        # Two plain calls have no transform that a trace could check.
        or {layer.transform for layer in nesting.layers} == {CALL_FIRST}
    )


FEW = 8
"""Different operations that an un-nested call may make and still be run: XLA compiles each, in a hundredth of what a check takes."""


def is_small(subject: Subject, facts: Profile, values: Values) -> bool:
    """True if an un-nested call is run although a trace shows that it holds: code may raise on arrays that passes in a trace, and to run it costs little.

    False if it is handed stand-ins: their values would have to be computed first.
    """
    return facts.program.operations <= FEW and not values.lack(subject)


def observe(
    subject: Subject, facts: Profile, nesting: Nesting, values: Values, programs: SharedPrograms, originals: Walk
) -> Observation | None:
    """The observation of a nesting by tracing it; `None` where that is not clean, or says too little: then it must be run.

    ``originals`` is a walk of what the call was handed that found no tracers.
    """
    subject = subject.for_run()
    staged = stage(subject, facts, nesting, Guards(subject, originals))
    if not staged.clean:
        return None
    try:
        output, after = compute(staged, programs) if values.needed else hand_out(staged, values)
    except Exception:  # noqa: BLE001 - a run decides where a program without values cannot
        return None
    subject.output_tree.arrays = output
    if walk(subject.output_tree.roots()).tracers:  # in a tree that refuses types, see `OutputTree.roots`
        return None
    state = nnx.merge(staged.graph, after)
    return Observation(
        nesting,
        state,
        output=output,
        still=unmoved(facts, dict(raw_leaves(subject.state)), dict(raw_leaves(state))),
        output_names=subject.output_tree.names,
        rebuild=subject.output_tree.rebuild,
    )


def unmoved(profile: Profile, went_in: Mapping[Path, Any], came_out: Mapping[Path, Any]) -> tuple[Path, ...]:
    """The leaves that the call should change, and that are the same arrays as before; jax hands on what a program passes through."""
    arrays = {path: value for path, value in went_in.items() if not is_held_ref(value)}
    same = (path for path in profile.state.changed if path in arrays and arrays[path] is came_out.get(path))
    return tuple(sorted(same, key=str))


def hand_out(staged: Staged, values: Values) -> tuple[Any, Any]:
    """Give the output and the leaves of the state: the values that the program hands through, and stand-ins for the rest.

    Raises `uncomputed.NoStandIn`.
    """
    jaxpr, arguments = staging.open_jaxpr(staged.traced.jaxpr), jax.tree.leaves(staged.arguments)
    results = []
    for source, var in zip(flow.sources(jaxpr), jaxpr.outvars, strict=True):
        if source is None:
            results.append(uncomputed.stand_in(var.aval, arguments))
            values.stand_ins[id(results[-1])] = results[-1]
        else:
            results.append(arguments[source])
    output, after = jax.tree.unflatten(jax.tree.structure(staged.traced.out_info), results)
    return output, after


def compute(staged: Staged, programs: SharedPrograms) -> tuple[Any, Any]:
    """The output and the leaves of the state, compiled once for every call of the same program. Raises what XLA raises."""
    with cached_compiles():
        output, after = programs.compiled(staged.traced.lower())(*staged.arguments)
    return output, after


def unfused(subject: Subject, facts: Profile, nesting: Nesting) -> Observation | None:
    """The result of a nesting as one program in which XLA fuses no operations; `None` where that cannot be compiled.

    The trace is that of the nesting: only the order in which floats are rounded is another.
    """
    options = staging.unfused_options()
    if options is None or facts.devices > 1 or any(layer.row.on_mesh for layer in nesting.layers):
        return None
    subject = subject.for_run()
    try:
        with subject.undone(subject.state):
            staged = stage(subject, facts, nesting, Guards(subject), axes=True)
            returned, after = staged.traced.lower().compile(compiler_options=options)(*staged.arguments)
            state = nnx.merge(staged.graph, after)
    except Exception:  # noqa: BLE001 - the run decides where this program cannot
        return None
    return Observation(
        nesting,
        state,
        output=un_nest(nesting, returned),
        returned=returned,
        output_names=subject.output_tree.names,
        rebuild=subject.output_tree.rebuild,
    )
