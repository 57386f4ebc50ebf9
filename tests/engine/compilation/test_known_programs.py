"""Facts of programs that an earlier run keeps by their text: the same verdict, figures and lines, and nothing is compiled."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checking import broken, call
from flax import nnx
from healthy import assign

from pytest_nnxcheck.compat import staging
from pytest_nnxcheck.compat.compile_cache import SharedPrograms, compile_folder, durable_text
from pytest_nnxcheck.engine import known_programs
from pytest_nnxcheck.engine.example import Example, Memo
from pytest_nnxcheck.engine.known_programs import ProgramFacts
from pytest_nnxcheck.values import uncomputed
from pytest_nnxcheck.xla import buffers
from pytest_nnxcheck.xla.hlo import aliases

X = jnp.ones((2, 64))


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The programs that jax compiles ahead of time."""
    found: list[Any] = []
    compile_one = jax.stages.Lowered.compile

    def counted(lowered: Any, *args: Any, **kwargs: Any) -> Any:
        found.append(lowered)
        return compile_one(lowered, *args, **kwargs)

    monkeypatch.setattr(jax.stages.Lowered, "compile", counted)
    return found


@pytest.fixture
def run(tmp_path: Path, compiled: list[Any]) -> Callable[..., Any]:
    """Make a call under a nesting, as one run of a test: what was found, and the number of programs that were compiled for it."""

    def once(
        make: Callable[[], Any], *args: Any, nesting: str = "jit > remat", values: bool = False, **settings: Any
    ) -> tuple[Any, int]:
        compiled.clear()
        with compile_folder(tmp_path / "kept"), Example(Memo(), values_needed=values) as example:
            found = call(make(), *args, nesting=nesting, example=example, **settings)
        return found, len(compiled)

    return once


def said(found: Any) -> Any:
    """All that an outcome says, with the lines of its buffers."""
    outcome = found.outcome
    evidence = replace(outcome.evidence, moves=()) if outcome.evidence else None
    return outcome.verdict, outcome.peak, outcome.budget, outcome.reason, outcome.notes, outcome.asserted, evidence


class Counter(nnx.Module):
    """Changes a part of its state."""

    def __init__(self) -> None:
        self.linear = nnx.Linear(64, 64, rngs=nnx.Rngs(0))
        self.mean = nnx.BatchStat(jnp.zeros(64))

    def __call__(self, x: jax.Array) -> jax.Array:
        assign(self.mean, x.mean(axis=0))
        return self.linear(x)


@pytest.mark.parametrize("nesting", ["jit", "jit > remat", "jit > vmap", "jit > scan", "jit[functional]"])
def test_a_second_run_compiles_nothing_and_says_the_same(run: Callable[..., Any], nesting: str) -> None:
    first, programs = run(Counter, X, nesting=nesting)
    second, again = run(Counter, X, nesting=nesting)

    assert first.outcome.verdict == "held", first.outcome
    assert (programs > 0, again) == (True, 0)
    assert said(second) == said(first)


def test_a_program_is_known_to_another_nesting_that_makes_it(run: Callable[..., Any]) -> None:
    run(Counter, X, nesting="jit")

    assert run(Counter, X, nesting="jit > eval_shape")[1] == 0


def test_other_arrays_are_the_same_program_and_other_shapes_another(run: Callable[..., Any]) -> None:
    run(Counter, X)

    assert run(Counter, 2 * X)[1] == 0
    assert run(Counter, jnp.ones((3, 64)))[1] > 0


def test_what_comes_out_of_a_known_program_has_no_values(run: Callable[..., Any]) -> None:
    run(Counter, X)
    found, _ = run(Counter, X)

    assert found.output.shape == (2, 64)
    with pytest.raises(RuntimeError, match="deleted"):
        np.asarray(found.output)


def test_where_the_body_reads_values_the_program_runs(run: Callable[..., Any]) -> None:
    first, _ = run(Counter, X)
    assert run(Counter, X)[1] == 0
    found, programs = run(Counter, X, values=True)

    assert np.array_equal(found.output, first.output)
    assert programs > 0


def test_an_invariant_that_needs_a_run_gets_one(run: Callable[..., Any]) -> None:
    for _ in range(2):
        found, programs = run(Counter, X, invariants="tracers,memory,donation,parity")
        assert found.outcome.verdict == "held"
        assert programs > 0


def test_a_second_call_that_is_handed_an_output_needs_no_value_of_it(tmp_path: Path, compiled: list[Any]) -> None:
    for known in (False, True):
        compiled.clear()
        with compile_folder(tmp_path / "kept"), Example(Memo()) as example:
            hidden = call(Counter(), X, nesting="jit > remat", example=example).output
            second = call(Counter(), hidden, nesting="jit > remat", example=example)
            assert second.outcome.verdict == "held"
            assert bool(compiled) is not known
            for unknown in ("jit > vmap", "jit > while_loop") if known else ():
                with pytest.raises(uncomputed.ValuesNeeded):
                    call(Counter(), hidden, nesting=unknown, example=example)


