"""The layers: one small function for each transform and style, as a user would write it.

Every function takes the program inside it, ``f(state, *inputs) -> out``, and gives a program of the same signature with the
same effect on the state, so layers compose in any order. They use only names of jax and flax, and the few values of a `Plan`
that the subject decides, so that their source *is* the program that ran.

``scan``, ``vmap`` and ``call_first`` take inputs with a leading axis of length 2 and give outputs with one: stacked outside the
compiled program, because XLA sinks a broadcast made inside and the memory figures would lie. The outputs are indexed outside
too: an output that nobody returns is deleted with the loop that made it.
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
    """What a layer must know of the subject and of its place in the nesting."""

    changed: Callable[[Any, Any], bool]
    """Filter for `nnx.split`: the leaves that the un-nested call changes."""
    written: Callable[[Any, Any], bool]
    """Filter for `nnx.split`: those, and the leaves that it writes and restores where `nnx.vmap` cannot broadcast them."""
    subject: Program
    """The un-nested subject, for ``call_first``."""
    element: Callable[[Any], Any]
    """Takes the axes of the layers further in off an input, for ``call_first``."""
    shapes: Any
    """The inner program's abstract output, to hold a user's own layer to; None where it is not known."""
    empty: Callable[[], Any]
    """Zeros of the inner program's output, for the carry of a ``while_loop``."""
    parameters: Callable[[Any, Any], bool]
    """Filter for `nnx.split`: the leaves that ``grad`` differentiates by, floating point `nnx.Param`."""
    jit: Callable[..., Program]
    """``jit(wrapper, f)``: the wrapper (`jax.jit` or `nnx.jit`) applied; at the root of the nesting with donation."""
    unchanged: Callable[[Any], AbstractContextManager[None]]
    """Notes what ``eval_shape`` does to the state, which must be nothing."""
    graph_updates: bool
    """Whether flax hands changes of the graph out of a transform, as it does in its graph mode."""
    length: int = LENGTH
    """Steps of a loop, and length of an axis."""


def split(state: Any, plan: Plan) -> tuple[Any, Any, Any]:
    """The graph of the state, its leaves that the call changes, and the rest."""
    graphdef, *states = nnx.split(state, plan.changed, ...)
    changed, rest = states
    return graphdef, changed, rest


def functional(f: Program, graphdef: Any, plan: Plan) -> Callable[..., Any]:
    """``f`` as a pure function: it returns the state that the call changes, and no other, as a user would write it."""

    def pure(changed: Any, rest: Any, *inputs: Any) -> Any:
        module = nnx.merge(graphdef, changed, rest)
        out = f(module, *inputs)
        return nnx.state(module, plan.changed), out

    return pure


def axes(module: Any, plan: Plan) -> Any:
    """The leaves that the call writes mapped, the rest broadcast: a prefix where flax's mode refuses `nnx.StateAxes`."""
    filters: Any = {plan.written: 0, ...: None}
    return nnx.StateAxes(filters) if plan.graph_updates else nnx.prefix(module, filters)


def rebuild(tree: Any) -> Any:
    """The same arrays in a new tree: flax refuses to mutate one that was captured from outside a loop."""
    return jax.tree.map(lambda leaf: leaf, tree)


def stack(tree: Any, length: int = LENGTH) -> Any:
    """A leading axis on every leaf."""
    return jax.tree.map(lambda leaf: jnp.stack([leaf] * length), tree)


def first(tree: Any) -> Any:
    """Element 0 of the leading axis of every leaf."""
    return jax.tree.map(lambda leaf: leaf[0], tree)


def jit_argument(f: Program, plan: Plan) -> Program:
    return plan.jit(nnx.jit, f)


def jit_functional(f: Program, plan: Plan) -> Program:
    def layer(state: Any, *inputs: Any) -> Any:
        graphdef, changed, rest = split(state, plan)
        pure = functional(f, graphdef, plan)
        changed, out = plan.jit(jax.jit, pure)(changed, rest, *inputs)
        nnx.update(state, changed)
        return out

    return layer


