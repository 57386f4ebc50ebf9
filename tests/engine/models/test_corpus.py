"""The corpus itself, held by plain jax and flax to what it claims: without the plugin, on every version."""

from __future__ import annotations

import itertools
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import bugs
import jax
import jax.numpy as jnp
import leaky
import pytest
import state_buffers
from flax import nnx
from flax.errors import TraceContextError
from healthy import FLAX, HEALTHY, WIDTH, Case
from leaky import LEAKY

from pytest_nnxcheck.compat import compile_cache

COMBINATIONS = tuple(itertools.product((False, True), (False, True)))
SIZES = (4, 1_000, 100_000)
OLD = FLAX < (0, 10, 7)


def is_tracer(value: object) -> bool:
    return isinstance(value, jax.core.Tracer)


def poisoned(module: Any) -> set[str]:
    """Paths of the state leaves that are tracers."""
    leaves = jax.tree_util.tree_leaves_with_path(nnx.state(module))
    return {".".join(map(name, path[: depth(path)])) for path, leaf in leaves if is_tracer(leaf)}


def depth(path: Any) -> int:
    """Length of a path without the entry of the Variable's own value."""
    return len(path) - 1 if getattr(path[-1], "name", None) in ("value", "raw_value") else len(path)


def name(entry: Any) -> str:
    return str(getattr(entry, "key", getattr(entry, "name", entry)))


def run_jitted(case: Case) -> Any:
    return nnx.jit(lambda subject, *args: subject(*args))(case.subject, *case.args)


def peak(function: Callable[..., Any], *args: Any, **options: Any) -> int:
    """Arguments + outputs + temporaries - aliased, in bytes."""
    with compile_cache.judged_compiles():
        found = jax.jit(function, **options).lower(*args).compile().memory_analysis()
    resident = found.argument_size_in_bytes + found.output_size_in_bytes - found.alias_size_in_bytes
    return int(resident + found.temp_size_in_bytes)


def bytes_of(state: Any) -> int:
    return sum(leaf.nbytes for leaf in jax.tree.leaves(state))


# Healthy


@pytest.mark.full
@pytest.mark.parametrize("factory", HEALTHY.values(), ids=HEALTHY)
@pytest.mark.parametrize("run", [Case.__call__, run_jitted], ids=["eager", "jit"])
def test_healthy_case_runs_twice_and_keeps_no_tracer(factory: Callable[[], Case], run: Callable[[Case], Any]) -> None:
    case = factory()
    run(case)
    assert all(jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(run(case)))
    assert not poisoned(case.subject)


def test_a_factory_makes_fresh_state() -> None:
    one, two = HEALTHY["batch_norm_train"](), HEALTHY["batch_norm_train"]()
    one()
    assert not jnp.array_equal(one.subject.mean[...], two.subject.mean[...])


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


OUTSIDE_OF_TWINS: dict[str, Callable[[Any], Any]] = {
    "closure_cell": lambda model: [cell.cell_contents for cell in model.norm.__closure__],
    "class_attribute": lambda model: vars(type(model)).values(),
    "default_argument": lambda model: leaky.MemoizesNumbers.__call__.__defaults__[0].values(),
    "cached_function": lambda model: [leaky.host_positions(WIDTH)],
    "raises_afterwards": lambda model: leaky.ChecksShape.seen,
}
"""Where a twin keeps something outside of its own attributes."""


@pytest.fixture
def clean() -> Iterator[None]:
    """Leaks outside the module outlive the test: clear them afterwards too."""
    yield
    for twins in LEAKY.values():
        twins.leaky()


@pytest.mark.usefixtures("clean")
@pytest.mark.parametrize("place", LEAKY)
def test_leaky_module_runs_eagerly_without_a_tracer(place: str) -> None:
    case = LEAKY[place].leaky()
    case()
    case()
    assert not any(map(is_tracer, KEPT[place](case.subject)))


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


@pytest.mark.skipif(not OLD, reason="arrays are leaves from flax 0.10.7 on")
@pytest.mark.parametrize("place", [place for place, twins in LEAKY.items() if twins.since > (0, 10)])
def test_flax_0_10_2_refuses_an_array_that_is_no_variable(place: str) -> None:
    with pytest.raises(ValueError, match="Arrays leaves are not supported"):
        run_jitted(LEAKY[place].leaky())


