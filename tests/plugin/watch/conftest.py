"""How the tests of watch mode run a suite; a file whose suites need more has a `watch` of its own."""

from __future__ import annotations

import pytest


@pytest.fixture
def watch(pytester, inner_args):
    """Run a suite watched: the result, and the tests that failed."""

    def run(source, *args, option="--nnx-watch"):
        pytester.makepyfile(test_suite=source)
        quiet = ("-p", "no:randomly", "-p", "no:cacheprovider")
        result = pytester.runpytest_inprocess(*inner_args, *quiet, *filter(None, [option]), *args)
        return result, sorted(
            {line.split(" - ")[0].split()[1] for line in result.outlines if line.startswith("FAILED")}
        )

    return run
