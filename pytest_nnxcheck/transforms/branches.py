"""Layers that do the step or skip it, as a training loop does: ``cond``, ``switch``. The skipped step returns zeros and leaves the state alone."""

from __future__ import annotations

from typing import Any

import jax
from flax import nnx

from pytest_nnxcheck.transforms.layer import Plan, Program, functional, opaque

__tracebackhide__ = True  # pytest shows the frames of the user, not these


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
