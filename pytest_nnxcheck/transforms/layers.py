"""The layers: one small function for each transform and style, as a user would write it, and the pieces that all are made of.

A layer takes the program inside it, ``f(state, *inputs) -> out``, and gives a program of the same signature with the same effect on the state, so layers compose in any
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

from pytest_nnxcheck.compat import arrays
from pytest_nnxcheck.core.errors import Unfit
from pytest_nnxcheck.core.nesting import Misfit

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


# --- layers that wrap one call: ``jit``, ``remat``, ``eval_shape``, and ``call_first``, which calls the subject once before


def jit_argument(f: Program, plan: Plan) -> Program:
    return plan.jit(nnx.jit, f)


def jit_functional(f: Program, plan: Plan) -> Program:
    def layer(state: Any, *inputs: Any) -> Any:
        pure, changed, rest = functional(f, state, plan)
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
        pure, changed, rest = functional(f, state, plan)
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


def eval_shape_argument(f: Program, plan: Plan) -> Program:
    # The abstract call is made for its side effects alone. The second one gives the values, on the very state that the first was handed.
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


# --- layers that run the call in a loop over the same input


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
        pure, changed, rest = functional(f, state, plan)

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


def while_loop_argument(f: Program, plan: Plan) -> Program:
    # A loop without a length stacks nothing. So the output is in the carry, and the carry needs one before the first step: zeros.
    def layer(state: Any, *inputs: Any) -> Any:
        def body(carry: Any) -> Any:
            step, state, inputs, _ = carry
            return step + 1, state, inputs, f(state, *inputs)

        start = (jnp.int32(0), state, inputs, plan.empty())
        return nnx.while_loop(lambda carry: carry[0] < plan.length, body, start)[3]

    return layer


def while_loop_functional(f: Program, plan: Plan) -> Program:
    def layer(state: Any, *inputs: Any) -> Any:
        pure, changed, rest = functional(f, state, plan)

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


def fori_loop_argument(f: Program, plan: Plan) -> Program:
    def layer(state: Any, *inputs: Any) -> Any:
        def body(step: Any, carry: Any) -> Any:
            state, inputs, _ = carry
            return state, inputs, f(state, *inputs)

        return nnx.fori_loop(0, plan.length, body, (state, inputs, plan.empty()))[2]

    return layer


def fori_loop_functional(f: Program, plan: Plan) -> Program:
    def layer(state: Any, *inputs: Any) -> Any:
        pure, changed, rest = functional(f, state, plan)

        def body(step: Any, carry: Any) -> Any:
            changed, _ = carry
            return pure(changed, rebuild(rest), *inputs)

        changed, out = jax.lax.fori_loop(0, plan.length, body, (changed, plan.empty()))
        nnx.update(state, changed)
        return out

    return layer


def fori_loop_closure(f: Program, plan: Plan) -> Program:
    def layer(state: Any, *inputs: Any) -> Any:
        def body(step: Any, carry: Any) -> Any:
            inputs, _ = carry
            return inputs, f(state, *inputs)

        return nnx.fori_loop(0, plan.length, body, (inputs, plan.empty()))[1]

    return layer


def fori_loop_jax_closure(f: Program, plan: Plan) -> Program:
    def layer(state: Any, *inputs: Any) -> Any:
        def body(step: Any, carry: Any) -> Any:
            inputs, _ = carry
            return inputs, f(state, *inputs)

        return jax.lax.fori_loop(0, plan.length, body, (inputs, plan.empty()))[1]

    return layer


# --- layers that map the call: ``vmap`` over an axis, ``shard_map`` over a mesh of all devices


def axes(module: Any, plan: Plan) -> Any:
    """The leaves that the call writes mapped, the rest broadcast: a prefix where flax's mode refuses `nnx.StateAxes`."""
    filters: Any = {plan.written: 0, ...: None}
    return nnx.StateAxes(filters) if plan.graph_updates else nnx.prefix(module, filters)


