"""What one abstract evaluation of the un-nested call tells: output shapes, and what the call does to the state.

Nothing is run: `jax.make_jaxpr` of the call, once for each kind of call.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from pytest_nnxcheck.compat import flax_modes, graph, staging
from pytest_nnxcheck.compat.arrays import NUMBERS, as_array, describe, discharged, is_ref_type, nbytes, value_of
from pytest_nnxcheck.compat.sharding import in_type
from pytest_nnxcheck.compat.variables import equation_line, variable_metadata, variable_value
from pytest_nnxcheck.core.facts import NO_WASTE, Path, Waste
from pytest_nnxcheck.core.peak import Captured
from pytest_nnxcheck.jaxprs import flow
from pytest_nnxcheck.jaxprs.captured import captured
from pytest_nnxcheck.jaxprs.forwarding import forwarded, puts_back
from pytest_nnxcheck.jaxprs.waste import waste
from pytest_nnxcheck.subject.staging import on_arrays
from pytest_nnxcheck.subject.subject import Subject
from pytest_nnxcheck.subject.write_back import statics
from pytest_nnxcheck.walk.fingerprint import equal, show
from pytest_nnxcheck.walk.raw_access import MISSING
from pytest_nnxcheck.walk.walk import holds_beside, walk

__tracebackhide__ = True  # pytest shows the frames of the user, not these

Key = tuple[Path, int]
"""One array of a state: the path of its Variable, and its number among the arrays of that."""


@dataclass(frozen=True, slots=True)
class Profile:
    """Facts of the un-nested call. All sizes are bytes of one call on one device."""

    # --- what it returns
    out: tuple[jax.ShapeDtypeStruct, ...] = ()
    """The types of its outputs."""
    out_names: tuple[str, ...] = ()
    """Their places in what the user's function returns."""
    plain: bool = False
    """Whether jax alone gives the output its structure: arrays and numbers, in containers that jax knows."""
    opened: tuple[tuple[str, Any], ...] = ()
    """The classes of the objects in the output that jax knows nothing of, with their fields."""
    origins: tuple[frozenset[int], ...] = ()
    """For each output the numbers of the inputs that go into it."""
    handed_out: tuple[int | None, ...] = ()
    """For each output the number of the input that it is as it came in."""

    # --- what it does to the state
    state_paths: tuple[Path, ...] = ()
    """Every leaf of the state, in the order in which jax flattens it."""
    changed: frozenset[Path] = frozenset()
    """The leaves that come out with another value."""
    added: tuple[Path, ...] = ()
    """The leaves that were not there before."""
    removed: tuple[Path, ...] = ()
    """The leaves that are gone."""
    retyped: tuple[tuple[Path, str, str], ...] = ()
    """The leaves that come out with another type: path, type before, type after."""
    promoted: tuple[tuple[Path, str], ...] = ()
    """The leaves that come out with another dtype, and the line at which each gets it."""
    relabelled: tuple[tuple[Path, str, str, str], ...] = ()
    """The metadata of Variables that it changes: path, name, value before, value after."""
    replaced: tuple[Path, ...] = ()
    """The Variables in whose place it puts another Variable."""
    in_references: bool = False
    """Whether a leaf, or an array that the call captures, is a `jax.Ref`: only a run writes it."""
    scans_references: bool = False
    """Whether a scan takes references step by step."""
    rewritten: str = ""
    """The line of a `jax.checkpoint` whose writes to a reference a gradient makes a second time."""
    restructured: bool = False
    """Whether it sets attributes that are no arrays."""
    unused: tuple[int, ...] = ()
    """The numbers of the leaves that it neither reads nor writes: it hands them on as they are, and nothing else needs them."""
    in_one_array: tuple[tuple[Path, Path], ...] = ()
    """Pairs of leaves that it hands back as one value: without a jit both hold one and the same array then."""
    restored: frozenset[Path] = frozenset()
    """The leaves that it writes and gives their value back, see `transforms.trials.restored_leaves`. Found out only where a ``vmap`` failed."""

    # --- training
    parameters: frozenset[Path] = frozenset()
    """The leaves that ``grad`` differentiates by."""
    gradients: tuple[jax.ShapeDtypeStruct, ...] = ()
    """The types of the gradients by them, in order."""
    dropped: tuple[Path, ...] = ()
    """The leaves of an optimizer whose update it throws away."""
    untrained: tuple[Path, ...] = ()
    """The leaves that its optimizers train, if it steps an optimizer and changes none of these leaves."""

    # --- sizes
    state_bytes: int = 0
    changed_bytes: int = 0
    restored_bytes: int = 0
    input_bytes: int = 0
    output_bytes: int = 0
    """The bytes of whole outputs, on several devices too: only a compiled program shows how outputs are sharded."""
    devices: int = 1
    """The most devices that one of its arrays lies on."""

    # --- its program
    captured: tuple[Captured, ...] = ()
    """The arrays that it captures, which a compiled program holds as constants."""
    donated: tuple[bool | None, ...] = ()
    """For each leaf, and each input behind them, whether a jit at the top of the call donates it; None where none takes it."""
    inner_donations: int = 0
    """How many arrays the jits inside donate."""
    writes_back: bool = False
    """Whether a scan hands out its stacked inputs as they were."""
    remat_in_scan: bool = False
    branches: bool = False
    """Whether it has a conditional."""
    calls_back: bool = False
    """Whether it runs Python code, or may raise, while the program runs."""
    waste: Waste = NO_WASTE
    """What its own structure spends memory on."""
    precision: float = 0.0
    """The distance between one and the next number of the lowest floating type that it computes in."""
    equations: int = 0
    """How many equations it makes, each step of a scan counted."""
    operations: int = 0
    """How many different ones."""

    @property
    def copied_bytes(self) -> int:
        """Bytes of one copy of the state; of the inputs, for a call in functional style that is handed arrays alone, an `nnx.State` among them."""
        return self.state_bytes or self.input_bytes


