"""Every hint of the table is followed: the change that it asks for is made, and the nesting holds.

A test says by its marker-like decorator which causes of the table it follows; the last test sees that none is left out.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import bugs
import cures
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import retraced
from checking import call, flat, slow, some, text
from cures import CUSTOM_RULES, DIFFERENTIATED, OWN, Steps, Tied, remembers
from flax import nnx
from healthy import BATCH, FLAX, WIDTH, numbers, rngs
from leaky import LEAKY, KeepsLastInVariable, KeepsLastSetInInit, case

from pytest_nnxcheck import Nesting, Outcome, Report, Violation, check, register_transform
from pytest_nnxcheck.core.facts import Leak
from pytest_nnxcheck.core.notes import ValueAsked
from pytest_nnxcheck.core.outcome import TracerLeft
from pytest_nnxcheck.core.settings import Settings
from pytest_nnxcheck.core.text import near
from pytest_nnxcheck.reporting import hints, notes, violations
from pytest_nnxcheck.runner import conclude
from pytest_nnxcheck.runner.strategies import Exclusions

FOLLOWED: set[str] = set()
DATA = FLAX >= (0, 12)
LEAKS_BY_CLOSURE = FLAX < (0, 10, 7)
old = pytest.mark.skipif(not LEAKS_BY_CLOSURE, reason="flax from 0.10.7 on refuses what leaks by a closure before")


def follows(*causes: str) -> Callable[[Any], Any]:
    """Say which causes a test follows."""
    assert {*causes} <= {*hints.TABLE}, causes
    FOLLOWED.update(causes)
    return lambda test: test


def one(subject: Any, *args: Any, nesting: str, **settings: Any) -> Report:
    return check(subject, *args, nesting=nesting, **settings)


# --- plain values


@follows("plain value, captured")
@old
def test_what_a_captured_module_keeps_goes_into_a_variable_and_the_module_becomes_an_argument():
    found = check(case(KeepsLastSetInInit).subject, numbers(BATCH), transforms="jit", max_examples=0)
    assert "keep the value in an nnx.Variable, and pass the module as an argument: model.last" in flat(str(found))
    assert one(case(KeepsLastInVariable).subject, numbers(BATCH), nesting="jit").ok
    assert not one(case(KeepsLastInVariable).subject, numbers(BATCH), nesting="jit[closure]").ok


@follows("plain value")
def test_a_plain_value_goes_into_a_variable():
    """Where flax has no `nnx.data`, a module's own plain value leaks in a trace of the user's own, if at all."""
    leak = Leak("model.last", "attribute", "DynamicJaxprTracer", "float32[3]", "", "", "module")
    told = hints.tracer_left(TracerLeft("model.last", leak=leak, has_data=DATA))
    assert "keep the value in an nnx.Variable that __init__ makes" in told
    assert ("nnx.data" in told) == DATA
    assert one(case(KeepsLastInVariable).subject, numbers(BATCH), nesting="jit").ok


@pytest.mark.slow
@follows("outlives")
def test_what_outlives_the_trace_is_not_kept():
    found = one(remembers, numbers(BATCH), nesting="jit")
    told = flat(str(found))
    assert "do not keep arrays made under a transform in a dict outside of the module: it outlives the trace" in told
    assert one(lambda x: x * 2, numbers(BATCH), nesting="jit").ok
    leaky, healthy = LEAKY["class_attribute"].leaky(), LEAKY["class_attribute"].healthy()
    assert "in a class attribute: it outlives" in flat(str(one(leaky.subject, *leaky.args, nesting="jit")))
    assert one(healthy.subject, *healthy.args, nesting="jit").ok


# --- a module that was captured


def norm() -> nnx.BatchNorm:
    return nnx.BatchNorm(WIDTH, rngs=rngs())


LOOPS = ("vmap", "while_loop", "fori_loop", "scan", "cond", "switch")
CAPTURED = ("captured", *(f"captured by {name}" for name in LOOPS))
BY_OWN = ("map", "vectorize", *CUSTOM_RULES, "eval_shape", "checkpoint", "grad", "value_and_grad", *DIFFERENTIATED)
CAPTURED_BY_OWN = (*CAPTURED, *(f"captured by {name}" for name in BY_OWN))
CAPTURING = ["jit", "scan", *slow("remat", "vmap", "while_loop", "fori_loop", "cond", "switch")]
FEW = {"vmap", "custom_vjp", "scan", "map", "eval_shape", "checkify", "grad", "jvp"}
"""One of each kind of transform that a user's own code may name."""


