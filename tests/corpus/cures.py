"""Programs that a hint is about, and the same as the hint says."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from healthy import WIDTH, assign, numbers, rngs
from jax.experimental import checkify
from leaky import KeepsLastSetInInit

from pytest_nnxcheck.compat.frames import CUSTOM_RULES


class KeepsLastInData(KeepsLastSetInInit):
    """What the hint says: the field wrapped where it is set first."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        super().__init__(rngs)
        self.last = nnx.data(None)


class Box:
    """A plain object."""


class KeepsInBox(nnx.Module):
    """Keeps its last output in an object of its own."""

    def __init__(self) -> None:
        self.linear = nnx.Linear(WIDTH, WIDTH, rngs=rngs())
        self.box = Box()

    def __call__(self, x: jax.Array) -> jax.Array:
        self.box.last = self.linear(x)
        return self.box.last


OUTSIDE: dict[str, Any] = {}


def remembers(x: jax.Array) -> jax.Array:
    OUTSIDE["last"] = x * 2
    return OUTSIDE["last"]


def in_while_loop(model: Any, x: jax.Array) -> jax.Array:
    return nnx.while_loop(lambda carry: carry[0] < 2, lambda carry: (carry[0] + 1, model(carry[1])), (0, x))[1]


def in_while_loop_cured(model: Any, x: jax.Array) -> jax.Array:
    def body(carry: Any) -> Any:
        step, model, x = carry
        return step + 1, model, model(x)

    return nnx.while_loop(lambda carry: carry[0] < 2, body, (jnp.array(0), model, x))[2]


def in_fori_loop(model: Any, x: jax.Array) -> jax.Array:
    return nnx.fori_loop(0, 2, lambda _, x: model(x), x)


def in_fori_loop_cured(model: Any, x: jax.Array) -> jax.Array:
    return nnx.fori_loop(0, 2, lambda _, carry: (carry[0], carry[0](carry[1])), (model, x))[1]


def in_scan(model: Any, xs: jax.Array) -> jax.Array:
    return nnx.scan(lambda x: model(x) * 1, in_axes=(0,), out_axes=0)(xs[None])[0]


def in_scan_cured(model: Any, xs: jax.Array) -> jax.Array:
    step = nnx.scan(lambda model, x: (model, model(x)), in_axes=(nnx.Carry, 0), out_axes=(nnx.Carry, 0))
    return step(model, xs[None])[1][0]


def in_map(model: Any, xs: jax.Array) -> jax.Array:
    return jax.lax.map(lambda x: model(x) * 1, xs[None])[0]


def in_cond(model: Any, x: jax.Array) -> jax.Array:
    return nnx.cond(x.sum() > -1, lambda x: model(x) * 1, lambda x: x, x)


def in_cond_cured(model: Any, x: jax.Array) -> jax.Array:
    return nnx.cond(x.sum() > -1, lambda model, x: model(x), lambda model, x: x, model, x)


def in_switch(model: Any, x: jax.Array) -> jax.Array:
    return nnx.switch(jnp.array(0), [lambda x: model(x) * 1, lambda x: x], x)


def in_switch_cured(model: Any, x: jax.Array) -> jax.Array:
    return nnx.switch(jnp.array(0), [lambda model, x: model(x), lambda model, x: x], model, x)


def in_jit(model: Any, x: jax.Array) -> jax.Array:
    return nnx.jit(lambda x: model(x) * 1)(x)


def in_jit_cured(model: Any, x: jax.Array) -> jax.Array:
    return nnx.jit(lambda model, x: model(x))(model, x)


def in_checkpoint(model, x):
    return jax.checkpoint(model)(x)


def in_checkpoint_cured(model, x):
    return nnx.remat(lambda model, x: model(x))(model, x)


def in_eval_shape(norm, x):
    return x * len(jax.eval_shape(norm, x).shape)


def in_eval_shape_cured(norm, x):
    return x * len(nnx.eval_shape(lambda norm, x: norm(x), norm, x).shape)


def in_vmap(norm, x):
    return jax.vmap(norm)(x)


def in_vmap_cured(norm, x):
    return nnx.vmap(lambda norm, x: norm(x, use_running_average=True), in_axes=(None, 0))(norm, x)


def in_grad(norm, x):
    return jax.grad(lambda x: norm(x).sum())(x)


def in_grad_cured(norm, x):
    return nnx.grad(lambda x, norm: norm(x).sum())(x, norm)


def in_value_and_grad(norm, x):
    return jax.value_and_grad(lambda x: norm(x).sum())(x)


def in_value_and_grad_cured(norm, x):
    return nnx.value_and_grad(lambda x, norm: norm(x).sum())(x, norm)


def in_checkify(norm: Any, x: jax.Array) -> jax.Array:
    return checkify.checkify(lambda x: norm(x) * 1)(x)[1]


def in_checkify_cured(norm: Any, x: jax.Array) -> jax.Array:
    return nnx.checkify(lambda norm, x: norm(x) * 1)(norm, x)[1]