def vmap_argument(f: Program, plan: Plan) -> Program:
    def layer(state: Any, *inputs: Any) -> Any:
        # Each element writes a state of its own: it has an axis before the map, and the first element is what one call leaves.
        nnx.update(state, stack(nnx.state(state, plan.written), plan.length))
        out = nnx.vmap(f, in_axes=(axes(state, plan), *(0 for _ in inputs)))(state, *inputs)
        nnx.update(state, first(nnx.state(state, plan.written)))
        return out

    return layer


def vmap_functional(f: Program, plan: Plan) -> Program:
    def layer(state: Any, *inputs: Any) -> Any:
        pure, changed, rest = functional(f, state, plan)
        changed, out = jax.vmap(pure, in_axes=(0, None, *(0 for _ in inputs)))(
            stack(changed, plan.length), rest, *inputs
        )
        nnx.update(state, first(changed))
        return out

    return layer


def stack_refs(tree: Any, length: int) -> Any:
    """A leading axis on every leaf; of a reference a new one."""

    def stacked(leaf: Any) -> Any:
        rows = jnp.stack([leaf[...]] * length)
        return jax.new_ref(rows) if isinstance(leaf, jax.Ref) else rows

    return jax.tree.map(stacked, tree)


def first_in_refs(tree: Any, before: Any) -> Any:
    """Element 0 of the leading axis of every leaf, written into the reference that the leaf was ``before``."""

    def written(leaf: Any, held: Any) -> Any:
        if not isinstance(held, jax.Ref):
            return leaf[0]
        held[...] = leaf[...][0]
        return held

    return jax.tree.map(written, tree, before)


def put(state: Any, leaves: Any) -> None:
    """Update a node; a reference that no Variable holds by another, where flax would write into the one that is there."""
    for name in [name for name, leaf in leaves.items() if isinstance(leaf, jax.Ref)]:
        delattr(state, name)
    nnx.update(state, leaves)


def vmap_argument_in_refs(f: Program, plan: Plan) -> Program:
    def layer(state: Any, *inputs: Any) -> Any:
        before = rebuild(nnx.state(state, plan.written))
        put(state, stack_refs(before, plan.length))
        out = nnx.vmap(f, in_axes=(axes(state, plan), *(0 for _ in inputs)))(state, *inputs)
        put(state, first_in_refs(nnx.state(state, plan.written), before))
        return out

    return layer


def vmap_functional_in_refs(f: Program, plan: Plan) -> Program:
    def layer(state: Any, *inputs: Any) -> Any:
        pure, before, rest = functional(f, state, plan, plan.written)
        written = stack_refs(before, plan.length)
        changed, out = jax.vmap(pure, in_axes=(0, None, *(0 for _ in inputs)))(written, rest, *inputs)
        first_in_refs(written, before)
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


REPLICATED = jax.sharding.PartitionSpec()


def mesh() -> Any:
    """All devices along one axis."""
    return jax.sharding.Mesh(jax.devices(), ("devices",))


def on_mesh(tree: Any) -> Any:
    """The arrays of a tree on every device, as one places a model before it is mapped: moved by the jit, none keeps its buffer."""
    everywhere = jax.sharding.NamedSharding(mesh(), REPLICATED)

    def place(leaf: Any) -> Any:
        if isinstance(leaf, jax.ShapeDtypeStruct):
            return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=everywhere)
        return jax.device_put(leaf, everywhere) if isinstance(leaf, jax.Array) else leaf

    return jax.tree.map(place, tree)


def shard_map_argument(f: Program, plan: Plan) -> Program:
    def layer(state: Any, *inputs: Any) -> Any:
        return arrays.nnx_shard_map(f, mesh(), REPLICATED)(state, *inputs)

    return layer


def shard_map_functional(f: Program, plan: Plan) -> Program:
    def layer(state: Any, *inputs: Any) -> Any:
        pure, changed, rest = functional(f, state, plan)
        changed, out = arrays.shard_map(pure, mesh(), REPLICATED)(changed, rest, *inputs)
        nnx.update(state, changed)
        return out

    return layer


