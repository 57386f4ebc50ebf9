"""The program alone, as any test would run it."""

from benchmarks.comparison.programs import chosen

PROGRAM = chosen()


def test_program() -> None:
    PROGRAM.run(PROGRAM.jitted(PROGRAM.subject))
