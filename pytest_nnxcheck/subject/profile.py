"""Evaluate the un-nested call abstractly, once: output shapes, the effect of the call on the state, and the training that it does.

Nothing is run: `jax.make_jaxpr` of the call, once for each kind of call.

The successor of an input is the output whose path it has; else one that is made of it. It names the leaf and the reason where a buffer was lost; only
the pointers prove that one was lost.
"""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from pytest_nnxcheck.compat import flax_modes, graph, staging
from pytest_nnxcheck.compat.arrays import NUMBERS, array_type, as_array, describe, in_type, is_in_ref, nbytes, value_of
from pytest_nnxcheck.core.facts import ArrayType, CallProgram, Path
from pytest_nnxcheck.core.text import first_line
from pytest_nnxcheck.jaxprs import flow
from pytest_nnxcheck.jaxprs.call_program import call_program, in_arrays
from pytest_nnxcheck.jaxprs.copies import output_values
from pytest_nnxcheck.subject import copies
from pytest_nnxcheck.subject.contents import Contents, diff
from pytest_nnxcheck.subject.subject import Key, Subject, numbered, on_arrays
from pytest_nnxcheck.walk.fingerprint import equal, show
from pytest_nnxcheck.walk.raw_access import MISSING
from pytest_nnxcheck.walk.walk import Walk, holds_beside, walk

__tracebackhide__ = True  # pytest shows the frames of the user, not these


@dataclass(frozen=True, slots=True)
class Output:
    """The output of the un-nested call."""

    types: tuple[jax.ShapeDtypeStruct, ...] = ()
    names: tuple[str, ...] = ()
    """The places of its arrays in what the user's function returns."""
    plain: bool = False
    """True if jax alone gives it its structure: arrays and numbers, in containers that jax knows."""
    origins: tuple[frozenset[int], ...] = ()
    """The numbers of the inputs that go into each array."""
    handed_out: tuple[int | None, ...] = ()
    """The number of the input that each array is, unchanged; None for an array that is none."""
    leaves: tuple[int | None, ...] = ()
    """The number of the leaf whose value each array is when the call has ended, see `leaves_returned`; None for an array that is none."""
    bytes: int = 0
    """The bytes of whole arrays, on several devices too: only a compiled program shows how outputs are sharded."""


@dataclass(frozen=True, slots=True)
class Retyped:
    """A leaf of the state that comes out with another type."""

    path: Path
    before: str
    """Its type before the call; the next field is that after it."""
    after: str
    line: str = ""
    """The line at which it gets another dtype; empty where it keeps its dtype, or where no equation shows it."""


@dataclass(frozen=True, slots=True)
class StateUse:
    """The effect of the un-nested call on its state."""

    paths: tuple[Path, ...] = ()
    """Every leaf, in the order in which jax flattens the state."""
    sizes: tuple[int, ...] = ()
    """The bytes of each leaf on one device."""
    changed: frozenset[Path] = frozenset()
    """The leaves that come out with another value."""
    changed_bytes: int = 0
    """The bytes of their new values on one device."""
    added: tuple[Path, ...] = ()
    """The leaves that were not there before."""
    removed: tuple[Path, ...] = ()
    """The leaves that are gone."""
    retyped: tuple[Retyped, ...] = ()
    relabelled: tuple[tuple[Path, str, str, str], ...] = ()
    """The metadata of Variables that it changes: path, name, value before, value after."""
    replaced: tuple[Path, ...] = ()
    """The Variables in whose place it puts another Variable."""
    poisoned: bool = False
    """True if it leaves tracers in a module, outside of the leaves."""
    restructured: bool = False
    """True if it sets attributes that are no arrays."""
    unused: tuple[int, ...] = ()
    """The numbers of the leaves that it neither reads nor writes: it hands them on as they are, and nothing else needs them."""
    in_one_array: tuple[tuple[Path, Path], ...] = ()
    """Pairs of leaves that it hands back as one value: without a jit both hold one and the same array then."""
    references: frozenset[Path] = frozenset()
    """The leaves that are a `jax.Ref` in a copy of the state: written in place, and never donated, which jax refuses."""
    lost: frozenset[Path] = frozenset()
    """The references that it leaves as they are, and would change as arrays: a transform of flax inside of it writes to copies of them."""
    restored: frozenset[Path] = frozenset()
    """The leaves that it writes and gives their value back, see `engine.trials.restored_leaves`. Found out only where a ``vmap`` failed."""

    @property
    def written(self) -> frozenset[Path]:
        """The leaves that it writes, whatever value they have then."""
        return self.changed | self.restored

    @property
    def bytes(self) -> int:
        """The bytes of all leaves on one device."""
        return sum(self.sizes)

    @property
    def restored_bytes(self) -> int:
        """The bytes of the restored leaves on one device."""
        return sum(size for path, size in zip(self.paths, self.sizes, strict=True) if path in self.restored)