def shard_map_closure(f: Program, plan: Plan) -> Program:
    def layer(state: Any, *inputs: Any) -> Any:
        return arrays.nnx_shard_map(lambda *inputs: f(state, *inputs), mesh(), REPLICATED)(*inputs)

    return layer


def shard_map_jax_closure(f: Program, plan: Plan) -> Program:
    def layer(state: Any, *inputs: Any) -> Any:
        return arrays.shard_map(lambda *inputs: f(state, *inputs), mesh(), REPLICATED)(*inputs)

    return layer


# --- layers that do the step or skip it, as a training loop does. The skipped step returns zeros and leaves the state alone


def cond_argument(f: Program, plan: Plan) -> Program:
    def layer(state: Any, *inputs: Any) -> Any:
        return nnx.cond(opaque(True), f, lambda state, *inputs: plan.empty(), state, *inputs)

    return layer


def cond_functional(f: Program, plan: Plan) -> Program:
    def layer(state: Any, *inputs: Any) -> Any:
        pure, changed, rest = functional(f, state, plan)

        def skip(changed: Any, rest: Any, *inputs: Any) -> Any:
            return changed, plan.empty()

        changed, out = jax.lax.cond(opaque(True), pure, skip, changed, rest, *inputs)
        nnx.update(state, changed)
        return out

    return layer


def cond_closure(f: Program, plan: Plan) -> Program:
    def layer(state: Any, *inputs: Any) -> Any:
        return nnx.cond(opaque(True), lambda *inputs: f(state, *inputs), lambda *inputs: plan.empty(), *inputs)

    return layer


def cond_jax_closure(f: Program, plan: Plan) -> Program:
    def layer(state: Any, *inputs: Any) -> Any:
        return jax.lax.cond(opaque(True), lambda *inputs: f(state, *inputs), lambda *inputs: plan.empty(), *inputs)

    return layer


def switch_argument(f: Program, plan: Plan) -> Program:
    def layer(state: Any, *inputs: Any) -> Any:
        return nnx.switch(opaque(1), [lambda state, *inputs: plan.empty(), f], state, *inputs)

    return layer


def switch_functional(f: Program, plan: Plan) -> Program:
    def layer(state: Any, *inputs: Any) -> Any:
        pure, changed, rest = functional(f, state, plan)

        def skip(changed: Any, rest: Any, *inputs: Any) -> Any:
            return changed, plan.empty()

        changed, out = jax.lax.switch(opaque(1), [skip, pure], changed, rest, *inputs)
        nnx.update(state, changed)
        return out

    return layer


def switch_closure(f: Program, plan: Plan) -> Program:
    def layer(state: Any, *inputs: Any) -> Any:
        return nnx.switch(opaque(1), [lambda *inputs: plan.empty(), lambda *inputs: f(state, *inputs)], *inputs)

    return layer


def switch_jax_closure(f: Program, plan: Plan) -> Program:
    def layer(state: Any, *inputs: Any) -> Any:
        return jax.lax.switch(opaque(1), [lambda *inputs: plan.empty(), lambda *inputs: f(state, *inputs)], *inputs)

    return layer


# --- ``grad``, which differentiates the sum of the outputs, and returns the gradients too, since XLA deletes unused results; ``custom_vjp``


def summed(out: Any) -> Any:
    """The scalar to differentiate: the sum of the floating point outputs."""
    leaves = [leaf for leaf in jax.tree.leaves(out) if jnp.issubdtype(leaf.dtype, jnp.inexact)]
    if not leaves:
        raise Unfit(Misfit("no float output"))
    # Only a real number has a gradient. In float32, since the sum of a large output in float16 is infinite.
    return sum(jnp.sum(jnp.real(leaf), dtype=jnp.float32) for leaf in leaves)


def inexact(inputs: tuple[Any, ...]) -> tuple[int, ...]:
    """The inputs that a gradient with the module captured is taken by."""
    return tuple(number for number, leaf in enumerate(inputs) if jnp.issubdtype(leaf.dtype, jnp.inexact))


