"""The corpus itself, held by plain jax and flax to what it claims: without the plugin, on every version."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator
from typing import Any

import bugs
import jax
import leaky
import pytest
from flax import nnx
from healthy import FLAX, WIDTH, Case
from leaky import LEAKY

from pytest_nnxcheck.compat import compile_cache

OLD = FLAX < (0, 10, 7)


def is_tracer(value: object) -> bool:
    return isinstance(value, jax.core.Tracer)


def run_jitted(case: Case) -> Any:
    return nnx.jit(lambda subject, *args: subject(*args))(case.subject, *case.args)


def peak(function: Callable[..., Any], *args: Any) -> int:
    """Arguments + outputs + temporaries - aliased, in bytes."""
    with compile_cache.judged_compiles():
        found = jax.jit(function).lower(*args).compile().memory_analysis()
    resident = found.argument_size_in_bytes + found.output_size_in_bytes - found.alias_size_in_bytes
    return int(resident + found.temp_size_in_bytes)


def bytes_of(state: Any) -> int:
    return sum(leaf.nbytes for leaf in jax.tree.leaves(state))


# Leaky


def frame_values(error: Exception) -> Iterator[Any]:
    for frame, _ in traceback.walk_tb(error.__traceback__):
        yield from frame.f_locals.values()


KEPT: dict[str, Callable[[Any], Any]] = {
    "none_attribute": lambda model: [model.last],
    "plain_list": lambda model: model.log,
    "dict": lambda model: model.debug.values(),
    "closure_cell": lambda model: [cell.cell_contents for cell in model.norm.__closure__],
    "class_attribute": lambda model: [leaky.TracksLargest.largest],
    "default_argument": lambda model: leaky.Memoizes.__call__.__defaults__[0].values(),  # type: ignore[index]
    "cached_function": lambda model: [leaky.positions(WIDTH)],
    "variable_metadata": lambda model: [model.linear.kernel.norm],
    "raises_afterwards": lambda model: leaky.ChecksRange.seen,
    "caught_exception": lambda model: [value for error in model.errors for value in frame_values(error)],
}


@pytest.fixture
def clean() -> Iterator[None]:
    """Leaks outside the module outlive the test: clear them afterwards too."""
    yield
    for twins in LEAKY.values():
        twins.leaky()


@pytest.mark.usefixtures("clean")
@pytest.mark.parametrize("place", LEAKY)
def test_leaky_module_holds_a_tracer_after_jit(place: str) -> None:
    twins = LEAKY[place]
    if twins.since > FLAX:
        pytest.skip(f"flax {FLAX} hands the value back as state, or refuses the call")
    case = twins.leaky()
    if twins.raises is None:
        run_jitted(case)
    else:
        with pytest.raises(twins.raises):
            run_jitted(case)
    assert any(map(is_tracer, KEPT[place](case.subject)))


# google/flax#4871


def temporaries_4871(call_first: bool) -> float:
    """Temporaries over parameters of the report's program."""
    model = bugs.report_4871(nnx.Rngs(0))
    state = nnx.split(model)[1]
    with compile_cache.judged_compiles():
        found = bugs.run_4871(model, call_first).lower(state, 0.0).compile().memory_analysis()
    return float(found.temp_size_in_bytes / bytes_of(state))


@pytest.mark.skipif(not OLD, reason="newer flax rejects the program")
def test_4871_copies_the_stack_after_a_first_call() -> None:
    assert temporaries_4871(call_first=True) == pytest.approx(1.0, abs=0.01)
    assert temporaries_4871(call_first=False) == pytest.approx(0.0, abs=0.01)


# A scan over nnx.remat


def copies_held(how: bugs.Remat) -> float:
    """Copies of the stacked kernels that a second call in one program adds to the peak."""
    graphdef, state = nnx.split(bugs.ScanOverRemat(nnx.Rngs(0), how))
    once = peak(lambda state, x: nnx.merge(graphdef, state)(x), state, *bugs.inputs_scan_over_remat())
    twice = peak(lambda state, x: bugs.call_twice(nnx.merge(graphdef, state), x), state, *bugs.inputs_scan_over_remat())
    return (twice - once) / bytes_of(state)


def test_scan_over_remat_holds_one_more_copy_a_call() -> None:
    assert copies_held("remat") == pytest.approx(1.0, abs=0.02)


@pytest.mark.parametrize("how", bugs.cures())
def test_cured_twins_hold_none(how: bugs.Remat) -> None:
    assert copies_held(how) == pytest.approx(0.0, abs=0.02)


# Donated pointers


def pointers(pair: bugs.Pair) -> dict[str, int]:
    return {name: getattr(pair, name)[...].unsafe_buffer_pointer() for name in ("a", "b") if hasattr(pair, name)}


@pytest.mark.filterwarnings("ignore:Some donated buffers were not usable")
@pytest.mark.parametrize("n", [4, 100_000])
@pytest.mark.parametrize(
    "step, kept", [(bugs.step_in_place, {"a", "b"}), (bugs.step_other_dtype, {"a"}), (bugs.step_drops_one, {"a"})]
)
def test_pointers_of_a_pair(step: Callable[[bugs.Pair], None], kept: set[str], n: int) -> None:
    pair = bugs.Pair(n)
    before = pointers(pair)
    nnx.jit(step, donate_argnums=0)(pair)
    assert {name for name, pointer in pointers(pair).items() if pointer == before[name]} == kept