@dataclass(frozen=True, slots=True)
class Training:
    """The leaves that the un-nested call trains."""

    parameters: frozenset[Path] = frozenset()
    """The leaves that ``grad`` differentiates by."""
    gradients: tuple[jax.ShapeDtypeStruct, ...] = ()
    """The types of the gradients by them, in order."""
    differentiates: bool = False
    """True if the call takes a derivative."""
    untrained: tuple[Path, ...] = ()
    """The leaves that its optimizers train, if it steps an optimizer and changes none of these leaves."""


@dataclass(frozen=True, slots=True)
class Profile:
    """Facts of the un-nested call."""

    output: Output = Output()
    state: StateUse = StateUse()
    training: Training = field(default_factory=Training)
    program: CallProgram = field(default_factory=CallProgram)
    lost_writes: tuple[copies.Write, ...] = ()
    stale_reads: tuple[copies.Read, ...] = ()
    unwatched: str = ""
    """The exception that it raises while its copies of the state are watched, in one line; empty where they were."""
    input_bytes: int = 0
    """The bytes of its inputs on one device."""
    devices: int = 1
    """The most devices that one of its arrays lies on."""
    copied_bytes: int = 0
    """The bytes of one copy of the state; of the inputs, for a call in functional style that is handed arrays alone, an `nnx.State` among them."""


UNKNOWN = Profile()
"""The profile of a call that cannot be evaluated: enough for a plain jit."""


@dataclass(frozen=True, slots=True)
class Evaluation:
    """One abstract evaluation of the un-nested call."""

    jaxpr: Any
    """A function of the leaves ``before`` and the inputs, whose results are ``out`` and the leaves ``after``; of references it takes the arrays."""
    out: tuple[jax.ShapeDtypeStruct, ...]
    before: dict[Key, Any]
    after: dict[Key, Any]
    moved: tuple[Key, ...]
    """The leaves that come out with another value, or were not there before."""
    sources: flow.Sources
    """The argument that each output is, as it is."""
    origins: tuple[int, ...]
    """The arguments that go into each output, as bits of a number."""
    contents: tuple[Contents, Contents]
    """The contents of the module before and after the call."""
    writes_copies: bool
    """True if the call copies a reference into another one, and writes that."""
    poisoned: bool
    """True if the call leaked tracers outside of the leaves."""
    differentiates: bool
    """True if the call takes a derivative."""
    program: CallProgram
    stale_reads: tuple[copies.Read, ...]


def profile(subject: Subject, before: Walk | None = None) -> Profile:
    """Evaluate the un-nested call abstractly; ``before`` is a walk over what it reaches. Raises what the user's code raises under a trace.

    Its copies of Variables are watched by a mark in their metadata. A call that raises with the marks, as where jax compares the metadata of trees that
    it maps over together, is evaluated without them: what it raises then is the user's own, and shows none of our marks.
    """
    try:
        return profiled(subject, before, copies.CopyWatch())
    except Exception as error:  # noqa: BLE001 - the user's code may raise anything
        error.__traceback__ = None  # the user's code may keep it, and raise it again
        unwatched = first_line(error)
    with subject.undone(
        subject.state, before
    ):  # a cache that holds a tracer of the first trace would make the second one raise
        pass
    return replace(profiled(subject, before), unwatched=unwatched)