def test_a_failure_is_found_in_both_runs_and_has_the_lines_of_a_compile(run: Callable[..., Any]) -> None:
    first, _ = run(Counter, X, nesting="jit", memory_budget="1KB")
    second, programs = run(Counter, X, nesting="jit", memory_budget="1KB")
    assert [broken(first), broken(second)] == [["memory"], ["memory"]]
    assert programs

    assert broken(run(Counter, X, nesting="jit")[0]) == []
    third, programs = run(Counter, X, nesting="jit", memory_budget="1KB")
    assert programs
    assert said(third) == said(first) == said(second)


SOURCE = """
import jax.numpy as jnp
from flax import nnx

class Net(nnx.Module):
    def __init__(self):
        self.linear = nnx.Linear(64, 64, rngs=nnx.Rngs(0))

    def __call__(self, x):
        hidden = jnp.tanh(self.linear(x))
        return jnp.outer(hidden[0], hidden[1]) @ hidden.T
"""


def test_moved_lines_are_the_same_program_and_are_said_as_they_are_now(tmp_path: Path, run: Callable[..., Any]) -> None:
    def made(text: str) -> Any:
        (tmp_path / "net.py").write_text(text)
        spec = importlib.util.spec_from_file_location("net", tmp_path / "net.py")
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module.Net

    first, _ = run(made(SOURCE), X)
    second, programs = run(made("# a comment\n# and another\n" + SOURCE), X)

    def lines(found: Any) -> list[int]:
        return [
            int(line.rpartition(":")[2]) for place in found.outcome.evidence.places if "net.py" in (line := place.line)
        ]

    assert programs == 0
    assert lines(first)
    assert lines(second) == [line + 2 for line in lines(first)]


def test_python_code_in_a_program_is_never_taken_of_an_earlier_run(run: Callable[..., Any]) -> None:
    def printed(x: jax.Array) -> jax.Array:
        jax.debug.callback(lambda value: None, x.sum())
        return x * 2

    run(lambda: printed, X)
    assert run(lambda: printed, X)[1] > 0


def test_a_text_that_names_objects_of_this_process_is_of_no_use_to_a_later_one() -> None:
    lowered = jax.jit(lambda x: x).lower(X)

    assert durable_text("text", lowered, ("float32[2,64]",))
    assert not durable_text("text", lowered, ("captured at 0x7f00",))


def test_a_damaged_file_and_one_of_another_form_cost_a_compile(
    tmp_path: Path, run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, _ = run(Counter, X)
    for file in (tmp_path / "kept").iterdir():
        file.write_bytes(file.read_bytes()[:-7])
    second, programs = run(Counter, X)
    assert programs
    assert said(second) == said(first)
    assert run(Counter, X)[1] == 0

    monkeypatch.setattr(known_programs, "FORM", 2)
    assert run(Counter, X)[1] > 0


@pytest.mark.parametrize("change", ["version", "flags", "option"])
def test_another_compiler_is_asked_again(change: str, run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    run(Counter, X)
    if change == "version":
        monkeypatch.setattr(known_programs, "_versions", lambda: ("another",))
    elif change == "flags":
        monkeypatch.setenv("XLA_FLAGS", "--xla_another=1")
    option = "jax_compiler_enable_remat_pass"
    if change == "option" and option not in jax.config.values:
        pytest.skip("this jax has no such option")
    with staging.configured({option: not jax.config.values[option]} if change == "option" else {}):
        assert run(Counter, X)[1] > 0


def test_facts_come_back_as_they_were_kept() -> None:
    program = SharedPrograms().compiled(jax.jit(lambda x, y: (x + y, y @ y.T), donate_argnums=0).trace(X, X).lower())
    facts = ProgramFacts(buffers.read(program.program), aliases(program.program), known_programs.lines_of(program))
    again = ProgramFacts.of_bytes(facts.to_bytes())

    assert facts.lines
    assert facts.memory.order
    assert again == facts
    assert again.memory.order == facts.memory.order


def test_lines_that_cannot_be_paired_are_no_lines() -> None:
    facts = ProgramFacts(buffers.read(jax.jit(lambda x: x + 1).lower(X).compile()), None, ("a:1", "a:2", "a:1"))

    assert facts.at(("a:3", "a:4")) is None
    assert facts.at(("a:3", "a:4", "a:5")) is None
    assert facts.at(("a:2", "a:1")) is facts
    moved = facts.at(("b:3", "b:4", "b:3"))
    assert moved is not None
    assert moved.lines == ("b:3", "b:4", "b:3")
