"""`equinox.debug.assert_max_traces` inside the jit: one trace for two calls."""

import equinox

from benchmarks.comparison.programs import chosen

PROGRAM = chosen()


def test_program() -> None:
    PROGRAM.run(PROGRAM.jitted(equinox.debug.assert_max_traces(PROGRAM.subject, max_traces=1)))
