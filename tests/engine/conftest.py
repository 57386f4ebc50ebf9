"""What the tests of one file share."""

from __future__ import annotations

import pytest

from pytest_nnxcheck.core.catalogue import OWN_INVARIANTS, REGISTERED
from pytest_nnxcheck.engine.example import Example, Memo


@pytest.fixture(scope="module")
def memo() -> Memo:
    return Memo()


@pytest.fixture
def example(memo: Memo):
    """As in one test of a user's: equal calls are profiled once, equal programs compiled once, and leaks put back after each."""
    with Example(memo) as opened:
        yield opened


@pytest.fixture
def forgotten():
    """The transforms and the invariants that a test registers are gone after it."""
    before = [(table, dict(table)) for table in (REGISTERED, OWN_INVARIANTS)]
    yield
    for table, rows in before:
        table.clear()
        table.update(rows)
