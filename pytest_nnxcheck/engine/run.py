"""Run the program of a nesting once on a copy of the state, or only compile it for an abstract one, and record the facts."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
from flax import nnx

from pytest_nnxcheck.compat import flax_modes, graph
from pytest_nnxcheck.compat.arrays import as_array, is_ref
from pytest_nnxcheck.compat.compile_cache import SharedPrograms, cached_compiles
from pytest_nnxcheck.compat.staging import StagedJit, quick_compiles, whole_stacks
from pytest_nnxcheck.core.facts import InnerDonation, Leaf, Leak, Move, Observation, Path
from pytest_nnxcheck.core.nesting import Nesting
from pytest_nnxcheck.core.peak import Memory
from pytest_nnxcheck.engine.compiled import Program, measured, with_addresses
from pytest_nnxcheck.engine.on_targets import OnTargets
from pytest_nnxcheck.engine.stage import stage, unmoved
from pytest_nnxcheck.invariants.donation import lost_leaves
from pytest_nnxcheck.subject.originals import leak, places_in
from pytest_nnxcheck.subject.profile import Profile
from pytest_nnxcheck.subject.subject import Subject
from pytest_nnxcheck.transforms.compose import Guards, compose, un_nest
from pytest_nnxcheck.transforms.layers import LENGTH
from pytest_nnxcheck.transforms.root import Root
from pytest_nnxcheck.walk.visit import Found
from pytest_nnxcheck.walk.walk import Walk, walk
from pytest_nnxcheck.xla.pointers import inner_donation, read_leaf

__tracebackhide__ = True  # pytest shows the frames of the user, not these

UNUSABLE = "Some donated buffers were not usable"
"""The beginning of jax's warning of donation that XLA cannot use."""


def observe(
    subject: Subject,
    profile: Profile,
    nesting: Nesting,
    donate: str,
    programs: SharedPrograms | None = None,
    targets: OnTargets | None = None,
    *,
    alone: bool = False,
    originals: Walk | None = None,
    copies: bool = False,
) -> Observation:
    """Run the program of a nesting that can take the call on a fresh copy of the state; one of ``programs`` that has the same text, unless it is to be ``alone``.

    ``originals`` is a walk of what the call was handed that found no tracers. The copies of the state in the program are measured if ``copies``
    are asked for, and it is compiled for ``targets`` as well.
    """
    subject = subject.for_run()
    state = subject.fresh()
    roots = subject.roots(state)
    guards = Guards(subject, (originals and originals.extended(roots)) or walk(roots))
    root = Root(subject, profile, nesting, donate)
    if subject.abstract and not root.takes_state:
        staged = stage(subject, profile, nesting, guards, state)
        output, after = (None, None) if staged.traced is None else staged.types
        state = state if staged.graph is None else nnx.merge(staged.graph, after)
        return ended(subject, nesting, guards, state, output, staged.error, staged.leaks)
    shared = programs or SharedPrograms(on=False)
    compiled: list[Program] = []
    parameters = root.parameters()

    def execute(staged: StagedJit) -> Any:
        program = measured(root, parameters, staged, shared, alone=alone, copies=copies)
        program = program if targets is None else replace(program, targets=targets.all(program))
        compiled.append(with_addresses(program) if subject.abstract else program)
        return compiled[-1].outputs if subject.abstract else staged.run(program.compiled)

    nested = compose(subject, profile, nesting, guards, root.jit(execute))
    state, inputs = root.handed(state)
    went_in = dict(graph.raw_leaves(state))
    # Before the program runs: what it donates has no pointer any more.
    given = [read_leaf(*leaf) for leaf in root.donated(went_in, inputs)]
    returned, error = run(nested, state, inputs)
    program = compiled[-1] if compiled else None
    output, successors = None, {}
    if error is None:
        output, successors = un_nest(nesting, returned), root.new_values(returned)
        subject.output_tree.arrays = output
    tracers = subject.tracers(state, guards.earlier)
    if not tracers and program is not None and subject.abstract and program.traced.hoisted:
        tracers = guards.left()  # which jax 0.5 and flax 0.10 let through
    seen = ended(subject, nesting, guards, state, output, error, tracers)
    seen = replace(seen, returned=returned)
    if program is not None:
        seen = replace(
            seen,
            memory=program.memory,
            copies=program.copies,
            shared=program.compiled.shared,
            compiled=program.compiled.program,
            targets=program.targets,
        )
    return seen if error or tracers else with_arrays(seen, root, program, went_in, inputs, given, successors)


def ended(
    subject: Subject,
    nesting: Nesting,
    guards: Guards,
    state: Any,
    output: Any,
    error: Exception | None,
    tracers: tuple[Found, ...],
) -> Observation:
    """The observation of a nesting that was run, or staged, and has ended. After leaked tracers, or an exception under layers, changed objects are put back."""
    # Lines are read before the places are put back: with them goes the last reference to what the tracer belongs to.
    leaks: tuple[Leak, ...] = ()
    dropped: tuple[Leak, ...] = ()
    if tracers:
        place_of, outermost = places_in(subject, state), next(iter(nesting.layers), None)
        leaks = tuple(leak(left, guards.culprit(left) or outermost, place_of(left)) for left in tracers)
    else:
        dropped = tuple(leak(tracer, report.layer) for report in guards.reports for tracer in report.leaks)
    if guards.earlier is not None and (tracers or (error and nesting.layers)):
        # Where a nesting raised, flax may have taken a captured module apart; what the un-nested call did is the user's.
        guards.earlier.places.restore()
    if tracers or guards.reports:
        # The caches of jax compare static attributes: a dead tracer among them makes every later call raise.
        jax.clear_caches()
    return Observation(
        nesting=nesting,
        state=state,
        output=output,
        error=error,
        leaks=leaks,
        dropped=dropped,
        mutated=tuple(guards.mutated),
        abstract=subject.abstract,
        output_names=subject.output_tree.names,
        rebuild=subject.output_tree.rebuild,
    )


