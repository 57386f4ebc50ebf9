"""What one abstract evaluation of the un-nested call tells: output shapes, and what the call does to the state.

Nothing is run: `jax.make_jaxpr` of the call over `nnx.split` and `nnx.merge`, once for each kind of call.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from pytest_nnxcheck.compat import arrays, flax_modes, graph, staging
from pytest_nnxcheck.compat.arrays import NUMBERS, as_array, describe, nbytes
from pytest_nnxcheck.compat.sharding import in_type
from pytest_nnxcheck.compat.variables import equation_line, variable_metadata, variable_value
from pytest_nnxcheck.core.facts import NO_WASTE, Path, Waste
from pytest_nnxcheck.core.peak import Captured
from pytest_nnxcheck.jaxprs import flow
from pytest_nnxcheck.jaxprs.captured import captured
from pytest_nnxcheck.jaxprs.waste import waste
from pytest_nnxcheck.subject.signatures import in_users_words
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
    """Facts of the un-nested call; sizes in bytes, of one call, on one device.

    With several ``devices`` the shards of the outputs are not known before a program is compiled: ``output_bytes`` counts them whole.
    ``writes_back`` says that a scan hands out its stacked inputs as they were; ``retyped`` are the leaves that
    come back with another type: (path, type before, type after), ``relabelled`` those of `relabelled`; ``dropped`` those of an optimizer whose update is thrown away, ``untrained`` those of `untrained`.
    ``replaced`` are the Variables in whose place the call puts another. A call that is ``restructured`` sets attributes that are no arrays. ``parameters`` are the leaves that ``grad`` differentiates
    by, ``gradients`` its abstract results, in order. ``origins`` are the numbers of the inputs that go into each output. A call that
    ``calls_back`` runs Python code, or raises, while the program runs; one that ``branches`` has a conditional. ``restored`` are those of `restored_leaves`,
    asked for where a ``vmap`` failed.
    ``waste`` is what its own structure spends memory on. ``precision`` is the distance between one and the next number of the lowest
    floating type that it computes in, ``equations`` how many it makes, each step of a scan counted, ``operations`` how many different ones. ``in_one_array`` are those of `in_one_array`. Its output is ``plain`` where jax alone gives it its structure,
    ``opened`` are the classes of objects in it that jax knows nothing of.
    """

    out: tuple[jax.ShapeDtypeStruct, ...]
    changed: frozenset[Path]
    added: tuple[Path, ...]
    writes_back: bool
    remat_in_scan: bool
    captured: tuple[Captured, ...]
    constant_bytes: int
    inner_donations: int
    state_paths: tuple[Path, ...]
    state_bytes: int
    changed_bytes: int
    input_bytes: int
    output_bytes: int
    devices: int
    retyped: tuple[tuple[Path, str, str], ...] = ()
    relabelled: tuple[tuple[Path, str, str, str], ...] = ()
    removed: tuple[Path, ...] = ()
    replaced: tuple[Path, ...] = ()
    restructured: bool = False
    dropped: tuple[Path, ...] = ()
    untrained: tuple[Path, ...] = ()
    out_names: tuple[str, ...] = ()
    parameters: frozenset[Path] = frozenset()
    gradients: tuple[jax.ShapeDtypeStruct, ...] = ()
    promoted: tuple[tuple[Path, str], ...] = ()
    origins: tuple[frozenset[int], ...] = ()
    calls_back: bool = False
    branches: bool = False
    restored: frozenset[Path] = frozenset()
    restored_bytes: int = 0
    waste: Waste = NO_WASTE
    precision: float = 0.0
    equations: int = 0
    operations: int = 0
    in_one_array: tuple[tuple[Path, Path], ...] = ()
    plain: bool = False
    opened: tuple[tuple[str, Any], ...] = ()
    unused: tuple[int, ...] = ()
    """The numbers of the leaves that the call neither reads nor writes: it hands them on as they are, and nothing else needs them."""
    donated: tuple[bool | None, ...] = ()
    """For each leaf, and each input behind them, whether a jit at the top of the call donates it; None where none takes it."""
    handed_out: tuple[int | None, ...] = ()
    """For each output the number of the input that it is as it came in."""

    @property
    def copied_bytes(self) -> int:
        """Bytes of one copy of the state; of the inputs, for a call in functional style that is handed arrays alone, an `nnx.State` among them."""
        return self.state_bytes or self.input_bytes


UNKNOWN = Profile((), frozenset(), (), False, False, (), 0, 0, (), 0, 0, 0, 0, 1)
"""The profile of a call that cannot be evaluated: enough for a plain jit."""


def type_in_a_trace(leaf: Any) -> str:
    """The type that a trace takes a leaf in with: a Python number has that of the array which jax makes of it."""
    return describe(as_array(leaf) if isinstance(leaf, NUMBERS) else leaf)


def profile(subject: Subject) -> Profile:
    """Evaluate the un-nested call abstractly. Raises what the user's code raises under a trace."""
    subject = subject.for_run()
    # Arrays are not copied: a trace reads no values, and those of an earlier trace have none.
    graphdef, before = flax_modes.split(subject.fresh() if subject.abstract else subject.state)

    structures: list[Any] = []
    variables: list[dict[Path, Any]] = []
    labels: list[dict[Path, dict[str, Any]]] = []
    poisoned: list[bool] = []

    def pure(leaves: Any, *inputs: Any) -> Any:
        module = nnx.merge(graphdef, leaves)
        structures.append(statics(module))
        variables.append(dict(graph.variables(module)))
        labels.append(metadata(module))
        out = subject.program(module, *inputs)
        structures.append(statics(module))
        variables.append(dict(graph.variables(module)))
        labels.append(metadata(module))
        state = flax_modes.state(module)
        poisoned.append(holds_beside(module, jax.tree.leaves(state)))
        return out, state

    closed, (out, after) = jax.make_jaxpr(in_users_words(pure, subject), return_shape=True)(before, *subject.inputs)
    if any(poisoned):
        # The caches of jax compare static attributes: a dead tracer among them makes every later call raise.
        jax.clear_caches()
    plain, opened = subject.output_tree.plain, subject.output_tree.opened
    jaxpr = staging.open_jaxpr(closed)
    origins_of_outputs = flow.sources(jaxpr)
    sources = origins_of_outputs[len(out) :]
    number_of = {key: number for number, (key, _) in enumerate(numbered(before))}
    shardings = {key: getattr(leaf, "sharding", None) for key, leaf in numbered(before)}
    moved = [
        (key[0], leaf, shardings.get(key))
        for (key, leaf), source in zip(numbered(after), sources, strict=True)
        if key not in number_of or number_of[key] != source
    ]
    same = {key: number_of.get(key) == source for (key, _), source in zip(numbered(after), sources, strict=True)}
    paths = {path for path, _ in number_of}
    types = {key: type_in_a_trace(leaf) for key, leaf in numbered(before)}
    changed = frozenset(path for path, *_ in moved if path in paths)
    outputs = enumerate(numbered(after), len(out))
    output_of = {key: output for output, (key, _) in outputs if key[0] in changed and key in number_of}
    captures = captured(closed, walk(subject.roots(subject.state)).arrays)
    parameters = differentiable(subject, before)
    return Profile(
        out=out,
        changed=changed,
        added=tuple(sorted({path for path, *_ in moved if path not in paths}, key=str)),
        writes_back=flow.writes_back(closed),
        remat_in_scan=flow.remat_in_scan(closed),
        captured=captures,
        constant_bytes=sum(constant.bytes for constant in captures),
        inner_donations=flow.inner_donations(closed),
        state_paths=tuple(path for path, _ in graph.flat_state(before)),
        state_bytes=sum(nbytes(leaf) for _, leaf in graph.flat_state(before)),
        changed_bytes=sum(nbytes(leaf, sharding) for path, leaf, sharding in moved if path in paths),
        input_bytes=sum(map(nbytes, subject.inputs)),
        output_bytes=sum(map(nbytes, out)),
        devices=max(map(devices, [*jax.tree.leaves(before), *subject.inputs])),
        retyped=tuple(
            (key[0], types[key], new) for key, leaf in numbered(after) if (new := describe(leaf)) != types.get(key, new)
        ),
        # A tracer among them is a leak, which a loop leaves as any other transform does.
        relabelled=() if any(poisoned) else tuple(relabelled(*labels)),
        removed=tuple(sorted(paths - {key[0] for key, _ in numbered(after)}, key=str)),
        replaced=replaced(*variables),
        restructured=structures[0] != structures[1],
        plain=plain,
        opened=opened,
        dropped=dropped_updates(subject, jaxpr, [key[0] for key in number_of], changed),
        untrained=untrained(subject, changed, out),
        out_names=subject.output_tree.names,
        parameters=parameters,
        gradients=tuple(
            jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=in_type(leaf))
            for path, leaf in graph.flat_state(before)
            if path in parameters
        ),
        promoted=promoted(jaxpr, len(out), before, after),
        waste=waste(jaxpr, {number_of[key]: output for key, output in output_of.items()}),
        precision=flow.lowest_precision(closed),
        equations=flow.equations(closed),
        operations=flow.operations(closed),
        calls_back=flow.calls_back(closed),
        branches=flow.branches(closed),
        in_one_array=in_one_array([path for (path, _), _ in numbered(after)], jaxpr.outvars[len(out) :]),
        origins=input_origins(jaxpr, len(out), len(subject.inputs)),
        unused=unused(jaxpr, len(out), same, number_of),
        donated=flow.donated_to_jits(jaxpr),
        handed_out=tuple(
            source - len(number_of) if source is not None and source >= len(number_of) else None
            for source in origins_of_outputs[: len(out)]
        ),
    )


