"""`jax.checking_leaks` around the program."""

import jax

from benchmarks.comparison.programs import chosen

PROGRAM = chosen()


def test_program() -> None:
    with jax.checking_leaks():
        PROGRAM.run(PROGRAM.jitted(PROGRAM.subject))
