"""How the tests of watch mode run a suite; a file whose suites need more has a `watch` of its own."""

from __future__ import annotations

import pytest
from watched import HEAD


@pytest.fixture
def watch(pytester, inner_args):
    """Run a suite watched, with what it begins with: the result, and the tests that failed."""

    def run(source, *args, option="--nnx-watch", head=HEAD):
        pytester.makepyfile(test_suite=head + source)
        quiet = ("-p", "no:randomly", "-p", "no:cacheprovider")
        result = pytester.runpytest_inprocess(*inner_args, *quiet, *filter(None, [option]), *args)
        return result, sorted(
            {line.split(" - ")[0].split()[1] for line in result.outlines if line.startswith("FAILED")}
        )

    return run