def needs_graph_updates(what: str, plan: Plan) -> None:
    """Raise `Unfit` in the modes of flax that have no such thing: the functional style is what one writes in them."""
    if not plan.graph_updates:
        raise Unfit(Misfit("no graph updates", what))


def grad_argument(f: Program, plan: Plan) -> Program:
    def loss(state: Any, *inputs: Any) -> Any:
        out = f(state, *inputs)
        return summed(out), out

    def layer(state: Any, *inputs: Any) -> Any:
        needs_graph_updates("nnx.DiffState", plan)
        by = nnx.DiffState(0, plan.parameters)
        (_, out), gradients = nnx.value_and_grad(loss, argnums=by, has_aux=True)(state, *inputs)
        return out, tuple(jax.tree.leaves(gradients))

    return layer


def grad_functional(f: Program, plan: Plan) -> Program:
    def layer(state: Any, *inputs: Any) -> Any:
        graphdef, *states = nnx.split(state, plan.parameters, plan.changed, ...)

        def loss(parameters: Any, changed: Any, rest: Any, *inputs: Any) -> Any:
            module = nnx.merge(graphdef, parameters, rebuild(changed), rebuild(rest))
            out = f(module, *inputs)
            return summed(out), (nnx.state(module, plan.changed), out)

        (_, (changed, out)), gradients = jax.value_and_grad(loss, has_aux=True)(*states, *inputs)
        nnx.update(state, changed)
        return out, tuple(jax.tree.leaves(gradients))

    return layer


def grad_closure(f: Program, plan: Plan) -> Program:
    def layer(state: Any, *inputs: Any) -> Any:
        def loss(*inputs: Any) -> Any:
            out = f(state, *inputs)
            return summed(out), out

        (_, out), gradients = nnx.value_and_grad(loss, argnums=inexact(inputs), has_aux=True)(*inputs)
        return out, tuple(gradients)

    return layer


def grad_jax_closure(f: Program, plan: Plan) -> Program:
    def layer(state: Any, *inputs: Any) -> Any:
        def loss(*inputs: Any) -> Any:
            out = f(state, *inputs)
            return summed(out), out

        (_, out), gradients = jax.value_and_grad(loss, argnums=inexact(inputs), has_aux=True)(*inputs)
        return out, tuple(gradients)

    return layer


def custom_vjp_argument(f: Program, plan: Plan) -> Program:
    # The rule that jax derives, written by hand: what the pullback saves are arrays, so that flax has no part in it.
    def forward(state: Any, *inputs: Any) -> Any:
        graphdef, leaves = nnx.split(state)

        def pure(leaves: Any, *inputs: Any) -> Any:
            module = nnx.merge(graphdef, leaves)
            out = f(module, *inputs)
            return nnx.state(module), out

        (leaves, out), pullback = jax.vjp(pure, leaves, *inputs)
        nnx.update(state, leaves)
        return out, pullback

    def backward(pullback: Any, cotangents: Any) -> Any:
        # The first cotangents are those of the arguments as the call left them. It changes the module alone: arrays stay as they are.
        (state, *_), out = cotangents
        return pullback((state, out))

    def layer(state: Any, *inputs: Any) -> Any:
        needs_graph_updates("a rule of nnx.custom_vjp that returns the cotangents of a module's state", plan)
        call = nnx.custom_vjp(f)
        call.defvjp(forward, backward)
        return call(state, *inputs)

    return layer


def custom_vjp_functional(f: Program, plan: Plan) -> Program:
    def layer(state: Any, *inputs: Any) -> Any:
        pure, changed, rest = functional(f, state, plan)
        call = jax.custom_vjp(pure)
        call.defvjp(lambda *args: jax.vjp(pure, *args), lambda pullback, cotangents: pullback(cotangents))
        changed, out = call(changed, rest, *inputs)
        nnx.update(state, changed)
        return out

    return layer
