"""jax' own switches: each leaves a healthy model healthy, and a leaky one leaky, or is refused in a sentence."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from leaky import LEAKY

from pytest_nnxcheck import CheckError, check

ONE = {"transforms": "jit", "sweep": "singles", "max_examples": 0, "styles": "argument"}
REFUSES = ("jax_disable_jit", "jax_no_tracing", "jax_no_execution")
"""The switches under which jax makes no program, or runs none."""
CHOSEN = ("jax_enable_checks", "jax_enable_x64")  # two more have tests of their own, below
SWITCHES = sorted(name for name, value in jax.config.values.items() if type(value) is bool and name not in REFUSES)


@pytest.fixture
def switched(request):
    """The option, with the other value for a while."""
    name = request.param
    before = jax.config.values[name]
    jax.config.update(name, not before)
    yield name
    jax.config.update(name, before)
    jax.clear_caches()


@pytest.mark.parametrize(
    "switched",
    [name if name in CHOSEN else pytest.param(name, marks=pytest.mark.full) for name in SWITCHES],
    indirect=True,
)
def test_a_switch_changes_no_verdict(switched):
    linear = nnx.Linear(4, 3, rngs=nnx.Rngs(0))
    try:
        nnx.jit(lambda model, x: model(x))(linear, jnp.ones((2, 4)))
    except Exception:
        pytest.skip("jax itself refuses the call")
    healthy = check(linear, jnp.ones((2, 4)), **ONE)
    assert healthy.verdict == "held", str(healthy)
    leaky = LEAKY["class_attribute"].leaky()
    assert check(leaky.subject, *leaky.args, **ONE).verdict == "violated"


def test_where_jax_keeps_old_values_donation_is_a_note():
    with jax.debug_nans(True):
        report = check(nnx.Linear(4, 3, rngs=nnx.Rngs(0)), jnp.ones((2, 4)), **ONE)
    assert report.verdict == "held"
    assert "donation not asserted: with jax_debug_nans jax keeps the old values" in str(
        [o.notes for o in report.outcomes]
    )


def test_a_context_that_checks_leaks_finds_none_of_ours():
    with jax.checking_leaks():
        assert check(nnx.Linear(4, 3, rngs=nnx.Rngs(0)), jnp.ones((2, 4)), **ONE).verdict == "held"


def test_without_jits_nothing_is_checked_and_a_sentence_says_so():
    with jax.disable_jit(), pytest.raises(CheckError, match="jax_disable_jit is on, and nothing can be checked"):
        check(nnx.Linear(4, 3, rngs=nnx.Rngs(0)), jnp.ones((2, 4)), **ONE)