def unused(jaxpr: Any, outputs: int, same: Mapping[Key, bool], number_of: Mapping[Key, int]) -> tuple[int, ...]:
    """The numbers of the leaves that come back as the ``same``, and that neither an output of the call nor another leaf needs."""
    needed = staging.inputs_needed(jaxpr, [*[True] * outputs, *(not kept for kept in same.values())])
    return tuple(number for key, number in number_of.items() if same.get(key) and not needed[number])


def in_one_array(paths: Sequence[Path], variables: Sequence[Any]) -> tuple[tuple[Path, Path], ...]:
    """Pairs of leaves that are handed back as one variable of the jaxpr: a call without a jit leaves them in one and the same array."""
    first: dict[int, Path] = {}
    pairs = ((first.setdefault(id(var), path), path) for path, var in zip(paths, variables, strict=True))
    return tuple((one, other) for one, other in pairs if one != other)


def restored_leaves(subject: Subject, changed: frozenset[Path]) -> frozenset[Path]:
    """The leaves that the call writes and gives their value back, where they come out of a `jax.vmap` with an axis that they did not go in with.

    A spectral norm that writes the normalized kernel and puts the old one back: the update of a mapped value is mapped. The call is
    made a few times, halving the leaves; none where the call cannot be mapped at all.
    """
    graphdef, before = flax_modes.split(subject.fresh() if subject.abstract else subject.state)
    keys = [key for key, _ in numbered(before)]
    leaves, treedef = jax.tree.flatten(before)

    def maps(mapped: frozenset[Path], handed_on: list[Path]) -> bool:
        """Whether the call can be mapped over these leaves and its inputs, and hands the others on without an axis."""

        def call(leaves: list[Any], *inputs: Any) -> list[Any]:
            module = nnx.merge(graphdef, jax.tree.unflatten(treedef, leaves))
            subject.program(module, *inputs)
            after = dict(numbered(flax_modes.state(module)))
            return [after.get(key) for key in keys if key[0] in handed_on]

        axes = [0 if path in mapped else None for path, _ in keys]
        handed = [with_axis(leaf) if axis == 0 else leaf for leaf, axis in zip(leaves, axes, strict=True)]
        mapped_call = jax.vmap(call, in_axes=(axes, *(0 for _ in subject.inputs)), out_axes=None)
        arguments = (handed, *map(with_axis, subject.inputs))
        try:
            # Inside a trace jax may give an update of a mapped value no axis, as it does outside of one.
            jax.eval_shape(mapped_call, *arguments) if subject.abstract else mapped_call(*arguments)
        except Exception:  # noqa: BLE001 - the user's code may raise anything, and raises it again where it is nested
            return False
        return True

    def batched(paths: list[Path]) -> list[Path]:
        if maps(changed, paths):
            return []
        half = len(paths) // 2
        return batched(paths[:half]) + batched(paths[half:]) if half else paths

    rest = [path for path in dict.fromkeys(path for path, _ in keys) if path not in changed]
    return frozenset(batched(rest)) if maps(changed, []) else frozenset()


