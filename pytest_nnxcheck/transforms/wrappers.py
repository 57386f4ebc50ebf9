"""Layers that wrap one call: ``jit``, ``remat``, ``eval_shape``, and ``call_first``, which calls the subject once before."""

from __future__ import annotations

from typing import Any

import jax
from flax import nnx

from pytest_nnxcheck.transforms.layer import Plan, Program, functional

__tracebackhide__ = True  # pytest shows the frames of the user, not these


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