UNKNOWN = Profile()
"""The profile of a call that cannot be evaluated: enough for a plain jit."""


def type_in_a_trace(leaf: Any) -> str:
    """The type that a trace takes a leaf in with: a Python number has that of the array which jax makes of it."""
    return describe(as_array(leaf) if isinstance(leaf, NUMBERS) else leaf)


@dataclass(frozen=True, slots=True)
class Structure:
    """What a module holds beside the values of its leaves, at one moment of the call."""

    statics: tuple[Any, ...]
    variables: dict[Path, Any]
    metadata: dict[Path, dict[str, Any]]

    @classmethod
    def of(cls, module: Any) -> Structure:
        """The structure of a module as it is now."""
        found = dict(graph.variables(module))
        metadata = {path: dict(variable_metadata(variable)) for path, variable in found.items()}
        return cls(statics(module), found, metadata)


def profile(subject: Subject) -> Profile:
    """Evaluate the un-nested call abstractly. Raises what the user's code raises under a trace."""
    subject = replace(subject.for_run(), in_refs=False)
    structures: list[Structure] = []
    poisoned: list[bool] = []

    def call(module: Any, *inputs: Any) -> Any:
        structures.append(Structure.of(module))
        out = subject.program(module, *inputs)
        structures.append(Structure.of(module))
        state = flax_modes.state(module)
        poisoned.append(holds_beside(module, jax.tree.leaves(state)))
        return out, jax.tree.map(value_of, state)

    function, (leaves, *inputs) = on_arrays(call, subject)
    closed, (out, after) = jax.make_jaxpr(function, return_shape=True)(leaves, *inputs)
    opened = staging.open_jaxpr(closed)
    in_references = any(is_ref_type(var.aval) for var in (*opened.invars, *opened.constvars))
    # The state that is returned has the last values of references.
    put_back = in_references and puts_back(discharged(closed)) > 0
    rewritten = flow.written_twice(closed) if in_references else ""
    closed = forwarded(discharged(closed, last_values=False)) if in_references else closed
    if any(poisoned):
        # The caches of jax compare static attributes: a dead tracer among them makes every later call raise.
        jax.clear_caches()
    known = facts_of_program(subject, closed, out, dict(numbered(leaves)), dict(numbered(after)))
    before, behind = structures
    return replace(
        known,
        out_names=subject.output_tree.names,
        plain=subject.output_tree.plain,
        in_references=in_references,
        scans_references=put_back,
        rewritten=rewritten,
        opened=subject.output_tree.opened,
        # A tracer among them is a leak, which a loop leaves as any other transform does.
        relabelled=() if any(poisoned) else tuple(relabelled(before.metadata, behind.metadata)),
        replaced=replaced(before.variables, behind.variables),
        restructured=before.statics != behind.statics,
    )


