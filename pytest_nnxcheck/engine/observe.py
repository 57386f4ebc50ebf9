"""Observe one call under one nesting: traced as a whole, compiled, or run, each on a copy of its state. Nothing else in the package runs a nesting.

A trace shows leaked tracers and exceptions as a run does. Without a jit outside, a clean one proves that the nesting holds: outputs and changed state
are stand-ins then, and where the test reads values, the traced program computes them. What any other trace shows is put back, and the nesting is run.
The program of a jit outside is compiled for its memory, and run. That of a subject without values cannot run: XLA's own aliasing tells of its buffers.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
from flax import nnx

from pytest_nnxcheck.compat import backend, flax_modes, refusals, staging
from pytest_nnxcheck.compat.arrays import copied, is_held_ref, is_in_ref, is_ref, value_of
from pytest_nnxcheck.compat.compile_cache import Compiled, cached_compiles, to_the_end
from pytest_nnxcheck.compat.graph import attributes, raw_leaves, taken_for_arrays
from pytest_nnxcheck.core.catalogue import CALL_FIRST, JIT, rows_of
from pytest_nnxcheck.core.facts import InnerDonation, Leaf, Leak, Move, Observation, Path
from pytest_nnxcheck.core.nesting import Nesting
from pytest_nnxcheck.core.on_target import OnTarget
from pytest_nnxcheck.core.peak import NO_COPIES, Copies, Memory, Split
from pytest_nnxcheck.core.text import first_line
from pytest_nnxcheck.engine import known_programs
from pytest_nnxcheck.engine.example import Call, Example
from pytest_nnxcheck.engine.known_programs import KnownProgram, facts_of, keep
from pytest_nnxcheck.jaxprs import flow
from pytest_nnxcheck.jaxprs.copies import TracedProgram, copies_in
from pytest_nnxcheck.subject.abstract_arrays import abstract_leaf
from pytest_nnxcheck.subject.originals import leak, places_in
from pytest_nnxcheck.subject.profile import UNKNOWN, Profile
from pytest_nnxcheck.subject.subject import Subject, on_arrays
from pytest_nnxcheck.transforms.compose import Guards, Root, compose, plain_jit, stack_inputs, un_nest
from pytest_nnxcheck.walk.visit import FoundTracer
from pytest_nnxcheck.walk.walk import holds_beside, recorded_since, walk
from pytest_nnxcheck.xla.pointers import inner_donation, read_leaf

__tracebackhide__ = True  # pytest shows the frames of the user, not these


@dataclass(frozen=True, slots=True)
class How:
    """The way in which a call is observed: run, where nothing else is said."""

    traced: bool = False
    """Trace it as a whole, and compile and run nothing."""
    donate: str | None = None
    """The arguments that the jit outside donates; `None` for those of the settings."""
    copies: bool = False
    """Measure the copies of the state in the program."""
    alone: bool = False
    """Compile a program of its own, and share none that has the same text: its buffers name its own lines."""
    earlier: bool = False
    """Take the facts of the program from an earlier run, if it is known, and hand out stand-ins for what it computes."""
    targets: Callable[[Program, OnMachine], tuple[OnTarget, ...]] | None = None
    """Compiles the program for targets as well, or what it is on their machines."""
    unfused: bool = False
    """Compile what was ``traced``, fuse no operations of it, and run that."""


RUN, TRACED = How(), How(traced=True)


def observe(call: Call, nesting: Nesting, how: How = RUN) -> Observation:
    """Run a call under a nesting that can take it, or trace or compile it. Where that leaked a tracer or raised, what it changed is put back.

    An abstract call is compiled where the jit outside is handed its state, and traced where that has to capture it: a constant of a program has a value.
    """
    # A program of its own: the structure of what it returns is written beside it, where no other run may write.
    subject = call.subject.for_run()
    root = Root(subject, call.profile, nesting, call.settings.donate if how.donate is None else how.donate)
    # A trace reads no values, so that the user's own arrays will do: those that an earlier trace handed out have none to copy.
    state = subject.state if how.traced and not subject.in_refs else subject.fresh(call.example.copied)
    # The copy leads to little that was not walked with the user's own objects.
    roots, walked = subject.roots(state), call.originals.walk
    earlier = (walked if how.traced else walked and walked.extended(roots)) or walk(roots)
    guards = Guards(subject, earlier)
    if how.traced:
        seen, tracers, touched = traced(call, root, guards, state, unfused=how.unfused)
    elif subject.abstract and not root.takes_state:
        seen, tracers, touched = traced_without_values(root, guards, state)
    else:
        try:
            seen, tracers, touched = run(call, root, guards, state, how)
        except Elsewhere as elsewhere:
            seen, tracers, touched = traced_for_targets(call, root, guards, elsewhere)
    leaks: tuple[Leak, ...] = ()
    dropped: tuple[Leak, ...] = ()
    recorded = tuple(leak(left, None) for left in recorded_since(earlier, roots))
    # Lines are read before the places are put back: with them goes the last reference to what a tracer belongs to.
    if tracers:
        place_of, outermost = places_in(subject, seen.state), next(iter(nesting.layers), None)
        leaks = tuple(leak(left, guards.culprit(left) or outermost, place_of(left)) for left in tracers)
    else:
        dropped = tuple(leak(tracer, report.layer) for report in guards.reports for tracer in report.leaks)
    # Where a nesting raised, flax may have taken a captured module apart; what the un-nested call did is the user's.
    if tracers or touched or not seen.proves or (seen.error and nesting.layers):
        earlier.places.restore()
    # The caches of jax compare static attributes: a dead tracer among them makes every later call raise.
    if tracers or touched or guards.reports:
        jax.clear_caches()
    tree = subject.output_tree
    mutated = tuple(guards.mutated)
    seen = replace(seen, recorded=recorded)
    return replace(seen, leaks=leaks, dropped=dropped, mutated=mutated, output_names=tree.names, rebuild=tree.rebuild)


WithTracers = tuple[Observation, tuple[FoundTracer, ...], bool]
"""An observation, the tracers that outlived their trace, and whether a trace of ours put its own where a run would have put arrays."""


# --- run, or compiled


class Stopped(Exception):
    """Raised when the jit outside has its program, to end the call."""


class Elsewhere(BaseException):
    """Raised in place of the exception by which this platform ``refused`` a program, where targets were asked about it.

    Not an ``Exception``, which would be that of the call.
    """

    def __init__(self, refused: Exception, targets: tuple[OnTarget, ...]) -> None:
        super().__init__()
        self.refused = refused
        self.targets = targets


def run(call: Call, root: Root, guards: Guards, state: Any, how: How) -> WithTracers:
    """Run the program of a nesting, compiled for its memory where a jit is outside; an abstract one is compiled alone."""
    subject, programs = root.subject, list[Program]()
    # Their paths are those of the state before the program runs.
    parameters = root.parameters()

    def execute(staged: staging.StagedJit) -> Any:
        program, compiled = judged_program(call, root, parameters, staged, how)
        programs.append(with_outputs(program, compiled, call))
        if programs[-1].outputs is not None:
            return programs[-1].outputs
        call.example.require_values(subject)
        return staged.run(compiled)

    nested = compose(subject, root.profile, root.nesting, guards, root.jit(execute))
    state, inputs = root.handed(state, call.example.copied)
    went_in = dict(raw_leaves(state))
    # Before the program runs: what it donates has no pointer any more.
    given = [read_leaf(*leaf) for leaf in root.donated(went_in, inputs)]
    returned, error = to_the_end(nested, state, inputs, call.example.stand_ins)
    program = programs[-1] if programs else None
    seen = Observation(root.nesting, state, returned=returned, error=error, abstract=subject.abstract)
    if error is None:
        seen = replace(seen, output=un_nest(root.nesting, returned, call.example.first))
        subject.output_tree.arrays = seen.output
    tracers = subject.tracers(state, guards.earlier)
    if program is not None:
        if not tracers and subject.abstract and program.traced.hoisted:
            tracers = guards.left()  # which jax 0.5 and flax 0.10 let through
        seen = with_program(seen, program, subject.label)
    if error or tracers:
        return seen, tracers, False
    came_out = dict(raw_leaves(state))
    if not subject.abstract:
        seen = replace(seen, still=unmoved(root.profile, went_in, came_out))
    if not root.nesting.layers:
        seen = replace(seen, inside=donated_inside(subject, went_in, inputs, came_out, returned))
    elif program is not None:
        given = given if program.outputs is None else [program.leaf(*leaf) for leaf in root.donated(went_in, inputs)]
        seen = with_moves(seen, root, program, came_out, given)
    return seen, (), False


def with_program(seen: Observation, program: Program, label: str) -> Observation:
    """The observation of a program, with what was read of it."""
    compiled, earlier = program.compiled, bool(program.known and program.known.earlier)
    seen = replace(seen, memory=program.memory, copies=program.copies, targets=program.targets, earlier=earlier)
    if compiled is None:
        return seen
    keeps = functools.partial(keep, compiled, label)
    return replace(seen, shared=compiled.shared, compiled=None if earlier else compiled.program, keep=keeps)


def with_moves(
    seen: Observation, root: Root, program: Program, came_out: Mapping[Path, Any], given: list[Leaf]
) -> Observation:
    """The observation of a program that ended well, with the fate of the arrays that it donates, which are ``given``."""
    after = {(name := root.subject.path(path)): program.leaf(name, value) for path, value in came_out.items()}
    after |= {donated: program.leaf(*new) for donated, new in root.new_values(seen.returned).items()}
    # A Variable may hold a tree, and a module plain values: what came back in those took a buffer as well.
    held = [value for _, value in attributes(seen.state)]
    arrays = jax.tree.leaves([*came_out.values(), seen.returned, *held])
    with_buffer = (each for each in arrays if isinstance(each, jax.Array | jax.ShapeDtypeStruct) or is_ref(each))
    reused = frozenset(pointer for array in with_buffer for pointer in program.leaf("", array).pointers)
    moves = tuple(Move(leaf, after.get(leaf.path)) for leaf in given)
    return replace(seen, moves=moves, reused=reused)


def donated_inside(
    subject: Subject, went_in: dict[Path, Any], inputs: tuple[Any, ...], came_out: dict[Path, Any], output: Any
) -> InnerDonation:
    """The arguments of the un-nested call that a jit inside it donated."""
    handed = {subject.path(path): array for path, array in went_in.items()}
    handed |= zip(subject.input_names, inputs, strict=False)
    left = {subject.path(path): array for path, array in came_out.items()}
    return inner_donation(handed, left, jax.tree.leaves(output))


def traced_again(call: Call, nesting: Nesting, after: Any) -> bool:
    """True if a nesting is traced again for the state ``after`` its first call. Whatever the traces touch is put back."""
    traces: list[int] = []

    def counted(*args: Any, **kwargs: Any) -> Any:
        traces.append(len(traces))
        return call.subject.function(*args, **kwargs)

    def stop(_: staging.StagedJit) -> Any:
        raise Stopped

    subject = call.subject.for_run(counted)
    root = Root(subject, call.profile, nesting, call.settings.donate)
    # One jitted function for both calls: it is what remembers its traces.
    program = compose(subject, call.profile, nesting, Guards(subject), root.jit(stop))
    with subject.undone(subject.state):
        to_the_end(program, *root.handed(subject.fresh()))
        first = len(traces)
        to_the_end(program, *root.handed(nnx.merge(*flax_modes.split(after))))
    return len(traces) > first


# --- traced


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
    leaks: tuple[FoundTracer, ...] = ()
    """The tracers of traces that had ended when this one did."""
    touched: bool = False
    """True if tracers were put where a run would have put arrays."""
    clean: bool = False
    """True if the trace leaked no tracer, and changed no module that a layer must not touch."""

    @property
    def types(self) -> tuple[Any, Any]:
        """The output and the leaves of the state, as types."""
        return jax.tree.map(  # type: ignore[no-any-return]
            lambda info: jax.ShapeDtypeStruct(info.shape, info.dtype, sharding=info.sharding), self.traced.out_info
        )


def stage(root: Root, guards: Guards, state: Any, *, axes: bool = False) -> Staged:
    """Trace a call under a nesting, from a state that is left as it is. With ``axes`` the output keeps the axes of the nesting."""
    subject, nesting = root.subject, root.nesting
    program = compose(subject, root.profile, nesting, guards, plain_jit)
    ours: dict[tuple[int, int], Any] = {}
    leaks: list[FoundTracer] = []
    ended: list[tuple[Any, bool]] = []

    def whole(module: Any, *inputs: Any) -> Any:
        inputs = stack_inputs(nesting, inputs)
        ours.update(guards.traces_of(module, inputs))
        try:
            # To flax our tracers are what the arrays of a plain call are.
            with contextlib.nullcontext() if nesting.layers else taken_for_arrays(ours.keys()):
                output = program(module, *inputs)
        finally:
            leaks.extend(subject.tracers(module, guards.earlier, ours))
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
    graph, beside = ended[0] if ended else (None, False)
    graph = graph if error is None else None
    touched = bool(subject.tracers(state, guards.earlier) or leaks or beside)
    # A program may have parameters that nobody passes: tracers that leaked out of a trace inside, which jax 0.5 finds out when it runs.
    parameters = [] if traced is None else staging.open_jaxpr(traced.jaxpr).invars
    hoisted = len(parameters) > len(jax.tree.leaves(arguments))
    clean = graph is not None and not (touched or guards.reports or guards.mutated or hoisted)
    return Staged(arguments, traced, error, graph, tuple(leaks), touched, clean)


def traced(call: Call, root: Root, guards: Guards, state: Any, *, unfused: bool) -> WithTracers:
    """Trace a nesting as a whole. What comes out are the values that it hands through, and stand-ins for the rest, or the values of the traced program."""
    subject, nesting = root.subject, root.nesting
    staged = stage(root, guards, state, axes=unfused)
    unclean = Observation(nesting, state, error=staged.error, proves=False)
    if not staged.clean:
        return unclean, staged.leaks, staged.touched
    returned = None
    try:
        if unfused:
            options = staging.unfused_options()
            returned, after = staged.traced.lower().compile(compiler_options=options)(*staged.arguments)
            output = un_nest(nesting, returned)
        elif call.example.values_needed:
            with cached_compiles():  # once for every call of the same program
                output, after = call.memo.shared_programs.compiled(staged.traced.lower())(*staged.arguments)
        else:
            output, after = hand_out(staged.traced, jax.tree.leaves(staged.arguments), call.example)
    except Exception:  # noqa: BLE001 - a run decides where a program without values cannot
        return unclean, (), False
    subject.output_tree.arrays = output
    if walk(subject.output_tree.roots()).tracers:  # in a tree that refuses types, see `OutputTree.roots`
        return unclean, (), False
    came_out = nnx.merge(staged.graph, after)
    still = unmoved(root.profile, dict(raw_leaves(state)), dict(raw_leaves(came_out)))
    return Observation(nesting, came_out, output=output, returned=returned, still=still), (), False


def traced_without_values(root: Root, guards: Guards, state: Any) -> WithTracers:
    """Trace a nesting as a whole, and judge it by that: no program of it can run."""
    staged = stage(root, guards, state)
    output, after = (None, None) if staged.traced is None else staged.types
    state = state if staged.graph is None else nnx.merge(staged.graph, after)
    return (
        Observation(root.nesting, state, output=output, error=staged.error, abstract=True),
        staged.leaks,
        staged.touched,
    )


def hand_out(traced: Any, arguments: Sequence[Any], example: Example) -> Any:
    """Give what a traced program returns: the values that it hands through, and stand-ins for the rest."""
    jaxpr = staging.open_jaxpr(traced.jaxpr)
    results = []
    for source, var in zip(flow.sources(jaxpr), jaxpr.outvars, strict=True):
        results.append(example.stand_in(var.aval) if source is None else arguments[source])
    return jax.tree.unflatten(jax.tree.structure(traced.out_info), results)


def unfused(subject: Subject, facts: Profile, nesting: Nesting) -> Observation | None:
    """The result of a nesting as one program in which XLA fuses no operations; `None` where that cannot be compiled.

    The trace is that of the nesting: only the order in which floats are rounded is another.
    """
    if staging.unfused_options() is None or facts.devices > 1 or any(layer.row.on_mesh for layer in nesting.layers):
        return None
    with subject.undone(subject.state):
        seen = observe(Call(subject, nesting, profile=facts), nesting, How(traced=True, unfused=True))
    return seen if seen.proves else None


def traced_for_targets(call: Call, root: Root, guards: Guards, elsewhere: Elsewhere) -> WithTracers:
    """Trace a nesting whose program targets alone can lower, so that the caller has something to go on with. No values can be computed here."""
    state, taken = root.subject.fresh(), any(not on.left_out for on in elsewhere.targets)
    seen, tracers, touched = Observation(root.nesting, state, proves=False), tuple[FoundTracer, ...](), False
    if taken and root.subject.abstract:
        seen, tracers, touched = traced_without_values(root, guards, state)
    elif taken and not call.example.values_needed:
        seen, tracers, touched = traced(call, root, guards, state, unfused=False)
    if not seen.proves:
        seen = replace(seen, error=elsewhere.refused, proves=True)
    return replace(seen, targets=elsewhere.targets, refused=first_line(elsewhere.refused)), tracers, touched


def unmoved(profile: Profile, went_in: Mapping[Path, Any], came_out: Mapping[Path, Any]) -> tuple[Path, ...]:
    """The leaves that the call should change, and that are the same arrays as before; jax hands on what a program passes through."""
    arrays = {path: value for path, value in went_in.items() if not is_held_ref(value)}
    same = (path for path in profile.state.changed if path in arrays and arrays[path] is came_out.get(path))
    return tuple(sorted(same, key=str))


def tells(call: Call) -> bool:
    """True if a trace of the nesting can show that it holds: not where values, the runtime, or donation inside the call may break it."""
    facts, nesting, settings = call.profile, call.nesting, call.settings
    return not (
        any(row.values for row in rows_of(settings.invariants))
        or settings.nesting is not None
        or settings.shortcuts == "off"
        # The memory and the donation of a jit outside are those of its compiled program.
        or (nesting.layers and nesting.layers[0].row.compiles)
        # The trace is that of a jit of ours, which the call need not survive where the test leaves jit out.
        or JIT not in settings.transforms
        # Without values nothing is run anyway: `observe` judges the trace.
        or call.subject.abstract
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


def traces(call: Call) -> bool:
    """True if a trace may tell that the nesting holds, so that it need not run. An un-nested call is run where it costs little, or its values are needed."""
    if not tells(call):
        return False
    runs = call.profile is UNKNOWN or call.example.values_needed or is_small(call)
    return bool(call.nesting.layers) or not runs


def takes_earlier(call: Call) -> bool:
    """True if what an earlier run found out of the program of a nesting is enough without a run: it is about the program alone, and not about values or the runtime."""
    facts, settings, layers = call.profile, call.settings, call.nesting.layers
    return not (
        not layers
        or not layers[0].row.compiles
        or any(row.values or row.runs or row.function for row in rows_of(settings.invariants))
        or settings.nesting is not None
        or settings.shortcuts == "off"
        or call.example.values_needed
        or call.subject.in_refs
        or facts is UNKNOWN
        or facts.program.calls_back
        or facts.program.inner_donations
        or facts.program.in_references
        or facts.devices > 1
        or any(layer.row.on_mesh for layer in layers)
        or staging.checks_values()
        # What is stacked along an axis has a value.
        or (call.example.lacks(call.subject) and any(layer.row.axis for layer in layers))
    )


FEW = 8
"""Different operations that an un-nested call may make and still be run: XLA compiles each, in a hundredth of what a check takes."""


def is_small(call: Call) -> bool:
    """True if an un-nested call is run although a trace shows that it holds: code may raise on arrays that passes in a trace, and to run it costs little.

    False if it is handed stand-ins: their values would have to be computed first.
    """
    return call.profile.program.operations <= FEW and not call.example.lacks(call.subject)


# --- the program of the jit outside


@dataclass(frozen=True, slots=True)
class Program:
    """The program of a jit at the root, compiled and read; traced alone where this platform refuses it."""

    staged: staging.StagedJit
    traced: TracedProgram
    names: tuple[str, ...]
    """The names of its flat parameters, as far as they are known: first those of the state."""
    compiled: Compiled | None = None
    known: KnownProgram | None = None
    memory: Memory | None = None
    copies: Copies = NO_COPIES
    targets: tuple[OnTarget, ...] = ()
    outputs: Any = None
    """The outputs of a program that does not run, each an object of its own: types, or stand-ins. `None` for one that runs."""
    addresses: Mapping[int, int] = field(default_factory=dict)
    """A number for each argument and output of a program that does not run, by their identity, in place of pointers.

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