def profiled(call: Subject, walked: Walk | None, watch: copies.CopyWatch | None = None) -> Profile:
    """The profile of the call; ``watch`` sees what it writes to copies."""
    subject = call.for_run(watch.around(call.function) if watch else None)
    evaluation = evaluated(subject, watch)
    before, inputs = evaluation.before, subject.inputs
    state, input_bytes = state_of(evaluation), sum(map(nbytes, inputs))
    if state.references and evaluation.writes_copies:
        with contextlib.suppress(Exception):  # the user's code may raise anything, on arrays
            as_arrays = state_of(evaluated(in_arrays_alone(subject)))
            state = replace(state, lost=as_arrays.changed & state.references - state.changed)
    return Profile(
        output_of(subject, evaluation),
        state,
        training(subject, evaluation, state.changed),
        evaluation.program,
        lost_writes=lost_writes(call, walked, evaluation, state.changed) if watch and watch.open(state.changed) else (),
        stale_reads=evaluation.stale_reads,
        input_bytes=input_bytes,
        copied_bytes=state.bytes or input_bytes,
        devices=max(map(devices, [*before.values(), *inputs])),
    )


def lost_writes(
    subject: Subject, before: Walk | None, evaluation: Evaluation, changed: AbstractSet[Path]
) -> tuple[copies.Write, ...]:
    """The writes of the call to copies of its Variables that no one gets: it is traced a second time, with names on what the copies hold.

    An output without a name is the result of a forward call, and no state.
    """
    watch = copies.CopyWatch(follows=True)
    with subject.undone(subject.state, before):  # a cache may hold a tracer of the first trace
        subject = subject.for_run(watch.around(subject.function))

    def call(module: Any, *inputs: Any) -> Any:
        watch.mark(module)
        return subject.program(module, *inputs), jax.tree.map(value_of, flax_modes.state(module))

    function, (leaves, *inputs) = on_arrays(call, subject)
    with watch:
        traced, (out, after) = jax.make_jaxpr(function, return_shape=True)(leaves, *inputs)
    returned = [number for number, name in enumerate(subject.output_tree.names) if name]
    stored = [number for number, (key, _) in enumerate(numbered(after), len(out)) if key in evaluation.moved]
    lost = watch.lost(staging.open_jaxpr(traced), changed, returned, stored)
    return tuple(lost[path] for path, _ in evaluation.before if path in lost)


def in_arrays_alone(subject: Subject) -> Subject:
    """The same call with arrays in the place of all references of its state."""
    return replace(subject, state=flax_modes.with_refs(subject.state, ref=False), in_refs=False).for_run()


def evaluated(subject: Subject, watch: copies.CopyWatch | None = None) -> Evaluation:
    """Trace the un-nested call once, and read its program; ``watch`` sees what it writes to copies."""
    contents: list[Contents] = []
    poisoned: list[bool] = []
    modules: list[Any] = []

    def call(module: Any, *inputs: Any) -> Any:
        modules.append(module)
        if watch is not None:
            watch.mark(module)
        contents.append(Contents.of(module))
        out = subject.program(module, *inputs)
        contents.append(Contents.of(module))
        state = flax_modes.state(module)
        poisoned.append(holds_beside(module, jax.tree.leaves(state)))
        return out, jax.tree.map(value_of, state)  # no program returns a reference

    function, (leaves, *inputs) = on_arrays(call, subject)
    with watch or contextlib.nullcontext(), staging.derivatives_taken() as derivatives:
        traced, (out, new_leaves) = jax.make_jaxpr(function, return_shape=True)(leaves, *inputs)
    if any(poisoned):
        # The caches of jax compare static attributes: a dead tracer among them makes every later call raise.
        jax.clear_caches()
    before, after = dict(numbered(leaves)), dict(numbered(new_leaves))
    closed = in_arrays(traced)
    jaxpr = staging.open_jaxpr(closed)
    sources = flow.sources(jaxpr)
    number_of, result_of = {key: n for n, key in enumerate(before)}, {key: n for n, key in enumerate(after, len(out))}
    moved = tuple(key for key in after if key not in before or sources[result_of[key]] != number_of[key])
    rewritten = {number_of[key]: result_of[key] for key in moved if key in before}
    return Evaluation(
        jaxpr,
        out,
        before,
        after,
        moved,
        sources=sources[: len(out)],
        origins=flow.origins(jaxpr)[: len(out)],
        contents=(contents[0], contents[1]),
        writes_copies=flow.writes_copies(traced),
        poisoned=any(poisoned),
        differentiates=bool(derivatives) or any(map(graph.is_of_derivative, flow.all_equations(jaxpr))),
        program=call_program(traced, closed, rewritten, walk(subject.roots(subject.state)).arrays),
        stale_reads=copies.stale(traced, subject.state, subject.roots(modules[0])),
    )


