"""No false alarm: healthy models of real layers break no invariant, under every transform and in every mode that takes them."""

from __future__ import annotations

from itertools import pairwise, product

import pytest
from checking import Example, call, models, text
from covering import ARRAY, LAYER_PAIRS, LAYERS, MODES, NAMES, PAIRS, REFUSED, STYLES, modes_of, pairs_of, takes, unfit
from flax import nnx
from healthy import FLAX, HEALTHY, numbers

from pytest_nnxcheck import Layer, Nesting, check
from pytest_nnxcheck.compat import flax_modes
from pytest_nnxcheck.core.catalogue import STYLES as ALL_STYLES
from pytest_nnxcheck.engine.example import Memo

ALL = "tracers,memory,donation,recompilation,finite,parity"


def outcomes_of(model, nestings):
    """The outcome of each nesting, as those of one test."""
    memo = Memo()
    return [outcome_of(model, nesting, memo) for nesting in nestings]


def outcome_of(model, nesting, memo):
    case = HEALTHY[model]()
    with flax_modes.flax_mode(nesting.mode), Example(memo) as example:
        return call(case.subject, *case.args, nesting=str(nesting), example=example, invariants=ALL).outcome


def assert_healthy(outcome):
    assert outcome.verdict == "held", f"{outcome.nesting}: {outcome}"
    assert not any("not asserted" in note for note in outcome.notes), outcome.notes
    assert 0 < outcome.peak <= outcome.budget


@pytest.mark.parametrize("model", models(["batch_norm_train"], otherwise=pytest.mark.slow))
def test_a_model_breaks_no_invariant(model):
    for outcome in outcomes_of(model, ARRAY[model]):
        assert_healthy(outcome)
    for transform, words in unfit(model).items():
        (outcome,) = outcomes_of(model, [Nesting.parse(f"jit > {transform}")])
        assert (outcome.verdict, outcome.unfit) == ("rejected", True)
        assert words in outcome.reason


@pytest.mark.skipif(len(MODES) == 1, reason="flax before 0.12.7 has one mode")
@pytest.mark.parametrize("model, mode", sorted(REFUSED))
def test_a_model_that_flax_does_not_take_in_a_mode_is_rejected_with_the_reason(model, mode):
    case = HEALTHY[model]()
    report = check(case.subject, *case.args, nesting=f"{mode}: eval_shape")
    (outcome,) = (each for each in report.outcomes if each.verdict == "rejected")
    assert outcome.by_mode
    assert "does not support Variable aliasing" in outcome.reason


def test_the_nestings_of_the_models_hold_every_pair():
    """A pair of transforms, a transform and a model, a mode and a model, two styles; and every layer."""
    ran = [(model, nesting) for model, nestings in ARRAY.items() for nesting in nestings]
    transforms = [[layer.transform for layer in nesting.layers] for _, nesting in ran]
    assert set().union(*map(pairs_of, transforms)) == PAIRS
    around = {(model, layer.transform) for model, nesting in ran for layer in nesting.layers}
    assert around == {(model, name) for model, name in product(HEALTHY, NAMES) if name not in unfit(model)}
    assert {(model, nesting.mode) for model, nesting in ran} == {*product(HEALTHY, MODES)} - REFUSED
    layers = [nesting.layers for _, nesting in ran]
    assert {layer for each in layers for layer in each} == {*LAYERS}
    assert {(outer.style, inner.style) for each in layers for outer, inner in pairwise(each)} == {
        *product(STYLES, STYLES)
    }


@pytest.mark.full
@pytest.mark.parametrize("model", sorted(HEALTHY))
def test_a_model_breaks_no_invariant_under_any_pair(model):
    """Each transform in each style right inside each other one, in each mode."""
    nestings = [
        Nesting((Layer("jit"), *pair), mode)
        for pair, mode in product(LAYER_PAIRS, modes_of(model))
        if all(takes(mode, layer) and layer.transform not in unfit(model) for layer in pair)
    ]
    for outcome in outcomes_of(model, nestings):
        assert_healthy(outcome)


@pytest.mark.slow
@pytest.mark.parametrize("model", models(["batch_norm_train"]))
def test_a_model_holds_or_is_rejected_under_the_defaults(model):
    """With the styles that capture the module, where that does not leak in truth (google/flax#4520)."""
    case = HEALTHY[model]()
    styles = ALL_STYLES[:2] if FLAX < (0, 11) else ALL_STYLES
    report = check(case.subject, *case.args, styles=styles, memory_advice="fail")
    assert report.ok, str(report)
    verdicts = [outcome.verdict for outcome in report.outcomes]
    assert set(verdicts) <= {"held", "rejected"}
    assert verdicts.count("held") > 20


class Block(nnx.Module):
    """A model whose 260 KiB of state are above the floor of every memory rule; batch of 16."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.inner = nnx.Linear(256, 128, rngs=rngs)
        self.norm = nnx.BatchNorm(128, rngs=rngs)
        self.drop = nnx.Dropout(0.1, rngs=rngs)
        self.outer = nnx.Linear(128, 256, rngs=rngs)

    def __call__(self, x):
        return x + self.outer(self.drop(nnx.relu(self.norm(self.inner(x)))))


@pytest.mark.slow
def test_a_model_above_the_floor_stays_below_1_2_of_its_expected_peak():
    example = Example()
    singles = [f"jit > {layer}" for layer in LAYERS if layer.row.default]
    for nesting in (*singles, "jit[functional] > scan > vmap > remat"):
        found = call(Block(nnx.Rngs(0)), numbers((16, 256)), nesting=nesting, example=example, memory_budget="1.2x")
        assert found.outcome.verdict == "held", f"{nesting}: {text(found)}"