def jit_closure(f: Program, plan: Plan) -> Program:
    def layer(state: Any, *inputs: Any) -> Any:
        return plan.jit(nnx.jit, lambda *inputs: f(state, *inputs))(*inputs)

    return layer


def jit_jax_closure(f: Program, plan: Plan) -> Program:
    def layer(state: Any, *inputs: Any) -> Any:
        return plan.jit(jax.jit, lambda *inputs: f(state, *inputs))(*inputs)

    return layer


def remat_argument(f: Program, plan: Plan) -> Program:
    return nnx.remat(f)


def remat_functional(f: Program, plan: Plan) -> Program:
    def layer(state: Any, *inputs: Any) -> Any:
        graphdef, changed, rest = split(state, plan)
        pure = functional(f, graphdef, plan)
        changed, out = jax.checkpoint(pure)(changed, rest, *inputs)
        nnx.update(state, changed)
        return out

    return layer


def remat_closure(f: Program, plan: Plan) -> Program:
    def layer(state: Any, *inputs: Any) -> Any:
        return nnx.remat(lambda *inputs: f(state, *inputs))(*inputs)

    return layer


def remat_jax_closure(f: Program, plan: Plan) -> Program:
    def layer(state: Any, *inputs: Any) -> Any:
        return jax.checkpoint(lambda *inputs: f(state, *inputs))(*inputs)

    return layer


def scan_argument(f: Program, plan: Plan) -> Program:
    def layer(state: Any, *inputs: Any) -> Any:
        def body(state: Any, inputs: Any) -> Any:
            return state, f(state, *inputs)

        carry = nnx.Carry
        _, out = nnx.scan(body, length=plan.length, in_axes=(carry, 0), out_axes=(carry, 0))(state, inputs)
        return out

    return layer


def scan_functional(f: Program, plan: Plan) -> Program:
    def layer(state: Any, *inputs: Any) -> Any:
        graphdef, changed, rest = split(state, plan)
        pure = functional(f, graphdef, plan)

        def body(changed: Any, inputs: Any) -> Any:
            return pure(changed, rebuild(rest), *inputs)

        changed, out = jax.lax.scan(body, changed, inputs, length=plan.length)
        nnx.update(state, changed)
        return out

    return layer


def scan_closure(f: Program, plan: Plan) -> Program:
    def layer(state: Any, *inputs: Any) -> Any:
        def body(inputs: Any) -> Any:
            return f(state, *inputs)

        return nnx.scan(body, length=plan.length, in_axes=(0,), out_axes=0)(inputs)

    return layer


def scan_jax_closure(f: Program, plan: Plan) -> Program:
    def layer(state: Any, *inputs: Any) -> Any:
        def body(carry: None, inputs: Any) -> Any:
            return carry, f(state, *inputs)

        _, out = jax.lax.scan(body, None, inputs, length=plan.length)
        return out

    return layer


def vmap_argument(f: Program, plan: Plan) -> Program:
    def layer(state: Any, *inputs: Any) -> Any:
        nnx.update(state, stack(nnx.state(state, plan.written), plan.length))
        out = nnx.vmap(f, in_axes=(axes(state, plan), *(0 for _ in inputs)))(state, *inputs)
        nnx.update(state, first(nnx.state(state, plan.written)))
        return out

    return layer


def vmap_functional(f: Program, plan: Plan) -> Program:
    def layer(state: Any, *inputs: Any) -> Any:
        graphdef, changed, rest = split(state, plan)
        pure = functional(f, graphdef, plan)
        changed, out = jax.vmap(pure, in_axes=(0, None, *(0 for _ in inputs)))(
            stack(changed, plan.length), rest, *inputs
        )
        nnx.update(state, first(changed))
        return out

    return layer