def facts_of_program(
    subject: Subject, closed: Any, out: tuple[Any, ...], before: dict[Key, Any], after: dict[Key, Any]
) -> Profile:
    """What the jaxpr of the un-nested call tells, whose arguments are the leaves ``before`` and the inputs, whose results ``out`` and the leaves ``after``."""
    jaxpr = staging.open_jaxpr(closed)
    sources = flow.sources(jaxpr)
    number_of = {key: number for number, key in enumerate(before)}
    output_of = {key: number for number, key in enumerate(after, len(out))}
    moved = [key for key in after if key not in before or sources[output_of[key]] != number_of[key]]
    paths = {path for path, _ in before}
    changed = frozenset(path for path, _ in moved if path in paths)
    written = [key for key in moved if key[0] in paths]
    parameters = differentiable(subject, before)
    types = {key: type_in_a_trace(leaf) for key, leaf in before.items()}
    return Profile(
        out=out,
        origins=input_origins(jaxpr, len(out), len(subject.inputs)),
        handed_out=tuple(
            source - len(before) if source is not None and source >= len(before) else None
            for source in sources[: len(out)]
        ),
        # --- what it does to the state
        state_paths=tuple(path for path, _ in before),
        changed=changed,
        added=tuple(sorted({path for path, _ in moved if path not in paths}, key=str)),
        removed=tuple(sorted(paths - {path for path, _ in after}, key=str)),
        retyped=tuple(
            (key[0], types[key], new) for key, leaf in after.items() if (new := describe(leaf)) != types.get(key, new)
        ),
        promoted=promoted(jaxpr, len(out), before, after),
        unused=unused(jaxpr, len(out), before, after, moved),
        in_one_array=in_one_array([path for path, _ in after], jaxpr.outvars[len(out) :]),
        # --- training
        parameters=parameters,
        gradients=tuple(
            jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=in_type(leaf))
            for (path, _), leaf in before.items()
            if path in parameters
        ),
        dropped=dropped_updates(subject, jaxpr, [path for path, _ in before], changed),
        untrained=untrained(subject, changed, out),
        # --- sizes
        state_bytes=sum(map(nbytes, before.values())),
        changed_bytes=sum(nbytes(after[key], getattr(before.get(key), "sharding", None)) for key in written),
        input_bytes=sum(map(nbytes, subject.inputs)),
        output_bytes=sum(map(nbytes, out)),
        devices=max(map(devices, [*before.values(), *subject.inputs])),
        # --- its program
        captured=captured(closed, walk(subject.roots(subject.state)).arrays),
        donated=flow.donated_to_jits(jaxpr),
        inner_donations=flow.inner_donations(closed),
        writes_back=flow.writes_back(closed),
        remat_in_scan=flow.remat_in_scan(closed),
        branches=flow.branches(closed),
        calls_back=flow.calls_back(closed),
        waste=waste(jaxpr, {number_of[key]: output_of[key] for key in after if key[0] in changed and key in before}),
        precision=flow.lowest_precision(closed),
        equations=flow.equations(closed),
        operations=flow.operations(closed),
    )


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


def replaced(before: dict[Path, Any], after: dict[Path, Any]) -> tuple[Path, ...]:
    """The paths at which another Variable is than before: a new one, or one of another path."""
    return tuple(path for path, variable in before.items() if after.get(path, variable) is not variable)


def relabelled(
    before: dict[Path, dict[str, Any]], after: dict[Path, dict[str, Any]]
) -> Iterator[tuple[Path, str, str, str]]:
    """The metadata of Variables that the call changes: path, name, value before, and value after."""
    for path, old in before.items():
        new = after.get(path, old)
        for name in dict.fromkeys((*old, *new)):
            was, became = old.get(name, MISSING), new.get(name, MISSING)
            # One whose comparison raises, raises in a loop as well: that is not for us to say.
            if not equal(was, became, unknown=True):
                shown, shown_after = ("nothing" if value is MISSING else show(value) for value in (was, became))
                yield path, name, shown, shown_after


