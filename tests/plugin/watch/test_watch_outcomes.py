"""``--nnx-watch``: what a fixture left, and tests that fail, skip or are expected to."""

from __future__ import annotations

import pytest

BEFORE = """
@pytest.fixture
def model():
    model = Net()
    poison(model)
    return model

def test_innocent(model):
    assert model.box

SHARED = Net()

@pytest.fixture
def torn_down():
    yield
    poison(SHARED)

def test_first(torn_down):
    use(SHARED)

def test_second():
    use(SHARED)

def test_third():
    use(SHARED)
"""


@pytest.mark.slow
def test_what_a_fixture_left_is_told_with_the_test_and_not_as_its_doing(watch):
    result, failed = watch(BEFORE)
    assert failed == ["test_suite.py::test_innocent", "test_suite.py::test_second"]
    result.stdout.fnmatch_lines(
        ["*there before the call of the test: a fixture, a teardown,", "*an import or an earlier test left it"]
    )


RAISES = """
MODEL = Net()

def test_fails():
    poison(MODEL)
    raise ValueError("its own")

def test_after():
    use(MODEL)

OTHER = Net()

@pytest.mark.xfail(strict=True)
def test_expected():
    poison(OTHER)
    raise ValueError("known")

THIRD = Net()

def test_skips():
    poison(THIRD)
    pytest.skip("half way")

def test_raises():
    # Its local variables are in its traceback: on every Python, nothing has to be monitored for them.
    own = Net()
    poison(own)
    raise ValueError("of another")
"""


@pytest.mark.slow
def test_a_test_that_fails_keeps_its_own_error_and_is_blamed_all_the_same(watch):
    result, failed = watch(RAISES)
    assert failed == ["test_suite.py::test_fails", "test_suite.py::test_raises"]
    result.stdout.fnmatch_lines(["E       ValueError: its own", "*nnx watch: tracers in MODEL.box.last"])
    for name, leaf in {"expected": "", "fails": "", "raises": "own.box.last", "skips": ""}.items():
        result.stdout.fnmatch_lines([f"test_suite.py::test_{name}  tracers in {leaf}*"])
    result.assert_outcomes(passed=1, failed=2, xfailed=1, skipped=1)
