"""A call under a nesting, staged: what its trace tells, and what it leaves behind."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from pytest_nnxcheck import Nesting
from pytest_nnxcheck.engine.stage import stage
from pytest_nnxcheck.subject.profile import UNKNOWN, profile
from pytest_nnxcheck.subject.subject import bind
from pytest_nnxcheck.transforms.compose import Guards
from pytest_nnxcheck.walk.walk import walk

SEEN = []


def staged(function, nesting):
    subject = bind(function, (nnx.Linear(3, 2, rngs=nnx.Rngs(0)), jnp.ones((4, 3))), {}).for_run()
    try:
        facts = profile(subject)
    except ValueError:
        facts = UNKNOWN
    SEEN.clear()
    return stage(subject, facts, Nesting.parse(nesting), Guards(subject, walk(subject.roots(subject.state))))


def healthy(model, x):
    return model(x)


def leaky(model, x):
    SEEN.append(x)
    return model(x)


def raises(model, x):
    raise ValueError("no such shape")


@pytest.mark.parametrize("nesting", ["un-nested", "scan", "vmap > remat"])
def test_a_healthy_call_is_staged_clean_with_the_types_of_one_call(nesting):
    found = staged(healthy, nesting)
    assert found.clean
    (output,), after = found.types
    assert (output.shape, sum(leaf.size for leaf in jax.tree.leaves(after))) == ((4, 2), 8)


def test_a_leaky_call_is_not_clean_and_its_tracer_is_put_away():
    found = staged(leaky, "scan")
    assert not found.clean
    assert [leak.path for leak in found.leaks] == ["SEEN[0]"]
    assert not SEEN


def test_a_call_that_raises_has_its_exception_and_no_program():
    found = staged(raises, "scan")
    assert str(found.error) == "no such shape"
    assert (found.traced, found.clean) == (None, False)