@pytest.mark.parametrize("place", LEAKY)
@pytest.mark.parametrize("run", [Case.__call__, run_jitted], ids=["eager", "jit"])
def test_healthy_twin_runs_twice_and_keeps_no_tracer(place: str, run: Callable[[Case], Any]) -> None:
    case = LEAKY[place].healthy()
    run(case)
    run(case)
    assert not poisoned(case.subject)
    kept = OUTSIDE_OF_TWINS.get(place, lambda model: vars(model).values())(case.subject)
    assert not any(map(is_tracer, kept))


@pytest.mark.parametrize("place", LEAKY)
def test_twins_share_shapes(place: str) -> None:
    leaky_case, healthy_case = LEAKY[place].leaky(), LEAKY[place].healthy()
    assert leaky_case().shape == healthy_case().shape


@pytest.mark.skipif(FLAX < (0, 12), reason="attributes are static or data from flax 0.12 on")
def test_a_none_set_in_the_constructor_is_refused_eagerly_and_leaks_under_jit() -> None:
    with pytest.raises(ValueError, match="Cannot assign data value"):
        leaky.case(leaky.KeepsLastSetInInit)()
    case = leaky.case(leaky.KeepsLastSetInInit)
    run_jitted(case)
    assert is_tracer(case.subject.last)


# google/flax#4520


@pytest.mark.parametrize("eval_shape", [jax.eval_shape, nnx.eval_shape], ids=["jax", "nnx"])
def test_4520_closure(eval_shape: Callable[..., Any]) -> None:
    model = bugs.report_4520(nnx.Rngs(0))
    if OLD:
        eval_shape(model, *bugs.inputs_4520())
        assert poisoned(model) == {"backbone.kernel", "backbone.bias"}
    else:
        with pytest.raises(ValueError, match="Cannot extract graph node from different trace level"):
            eval_shape(model, *bugs.inputs_4520())
        assert not poisoned(model)


def test_4520_argument_is_clean() -> None:
    model = bugs.report_4520(nnx.Rngs(0))
    out = nnx.eval_shape(lambda model, x: model(x), model, *bugs.inputs_4520())
    assert out.shape == (4, 10)
    assert not poisoned(model)


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


@pytest.mark.skipif(not OLD, reason="newer flax rejects the program")
def test_4871_with_an_integer_and_no_first_call_meets_its_own_tracers() -> None:
    model = bugs.report_4871(nnx.Rngs(0), depth=5, width=8)
    with pytest.raises(jax.errors.UnexpectedTracerError):
        bugs.run_4871(model, call_first=False)(nnx.split(model)[1], 0)
    assert not poisoned(model)


@pytest.mark.skipif(OLD, reason="flax 0.10.2 accepts the program")
@pytest.mark.parametrize("call_first", [False, True])
def test_4871_is_rejected(call_first: bool) -> None:
    model = bugs.report_4871(nnx.Rngs(0), depth=5, width=8)
    with pytest.raises(ValueError, match="Cannot extract graph node from different trace level"):
        bugs.run_4871(model, call_first)(nnx.split(model)[1], 0)
    assert not poisoned(model)


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


@pytest.mark.skipif(not OLD, reason="from flax 0.10.7 on nnx.scan hands no parameters back that did not change")
def test_nnx_scan_itself_copies_on_flax_0_10_2() -> None:
    assert copies_held("none") == pytest.approx(1.0, abs=0.02)


@pytest.mark.parametrize("how", bugs.cures())
def test_cured_twins_compute_the_same(how: bugs.Remat) -> None:
    outputs = [bugs.ScanOverRemat(nnx.Rngs(0), way)(*bugs.inputs_scan_over_remat()) for way in ("remat", how)]
    assert jnp.allclose(*outputs, atol=1e-6)


# google/flax#4819


def refusal(remat: bool, scan: bool) -> tuple[type[Exception], str] | None:
    """What the jitted decoding loop of the report raises on the installed version."""
    if OLD:
        return (jax.errors.UnexpectedTracerError, "unexpected tracer") if remat or scan else None
    if scan:
        return ValueError, "Cannot extract graph node from different trace level"
    return (TraceContextError, "different trace level") if remat else None


@pytest.mark.parametrize("remat, scan", COMBINATIONS)
def test_4819_decode_under_jit(remat: bool, scan: bool) -> None:
    model = bugs.report_4819(nnx.Rngs(0), remat, scan)
    expected = refusal(remat, scan)
    if expected is None:
        nnx.jit(bugs.autoregressive_decode)(model, *bugs.inputs_4819())
    else:
        with pytest.raises(expected[0], match=expected[1]):
            nnx.jit(bugs.autoregressive_decode)(model, *bugs.inputs_4819())
    assert not poisoned(model)


