"""Layers that run the call in a loop over the same input: ``scan``, ``while_loop``, ``fori_loop``."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from pytest_nnxcheck.transforms.layer import Plan, Program, functional, rebuild

__tracebackhide__ = True  # pytest shows the frames of the user, not these


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
