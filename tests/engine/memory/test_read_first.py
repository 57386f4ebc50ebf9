"""A leaf that a call reads, and then writes a part of: a replay buffer, a slot of a memory. XLA copies it unless it is told what comes first."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from checking import broken, call, text
from flax import nnx
from healthy import rngs
from rewritten_leaves import READS, WRITES, Ring

from pytest_nnxcheck import compat
from pytest_nnxcheck.reporting import hints

X = jnp.ones(64)
JAX = jax.__version_info__[:2]
BOTH = [(read, write) for read in READS for write in WRITES]


@pytest.mark.parametrize("read, write", [BOTH[0], *(pytest.param(*each, marks=pytest.mark.full) for each in BOTH[1:])])
def test_what_is_read_and_then_written_is_copied(read, write):
    found = call(Ring(read, write), X, nesting="jit")
    if compat.barriers_order():
        assert broken(found) == ["memory"], text(found)
        assert found.outcome.violations[0].summary == "the program holds 1.0 more copies of its state at the peak"
        assert found.outcome.violations[0].hint == hints.hint("read, then written")
    else:
        assert found.outcome.verdict == "held", text(found)
        assert "1.0 copies of the state not judged: XLA inserts them for leaves that the call reads" in text(found)


@pytest.mark.parametrize("read, write", [BOTH[0], *(pytest.param(*each, marks=pytest.mark.full) for each in BOTH[1:])])
@pytest.mark.parametrize(
    "nesting",
    [
        "jit",
        "jit[functional]",
        "jit > scan",
        pytest.param("jit > vmap", marks=pytest.mark.skipif(JAX < (0, 5), reason="no barrier is mapped by jax 0.4")),
    ],
)
def test_a_read_that_is_said_to_come_first_makes_no_copy(read, write, nesting):
    found = call(Ring(read, write, ordered=True), X, nesting=nesting)
    assert found.outcome.verdict == "held", text(found)
    assert not compat.barriers_order() or "not judged" not in text(found)


def test_what_is_read_after_the_write_as_well_is_a_copy_that_no_order_saves():
    class Late(Ring):
        def __call__(self, x):
            before = self.rows[...]
            super().__call__(x)
            return before @ jnp.sin(self.rows[...] @ x)[:64]

    found = call(Late("row", "row"), X, nesting="jit")
    assert broken(found) == ["memory"], text(found)
    assert found.outcome.violations[0].hint == ""


def test_xla_is_not_asked_where_nothing_is_copied(monkeypatch):
    asked = []
    monkeypatch.setattr(compat, "barriers_order", lambda: asked.append(1))
    for nesting in ("jit", "jit > scan"):
        assert call(nnx.Linear(64, 64, rngs=rngs()), X, nesting=nesting).outcome.verdict == "held"
    assert not asked


def test_a_peak_in_which_nothing_is_copied_has_no_such_hint():
    found = call(Ring("row", "row", ordered=True), X, nesting="jit", memory_budget="64KiB")
    assert broken(found) == ["memory"], text(found)
    copied = "copy of model.rows" in text(found)  # by older XLA, which no barrier keeps from it
    assert copied is not compat.barriers_order()
    assert found.outcome.violations[0].hint == ""