@follows(*CAPTURED)
@old
@pytest.mark.parametrize("transform", CAPTURING)
def test_a_layer_that_captures_is_handed_the_module(transform):
    found = check(
        norm(), numbers(BATCH), transforms=transform, styles="closure", sweep="singles", max_depth=1, max_examples=0
    )
    assert f"hint {hints.captured_by(transform)}" in flat(str(found))
    assert f"passes {transform}, {transform}[functional]" in flat(str(found))
    assert one(norm(), numbers(BATCH), nesting=transform).ok


@pytest.mark.slow
@follows(*CAPTURED_BY_OWN)
@pytest.mark.parametrize("transform", some(OWN, FEW))
def test_a_transform_of_the_user_s_own_is_handed_the_module(transform):
    own, cured = OWN[transform]
    # A function with a rule of its own is traced where the call is.
    with_exception = call(own, norm(), numbers(BATCH), nesting="jit" if transform in CUSTOM_RULES else "un-nested")
    told = text(with_exception)
    assert with_exception.outcome.verdict in ("violated", "failed"), told
    assert f"{transform} at {near(cures.__file__)}:" in told
    assert hints.captured_by(transform) in told
    assert call(cured, norm(), numbers(BATCH), nesting="un-nested").outcome.verdict == "held"
    assert call(cured, norm(), numbers(BATCH), nesting="jit").outcome.verdict == "held"


@follows("captured by shard_map")
@old
def test_a_shard_map_that_captures_is_handed_the_state():
    found = one(norm(), numbers(BATCH), nesting="shard_map[jax_closure]")
    assert hints.captured_by("shard_map") in flat(str(found))
    assert one(norm(), numbers(BATCH), nesting="shard_map[functional]").ok


@follows("captured by registered")
@old
@pytest.mark.usefixtures("forgotten")
def test_a_registered_transform_hands_the_module_on():
    def capturing(f: Any) -> Any:
        return lambda state, *inputs: nnx.jit(lambda *inputs: f(state, *inputs))(*inputs)

    register_transform("twice", style="closure")(capturing)
    register_transform("twice")(nnx.jit)
    found = one(norm(), numbers(BATCH), nesting="twice[closure]")
    assert "hint twice should hand the module on as an argument of f" in flat(str(found))
    assert one(norm(), numbers(BATCH), nesting="twice").ok


def test_a_hint_that_was_tried_and_did_not_help_is_taken_back():
    """The value is lost with the module as an argument too: handing it on is no way out."""
    nesting, hint = Nesting.parse("jit[closure]"), hints.captured_by("jit")
    leak = Leak("model.mean", "BatchStat", "DynamicJaxprTracer", "float32[3]", "", str(nesting.layers[0]))
    violation = Violation("tracers", findings=(TracerLeft(leak.path, leak=leak),))
    outcome = violations.worded(Outcome(nesting, "violated", (violation,)))
    assert outcome.violations[0].hint == hint

    def hint_where(neighbour: Outcome | None) -> str:
        tried = conclude.explain(
            outcome, Settings(), Exclusions(), lambda near, _: neighbour and replace(neighbour, nesting=near)
        )
        return tried.violations[0].hint

    assert hint_where(outcome) == ""
    assert hint_where(replace(outcome, verdict="held", violations=())) == hint


# --- memory

TABLE_OF_NUMBERS = np.ones((256, 256), np.float32)


@follows("captured constant")
def test_a_captured_array_becomes_an_argument():
    captured = jnp.asarray(TABLE_OF_NUMBERS)
    found = one(lambda x: x @ captured, numbers((4, 256)), nesting="jit")
    assert hints.hint("captured constant") in flat(str(found))
    assert one(lambda x, table: x @ table, numbers((4, 256)), captured, nesting="jit").ok


