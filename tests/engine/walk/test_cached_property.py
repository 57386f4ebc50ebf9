"""A `functools.cached_property` keeps what the first trace computes: nobody sets it, so its advice is not that for attributes."""

from __future__ import annotations

import functools
import gc
import re
import weakref

import jax.numpy as jnp
import pytest
from checking import flat
from flax import nnx
from healthy import numbers

from pytest_nnxcheck import check
from pytest_nnxcheck.walk.raw_access import layout


class Computed(nnx.Module):
    """Computes its angles at each call."""

    def __init__(self):
        self.linear = nnx.Linear(4, 4, rngs=nnx.Rngs(0))

    def compute(self):
        return jnp.arange(4.0) / 4

    @property
    def angles(self):
        return self.compute()

    def __call__(self, x):
        return self.linear(x) * jnp.cos(self.angles)


class Cached(Computed):
    @functools.cached_property
    def angles(self):
        return self.compute()


class Inherits(Cached):
    pass


class Kept(Computed):
    """Computes its angles once, where no trace is."""

    def __init__(self):
        super().__init__()
        self.kept = nnx.Variable(self.compute())

    def compute(self):
        return self.kept[...] if hasattr(self, "kept") else super().compute()


@pytest.mark.slow
@pytest.mark.parametrize("model", [Cached, Inherits])
@pytest.mark.parametrize("nesting", ["eval_shape[closure]", "jit[jax_closure]"])
def test_what_a_cached_property_keeps_is_computed_anew_or_kept_in_a_variable(model, nesting):
    found = check(model(), numbers((2, 4)), nesting=nesting)
    assert "float32[4] in cached property" in flat(str(found))
    assert "hint make it a property, or compute it in __init__ and keep it in an nnx.Variable: functools" in flat(
        str(found)
    )
    for cured in (Computed, Kept):
        assert check(cured(), numbers((2, 4)), nesting=nesting).ok


def test_another_attribute_of_such_an_object_stays_one():
    other = Cached()

    def keeps(x):
        other.__dict__["last"] = x * 2
        return other(x)

    found = flat(str(check(keeps, numbers((2, 4)), nesting="jit")))
    assert re.search(r"leaked other\.last .*Tracer float32\[2,4\] in attribute", found)
    assert re.search(r"leaked other\.angles .*Tracer float32\[4\] in cached property", found)


class Extended:
    """Gets a cached property after it was looked at."""


def test_a_cached_property_that_a_class_gets_later_is_seen(monkeypatch):
    assert layout(Extended).cached == frozenset()
    monkeypatch.setattr(Extended, "angles", functools.cached_property(lambda self: 0), raising=False)
    assert layout(Extended).cached == {"angles"}


def test_a_class_that_a_test_made_goes_with_it():
    made = type("Extended", (), {"__module__": __name__})
    assert layout(made).own_dict is not None
    gone = weakref.ref(made)
    del made
    gc.collect()
    assert gone() is None