OnMachine = Callable[[backend.Machine], tuple["Program", dict[str, str]]]
"""See `on_machine`."""


def on_machine(root: Root, program: Program, machine: backend.Machine) -> tuple[Program, dict[str, str]]:
    """The program as it is traced on another machine, whose figures stay those of the CPU's, and the lines that ask for the machine, with their answers.

    Raises what the user's code raises there. Nothing of it runs.
    """
    subject, found = root.subject.for_run(), list[staging.StagedJit]()
    there = replace(root, subject=subject)

    def stop(staged: staging.StagedJit) -> Any:
        found.append(staged)
        raise Stopped

    nested = compose(subject, root.profile, root.nesting, Guards(subject), there.jit(stop))
    with subject.undone(subject.state), backend.asked(machine) as lines:
        _, error = to_the_end(nested, *there.handed(subject.fresh()))
    if error is not None and not found:
        raise error
    return replace(program, staged=found[0], traced=traced_program(there, found[0])), lines


def traced_program(root: Root, staged: staging.StagedJit) -> TracedProgram:
    """The traced program of a root."""
    outputs, returned = root.outputs(len(staging.open_jaxpr(staged.traced.jaxpr).outvars))
    arguments = jax.tree.leaves(staged.arguments)
    return TracedProgram.of(staged.traced.jaxpr, arguments, staged.donated, outputs=outputs, returned=returned)