def with_arrays(
    seen: Observation,
    root: Root,
    program: Program | None,
    went_in: dict[Path, Any],
    inputs: tuple[Any, ...],
    given: list[Leaf],
    successors: dict[str, tuple[str, Any]],
) -> Observation:
    """The observation of a nesting that ran well, with the fate of the arrays that it was handed.

    ``given`` are those that it donates, ``successors`` the outputs that are new values of inputs.
    """
    came_out = dict(graph.raw_leaves(seen.state))
    if not seen.abstract:
        seen = replace(seen, still=unmoved(root.profile, went_in, came_out))
    if not seen.nesting.layers:
        return replace(seen, inside=donated_inside(root.subject, went_in, inputs, came_out, seen.returned))
    if program is None:
        return seen
    if seen.abstract:
        given = [program.leaf(*leaf) for leaf in root.donated(went_in, inputs)]
    after = {(name := root.subject.path(path)): program.leaf(name, value) for path, value in came_out.items()}
    after |= {donated: program.leaf(*new) for donated, new in successors.items()}
    # A Variable may hold a tree, and a module plain values: what came back in those took a buffer as well.
    attributes = [value for _, value in graph.attributes(seen.state)]
    arrays = jax.tree.leaves([*came_out.values(), seen.returned, *attributes])
    with_buffer = (each for each in arrays if isinstance(each, jax.Array | jax.ShapeDtypeStruct) or is_ref(each))
    returned = [program.leaf("", array) for array in with_buffer]
    reused = frozenset(pointer for leaf in returned for pointer in leaf.pointers)
    moves = tuple(Move(leaf, after.get(leaf.path)) for leaf in given)
    return replace(seen, moves=moves, lost=lost_leaves(moves, reused))


def donated_inside(
    subject: Subject, went_in: dict[Path, Any], inputs: tuple[Any, ...], came_out: dict[Path, Any], output: Any
) -> InnerDonation:
    """The arguments of the un-nested call that a jit inside it donated."""
    handed = {subject.path(path): array for path, array in went_in.items()}
    handed |= zip(subject.input_names, inputs, strict=False)
    left = {subject.path(path): array for path, array in came_out.items()}
    return inner_donation(handed, left, jax.tree.leaves(output))


def run(program: Callable[..., Any], state: Any, inputs: tuple[Any, ...]) -> tuple[Any, Exception | None]:
    """Run to the end. Donation that XLA cannot use is reported by us, with paths; jax's warning of it is left out."""
    try:
        with warnings.catch_warnings(), quick_compiles(), whole_stacks(), cached_compiles():
            warnings.filterwarnings("ignore", message=UNUSABLE)
            return jax.tree.map(as_array, jax.block_until_ready(program(state, *inputs))), None
    except Exception as error:  # noqa: BLE001 - the user's code may raise anything
        return None, error


# --- programs that are not run: the call ends where the jit outside has traced them


class Stopped(Exception):
    """Raised when the jit outside has its program, to end the call."""


def stopping(root: Root, look: Callable[[StagedJit], object], length: int = LENGTH) -> Callable[[Any], None]:
    """A function of the state that calls the nesting up to its jit, and looks at the program of that."""

    def stop(staged: StagedJit) -> Any:
        look(staged)
        raise Stopped

    program = compose(root.subject, root.profile, root.nesting, Guards(root.subject), root.jit(stop), length)

    def call(state: Any) -> None:
        run(program, *root.handed(state, length))

    return call


def measure(subject: Subject, profile: Profile, nesting: Nesting, donate: str, length: int) -> Memory | None:
    """The memory of the program of a nesting whose loops and axes have another length. `None` where it does not compile."""
    subject = subject.for_run()
    root, state = Root(subject, profile, nesting, donate), subject.fresh()
    found: list[Memory] = []
    with subject.undone(state):
        stopping(
            root,
            lambda staged: found.append(measured(root, root.parameters(), staged, SharedPrograms()).memory),
            length,
        )(state)
    return found[0] if found else None


def traced_again(subject: Subject, profile: Profile, nesting: Nesting, donate: str, after: Any) -> bool:
    """True if a nesting is traced again for the state ``after`` its first call. Whatever the traces touch is put back."""
    traces: list[int] = []

    def counted(*args: Any, **kwargs: Any) -> Any:
        traces.append(len(traces))
        return subject.function(*args, **kwargs)

    call = stopping(Root(subject.for_run(counted), profile, nesting, donate), lambda _: None)
    with subject.undone(subject.state):
        call(subject.fresh())
        first = len(traces)
        call(nnx.merge(*flax_modes.split(after)))
    return len(traces) > first
