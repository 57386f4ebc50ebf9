"""The definition of a layer, which takes a program and gives one of the same signature, and the pieces that all layers are made of.

A layer is one small function for each transform and style, as a user would write it. It takes the program inside it,
``f(state, *inputs) -> out``, and gives a program of the same signature with the same effect on the state, so layers compose in any
order. Layers use only names of jax and flax, and the few values of a `Plan` that the subject decides, so that their source *is* the
program that ran.

Layers that stack (``scan``, ``vmap``, ``call_first``) take inputs with a leading axis of length 2 and give outputs with one: stacked
outside the compiled program, because XLA sinks a broadcast made inside and the memory figures would lie. The outputs are indexed
outside too: an output that nobody returns is deleted with the loop that made it.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

__tracebackhide__ = True  # pytest shows the frames of the user, not these

Program = Callable[..., Any]
"""``f(state, *inputs) -> out``: state is a graph node, inputs and out are arrays (out in tuples)."""

LENGTH = 2
"""Length of every scan and vmap axis, and the number of steps of a loop; what a further step costs is measured with twice as many."""


@dataclass(frozen=True, slots=True)
class Plan:
    """The facts of the subject, and of its place in the nesting, that a layer needs."""

    changed: Callable[[Any, Any], bool]
    """Filter for `nnx.split`: the leaves that the un-nested call changes."""
    written: Callable[[Any, Any], bool]
    """Filter for `nnx.split`: the changed leaves, and those that it writes and restores where `nnx.vmap` cannot broadcast them."""
    subject: Program
    """The un-nested subject, for ``call_first``."""
    element: Callable[[Any], Any]
    """A function that takes the axes of the layers further in off an input, for ``call_first``."""
    shapes: Any
    """The inner program's abstract output, to hold a user's own layer to; None where it is not known."""
    empty: Callable[[], Any]
    """Zeros of the inner program's output, for the carry of a ``while_loop``."""
    parameters: Callable[[Any, Any], bool]
    """Filter for `nnx.split`: the leaves that ``grad`` differentiates by, floating point `nnx.Param`."""
    jit: Callable[..., Program]
    """``jit(wrapper, f)``: the wrapper (`jax.jit` or `nnx.jit`) applied; at the root of the nesting with donation."""
    unchanged: Callable[[Any], AbstractContextManager[None]]
    """A context that notes changes of ``eval_shape`` to the state, which must be none."""
    graph_updates: bool
    """True if flax hands changes of the graph out of a transform, as it does in its graph mode."""
    length: int = LENGTH
    """Steps of a loop, and length of an axis."""


def functional(f: Program, state: Any, plan: Plan, apart: Any = None) -> tuple[Callable[..., Any], Any, Any]:
    """``f`` as a pure function of the leaves that the call changes, or of others set ``apart``, and of the rest; and these two.

    It returns the leaves that the call changes, and no others, as a user would write it.
    """
    graphdef, *states = nnx.split(state, apart or plan.changed, ...)
    changed, rest = states

    def pure(changed: Any, rest: Any, *inputs: Any) -> Any:
        module = nnx.merge(graphdef, changed, rest)
        out = f(module, *inputs)
        return nnx.state(module, plan.changed), out

    return pure, changed, rest


def rebuild(tree: Any) -> Any:
    """The same arrays in a new tree: flax refuses to mutate one that was captured from outside a loop."""
    return jax.tree.map(lambda leaf: leaf, tree)


def stack(tree: Any, length: int = LENGTH) -> Any:
    """A leading axis on every leaf."""
    return jax.tree.map(lambda leaf: jnp.stack([leaf] * length), tree)


def first(tree: Any) -> Any:
    """Element 0 of the leading axis of every leaf."""
    return jax.tree.map(lambda leaf: leaf[0], tree)


def opaque(value: Any) -> Any:
    """A value that XLA cannot see through: a branch that can never run would be deleted."""
    return jax.lax.optimization_barrier(jnp.asarray(value))
