"""No false alarm: healthy models of real layers hold under the defaults, or are rejected by flax, on every version."""

from __future__ import annotations

import pytest
from checking import WITHOUT_CLOSURES, call, models, text
from flax import nnx
from healthy import FLAX, HEALTHY

from pytest_nnxcheck import check
from pytest_nnxcheck.core.catalogue import STYLES
from pytest_nnxcheck.engine.session import Session

STYLES_HERE = STYLES[:2] if FLAX < (0, 11) else STYLES
"""On flax 0.10 a closure over state that changes leaks in truth (google/flax#4520)."""


@pytest.mark.parametrize("name", models(without=["attention_decoding"]))
def test_a_healthy_model_holds_under_the_defaults(name):
    verdicts = verdicts_of(name)
    assert verdicts.count("held") > 20


@pytest.mark.parametrize("name", ["attention_decoding", "conv", "list_container", "lora_linear", "lstm_cell"])
def test_a_healthy_model_holds_under_the_quick_effort(name):
    verdicts = verdicts_of(name, effort="quick")
    assert verdicts.count("held") > 10


def verdicts_of(name, **settings):
    case = HEALTHY[name]()
    report = check(case.subject, *case.args, styles=STYLES_HERE, **settings)
    assert report.ok, str(report)
    verdicts = [outcome.verdict for outcome in report.outcomes]
    assert set(verdicts) <= {"held", "rejected"}
    assert all(outcome.peak <= outcome.budget for outcome in report.outcomes if outcome.peak)
    return verdicts


class Block(nnx.Module):
    """A model whose 260 KiB of state are above the floor of every memory rule; batch of 16."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.inner = nnx.Linear(256, 128, rngs=rngs)
        self.norm = nnx.BatchNorm(128, rngs=rngs)
        self.drop = nnx.Dropout(0.1, rngs=rngs)
        self.outer = nnx.Linear(128, 256, rngs=rngs)

    def __call__(self, x):
        return x + self.outer(self.drop(nnx.relu(self.norm(self.inner(x)))))


@pytest.mark.parametrize(
    "nesting", [f"jit > {layer}" for layer in WITHOUT_CLOSURES] + ["jit[functional] > scan > vmap > remat"]
)
def test_a_model_above_the_floor_stays_below_1_2_of_its_expected_peak(nesting):
    from healthy import numbers

    session = Session()
    found = call(Block(nnx.Rngs(0)), numbers((16, 256)), nesting=nesting, session=session, memory_budget="1.2x")
    assert found.outcome.verdict == "held", text(found)
