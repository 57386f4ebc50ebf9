"""A run against a baseline, and its file."""

import pytest
from baselines import PEAKS


@pytest.fixture
def peaks(pytester):
    return pytester.path / PEAKS


@pytest.fixture
def run(run_inner):
    """Run a suite against peaks.json; a run in this process would inherit that warnings are errors."""

    def start(source, *args, **more):
        return run_inner(source, f"--nnx-baseline={PEAKS}", "-Wdefault", *args, **more)

    return start