@pytest.mark.slow
@follows("scan writes back", "scan writes back, remat")
def test_a_scan_over_remat_is_written_as_the_hint_says():
    found = call(bugs.call_twice, bugs.ScanOverRemat(rngs()), *bugs.inputs_scan_over_remat(), nesting="jit")
    cause = "scan writes back, remat" if DATA else "scan writes back"
    assert found.outcome.violations[0].hint == hints.hint(cause, checkpoint=" under jax.checkpoint")
    cure = "no_graph_updates" if DATA else "functional"
    cured = bugs.ScanOverRemat(rngs(), cure)
    assert call(bugs.call_twice, cured, *bugs.inputs_scan_over_remat(), nesting="jit").outcome.verdict == "held"


def budgeted(subject: Any, *args: Any, **settings: Any) -> Report:
    return check(subject, *args, transforms="jit", styles="argument", max_depth=1, max_examples=0, **settings)


@pytest.mark.slow
@follows("not donated")
def test_a_peak_that_donation_lowers_below_the_budget():
    (x,) = bugs.inputs_926()
    found = budgeted(bugs.ten_convolutions, x, memory_budget=3 * x.nbytes)
    assert "donate x as well: with donate='state,x' the nesting holds, at a peak of 512.0 KiB" in flat(str(found))
    assert one(bugs.ten_convolutions, x, nesting="jit", donate="state,x", memory_budget=3 * x.nbytes).ok
    # Nothing to say where donation does not help, or where all is donated.
    assert "donate x" not in str(budgeted(bugs.ten_convolutions, x, memory_budget=x.nbytes))


# --- donation


@follows("not returned")
def test_a_donated_array_is_returned():
    a, b = numbers((64,)), numbers((64,))
    found = one(bugs.arrays_step_drops_one, a, b, nesting="jit", donate="all")
    assert hints.hint("not returned") in flat(str(found))
    assert one(bugs.arrays_step, a, b, nesting="jit", donate="all").ok


@follows("shared", "viewed")
def test_an_array_that_is_shared_or_viewed_is_copied():
    x = numbers((64,))
    assert hints.hint("shared") in flat(str(one(Tied(share=True), x, nesting="jit")))
    assert hints.hint("viewed") in flat(str(one(Tied(share=False, view=np.asarray), x, nesting="jit")))
    assert one(Tied(share=False, view=np.array), x, nesting="jit").ok


# --- parity


@follows("jax transform")
@pytest.mark.skipif(not DATA, reason="modules are pytrees from flax 0.12 on; before, jax refuses them")
@pytest.mark.parametrize(
    "copied, cured",
    [
        (jax.jit(lambda m, x: m(x)), nnx.jit(lambda m, x: m(x))),
        (
            lambda m, x: jax.lax.cond(True, lambda m, x: m(x), lambda m, x: x, m, x),
            lambda m, x: nnx.cond(True, lambda m, x: m(x), lambda m, x: x, m, x),
        ),
    ],
    ids=["jit", "cond"],
)
def test_a_transform_of_flax_hands_updates_back(copied, cured):
    found = call(copied, norm(), numbers(BATCH), invariants="parity")
    assert hints.hint("jax transform") in text(found)
    assert call(cured, norm(), numbers(BATCH), invariants="parity").outcome.verdict == "held"


# --- Python that asks for a value


@follows("value")
@pytest.mark.parametrize(
    "asks, cured",
    [
        ("if", "jnp.where"),
        ("range", "nnx.while_loop"),
        ("slice", "jax.lax.dynamic_slice"),
        ("mask", "jnp.where as a mask"),
    ],
)
@pytest.mark.parametrize("nesting", ["jit", "jit[functional] > remat"])
def test_python_that_decides_on_a_value_is_told_what_to_write(asks, cured, nesting):
    found = call(functools.partial(Steps().__call__, how=asks), numbers((2, 4)), nesting=nesting)
    assert found.outcome.verdict == "failed"
    assert found.outcome.facts == (ValueAsked(),), text(found)
    assert notes.explanation(ValueAsked()) == hints.hint("value")
    assert (
        call(functools.partial(Steps().__call__, how=cured), numbers((2, 4)), nesting=nesting).outcome.verdict == "held"
    )


