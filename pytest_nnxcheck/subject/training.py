"""The training that a call does: the parameters that ``grad`` differentiates by, and updates that do not reach them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from pytest_nnxcheck.compat import flax_modes, graph
from pytest_nnxcheck.compat.sharding import in_type
from pytest_nnxcheck.compat.variables import variable_value
from pytest_nnxcheck.core.facts import Path
from pytest_nnxcheck.jaxprs import flow
from pytest_nnxcheck.subject.staging import Key
from pytest_nnxcheck.subject.subject import Subject

__tracebackhide__ = True  # pytest shows the frames of the user, not these


@dataclass(frozen=True, slots=True)
class Training:
    """The leaves that the un-nested call trains, and the updates that it drops."""

    parameters: frozenset[Path] = frozenset()
    """The leaves that ``grad`` differentiates by."""
    gradients: tuple[jax.ShapeDtypeStruct, ...] = ()
    """The types of the gradients by them, in order."""
    dropped: tuple[Path, ...] = ()
    """The leaves of an optimizer whose update it throws away."""
    untrained: tuple[Path, ...] = ()
    """The leaves that its optimizers train, if it steps an optimizer and changes none of these leaves."""


def training(
    subject: Subject, jaxpr: Any, before: Mapping[Key, Any], out: tuple[Any, ...], changed: frozenset[Path]
) -> Training:
    """Find the training of the un-nested call; its jaxpr takes the leaves ``before``, its outputs have the types ``out``, and it changes the leaves ``changed``."""
    parameters = differentiable(subject, before)
    of_parameters = [leaf for (path, _), leaf in before.items() if path in parameters]
    nodes = flax_modes.iter_graph(subject.state)
    optimizers = {tuple(path): node for path, node in nodes if isinstance(node, nnx.Optimizer)}
    return Training(
        parameters=parameters,
        gradients=tuple(jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=in_type(leaf)) for leaf in of_parameters),
        dropped=dropped_updates(optimizers, jaxpr, [path for path, _ in before], changed),
        untrained=untrained(subject, optimizers, changed, out),
    )


def dropped_updates(
    optimizers: Iterable[Path], jaxpr: Any, paths: list[Path], changed: frozenset[Path]
) -> tuple[Path, ...]:
    """Leaves of the optimizers, where the call updates a copy of one, and none that was handed in.

    `nnx.Optimizer.update` always counts its step: a count that is computed and reaches no output was a copy's.
    """
    dropped: list[Path] = []
    for owner in optimizers:
        own = [path for path in paths if path[: len(owner)] == owner and path[len(owner)] in ("step", "opt_state")]
        step = next((paths.index(path) for path in own if path[len(owner) :] == ("step",)), None)
        if changed.intersection(own):
            return ()
        if step is not None and flow.counted_in_vain(jaxpr, step):
            dropped += own
    return tuple(dict.fromkeys(dropped))


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
    shapes = {getattr(variable_value(variables[path]), "shape", ()) for path in paths}
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