def output_of(subject: Subject, evaluation: Evaluation) -> Output:
    """The output of the call."""
    tree, leaves, inputs = subject.output_tree, len(evaluation.before), range(len(subject.inputs))
    sources = evaluation.sources
    return Output(
        types=evaluation.out,
        bytes=sum(map(nbytes, evaluation.out)),
        names=tree.names,
        plain=tree.plain,
        origins=tuple(
            frozenset(number for number in inputs if bits >> (leaves + number) & 1) for bits in evaluation.origins
        ),
        handed_out=tuple(source - leaves if source is not None and source >= leaves else None for source in sources),
        leaves=tuple(leaves_returned(subject, evaluation, tree.names)),
    )


def leaves_returned(subject: Subject, evaluation: Evaluation, names: Sequence[str]) -> Iterator[int | None]:
    """The number of the leaf whose value each output is, as the call leaves it; None for an output that is none.

    What the module keeps of the call is no such leaf: an input, an `nnx.Intermediate`, and the sole output of a call, which has no name, unless it is a parameter.
    """
    variables = dict(graph.variables(subject.state))
    number_of = {key: number for number, key in enumerate(evaluation.before)}
    handed_in, values = output_values(evaluation.jaxpr)
    held = {
        id(value): key
        for key, value in zip(evaluation.after, values[len(names) :], strict=True)
        if key in number_of and not isinstance(variables.get(key[0]), nnx.Intermediate)
    }
    for value in handed_in[len(number_of) :]:
        held.pop(id(value), None)
    for name, value in zip(names, values, strict=False):
        key = held.get(id(value))
        is_result = not name and key in evaluation.moved
        yield (
            None if key is None or (is_result and not isinstance(variables.get(key[0]), nnx.Param)) else number_of[key]
        )


def state_of(evaluation: Evaluation) -> StateUse:
    """The effect of the call on its state."""
    jaxpr, before, after, moved = evaluation.jaxpr, evaluation.before, evaluation.after, evaluation.moved
    outputs, (old, new) = len(evaluation.out), evaluation.contents
    paths = {path for path, _ in before}
    written = [key for key in moved if key[0] in paths]
    return StateUse(
        paths=tuple(path for path, _ in before),
        sizes=tuple(map(nbytes, before.values())),
        changed=frozenset(path for path, _ in written),
        changed_bytes=sum(nbytes(after[key], getattr(before.get(key), "sharding", None)) for key in written),
        added=tuple(sorted({path for path, _ in moved if path not in paths}, key=str)),
        removed=tuple(sorted(paths - {path for path, _ in after}, key=str)),
        retyped=tuple(retyped(jaxpr, outputs, before, after)),
        # A tracer among them is a leak, which a loop leaves as any other transform does.
        relabelled=() if evaluation.poisoned else tuple(relabelled(old, new)),
        replaced=tuple(
            path for path, variable in old.variables.items() if new.variables.get(path, variable) is not variable
        ),
        poisoned=evaluation.poisoned,
        restructured=old.attributes != new.attributes,
        unused=unused(jaxpr, outputs, before, after, moved),
        in_one_array=in_one_array([path for path, _ in after], jaxpr.outvars[outputs:]),
        references=frozenset(path for (path, _), leaf in before.items() if is_in_ref(leaf)),
    )


