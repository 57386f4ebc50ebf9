"""Run one program once, or compile it where it is abstract, and collect the facts: output or exception, tracers, memory, moves."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import jax
from flax import nnx

from pytest_nnxcheck.compat import flax_modes, graph, staging, variables
from pytest_nnxcheck.compat.arrays import as_array, copied, describe
from pytest_nnxcheck.compat.compile_cache import Compiled, SharedPrograms, cached_compiles
from pytest_nnxcheck.compat.staging import Staged, quick_compiles, whole_stacks
from pytest_nnxcheck.core.errors import Unfit
from pytest_nnxcheck.core.facts import InnerDonation, Leaf, Leak, Move, Observation, Path
from pytest_nnxcheck.core.nesting import Layer, Nesting
from pytest_nnxcheck.core.peak import Copies, Memory, OnTarget, Split
from pytest_nnxcheck.engine.abstract_run import Addresses, traced
from pytest_nnxcheck.engine.on_targets import OnTargets, Program
from pytest_nnxcheck.jaxprs.copies import TracedProgram, copies_in
from pytest_nnxcheck.subject.abstract_arrays import abstract_leaf
from pytest_nnxcheck.subject.profile import Profile
from pytest_nnxcheck.subject.subject import Subject
from pytest_nnxcheck.subject.use_of_state import successors
from pytest_nnxcheck.transforms.compose import (
    Guards,
    compose,
    donated_inputs,
    own_output,
    plain_jit,
    stack_inputs,
    un_nest,
)
from pytest_nnxcheck.transforms.fitness import unfit
from pytest_nnxcheck.transforms.layer import LENGTH
from pytest_nnxcheck.transforms.mapping import on_mesh
from pytest_nnxcheck.walk.visit import Found
from pytest_nnxcheck.walk.walk import Walk, walk
from pytest_nnxcheck.xla import buffers
from pytest_nnxcheck.xla.origins import marked
from pytest_nnxcheck.xla.pointers import inner_donation, read_leaf

__tracebackhide__ = True  # pytest shows the frames of the user, not these

UNUSABLE = "Some donated buffers were not usable"


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
    with_copies: bool = False,
) -> Observation:
    """Run the program of a nesting on a fresh copy of the state; one of ``programs`` that has the same text, unless it is to be ``alone``.

    ``originals`` is a walk of what the call was handed that found no tracers. ``with_copies`` measures the copies of the state in the program,
    ``targets`` compiles it for other chips as well.
    """
    subject = subject.for_run()
    state = subject.fresh()
    if misfit := unfit(subject, profile, nesting):
        return Observation(nesting, state, error=Unfit(misfit))
    roots = subject.roots(state)
    before = (originals and originals.extended(roots)) or walk(roots)
    guards = Guards(subject, before)
    shared = programs or SharedPrograms(on=False)
    root = Root(
        subject, profile, nesting, donate, programs=shared, alone=alone, with_copies=with_copies, targets=targets
    )
    program = compose(subject, profile, nesting, guards, root.jit)
    state, inputs = root.handed(state, LENGTH)
    went_in = dict(graph.raw_leaves(state))
    donated = root.donated(went_in, inputs)
    given = [read_leaf(*leaf) for leaf in donated]
    if subject.abstract and not root.compiles:
        output, error, tracers = traced(program, subject, guards, state, inputs, un_nested=not nesting.layers)
    else:
        output, error = run(program, state, inputs)
        if error is None:
            subject.output_tree.arrays = un_nest(nesting, output)
        remaining = subject.tracers(state, before)
        tracers = remaining or (guards.left() if root.hoisted else ())
    # Lines are read before the places are put back: with them goes the last reference to what the tracer belongs to.
    leaks: tuple[Leak, ...] = ()
    if tracers:
        place_of = places_in(subject, state)
        leaks = tuple(leak(left, guards.culprit(left) or outermost(nesting), place_of(left)) for left in tracers)
    blamed = () if tracers else guards.reports
    dropped = tuple(leak(tracer, report.layer) for report in blamed for tracer in report.leaks)
    if tracers or (error and nesting.layers):
        # Where a nesting raised, flax may have taken a captured module apart; what the un-nested call did is the user's.
        before.places.restore()
    if tracers or guards.reports:
        # The caches of jax compare static attributes: a dead tracer among them makes every later call raise.
        jax.clear_caches()
    seen = Observation(
        nesting=nesting,
        state=state,
        output=None if error else un_nest(nesting, output),
        returned=output,
        error=error,
        leaks=leaks,
        dropped=dropped,
        mutated=tuple(guards.mutated),
        memory=root.memories[0] if root.memories else None,
        copies=root.copies[0] if root.copies else Copies(),
        abstract=subject.abstract,
        shared=any(root.shared),
        output_names=subject.output_tree.names,
        rebuild=subject.output_tree.rebuild,
        compiled=root.compiled_programs[-1] if root.compiled_programs else None,
        targets=root.on_targets[0] if root.on_targets else (),
    )
    if error or tracers:
        return seen
    came_out = dict(graph.raw_leaves(state))
    if not subject.abstract:
        seen = replace(seen, still=unmoved(profile, went_in, came_out))
    if not nesting.layers:
        return replace(seen, inside=donated_inside(subject, went_in, inputs, came_out, output))
    given = [root.leaf(*leaf) for leaf in donated] if subject.abstract else given
    return with_moves(seen, root, given, came_out) if root.memories else seen


def with_moves(seen: Observation, root: Root, given: list[Leaf], came_out: dict[Path, Any]) -> Observation:
    """The observation of a compiled program that ran well, with where the donated leaves lay that it was given, and where lies what came back."""
    after = {(name := root.subject.path(path)): root.leaf(name, value) for path, value in came_out.items()}
    # A Variable may hold a tree: what came back in that took a buffer as well.
    arrays = [*jax.tree.leaves([*came_out.values(), seen.returned]), *plain_leaves(seen.state)]
    returned = [root.leaf("", array) for array in arrays if isinstance(array, jax.Array | jax.ShapeDtypeStruct)]
    reused = frozenset(pointer for leaf in returned for pointer in leaf.pointers)
    after |= new_values(root, seen.returned)
    return replace(seen, reused=reused, moves=tuple(Move(leaf, after.get(leaf.path)) for leaf in given))


def donated_inside(
    subject: Subject, went_in: dict[Path, Any], inputs: tuple[Any, ...], came_out: dict[Path, Any], output: Any
) -> InnerDonation:
    """What a jit inside the un-nested call donated of what that was handed."""
    handed = {subject.path(path): array for path, array in went_in.items()}
    handed |= zip(subject.input_names, inputs, strict=False)
    left = {subject.path(path): array for path, array in came_out.items()}
    return inner_donation(handed, left, jax.tree.leaves(output))


def unmoved(profile: Profile, went_in: dict[Path, Any], came_out: dict[Path, Any]) -> tuple[Path, ...]:
    """The leaves that the call should change, and that are the same arrays as before; jax hands on what a program passes through."""
    same = (path for path in profile.changed if path in went_in and went_in[path] is came_out.get(path))
    return tuple(sorted(same, key=str))


def measure(subject: Subject, profile: Profile, nesting: Nesting, donate: str, length: int) -> Memory | None:
    """The memory of the program of a nesting whose loops and axes have another length: compiled, and not run. `None` where it does not compile."""
    subject = subject.for_run()
    root = Root(subject, profile, nesting, donate, stops="compiled")
    program = compose(subject, profile, nesting, Guards(subject), root.jit, length)
    state, inputs = root.handed(subject.fresh(), length)
    with subject.undone(state):
        run(program, state, inputs)
    return root.memories[0] if root.memories else None


def traced_again(subject: Subject, profile: Profile, nesting: Nesting, donate: str, after: Any) -> bool:
    """Whether a nesting is traced again for the state ``after`` its first call: traced and lowered for both, neither compiled nor run.

    Whatever the traces touch is put back.
    """
    traces: list[int] = []

    def counted(*args: Any, **kwargs: Any) -> Any:
        traces.append(len(traces))
        return subject.function(*args, **kwargs)

    counting = subject.for_run(counted)
    root = Root(counting, profile, nesting, donate, stops="lowered")
    program = compose(counting, profile, nesting, Guards(counting), root.jit)
    with subject.undone(subject.state):
        for state in (subject.fresh(), nnx.merge(*flax_modes.split(after))):
            first = len(traces)
            handed, inputs = root.handed(state, LENGTH)
            run(program, handed, inputs)
    return len(traces) > first


class Measured(Exception):
    """The program is lowered, or compiled, and that is all that was asked for."""


def run(program: Callable[..., Any], state: Any, inputs: tuple[Any, ...]) -> tuple[Any, Exception | None]:
    """Run to the end. Donation that XLA cannot use is reported by us, with paths; jax's warning of it is left out."""
    try:
        with warnings.catch_warnings(), quick_compiles(), whole_stacks(), cached_compiles():
            warnings.filterwarnings("ignore", message=UNUSABLE)
            return jax.tree.map(as_array, jax.block_until_ready(program(state, *inputs))), None
    except Exception as error:  # noqa: BLE001 - the user's code may raise anything
        return None, error


