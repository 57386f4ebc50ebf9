"""Modules that keep a tracer, and their twins that keep its shape: the walk finds the first, names the place, and finds nothing in the second.

The poison is made by a plain `nnx.jit` with the module as argument, and undone by `Places.restore`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import flax
import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from pytest_nnxcheck.walk.walk import Walk, walk

X = jnp.ones((2, 3))
STATIC = tuple(map(int, flax.__version__.split(".")[:2])) >= (0, 12)
"""Before flax 0.12 what a module puts in an attribute travels as state, or is refused: nothing is left behind."""

Keep = Callable[[Any], Any]


def whole(y: Any) -> Any:
    """The bug: the traced value itself is kept."""
    return y


def shape_only(y: Any) -> Any:
    """The cure: what is kept is not traced."""
    return y.shape


leaky_and_healthy = pytest.mark.parametrize("kept", [whole, shape_only])


class Box:
    """A plain Python object of the user: flax knows nothing of it."""


def jit_call(model: Any, x: Any = X) -> Any:
    return nnx.jit(lambda model, x: model(x))(model, x)


def look(*roots: tuple[str, object], **how: Any) -> Walk:
    """Everything that the roots lead to."""
    return walk(roots, **how)


def found_in(*roots: tuple[str, object]) -> list[tuple[str, str]]:
    return [(found.path, found.holder) for found in walk(roots).tracers]


def check(model: Any, kept: Keep, path: str, holder: str, call: Any = jit_call, again: Any = None) -> None:
    """The walk is clean before; after the call it finds what is kept; and clean again, with a working module, once restored."""
    before = walk([("model", model)])
    assert (before.tracers, before.complete) == ([], True)
    call(model, X)
    assert found_in(("model", model)) == ([(path, holder)] if kept is whole else [])
    later = before.since([("model", model)])
    assert later is not None
    assert len(later.tracers) == len(found_in(("model", model)))
    assert before.places.restore() == ()
    assert found_in(("model", model)) == []
    for works in (again or type(model).__call__, call):
        if (
            kept is whole
        ):  # a tracer in the structure of a module stays in the keys of jax's caches, where it meets the next call
            jax.clear_caches()
        assert works(model, X).shape == X.shape
        assert before.places.restore() == ()
        assert found_in(("model", model)) == []


def check_static(model: Any, kept: Keep, path: str, holder: str) -> None:
    """The same for attributes that flax takes for state before 0.12: they leave no tracer there, or the call is refused."""
    if STATIC:
        # flax 0.12 refuses an array in such an attribute when the call is eager.
        check(model, kept, path, holder, again=jit_call)
        return
    with contextlib.suppress(ValueError):
        jit_call(model)
    assert found_in(("model", model)) == []


class Boxed(nnx.Module):
    """Puts what is kept into a box, in a way that the test chooses."""

    def __init__(self, content: Any, put: Callable[[Any, Any], None], kept: Keep) -> None:
        self.box = Box()
        self.box.content = content
        self.put = put
        self.kept = kept

    def __call__(self, x: Any) -> Any:
        self.put(self.box, self.kept(x * 2))
        return x


class Slotted:
    __slots__ = ("_Slotted__private", "value")


def tracer_of(transform: Callable[..., Any]) -> Any:
    kept: list[Any] = []
    transform(lambda x: (kept.append(x * 2), x.sum())[1])(X)
    return kept[0]
