"""The further layers, which run only where ``transforms`` names them; they are made as those of `transforms` are.

``cond`` and ``switch`` do the step or skip it, as a training loop does; the skipped step returns zeros and leaves the state alone.
``grad`` differentiates the sum of the outputs, and returns the gradients beside them: dropped, XLA would delete the backward pass.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from pytest_nnxcheck import compat
from pytest_nnxcheck.transforms import Plan, Program, functional, rebuild, split
from pytest_nnxcheck.verdicts import Unfit

__tracebackhide__ = True  # pytest shows the frames of the user, not these

REPLICATED = jax.sharding.PartitionSpec()


def opaque(value: Any) -> Any:
    """A value that XLA cannot see through: a branch that can never run would be deleted."""
    return jax.lax.optimization_barrier(jnp.asarray(value))


def fori_loop_argument(f: Program, plan: Plan) -> Program:
    def layer(state: Any, *inputs: Any) -> Any:
        def body(step: Any, carry: Any) -> Any:
            state, inputs, _ = carry
            return state, inputs, f(state, *inputs)

        return nnx.fori_loop(0, plan.length, body, (state, inputs, plan.empty()))[2]

    return layer


def fori_loop_functional(f: Program, plan: Plan) -> Program:
    def layer(state: Any, *inputs: Any) -> Any:
        graphdef, changed, rest = split(state, plan)
        pure = functional(f, graphdef, plan)

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


def cond_argument(f: Program, plan: Plan) -> Program:
    def layer(state: Any, *inputs: Any) -> Any:
        return nnx.cond(opaque(True), f, lambda state, *inputs: plan.empty(), state, *inputs)

    return layer


def cond_functional(f: Program, plan: Plan) -> Program:
    def layer(state: Any, *inputs: Any) -> Any:
        graphdef, changed, rest = split(state, plan)
        pure = functional(f, graphdef, plan)

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
        graphdef, changed, rest = split(state, plan)
        pure = functional(f, graphdef, plan)

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


def summed(out: Any) -> Any:
    """The scalar to differentiate: the sum of the floating point outputs."""
    leaves = [leaf for leaf in jax.tree.leaves(out) if jnp.issubdtype(leaf.dtype, jnp.inexact)]
    if not leaves:
        raise Unfit("the call returns no floating point array to differentiate")
    return sum(jnp.sum(jnp.real(leaf), dtype=jnp.float32) for leaf in leaves)


def inexact(inputs: tuple[Any, ...]) -> tuple[int, ...]:
    """The inputs that a gradient with the module captured is taken by."""
    return tuple(number for number, leaf in enumerate(inputs) if jnp.issubdtype(leaf.dtype, jnp.inexact))


def needs_graph_updates(what: str, plan: Plan) -> None:
    """Raise `Unfit` in the modes of flax that have no such thing: the functional style is what one writes in them."""
    if not plan.graph_updates:
        raise Unfit(
            f"{what} needs flax's graph updates, which this mode lacks: the functional style works in every mode"
        )


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
        graphdef, changed, rest = split(state, plan)
        pure = functional(f, graphdef, plan)
        call = jax.custom_vjp(pure)
        call.defvjp(lambda *args: jax.vjp(pure, *args), lambda pullback, cotangents: pullback(cotangents))
        changed, out = call(changed, rest, *inputs)
        nnx.update(state, changed)
        return out

    return layer


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
        return compat.nnx_shard_map(f, mesh(), REPLICATED)(state, *inputs)

    return layer


def shard_map_functional(f: Program, plan: Plan) -> Program:
    def layer(state: Any, *inputs: Any) -> Any:
        graphdef, changed, rest = split(state, plan)
        pure = functional(f, graphdef, plan)
        changed, out = compat.shard_map(pure, mesh(), REPLICATED)(changed, rest, *inputs)
        nnx.update(state, changed)
        return out

    return layer


def shard_map_closure(f: Program, plan: Plan) -> Program:
    def layer(state: Any, *inputs: Any) -> Any:
        return compat.nnx_shard_map(lambda *inputs: f(state, *inputs), mesh(), REPLICATED)(*inputs)

    return layer


def shard_map_jax_closure(f: Program, plan: Plan) -> Program:
    def layer(state: Any, *inputs: Any) -> Any:
        return compat.shard_map(lambda *inputs: f(state, *inputs), mesh(), REPLICATED)(*inputs)

    return layer
