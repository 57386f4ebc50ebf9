"""No false alarm under the further transforms: every healthy model holds under each, or is left out for a reason known here."""

from __future__ import annotations

import pytest
from checking import FURTHER_SINGLES, LONG, call, models, text
from healthy import HEALTHY

from pytest_nnxcheck.core.catalogue import FURTHER, TRANSFORMS
from pytest_nnxcheck.core.nesting import Layer, Nesting, impossible
from pytest_nnxcheck.engine.session import Session

WITHOUT_PARAMETERS = {"dropout"}
LAYERS = [layer for layer in map(Layer.parse, FURTHER_SINGLES) if not layer.captures]
OTHERS = [Layer(transform, style) for style in ("argument", "functional") for transform in TRANSFORMS]
PAIRS = list(
    dict.fromkeys(
        pair
        for layer in LAYERS
        for other in [*LAYERS, *OTHERS]
        for pair in ((layer, other), (other, layer))
        if not impossible(Nesting(pair))
    )
)
SHARE = 7
"""Pairs for each model, from its own place on: no model runs the pairs of another."""


def nestings(name):
    """Every further layer once, alone or under a jit by turns, and a share of the pairs."""
    turn = sorted(HEALTHY).index(name)
    for number, layer in enumerate(LAYERS):
        jit = Layer("jit", "functional" if number % 4 == 3 else "argument")
        yield Nesting((layer,) if (number + turn) % 2 else (jit, layer))
    # 11 has no factor in common with the number of pairs: a step of it comes by all of them.
    start = turn * SHARE * 11
    shares = (PAIRS[(start + 11 * number) % len(PAIRS)] for number in range(SHARE))
    yield from (Nesting((Layer("jit"), *pair)) for pair in shares)


@pytest.mark.parametrize("name", models(without=[*LONG, "scan_over_layers", "dropout"]))
def test_a_healthy_model_holds_under_the_further_transforms(name):
    session, verdicts = Session(), []
    for nesting in nestings(name):
        case = HEALTHY[name]()
        found = call(case.subject, *case.args, nesting=str(nesting), session=session)
        verdicts.append(found.outcome.verdict)
        if name in WITHOUT_PARAMETERS and "grad" in str(nesting):
            assert found.outcome.unfit
            assert found.outcome.reason == "the state holds no floating point nnx.Param to differentiate by"
        elif not found.outcome.reason.startswith("iterate"):
            assert found.outcome.verdict == "held", f"{nesting}: {text(found)}"
    assert verdicts.count("held") > 10


def test_the_models_run_through_every_layer_in_both_ways_and_each_through_pairs_of_its_own():
    ran = {nesting.layers for name in HEALTHY for nesting in nestings(name)}
    alone = {layers[0] for layers in ran if len(layers) == 1}
    compiled = {layers[1] for layers in ran if len(layers) == 2 and layers[0].transform == "jit"}
    assert alone == compiled == set(LAYERS)
    assert {layer.transform for layer in alone} == {*FURTHER}
    assert len(PAIRS) % 11
    assert len({layers[1:] for layers in ran if len(layers) == 3}) == SHARE * len(HEALTHY)
