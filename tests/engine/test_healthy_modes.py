"""No false alarm in any mode of flax: healthy models of real layers hold, or flax itself rejects them with a reason."""

from __future__ import annotations

import pytest
from checking import models
from healthy import FLAX, HEALTHY

from pytest_nnxcheck import check

pytestmark = pytest.mark.skipif(FLAX < (0, 12, 7), reason="flax before 0.12.7 has one mode, which test_healthy.py runs")

REJECTED = {"shared_weights": {"tree": "does not support Variable aliasing"}}
"""What flax says of the models that it does not take in a mode; it takes all others."""


@pytest.mark.parametrize("name", models())
def test_a_healthy_model_holds_in_every_mode_or_flax_says_why_not(name):
    case = HEALTHY[name]()
    settings = {"styles": "argument", "sweep": "singles", "max_examples": 0}
    report = check(case.subject, *case.args, modes="graph_no_updates,tree", **settings)
    refused = REJECTED.get(name, {})
    assert report.modes == {mode: "rejected" if mode in refused else "held" for mode in ("graph_no_updates", "tree")}
    for outcome in report.outcomes:
        assert outcome.verdict in ("held", "rejected"), str(report)
        assert outcome.verdict == "held" or (outcome.by_mode and outcome.reason), outcome
    for mode, words in refused.items():
        assert any(words in outcome.reason for outcome in report.outcomes if outcome.nesting.mode == mode)


@pytest.mark.parametrize("name", ["batch_norm_train", "dropout", "scan_over_layers"])
def test_models_whose_state_changes_hold_in_longer_nestings_and_other_styles(name):
    case = HEALTHY[name]()
    for nesting in ("tree: jit[functional] > scan > vmap", "tree: jit > vmap[functional] > remat > while_loop"):
        report = check(case.subject, *case.args, nesting=nesting)
        assert report.ok, str(report)