@dataclass(frozen=True, slots=True)
class Root:
    """The jit of the outermost layer: donates, keeps unused parameters, and shows what it compiled.

    ``keep_unused`` makes a leaf that is written but never read a parameter, so that it is donated and keeps its pointer, and
    flat parameter numbers line up with leaves. A root that ``stops`` lowers or compiles its program, and does not run it; of ``programs`` it takes
    one of the same text, unless its own is compiled ``alone``. ``shared`` says that it did, ``compiled_programs`` are those that ran.
    """

    subject: Subject
    profile: Profile
    nesting: Nesting
    donate: str
    stops: Literal["", "lowered", "compiled"] = ""
    programs: SharedPrograms = field(default_factory=SharedPrograms)
    alone: bool = False
    with_copies: bool = False
    targets: OnTargets | None = None
    on_targets: list[tuple[OnTarget, ...]] = field(default_factory=list)
    memories: list[Memory] = field(default_factory=list)
    copies: list[Copies] = field(default_factory=list)
    addresses: Addresses = field(default_factory=Addresses)
    shared: list[bool] = field(default_factory=list)
    compiled_programs: list[Any] = field(default_factory=list)

    @property
    def compiles(self) -> bool:
        """Whether an abstract program can be compiled: what a closure captures would have to be a constant, with a value."""
        return self.style in ("argument", "functional")

    @property
    def hoisted(self) -> bool:
        """Whether the program has parameters that nobody passes: leaked tracers, which jax 0.5 and flax 0.10 let through."""
        if not self.subject.abstract or not self.memories:
            return False
        numbers = (
            number for buffer in self.memories[0].buffers if buffer.kind == "argument" for number in buffer.parameters
        )
        return max(numbers, default=-1) >= self.addresses.parameters

    @property
    def style(self) -> str | None:
        """Style of the outermost layer if that is a jit."""
        layers = self.nesting.layers
        return layers[0].style if layers and layers[0].row.compiles else None

    def jit(self, wrapper: Callable[..., Any], f: Callable[..., Any]) -> Callable[..., Any]:
        state_arguments = {"argument": 1, "functional": 2}.get(self.style or "", 0)
        donated: tuple[int, ...] = (0,) if state_arguments and self.donate != "none" else ()
        donated += tuple(state_arguments + number for number in donated_inputs(self.subject, self.nesting, self.donate))
        options = {"donate_argnums": donated} if donated else {}
        if self.subject.abstract and not self.compiles:
            return plain_jit(wrapper, f)
        program: Callable[..., Any] = staging.staged(
            wrapper,
            marked(f),
            self.compiled,
            self.on_compiled,
            abstract=self.subject.abstract,
            keep_unused=True,
            **options,
        )
        return program

    def handed(self, state: Any, length: int) -> tuple[Any, tuple[Any, ...]]:
        """What the program is called with: the state, and inputs with an axis for every layer that takes one."""
        inputs = stack_inputs(self.nesting, self.subject.inputs, length)
        if self.compiles and any(layer.row.on_mesh for layer in self.nesting.layers):
            # Elsewhere jax moves them by itself, and refuses to mix captured ones with those of the mesh.
            graphdef, leaves = flax_modes.split(state)
            state, inputs = nnx.merge(graphdef, on_mesh(leaves)), on_mesh(inputs)
        # Copies: what is donated here, or by a jit inside the call, must not be the user's own array.
        return state, tuple(map(abstract_leaf if self.subject.abstract else copied, inputs))

    def compiled(self, lowered: Any) -> Compiled:
        if self.stops == "lowered":
            raise Measured
        return self.programs.compiled(lowered, alone=self.alone)

    def on_compiled(self, compiled: Compiled, staged: Staged) -> Any:
        names = (*self.parameters(), *self.subject.input_names)
        self.shared.append(compiled.shared)
        self.compiled_programs.append(compiled.program)
        label = self.subject.label
        if label not in compiled.read:
            compiled.read[label] = buffers.read(compiled.program, subject=label)
        self.memories.append(compiled.read[label].with_names(names))
        if self.stops == "compiled":
            raise Measured
        program = TracedProgram.of(staged, len(self.parameters()))
        if self.with_copies:
            self.copies.append(copies_in(program, self.memories[-1], self.profile.copied_bytes, self.split_of(program)))
        if self.targets is not None and not program.hoisted:
            self.on_targets.append(
                self.targets.all(Program.of(staged, program, names, compiled.program, self.memories[-1].constants))
            )
        if not self.subject.abstract:
            return None
        return self.addresses.assign(compiled.program, staged.arguments, staged.lowered.out_info)

    def split_of(self, program: TracedProgram) -> Callable[[Any], Split]:
        """What compiles another jitted function of the program's arguments, and gives its totals."""
        return lambda jitted: buffers.split_of(self.programs.program(jitted.lower(*program.arguments)))

    def leaf(self, path: str, array: Any) -> Leaf:
        return self.addresses.leaf(path, array) if self.subject.abstract else read_leaf(path, array)

    def donated(self, went_in: dict[Path, Any], inputs: tuple[Any, ...]) -> list[tuple[str, Any]]:
        """Names and values of the leaves that the root donates, before it does: of the state those that went in."""
        leaves: list[tuple[str, Any]] = []
        if self.style is None or self.donate == "none":
            return leaves
        if self.style in ("argument", "functional"):
            every, changed = self.style == "argument", self.profile.changed
            leaves = [(self.subject.path(path), value) for path, value in went_in.items() if every or path in changed]
        leaves += [
            (self.subject.input_names[number], inputs[number])
            for number in donated_inputs(self.subject, self.nesting, self.donate)
        ]
        return leaves

    def parameters(self) -> tuple[str, ...]:
        """Names of the program's flat state parameters, in order."""
        if self.style not in ("argument", "functional"):
            return ()
        paths: Iterable[Path] = self.profile.state_paths
        if self.style == "functional":
            paths = sorted(paths, key=lambda path: path not in self.profile.changed)
        elif not flax_modes.mode_flags()[0]:
            paths = graph.flattened_paths(self.subject.state)
        return tuple(self.subject.path(path) for path in paths)


def plain_leaves(state: Any) -> list[Any]:
    """What the modules hold beside Variables: arrays in a plain dict, say, which `nnx.jit` of flax 0.10 hands back as well."""
    return [leaf for _, value in graph.attributes(state) for leaf in jax.tree.leaves(value)]


def new_values(root: Root, output: Any) -> dict[str, Leaf]:
    """The outputs that are the new values of donated inputs, by the names of those."""
    subject = root.subject
    own = jax.tree.leaves(own_output(root.nesting, output))
    given = donated_inputs(subject, root.nesting, root.donate)
    pairs = [pair for pair in successors(subject, root.profile, root.donate).items() if pair[0] in given]
    names = {number: subject.input_names[number] for number, _ in pairs}
    outputs = [root.leaf(f"output{name}", leaf) for name, leaf in zip(root.profile.out_names, own, strict=False)]
    return {names[number]: outputs[place] for number, place in pairs if place < len(outputs)}


def outermost(nesting: Nesting) -> Layer | None:
    return nesting.layers[0] if nesting.layers else None


def places_in(subject: Subject, state: Any) -> Callable[[Found], str]:
    """What tells where a tracer is: in a Variable or a plain value of a graph node, in another object that a node holds, outside of them, or in
    what the call returned alone.
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
