"""What a violation says as data: the kind of each thing that broke, its path, and why a buffer was lost."""

from __future__ import annotations

import inspect
import re
from types import SimpleNamespace

import bugs
import jax.numpy as jnp
import pytest
from checking import Example, call, text
from flax import nnx
from jax.errors import UnexpectedTracerError

from pytest_nnxcheck import Nesting
from pytest_nnxcheck.core.facts import Leak, Observation
from pytest_nnxcheck.invariants.donation import SharedBuffer
from pytest_nnxcheck.invariants.tracers import judge


def findings(found):
    return [finding for violation in found.outcome.violations for finding in violation.findings]


def test_a_leaf_that_is_written_and_never_read_keeps_its_buffer():
    def overwrites(pair: bugs.Pair) -> None:
        bugs.assign(pair.b, jnp.full(64, 3.0))

    found = call(overwrites, bugs.Pair(64), nesting="jit")
    assert found.outcome.verdict == "held", text(found)


def test_an_array_that_is_donated_for_two_inputs_is_shared():
    array = jnp.ones(64)
    found = call(bugs.arrays_step, array, array, nesting="jit", donate="all")
    assert findings(found) == [SharedBuffer("a", other="b", twice=True)], text(found)
    assert "a and b share a buffer: XLA refuses to donate it twice" in text(found)


def test_more_findings_than_rows_are_kept():
    class Wide(nnx.Module):
        def __init__(self) -> None:
            for n in range(15):
                setattr(self, f"p{n:02}", nnx.Param(jnp.ones(64)))

    def retypes(model: Wide) -> None:
        for _, variable in nnx.iter_graph(model):
            if isinstance(variable, nnx.Variable):
                bugs.assign(variable, variable[...].astype(jnp.bfloat16))

    found = call(retypes, Wide(), nesting="jit")
    assert len(findings(found)) == 15
    assert "and 3 more" in text(found)


def test_of_several_invariants_the_most_serious_is_told_first():
    found = call(bugs.step_other_dtype, bugs.Pair(64), nesting="jit", memory_budget=1)
    assert [violation.invariant for violation in found.outcome.violations] == ["donation", "memory"]


def test_a_program_that_was_compiled_for_another_call_names_the_lines_of_its_own():
    example = Example()
    first, second = (
        call(subject, nnx.Linear(64, 64, rngs=nnx.Rngs(0)), nesting="jit", memory_budget=1, example=example)
        for subject in (squares, squares_below)
    )
    lines = [re.findall(r"test_findings.py:(\d+)", text(found)) for found in (first, second)]
    start, below = (inspect.getsourcelines(subject)[1] + 1 for subject in (squares, squares_below))
    assert [{*found} for found in lines] == [{str(start)}, {str(below)}]


def squares(model):
    return (model.kernel[...] @ model.kernel[...]) @ model.kernel[...]


def squares_below(model):
    return (model.kernel[...] @ model.kernel[...]) @ model.kernel[...]


@pytest.mark.parametrize("leaks, path", [(("KEPT[0]",), "KEPT[0]"), ((), "merged")])
def test_where_jax_trips_over_a_leak_the_leak_is_what_broke(leaks, path):
    error = UnexpectedTracerError("of an ended trace")
    kept, inside = (
        tuple(Leak(name, "list", "DynamicJaxprTracer", "float32[]", "", "") for name in names)
        for names in (leaks, ("merged",))
    )
    seen = Observation(Nesting.parse("jit"), None, error=error, leaks=kept, dropped=inside)
    assert [left.path for left in judge(SimpleNamespace(observation=seen))] == [path]