def input_origins(jaxpr: Any, outputs: int, inputs: int) -> tuple[frozenset[int], ...]:
    """The numbers of the inputs that go into each output of the call; the leaves of the state come before them."""
    first = len(jaxpr.invars) - inputs
    return tuple(
        frozenset(number for number in range(inputs) if bits >> (first + number) & 1)
        for bits in flow.origins(jaxpr)[:outputs]
    )


def promoted(
    jaxpr: Any, outputs: int, before: Mapping[Key, Any], after: Mapping[Key, Any]
) -> tuple[tuple[Path, str], ...]:
    """Path of each leaf that comes back with another dtype, and the line at which it gets it; its results follow the outputs."""
    dtypes = {key: leaf.dtype for key, leaf in before.items() if hasattr(leaf, "dtype")}
    lines = []
    for number, (key, leaf) in enumerate(after.items(), outputs):
        if key in dtypes and getattr(leaf, "dtype", dtypes[key]) != dtypes[key]:
            eqn = flow.retyped_at(jaxpr, number, dtypes[key])
            lines.append((key[0], equation_line(eqn) if eqn is not None else ""))
    return tuple(lines)


def dropped_updates(subject: Any, jaxpr: Any, paths: list[Path], changed: frozenset[Path]) -> tuple[Path, ...]:
    """Leaves of the optimizers, where the call updates a copy of one, and none that was handed in.

    `nnx.Optimizer.update` always counts its step: a count that is computed and reaches no output was a copy's.
    """
    owned = [path for path, node in flax_modes.iter_graph(subject.state) if isinstance(node, nnx.Optimizer)]
    dropped: list[Path] = []
    for owner in dict.fromkeys(map(tuple, owned)):
        own = [path for path in paths if path[: len(owner)] == owner and path[len(owner)] in ("step", "opt_state")]
        step = next((paths.index(path) for path in own if path[len(owner) :] == ("step",)), None)
        if changed.intersection(own):
            return ()
        if step is not None and flow.counted_in_vain(jaxpr, step):
            dropped += own
    return tuple(dict.fromkeys(dropped))


def untrained(subject: Subject, changed: frozenset[Path], out: tuple[Any, ...]) -> tuple[Path, ...]:
    """What the optimizers are to train, where the call steps one of them, and neither changes nor returns any of it: it trains a copy."""
    optimizers = [
        (tuple(path), node) for path, node in flax_modes.iter_graph(subject.state) if isinstance(node, nnx.Optimizer)
    ]
    stepped = [node for path, node in optimizers if (*path, "step") in changed]
    own = tuple((*path, name) for path, _ in optimizers for name in ("step", "opt_state"))
    variables = dict(graph.variables(subject.state))
    paths = {
        path
        for node in stepped
        for path, _ in graph.flat_state(nnx.state(subject.state, getattr(node, "wrt", nnx.Param)))
        if path in variables and not any(path[: len(start)] == start for start in own)
    }
    shapes = {getattr(variable_value(variables[path]), "shape", ()) for path in paths}
    if paths & changed or shapes & {leaf.shape for leaf in out}:
        return ()
    return tuple(sorted(paths, key=str))


def differentiable(subject: Subject, leaves: Mapping[Key, Any]) -> frozenset[Path]:
    """The floating point `nnx.Param` of the state: what one trains."""
    trained = {path for path, variable in graph.variables(subject.state) if isinstance(variable, nnx.Param)}
    fixed = {
        path
        for (path, _), leaf in leaves.items()
        if not (hasattr(leaf, "dtype") and jnp.issubdtype(leaf.dtype, jnp.inexact))
    }
    return frozenset(path for path, _ in leaves if path in trained - fixed)


def numbered(state: Any) -> Iterator[tuple[Key, Any]]:
    """The leaves of a state, told apart where one Variable holds several arrays."""
    seen: Counter[Path] = Counter()
    for path, leaf in graph.flat_state(state):
        yield (path, seen[path]), leaf
        seen[path] += 1


def devices(array: Any) -> int:
    """Devices that an array lies on; one where that is not said."""
    sharding = getattr(array, "sharding", None)
    return sharding.num_devices if isinstance(sharding, jax.sharding.Sharding) else 1
