"""A marked test of pytest-nnxcheck: the subject alone, no program around it and no setting."""

from typing import Any

import pytest

from benchmarks.comparison.programs import chosen

PROGRAM = chosen()


@pytest.mark.nnx_invariants
def test_program(nnx_wrap: Any) -> None:
    nnx_wrap(PROGRAM.subject)(*PROGRAM.args)
