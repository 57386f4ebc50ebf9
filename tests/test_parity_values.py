"""Parity of plain values: arrays of NumPy wherever they are kept, and Python scalars in place of arrays."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checking import broken, call, text
from flax import nnx
from healthy import FLAX, assign, numbers

X = numbers((3, 4))
KEPT = {
    "array": lambda first: np.array([first, 1], np.int32),
    "tuple": lambda first: (np.array([first, 1], np.int32),),
    "list": lambda first: [np.array([first, 1], np.int32), "name"],
    "dict": lambda first: {"indices": [np.array([first, 1], np.int64)], "scale": np.float64(2.0)},
    "jax": lambda first: (jnp.array([first, 1], np.int32),),
}
data = getattr(nnx, "data", lambda value: value)


class Permutes(nnx.Module):
    """Keeps its indices in arrays of NumPy, as published flows do; counts its calls."""

    def __init__(self, kept):
        self.kept = data(kept)
        self.count = nnx.BatchStat(jnp.zeros(()))

    def __call__(self, x):
        assign(self.count, jnp.asarray(self.count) + 1)
        return x * 2


def moved(leaf):
    return leaf if isinstance(leaf, str) or not jnp.ndim(leaf) else leaf + 1


class Forgets(Permutes):
    """Sets others under a trace."""

    def __call__(self, x):
        if isinstance(x, jax.core.Tracer):
            self.kept = data(jax.tree.map(moved, self.kept))
        return super().__call__(x)


carries = pytest.mark.skipif(FLAX < (0, 10, 7), reason="earlier flax takes no arrays in containers into a transform")


@carries
@pytest.mark.parametrize("nesting", ["jit", "scan", "vmap", "un-nested"])
@pytest.mark.parametrize("kind", KEPT)
def test_arrays_of_numpy_are_compared_by_their_numbers(kind, nesting):
    found = call(Permutes(KEPT[kind](0)), X, nesting=nesting, invariants="parity")
    # No carry of jax is an int64.
    assert found.outcome.verdict == ("rejected" if (kind, nesting) == ("dict", "scan") else "held"), text(found)


@carries
@pytest.mark.parametrize("kind", ["array", "tuple", "list", "dict"])
def test_other_numbers_are_told_with_both_values(kind):
    found = call(Forgets(KEPT[kind](0)), X, nesting="jit", invariants="parity")
    assert broken(found) == ["parity"], text(found)
    assert "0 expected, 1 after" in text(found)
    assert f"model.kept{ {'array': '', 'dict': chr(91) + repr('indices') + '][0]'}.get(kind, '[0]') }" in text(found)


def test_a_python_scalar_of_the_same_value_is_equal_and_a_note():
    class Fitted(nnx.Module):
        def __init__(self):
            self.fitted = nnx.BatchStat(jnp.array(False))

        def __call__(self, x):
            assign(self.fitted, jnp.array(True))
            return x * 2

    hands_out_bool = type(jax.checkpoint(lambda x: jnp.array(True))(1.0)) is bool
    found = call(Fitted(), X, nesting="remat", invariants="parity")
    assert found.outcome.verdict == "held", text(found)
    note = "model.fitted is a Python bool now, no array: jax.checkpoint outside of a jit hands a constant out as it is"
    assert (note in found.outcome.notes) is hands_out_bool


def test_one_of_another_value_is_none():
    class Wrong(nnx.Module):
        def __init__(self):
            self.fitted = nnx.BatchStat(jnp.array(False))

        def __call__(self, x):
            assign(self.fitted, jnp.array(not isinstance(x, jax.core.Tracer)))
            return x * 2

    assert broken(call(Wrong(), X, nesting="remat", invariants="parity")) == ["parity"]
