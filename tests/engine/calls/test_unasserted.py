"""Tracers that a test does not assert: the call gives what it computes, and a note says that they remain."""

import jax.numpy as jnp
import pytest
from checking import call
from flax import nnx

from pytest_nnxcheck import CheckError, check

SEEN = []


class Keeps(nnx.Module):
    """Keeps its input outside of the module."""

    def __call__(self, x):
        SEEN.append(x)
        return x * 2


class Forgets(nnx.Module):
    def __call__(self, x):
        return x * 2


@pytest.mark.parametrize("cls", [Keeps, Forgets])
@pytest.mark.parametrize("nesting", ["jit", "scan"])
def test_the_output_is_there(cls, nesting):
    found = call(cls(), jnp.ones((2, 4)), nesting=nesting, invariants="memory,parity")
    assert found.outcome.verdict == "held"
    assert found.output.shape == (2, 4)
    assert (found.output == 2).all()


def test_a_note_says_that_tracers_remain():
    said = "tracers remain in SEEN[0]: the invariants do not name tracers"
    noted = {cls: check(cls(), jnp.ones((2, 4)), nesting="jit", invariants="memory").notes for cls in (Keeps, Forgets)}
    assert any(note.startswith(said) for note in noted[Keeps])
    assert not noted[Forgets]
    asserted = check(Keeps(), jnp.ones((2, 4)), nesting="jit")
    assert not asserted.ok
    assert not any(said in note for note in asserted.notes)


def test_donation_alone_asks_for_a_call_that_donates():
    """A function of arrays has no state, which is what is donated by default; of its arguments one can be."""
    with pytest.raises(CheckError, match=r"nothing was checked: donation is checked .* \(donate is state\)"):
        check(lambda x: x * 2, jnp.ones((2, 4)), invariants="donation", effort="quick")
    assert check(lambda x: x * 2, jnp.ones((2, 4)), invariants="donation", effort="quick", donate="all").ok