def vmap_closure(f: Program, plan: Plan) -> Program:
    def layer(state: Any, *inputs: Any) -> Any:
        return nnx.vmap(lambda *inputs: f(state, *inputs))(*inputs)

    return layer


def vmap_jax_closure(f: Program, plan: Plan) -> Program:
    def layer(state: Any, *inputs: Any) -> Any:
        return jax.vmap(lambda *inputs: f(state, *inputs))(*inputs)

    return layer


def while_loop_argument(f: Program, plan: Plan) -> Program:
    def layer(state: Any, *inputs: Any) -> Any:
        def body(carry: Any) -> Any:
            step, state, inputs, _ = carry
            return step + 1, state, inputs, f(state, *inputs)

        start = (jnp.int32(0), state, inputs, plan.empty())
        return nnx.while_loop(lambda carry: carry[0] < plan.length, body, start)[3]

    return layer


def while_loop_functional(f: Program, plan: Plan) -> Program:
    def layer(state: Any, *inputs: Any) -> Any:
        graphdef, changed, rest = split(state, plan)
        pure = functional(f, graphdef, plan)

        def body(carry: Any) -> Any:
            step, changed, inputs, _ = carry
            changed, out = pure(changed, rebuild(rest), *inputs)
            return step + 1, changed, inputs, out

        start = (jnp.int32(0), changed, inputs, plan.empty())
        _, changed, _, out = jax.lax.while_loop(lambda carry: carry[0] < plan.length, body, start)
        nnx.update(state, changed)
        return out

    return layer


def while_loop_closure(f: Program, plan: Plan) -> Program:
    def layer(state: Any, *inputs: Any) -> Any:
        def body(carry: Any) -> Any:
            step, inputs, _ = carry
            return step + 1, inputs, f(state, *inputs)

        start = (jnp.int32(0), inputs, plan.empty())
        return nnx.while_loop(lambda carry: carry[0] < plan.length, body, start)[2]

    return layer


def while_loop_jax_closure(f: Program, plan: Plan) -> Program:
    def layer(state: Any, *inputs: Any) -> Any:
        def body(carry: Any) -> Any:
            step, inputs, _ = carry
            return step + 1, inputs, f(state, *inputs)

        start = (jnp.int32(0), inputs, plan.empty())
        return jax.lax.while_loop(lambda carry: carry[0] < plan.length, body, start)[2]

    return layer


def eval_shape_argument(f: Program, plan: Plan) -> Program:
    def layer(state: Any, *inputs: Any) -> Any:
        with plan.unchanged(state):
            nnx.eval_shape(f, state, *inputs)
        return f(state, *inputs)

    return layer


def eval_shape_functional(f: Program, plan: Plan) -> Program:
    def layer(state: Any, *inputs: Any) -> Any:
        graphdef, leaves = nnx.split(state)
        with plan.unchanged(state):
            jax.eval_shape(lambda leaves, *inputs: f(nnx.merge(graphdef, leaves), *inputs), leaves, *inputs)
        return f(state, *inputs)

    return layer


def eval_shape_closure(f: Program, plan: Plan) -> Program:
    def layer(state: Any, *inputs: Any) -> Any:
        with plan.unchanged(state):
            nnx.eval_shape(lambda *inputs: f(state, *inputs), *inputs)
        return f(state, *inputs)

    return layer


def eval_shape_jax_closure(f: Program, plan: Plan) -> Program:
    def layer(state: Any, *inputs: Any) -> Any:
        with plan.unchanged(state):
            jax.eval_shape(lambda *inputs: f(state, *inputs), *inputs)
        return f(state, *inputs)

    return layer


def call_first(f: Program, plan: Plan) -> Program:
    def layer(state: Any, *inputs: Any) -> Any:
        before = plan.subject(state, *(plan.element(leaf[0]) for leaf in inputs))
        return before, f(state, *(leaf[1] for leaf in inputs))

    return layer
