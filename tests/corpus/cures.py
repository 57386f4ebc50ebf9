"""Programs that a hint is about, and the same as the hint says."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from healthy import assign, numbers, rngs
from jax.experimental import checkify

from pytest_nnxcheck.compat.frames import CUSTOM_RULES

OUTSIDE: dict[str, Any] = {}


def remembers(x: jax.Array) -> jax.Array:
    OUTSIDE["last"] = x * 2
    return OUTSIDE["last"]


def in_checkpoint(model: Any, x: jax.Array) -> jax.Array:
    return jax.checkpoint(model)(x)


def scanned(model: Any, x: jax.Array) -> jax.Array:
    step = nnx.scan(lambda model, x: (model, model(x)), in_axes=(nnx.Carry, 0), out_axes=(nnx.Carry, 0))
    return step(model, x[None])[1][0]


def mapped(norm: Any, x: jax.Array) -> jax.Array:
    return nnx.vmap(lambda norm, x: norm(x, use_running_average=True), in_axes=(None, 0))(norm, x)


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


OWN: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "vmap": (lambda norm, x: jax.vmap(norm)(x), mapped),
    "vectorize": (lambda norm, x: jnp.vectorize(lambda x: norm(x) * 1, signature="(a)->(a)")(x), mapped),
    **{name: (functools.partial(in_rule, name), functools.partial(in_rule_cured, name)) for name in CUSTOM_RULES},
    "eval_shape": (
        lambda norm, x: x * len(jax.eval_shape(norm, x).shape),
        lambda norm, x: x * len(nnx.eval_shape(lambda norm, x: norm(x), norm, x).shape),
    ),
    "grad": (
        lambda norm, x: jax.grad(lambda x: norm(x).sum())(x),
        lambda norm, x: nnx.grad(lambda x, norm: norm(x).sum())(x, norm),
    ),
    "value_and_grad": (
        lambda norm, x: jax.value_and_grad(lambda x: norm(x).sum())(x),
        lambda norm, x: nnx.value_and_grad(lambda x, norm: norm(x).sum())(x, norm),
    ),
    "while_loop": (
        lambda norm, x: nnx.while_loop(lambda c: c[0] < 2, lambda c: (c[0] + 1, norm(c[1])), (0, x))[1],
        lambda norm, x: nnx.while_loop(lambda c: c[0] < 2, lambda c: (c[0] + 1, c[1], c[1](c[2])), (0, norm, x))[2],
    ),
    "fori_loop": (
        lambda norm, x: nnx.fori_loop(0, 2, lambda _, x: norm(x), x),
        lambda norm, x: nnx.fori_loop(0, 2, lambda _, carry: (carry[0], carry[0](carry[1])), (norm, x))[1],
    ),
    "scan": (lambda norm, x: nnx.scan(lambda x: norm(x) * 1, in_axes=(0,), out_axes=0)(x[None])[0], scanned),
    "map": (lambda norm, x: jax.lax.map(lambda x: norm(x) * 1, x[None])[0], scanned),
    "cond": (
        lambda norm, x: nnx.cond(x.sum() > -1, lambda x: norm(x) * 1, lambda x: x, x),
        lambda norm, x: nnx.cond(x.sum() > -1, lambda norm, x: norm(x), lambda norm, x: x, norm, x),
    ),
    "switch": (
        lambda norm, x: nnx.switch(jnp.array(0), [lambda x: norm(x) * 1, lambda x: x], x),
        lambda norm, x: nnx.switch(jnp.array(0), [lambda norm, x: norm(x), lambda norm, x: x], norm, x),
    ),
    "jit": (lambda norm, x: nnx.jit(lambda x: norm(x) * 1)(x), nnx.jit(lambda norm, x: norm(x))),
    "checkpoint": (in_checkpoint, nnx.remat(lambda norm, x: norm(x))),
    "checkify": (
        lambda norm, x: checkify.checkify(lambda x: norm(x) * 1)(x)[1],
        lambda norm, x: nnx.checkify(lambda norm, x: norm(x) * 1)(norm, x)[1],
    ),
    **{name: tuple(functools.partial(f, name) for f in (derivative, derivative_cured)) for name in DIFFERENTIATED},
}
"""A transform of the user's own in which a function captures the module, and the same with the module as an argument."""


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