def with_axis(leaf: Any) -> Any:
    """Two of an array, abstract where it is."""
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct((2, *leaf.shape), leaf.dtype, sharding=in_type(leaf, 1))
    return arrays.stacked(leaf, 2)


def replaced(before: dict[Path, Any], after: dict[Path, Any]) -> tuple[Path, ...]:
    """The paths at which another Variable is than before: a new one, or one of another path."""
    return tuple(path for path, variable in before.items() if after.get(path, variable) is not variable)


def metadata(module: Any) -> dict[Path, dict[str, Any]]:
    """The metadata of each Variable, as it is now."""
    return {path: dict(variable_metadata(variable)) for path, variable in graph.variables(module)}


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


def promoted(jaxpr: Any, outputs: int, before: Any, after: Any) -> tuple[tuple[Path, str], ...]:
    """Path of each leaf that comes back with another dtype, and the line at which it gets it; its results follow the outputs."""
    dtypes = {key: leaf.dtype for key, leaf in numbered(before) if hasattr(leaf, "dtype")}
    lines = []
    for number, (key, leaf) in enumerate(numbered(after), outputs):
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


def differentiable(subject: Subject, state: Any) -> frozenset[Path]:
    """The floating point `nnx.Param` of the state: what one trains."""
    trained = {path for path, variable in graph.variables(subject.state) if isinstance(variable, nnx.Param)}
    leaves = graph.flat_state(state)
    fixed = {path for path, leaf in leaves if not (hasattr(leaf, "dtype") and jnp.issubdtype(leaf.dtype, jnp.inexact))}
    return frozenset(path for path, _ in leaves if path in trained - fixed)


def numbered(state: Any) -> Iterable[tuple[tuple[Path, int], Any]]:
    """The leaves of a state, told apart where one Variable holds several arrays."""
    seen: Counter[Path] = Counter()
    for path, leaf in graph.flat_state(state):
        yield (path, seen[path]), leaf
        seen[path] += 1


def devices(array: Any) -> int:
    """Devices that an array lies on; one where that is not said."""
    sharding = getattr(array, "sharding", None)
    return sharding.num_devices if isinstance(sharding, jax.sharding.Sharding) else 1
