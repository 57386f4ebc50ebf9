"""What the tests of one file share."""

from __future__ import annotations

import pytest

from pytest_nnxcheck.engine.session import Session


@pytest.fixture(scope="module")
def shared_session() -> Session:
    return Session()


@pytest.fixture
def session(shared_session: Session):
    """As in one test of a user's: equal calls are profiled once, equal programs compiled once, and leaks put back after each."""
    shared_session.begin_example()
    yield shared_session
    shared_session.end_example()
