"""pytest-jax-bench: compile time, run time and memory of the jitted program, a line a run in its table. It fails nothing."""

from typing import Any

from benchmarks.comparison.programs import chosen

PROGRAM = chosen()


def test_program(jax_bench: Any, record_property: Any) -> None:
    bench = jax_bench(jit_rounds=2, jit_warmup=0)
    result, _ = bench.measure(None, PROGRAM.jitted(PROGRAM.subject), *PROGRAM.passed)
    record_property("shown", [result.jit_peak_bytes, result.jit_temporary_bytes, result.jit_constants_bytes])