def judged_program(
    call: Call, root: Root, parameters: tuple[str, ...], staged: staging.StagedJit, how: How
) -> tuple[Program, Compiled]:
    """The program of a root, compiled here and for targets: ``parameters`` names those that are the state.

    Raises what jax and XLA raise, and `Elsewhere` where this platform refuses it and targets were asked.
    """
    program = Program(staged, traced_program(root, staged), (*parameters, *root.subject.input_names))

    def on_targets(program: Program) -> tuple[OnTarget, ...]:
        return how.targets(program, functools.partial(on_machine, root, program)) if how.targets else ()

    try:
        program, compiled = measured(call, root, program, how)
    except Exception as error:
        if how.targets is None or not refusals.is_of_platform(error):
            raise
        raise Elsewhere(error, on_targets(program)) from error
    return replace(program, targets=on_targets(program)), compiled


def measured(call: Call, root: Root, program: Program, how: How) -> tuple[Program, Compiled]:
    """Compile the program of a root, or take what is known of one that has the same text, and read it. Raises what jax and XLA raise."""
    programs, traced, runs = call.memo.shared_programs, program.traced, not takes_earlier(call)
    compiled = programs.compiled(program.staged.traced.lower(), alone=how.alone, runs=runs)
    known = facts_of(compiled, root.subject.label, earlier=how.earlier)
    memory = known.facts.memory.with_names(program.names)

    def split_of(jitted: Any) -> Split:
        return known_programs.split_of(programs.compiled(jitted.lower(*traced.arguments), runs=runs))

    held = copies_in(traced, memory, root.profile.copied_bytes, split_of) if how.copies else NO_COPIES
    return replace(program, compiled=compiled, known=known, memory=memory, copies=held), compiled