def type_in_a_trace(leaf: Any) -> str:
    """The type that a trace takes a leaf in with: a Python number has that of the array which jax makes of it."""
    return describe(as_array(leaf) if isinstance(leaf, NUMBERS) else leaf)


def retyped(jaxpr: Any, outputs: int, before: Mapping[Key, Any], after: Mapping[Key, Any]) -> Iterator[Retyped]:
    """The leaves that come back with another type; in the results of the jaxpr they follow the outputs."""
    for number, (key, leaf) in enumerate(after.items(), outputs):
        if key not in before or (old := type_in_a_trace(before[key])) == (new := describe(leaf)):
            continue
        dtype = getattr(before[key], "dtype", None)
        eqn = flow.retyped_at(jaxpr, number, dtype) if dtype not in (None, getattr(leaf, "dtype", dtype)) else None
        yield Retyped(key[0], old, new, graph.equation_line(eqn) if eqn is not None else "")


def unused(
    jaxpr: Any, outputs: int, before: Iterable[Key], after: Iterable[Key], moved: Iterable[Key]
) -> tuple[int, ...]:
    """The numbers of the leaves that come back as they were, and that neither an output of the call nor another leaf needs."""
    same = {*after}.difference(moved)
    needed = staging.inputs_needed(jaxpr, [*[True] * outputs, *(key not in same for key in after)])
    return tuple(number for number, key in enumerate(before) if key in same and not needed[number])


def in_one_array(paths: Sequence[Path], variables: Sequence[Any]) -> tuple[tuple[Path, Path], ...]:
    """Pairs of leaves that are handed back as one variable of the jaxpr: a call without a jit leaves them in one and the same array."""
    first: dict[int, Path] = {}
    pairs = ((first.setdefault(id(var), path), path) for path, var in zip(paths, variables, strict=True))
    return tuple((one, other) for one, other in pairs if one != other)


def relabelled(old: Contents, new: Contents) -> Iterator[tuple[Path, str, str, str]]:
    """The metadata that the call changes, of Variables in places where there was one before: path, name, value before, and value after."""
    # Metadata whose comparison raises, raises in a loop as well: that is not for us to say.
    for (*path, name), *values in diff(old.metadata, new.metadata, functools.partial(equal, unknown=True)):
        if name != copies.MARK and tuple(path) in old.variables.keys() & new.variables.keys():
            was, became = ("nothing" if value is MISSING else show(value) for value in values)
            yield tuple(path), name, was, became


def devices(array: Any) -> int:
    """The number of devices that an array lies on; one where it has no sharding."""
    sharding = getattr(array, "sharding", None)
    return sharding.num_devices if isinstance(sharding, jax.sharding.Sharding) else 1


# --- training: the parameters that ``grad`` differentiates by, and updates that do not reach them


def training(subject: Subject, evaluation: Evaluation, changed: frozenset[Path]) -> Training:
    """Find the training of the un-nested call, which changes the leaves ``changed``."""
    before = evaluation.before
    parameters = differentiable(subject, before)
    of_parameters = [leaf for (path, _), leaf in before.items() if path in parameters]
    nodes = flax_modes.iter_graph(subject.state)
    optimizers = {tuple(path): node for path, node in nodes if isinstance(node, nnx.Optimizer)}
    return Training(
        parameters=parameters,
        gradients=tuple(jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=in_type(leaf)) for leaf in of_parameters),
        differentiates=evaluation.differentiates,
        untrained=untrained(subject, optimizers, changed, evaluation.out),
    )


def untrained(
    subject: Subject, optimizers: Mapping[Path, Any], changed: frozenset[Path], out: tuple[Any, ...]
) -> tuple[Path, ...]:
    """The leaves that the optimizers should train, if the call steps one of them, and neither changes nor returns any of the leaves: it trains a copy."""
    stepped = [node for path, node in optimizers.items() if (*path, "step") in changed]
    own = tuple((*path, name) for path in optimizers for name in ("step", "opt_state"))
    variables = dict(graph.variables(subject.state))
    paths = {
        path
        for node in stepped
        for path, _ in graph.flat_state(nnx.state(subject.state, getattr(node, "wrt", nnx.Param)))
        if path in variables and not any(path[: len(start)] == start for start in own)
    }
    shapes = {getattr(graph.variable_value(variables[path]), "shape", ()) for path in paths}
    if paths & changed or shapes & {leaf.shape for leaf in out}:
        return ()
    return tuple(sorted(paths, key=str))


