"""pytest-memray: the heap may grow by twice the state and 16 MiB while the program is compiled and called. The model is made before."""

import pytest

from benchmarks.comparison.programs import chosen

PROGRAM = chosen()
LIMIT = 2 * PROGRAM.state_bytes + 16 * 1024**2


@pytest.mark.limit_memory(f"{LIMIT} B")
def test_program() -> None:
    PROGRAM.run(PROGRAM.jitted(PROGRAM.subject))
