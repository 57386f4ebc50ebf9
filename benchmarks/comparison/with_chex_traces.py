"""`chex.assert_max_traces` inside the jit: one trace for two calls."""

import chex

from benchmarks.comparison.programs import chosen

PROGRAM = chosen()


def test_program() -> None:
    PROGRAM.run(PROGRAM.jitted(chex.assert_max_traces(PROGRAM.subject, 1)))