def differentiable(subject: Subject, leaves: Mapping[Key, Any]) -> frozenset[Path]:
    """The floating point `nnx.Param` of the state, which one trains."""
    trained = {path for path, variable in graph.variables(subject.state) if isinstance(variable, nnx.Param)}
    fixed = {
        path
        for (path, _), leaf in leaves.items()
        if not (hasattr(leaf, "dtype") and jnp.issubdtype(leaf.dtype, jnp.inexact))
    }
    return frozenset(path for path, _ in leaves if path in trained - fixed)


# --- successors: the outputs that are new values of inputs

Typed = tuple[str, ArrayType]
"""Name and type of an array."""


def successors(subject: Subject, profile: Profile, donate: str) -> dict[int, int]:
    """The number of the output that is the new value of each donated input, as far as there is one."""
    donated = {
        number: (subject.input_names[number], array_type(subject.inputs[number])) for number in subject.donated(donate)
    }
    output = profile.output
    outputs = list(zip(output.names, map(array_type, output.types), strict=True)) if donated else []
    return new_values(donated, outputs, output.origins)


def new_values(
    inputs: Mapping[int, Typed], outputs: Sequence[Typed], origins: Sequence[AbstractSet[int]]
) -> dict[int, int]:
    """The number of the output that is the new value of each of these inputs, as far as there is one: the best matches first.

    ``origins`` are the numbers of the inputs that go into each output; it may be empty, where that is not known.
    """
    ways = []
    for number, of_input in inputs.items():
        for output, of_output in enumerate(outputs):
            rank = fit(of_input, of_output, origins[output] & inputs.keys() if origins else set(inputs), number)
            if rank is not None:
                ways.append((rank, -output, -number))
    new: dict[int, int] = {}
    taken = set[int]()
    for _, output, number in sorted(ways, reverse=True):
        if -number not in new and -output not in taken:
            new[-number] = -output
            taken.add(-output)
    return new


def fit(of_input: Typed, of_output: Typed, made_of: AbstractSet[int], number: int) -> tuple[int, ...] | None:
    """Rank an output as the new value of an input, the greater the better: by the inputs that it is ``made_of``, by name, by type; None where it does not fit."""
    path, place = keys(of_input[0]), keys(of_output[0])
    sole = 0 if number not in made_of else 1 if len(made_of) > 1 else 2
    named, deeper, alike = common(path, place), len(place) - len(path), likeness(of_input[1], of_output[1])
    words = any(not re.fullmatch(r"\[\d+\]", key) for key in path[len(path) - named :])
    # A name is enough if it is more than a number, or as deep as in a tuple that is returned; a type only with what goes into it.
    if not ((words or deeper > 0 or alike > 0) if named else (sole and alike > 1)):
        return None
    # The usual output is a tuple of results and new state: there paths are one key deeper.
    return sole, named, alike, -abs(deeper - 1)


def keys(path: str) -> list[str]:
    """The steps of a path behind its root: ``opt_state[0].mu['kernel']`` has three."""
    return re.findall(r"\.\w+|\['(?:[^'\\]|\\.)*'\]|\[\"[^\"]*\"\]|\[[^\]]*\]", path)


def common(one: list[str], other: list[str]) -> int:
    """The number of keys that two paths have in common at their ends."""
    pairs = zip(one[::-1], other[::-1], strict=False)
    return next((n for n, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


def likeness(one: ArrayType, other: ArrayType) -> int:
    """3 for the same type, 2 for the same shape, 1 for as many axes."""
    if one == other:
        return 3
    shapes = [kind.shape or () for kind in (one, other)]
    return 2 if shapes[0] == shapes[1] else int(len(shapes[0]) == len(shapes[1]))
