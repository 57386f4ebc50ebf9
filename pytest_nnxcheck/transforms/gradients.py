"""The layers ``grad`` and ``custom_vjp``. ``grad`` differentiates the sum of the outputs, and returns the gradients too: XLA deletes unused results."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from pytest_nnxcheck.core.errors import Unfit
from pytest_nnxcheck.core.nesting import Misfit
from pytest_nnxcheck.transforms.layer import Plan, Program, functional, rebuild

__tracebackhide__ = True  # pytest shows the frames of the user, not these


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
