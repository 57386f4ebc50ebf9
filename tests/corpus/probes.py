"""What the installed flax does, asked of it by small programs, and spellings that differ: where a number of a version would have to be guessed."""

from __future__ import annotations

import functools
import inspect
from typing import Any

import jax
import jax.numpy as jnp
from flax import errors, nnx


class Holder(nnx.Module):
    """Holds what is put into it."""


def value_of(variable: nnx.Variable[Any]) -> Any:
    """A Variable's value, arrays in containers too, in the spelling that the installed flax does not deprecate."""
    return variable.get_value() if hasattr(variable, "get_value") else variable.value


@functools.cache
def keeps_tracers() -> bool:
    """Whether a module that a transform of flax got keeps a tracer which the call puts into a plain attribute.

    From flax 0.12.5 on, before Python 3.14. Otherwise flax takes the tracer for data and hands it back as an array; flax 0.10.2 refuses it.
    """
    holder = Holder()
    try:
        nnx.remat(lambda holder, x: setattr(holder, "kept", x))(holder, jnp.ones(()))
    except ValueError:
        return False
    return isinstance(holder.kept, jax.core.Tracer)


@functools.cache
def refuses_lists() -> bool:
    """Whether flax refuses a list of arrays in a new attribute, outside of a trace: from 0.12.5 on."""
    try:
        Holder().parts = [jnp.ones(())]
    except ValueError:
        return True
    return False


@functools.cache
def remat_writes_captured() -> bool:
    """Whether `nnx.remat` writes tracers into a module of an outer trace; from flax 0.12.1 on it raises instead."""
    model = nnx.Linear(1, 1, rngs=nnx.Rngs(0))
    try:
        jax.eval_shape(lambda x: nnx.remat(lambda model, x: model(x))(model, x), jnp.ones((1, 1)))
    except errors.TraceContextError:
        return False
    return any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(nnx.state(model)))


@functools.cache
def remat_takes_graph_updates() -> bool:
    """Whether `nnx.remat` takes ``graph_updates``: from flax 0.12.6 on."""
    return "graph_updates" in inspect.signature(nnx.remat).parameters


@functools.cache
def fori_loop_takes_new_variables() -> bool:
    """Whether the body of an `nnx.fori_loop` may put another Variable in the place of one: from flax 0.12.3 on."""

    def body(_: Any, holder: Any) -> Any:
        holder.kept = nnx.Variable(jnp.ones(()))
        return holder

    holder = Holder()
    holder.kept = nnx.Variable(jnp.ones(()))
    try:
        nnx.fori_loop(0, 1, body, holder)
    except ValueError:
        return False
    return True


def reference_variable(value: jax.Array) -> nnx.Variable[Any]:
    """A Variable whose array is a `jax.Ref`; flax 0.12.0 has another word for it."""
    word = "use_ref" if "use_ref" in inspect.signature(nnx.Variable.__init__).parameters else "ref"
    return nnx.Variable(value, **{word: True})