@pytest.mark.skipif(FLAX >= (0, 12), reason="flax 0.12 refuses what it cannot do")
@pytest.mark.parametrize("remat, scan", COMBINATIONS)
def test_4819_decode_eagerly_leaks_where_it_is_not_refused(remat: bool, scan: bool) -> None:
    model = bugs.report_4819(nnx.Rngs(0), remat, scan)
    if scan and not OLD:
        with pytest.raises(ValueError, match="different trace level"):
            bugs.autoregressive_decode(model, *bugs.inputs_4819())
        assert not poisoned(model)
    else:
        bugs.autoregressive_decode(model, *bugs.inputs_4819())
        assert bool(poisoned(model)) == (remat or scan)


@pytest.mark.parametrize("remat, scan", COMBINATIONS)
def test_4819_holds_with_the_model_in_the_carry(remat: bool, scan: bool) -> None:
    model = bugs.report_4819(nnx.Rngs(0), remat, scan)
    x = bugs.inputs_4819()[0]
    out = bugs.autoregressive_decode_in_carry(model, x, steps=3)
    assert jnp.allclose(out, model(model(model(x))), atol=1e-5)
    assert not poisoned(model)


# Donated pointers


def pointers(pair: bugs.Pair) -> dict[str, int]:
    return {name: getattr(pair, name)[...].unsafe_buffer_pointer() for name in ("a", "b") if hasattr(pair, name)}


@pytest.mark.filterwarnings("ignore:Some donated buffers were not usable")
@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize(
    "step, kept",
    [
        (bugs.step_in_place, {"a", "b"}),
        (bugs.step_other_dtype, {"a"}),
        (bugs.step_drops_one, {"a"}),
    ],
)
def test_pointers_of_a_pair(step: Callable[[bugs.Pair], None], kept: set[str], n: int) -> None:
    pair = bugs.Pair(n)
    before = pointers(pair)
    nnx.jit(step, donate_argnums=0)(pair)
    assert {name for name, pointer in pointers(pair).items() if pointer == before[name]} == kept


@pytest.mark.filterwarnings("ignore:Some donated buffers were not usable")
@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize(
    "step, kept",
    [
        (bugs.arrays_step, [True, True]),
        (bugs.arrays_step_other_dtype, [True, False]),
        (bugs.arrays_step_drops_one, [True]),
    ],
)
def test_pointers_of_plain_arrays(step: Callable[..., bugs.Arrays], kept: list[bool], n: int) -> None:
    arrays = (jnp.arange(n, dtype=jnp.float32), jnp.ones(n, jnp.float32))
    before = [array.unsafe_buffer_pointer() for array in arrays]
    after = jax.jit(step, donate_argnums=(0, 1))(*arrays)
    assert [new.unsafe_buffer_pointer() == old for new, old in zip(after, before, strict=False)] == kept


# jax-ml/jax#926


@pytest.mark.parametrize("donated, times", [((), 4.0), ((0,), 2.0)])
def test_926_peak(donated: tuple[int, ...], times: float) -> None:
    (x,) = bugs.inputs_926()
    assert peak(bugs.ten_convolutions, x, donate_argnums=donated) / x.nbytes == pytest.approx(times, abs=0.01)


@pytest.mark.parametrize("kind", state_buffers.buffers_926())
def test_926_buffers_change_by_the_call_and_keep_their_pointers(kind: str) -> None:
    module = state_buffers.buffers_926()[kind]
    is_buffer = nnx.filterlib.to_predicate((nnx.BatchStat, state_buffers.Buffer))
    before = [jnp.copy(leaf) for leaf in jax.tree.leaves(nnx.state(module, is_buffer))]
    addresses = [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(nnx.state(module))]
    # sigma of flax's own layer is written and never read: without keep_unused the argument is dropped, not donated
    run = nnx.jit(lambda module, x: module(x), donate_argnums=0, keep_unused=True)
    run(module, jax.random.normal(jax.random.key(2), (3, 8)))
    after = jax.tree.leaves(nnx.state(module, is_buffer))
    assert not all(jnp.array_equal(old, new) for old, new in zip(before, after, strict=True))
    assert [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(nnx.state(module))] == addresses
