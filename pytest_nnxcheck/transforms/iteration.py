"""The loops that feed the output of a step to the next, ``h = block(h)``, as layers, decoding and diffusion do; opt-in, made as the other layers are.

They keep the output of every step along a leading axis: the first is that of the un-nested call.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from pytest_nnxcheck.transforms.layer import Plan, Program, functional, rebuild, split, stack

__tracebackhide__ = True  # pytest shows the frames of the user, not these


def fed_back(out: Any, inputs: Any) -> Any:
    """The inputs of the next step: the output in the place of the first ones."""
    return *out, *inputs[len(out) :]


def written(outs: Any, step: Any, out: Any) -> Any:
    """The outputs of all steps, that of one step written at its place."""
    return jax.tree.map(lambda every, one: every.at[step].set(one), outs, out)


def iterate_scan_argument(f: Program, plan: Plan) -> Program:
    def layer(state: Any, *inputs: Any) -> Any:
        def body(carry: Any) -> Any:
            state, inputs = carry
            out = f(state, *inputs)
            return (state, fed_back(out, inputs)), out

        carry = nnx.Carry
        return nnx.scan(body, length=plan.length, in_axes=(carry,), out_axes=(carry, 0))((state, inputs))[1]

    return layer


def iterate_scan_functional(f: Program, plan: Plan) -> Program:
    def layer(state: Any, *inputs: Any) -> Any:
        graphdef, changed, rest = split(state, plan)
        pure = functional(f, graphdef, plan)

        def body(carry: Any, _: None) -> Any:
            changed, inputs = carry
            changed, out = pure(changed, rebuild(rest), *inputs)
            return (changed, fed_back(out, inputs)), out

        (changed, _), outs = jax.lax.scan(body, (changed, inputs), length=plan.length)
        nnx.update(state, changed)
        return outs

    return layer


def iterate_scan_closure(f: Program, plan: Plan) -> Program:
    def layer(state: Any, *inputs: Any) -> Any:
        def body(inputs: Any) -> Any:
            out = f(state, *inputs)
            return fed_back(out, inputs), out

        carry = nnx.Carry
        return nnx.scan(body, length=plan.length, in_axes=(carry,), out_axes=(carry, 0))(inputs)[1]

    return layer


def iterate_scan_jax_closure(f: Program, plan: Plan) -> Program:
    def layer(state: Any, *inputs: Any) -> Any:
        def body(inputs: Any, _: None) -> Any:
            out = f(state, *inputs)
            return fed_back(out, inputs), out

        return jax.lax.scan(body, inputs, length=plan.length)[1]

    return layer


def iterate_while_loop_argument(f: Program, plan: Plan) -> Program:
    def layer(state: Any, *inputs: Any) -> Any:
        def body(carry: Any) -> Any:
            step, state, inputs, outs = carry
            out = f(state, *inputs)
            return step + 1, state, fed_back(out, inputs), written(outs, step, out)

        start = (jnp.int32(0), state, inputs, stack(plan.empty(), plan.length))
        return nnx.while_loop(lambda carry: carry[0] < plan.length, body, start)[3]

    return layer


def iterate_while_loop_functional(f: Program, plan: Plan) -> Program:
    def layer(state: Any, *inputs: Any) -> Any:
        graphdef, changed, rest = split(state, plan)
        pure = functional(f, graphdef, plan)

        def body(carry: Any) -> Any:
            step, changed, inputs, outs = carry
            changed, out = pure(changed, rebuild(rest), *inputs)
            return step + 1, changed, fed_back(out, inputs), written(outs, step, out)

        start = (jnp.int32(0), changed, inputs, stack(plan.empty(), plan.length))
        _, changed, _, outs = jax.lax.while_loop(lambda carry: carry[0] < plan.length, body, start)
        nnx.update(state, changed)
        return outs

    return layer


def iterate_while_loop_closure(f: Program, plan: Plan) -> Program:
    def layer(state: Any, *inputs: Any) -> Any:
        def body(carry: Any) -> Any:
            step, inputs, outs = carry
            out = f(state, *inputs)
            return step + 1, fed_back(out, inputs), written(outs, step, out)

        start = (jnp.int32(0), inputs, stack(plan.empty(), plan.length))
        return nnx.while_loop(lambda carry: carry[0] < plan.length, body, start)[2]

    return layer


def iterate_while_loop_jax_closure(f: Program, plan: Plan) -> Program:
    def layer(state: Any, *inputs: Any) -> Any:
        def body(carry: Any) -> Any:
            step, inputs, outs = carry
            out = f(state, *inputs)
            return step + 1, fed_back(out, inputs), written(outs, step, out)

        start = (jnp.int32(0), inputs, stack(plan.empty(), plan.length))
        return jax.lax.while_loop(lambda carry: carry[0] < plan.length, body, start)[2]

    return layer


def iterate_fori_loop_argument(f: Program, plan: Plan) -> Program:
    def layer(state: Any, *inputs: Any) -> Any:
        def body(step: Any, carry: Any) -> Any:
            state, inputs, outs = carry
            out = f(state, *inputs)
            return state, fed_back(out, inputs), written(outs, step, out)

        start = (state, inputs, stack(plan.empty(), plan.length))
        return nnx.fori_loop(0, plan.length, body, start)[2]

    return layer


def iterate_fori_loop_functional(f: Program, plan: Plan) -> Program:
    def layer(state: Any, *inputs: Any) -> Any:
        graphdef, changed, rest = split(state, plan)
        pure = functional(f, graphdef, plan)

        def body(step: Any, carry: Any) -> Any:
            changed, inputs, outs = carry
            changed, out = pure(changed, rebuild(rest), *inputs)
            return changed, fed_back(out, inputs), written(outs, step, out)

        start = (changed, inputs, stack(plan.empty(), plan.length))
        changed, _, outs = jax.lax.fori_loop(0, plan.length, body, start)
        nnx.update(state, changed)
        return outs

    return layer


def iterate_fori_loop_closure(f: Program, plan: Plan) -> Program:
    def layer(state: Any, *inputs: Any) -> Any:
        def body(step: Any, carry: Any) -> Any:
            inputs, outs = carry
            out = f(state, *inputs)
            return fed_back(out, inputs), written(outs, step, out)

        return nnx.fori_loop(0, plan.length, body, (inputs, stack(plan.empty(), plan.length)))[1]

    return layer


def iterate_fori_loop_jax_closure(f: Program, plan: Plan) -> Program:
    def layer(state: Any, *inputs: Any) -> Any:
        def body(step: Any, carry: Any) -> Any:
            inputs, outs = carry
            out = f(state, *inputs)
            return fed_back(out, inputs), written(outs, step, out)

        return jax.lax.fori_loop(0, plan.length, body, (inputs, stack(plan.empty(), plan.length)))[1]

    return layer
