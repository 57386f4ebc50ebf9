"""How the tests of programs to paste run a suite."""

from __future__ import annotations

import pytest
from pasted_programs import HEAD


@pytest.fixture
def inner(pytester, inner_args):
    """Run a suite with the real engine in this process."""

    def run(source, *args, name="test_inner", conftest="", subprocess=False):
        pytester.makeconftest(conftest)
        pytester.makepyfile(**{name: HEAD + source})
        start = pytester.runpytest_subprocess if subprocess else pytester.runpytest_inprocess
        return start(*inner_args, "-p", "no:randomly", "--nnx-max-examples", "0", *args)

    return run