def in_vectorize(norm: Any, x: jax.Array) -> jax.Array:
    return jnp.vectorize(lambda x: norm(x) * 1, signature="(a)->(a)")(x)


def backward(residuals: None, cotangents: Any) -> Any:
    return cotangents


def with_rule(name: str, f: Callable[..., Any], *args: Any) -> Any:
    """The call of a function that has a rule of its own, which these calls do not get to."""
    ruled = getattr(jax, name)(f)
    if name == "custom_vjp":
        ruled.defvjp(lambda *args: (ruled(*args), None), backward)
    else:
        ruled.defjvp(lambda primals, tangents: (ruled(*primals), tangents))
    return ruled(*args)


def in_rule(name: str, norm: Any, x: jax.Array) -> jax.Array:
    return with_rule(name, lambda x: norm(x) * 1, x)


def in_rule_cured(name: str, norm: Any, x: jax.Array) -> jax.Array:
    graphdef, state = nnx.split(norm)

    def f(state: Any, x: jax.Array) -> Any:
        norm = nnx.merge(graphdef, state)
        return norm(x), nnx.state(norm)

    y, state = with_rule(name, f, state, x)
    nnx.update(norm, state)
    return y


DIFFERENTIATED = {
    "jvp": lambda f, x, **aux: jax.jvp(f, (x,), (x,), **aux),
    "vjp": jax.vjp,
    "linearize": jax.linearize,
    "jacfwd": lambda f, x, **aux: jax.jacfwd(f, **aux)(x),
    "jacrev": lambda f, x, **aux: jax.jacrev(f, **aux)(x),
    "hessian": lambda f, x, **aux: jax.hessian(f, **aux)(x),
}


def derivative(name: str, norm: Any, x: jax.Array) -> jax.Array:
    return DIFFERENTIATED[name](lambda x: norm(x).sum(), x)[0]


def derivative_cured(name: str, norm: Any, x: jax.Array) -> jax.Array:
    def f(x: jax.Array) -> Any:
        copy = nnx.clone(norm)
        return copy(x).sum(), nnx.state(copy)

    first, *_, state = DIFFERENTIATED[name](f, x, has_aux=True)
    nnx.update(norm, state)
    return first


OWN = {
    "vmap": (in_vmap, in_vmap_cured),
    "vectorize": (in_vectorize, in_vmap_cured),
    **{name: (functools.partial(in_rule, name), functools.partial(in_rule_cured, name)) for name in CUSTOM_RULES},
    "eval_shape": (in_eval_shape, in_eval_shape_cured),
    "grad": (in_grad, in_grad_cured),
    "value_and_grad": (in_value_and_grad, in_value_and_grad_cured),
    "while_loop": (in_while_loop, in_while_loop_cured),
    "fori_loop": (in_fori_loop, in_fori_loop_cured),
    "scan": (in_scan, in_scan_cured),
    "map": (in_map, in_scan_cured),
    "cond": (in_cond, in_cond_cured),
    "switch": (in_switch, in_switch_cured),
    "jit": (in_jit, in_jit_cured),
    "checkpoint": (in_checkpoint, in_checkpoint_cured),
    "checkify": (in_checkify, in_checkify_cured),
    **{name: tuple(functools.partial(f, name) for f in (derivative, derivative_cured)) for name in DIFFERENTIATED},
}


class Tied(nnx.Module):
    """Two arrays that may share their buffer; ``view`` is a plain value beside them."""

    def __init__(self, share: bool, view: Callable[[Any], Any] | None = None) -> None:
        self.a = nnx.Param(numbers((64, 64)))
        self.b = nnx.Param(self.a[...] if share else jnp.copy(self.a[...]))
        self.held = functools.partial(print, view(self.a[...]) if view else None)

    def __call__(self, x: jax.Array) -> jax.Array:
        assign(self.a, self.a[...] * 0.9)
        return x @ self.a[...] @ self.b[...]


class Steps(nnx.Module):
    """Applies its layer three times at most, clips, and selects: as Python says it, or as jax does."""

    def __init__(self):
        self.linear = nnx.Linear(4, 4, rngs=rngs())

    def __call__(self, x, *, how):
        if how == "if":
            return -x if x.sum() < 0 else self.linear(x)
        if how == "jnp.where":
            return jnp.where(x.sum() < 0, -x, self.linear(x))
        if how == "range":
            for _ in range(jnp.argmax(x)):
                x = self.linear(x)
            return x
        if how == "slice":
            return self.linear(x[: jnp.argmax(x)])
        if how == "jax.lax.dynamic_slice":
            return self.linear(jax.lax.dynamic_slice(x, (jnp.argmax(x), 0), (1, 4)))
        if how == "mask":
            return self.linear(x)[x.sum(axis=1) > 0].sum()
        if how == "jnp.where as a mask":
            return jnp.where(x.sum(axis=1) > 0, self.linear(x).sum(axis=1), 0.0).sum()
        return nnx.while_loop(
            lambda carry: carry[1].sum() > 0, lambda carry: (carry[0], carry[0].linear(carry[1]) - 1e3), (self, x)
        )[1]