SWEPT = "invariants/test_kept_values.py::test_with_what_the_hint_says_all_default_nestings_hold"
ELSEWHERE = {  # where the twins are anyway
    **dict.fromkeys(
        ("plain value, data", "plain value, container", "plain value, nnx container", "plain object"), SWEPT
    ),
    **dict.fromkeys(("kept function", "kept function, outside"), SWEPT),
    "metadata": "invariants/test_kept_in_containers.py::test_what_a_variable_has_as_metadata_goes_into_one_of_its_own",
    "grows": "donation/test_donation.py::test_a_cache_that_grows_is_as_long_as_it_gets_from_the_start",
    "captured by the call": "invariants/test_captured_modules.py::test_handed_on_as_an_argument_it_holds",
    "constant of the call": "memory/test_memory_lines.py::test_what_numpy_makes_in_the_call_is_made_with_jnp_or_kept",
    "kept by what is returned": "invariants/test_returned.py::test_what_the_hint_says_holds_under_the_whole_sweep",
    "input": "calls/test_held_before.py::test_an_argument_that_is_a_tracer",
    "returned": "memory/test_copies.py::test_state_that_is_returned_beside_its_module_is_a_copy",
    "mapped branch": "memory/test_mapped_branches.py::test_a_branch_that_vmap_maps_repeats_its_weights_and_results_that_are_chosen_do_not",
    "dropped": "donation/test_training.py::test_an_update_that_goes_to_a_copy_of_the_optimizer_is_named_with_every_leaf",
    "sharding": "../system/processes/test_sharded.py::test_a_step_that_reshards_its_state_loses_the_donation_and_names_both_specs",
    "jit made anew": "invariants/test_inner_jits.py::test_with_what_the_hint_says_it_holds",
    "other kind": "invariants/test_recompilation.py::test_what_holds_no_fraction_is_made_a_float_where_it_is_made_first",
    "broadcast": "parity/test_dropped_updates.py::test_with_what_the_hint_says_the_call_holds",
    "cached property": "walk/test_cached_property.py::test_what_a_cached_property_keeps_is_computed_anew_or_kept_in_a_variable",
    "plain value, State": "walk/test_kept_state.py::test_what_holds_a_state_is_declared_as_data",
    "merged": "transforms/test_neighbours.py::test_5050_names_the_merge_that_takes_over_variables",
    "generator": "walk/test_generators.py::test_keys_of_rngs_or_of_an_argument_hold",
    "pinned": "walk/test_writes.py::test_one_that_a_transform_handed_out_is_as_good_as_new",
    "attribute dropped": "parity/test_parity.py::test_a_count_in_a_variable_holds_and_so_does_an_attribute_that_a_layer_hands_back",
    "flag dropped": "parity/test_parity_values.py::test_with_what_the_hint_says_it_holds",
    "reference": "references/test_ref_invariants.py::test_a_reference_that_is_replaced_loses_its_buffer_whatever_is_donated",
    "reference lost": "references/test_ref_invariants.py::test_a_write_that_a_transform_of_graph_mode_loses_is_told_by_default_and_found_by_parity",
    "reference twice": "references/test_ref_invariants.py::test_a_write_that_a_gradient_makes_twice_is_told",
    "scan over references": "references/test_ref_invariants.py::test_a_scan_over_references_holds_them_twice",
}


@follows("attribute counted", "weak type", "dtype")
@pytest.mark.parametrize(
    "broken, cured, cause",
    [
        ("counter", "variable", "attribute counted"),
        ("weak", "strong", "weak type"),
        ("number", "strong", "weak type"),
        ("promoted", "strong", "dtype"),
    ],
)
def test_what_is_traced_again_is_mended_as_the_hint_says(broken, cured, cause):
    report = one(retraced.MODELS[broken][0](), retraced.INPUT, nesting="jit", invariants="recompilation")
    filled = {"path": "model.calls" if broken == "counter" else "model.mean", "line": ""}
    dtype = "bfloat16" if broken == "promoted" else "float32"
    assert report.violations[0].hint == hints.hint(cause, dtype=dtype, **filled)
    assert one(retraced.MODELS[cured][0](), retraced.INPUT, nesting="jit", invariants="recompilation").ok


def test_every_cause_is_followed():
    for path, name in (test.split("::") for test in ELSEWHERE.values()):
        assert f"\ndef {name}(" in (Path(__file__).parents[1] / path).read_text()
    assert {*FOLLOWED, *ELSEWHERE} == {*hints.TABLE}