def with_outputs(program: Program, compiled: Compiled, call: Call) -> Program:
    """A program that does not run, with what it returns and what XLA's own aliasing tells of their buffers; any other as it is."""
    assert program.known is not None
    if call.subject.abstract:
        outputs = abstract_outputs(program, compiled)
    elif program.known.earlier:
        outputs = stand_ins(program, call.example)
    else:
        return program
    parameters, made, aliased = program.traced.arguments, jax.tree.leaves(outputs), program.known.facts.aliases
    if aliased is None:
        return replace(program, outputs=outputs)
    # An output that is no parameter's has an address behind all of theirs.
    numbers = [*range(len(parameters)), *(aliased.get(number, len(parameters) + number) for number in range(len(made)))]
    addresses = {id(leaf): number + 1 for leaf, number in zip([*parameters, *made], numbers, strict=True)}
    return replace(program, outputs=outputs, addresses=addresses)


def abstract_outputs(program: Program, compiled: Compiled) -> Any:
    """The types of what an abstract program returns."""
    infos, treedef = jax.tree.flatten(program.staged.traced.out_info)
    one_device = program.in_refs or (program.known is not None and program.known.earlier)
    shardings = [None] * len(infos) if one_device else jax.tree.leaves(compiled.program.output_shardings)
    made = [
        abstract_leaf(jax.ShapeDtypeStruct(info.shape, info.dtype, sharding=sharding))
        for info, sharding in zip(infos, shardings, strict=True)
    ]
    return jax.tree.unflatten(treedef, made)


def stand_ins(program: Program, example: Example) -> Any:
    """Outputs of a program that does not run: copies of the values that it hands through, as a run gives, and stand-ins for the rest."""
    arguments = program.traced.arguments
    handed = {id(array) for array in arguments} - {*example.stand_ins}
    outputs = hand_out(program.staged.traced, arguments, example)
    return jax.tree.map(lambda array: copied(array) if id(array) in handed else array, outputs)
