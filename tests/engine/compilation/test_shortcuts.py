"""The shortcuts change no outcome: with them and without, every nesting of every subject of the corpus says the same, field by field."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import bugs
import jax
import pytest
from flax import nnx
from healthy import FLAX, HEALTHY, Case
from leaky import LEAKY
from wild import WILD

from pytest_nnxcheck import Outcome, check
from pytest_nnxcheck.core.catalogue import FURTHER

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

PAIRS = {"sweep": "pairs", "max_examples": 6, "all": "on"}
"""Every single layer, chains, pairs without a jit, and a few draws."""


def facts(outcome: Outcome) -> dict[str, Any]:
    """All that an outcome says, the time it took aside."""
    known = outcome.evidence
    return {
        "verdict": outcome.verdict,
        "peak": outcome.peak,
        "budget": outcome.budget,
        "violations": outcome.violations,
        "reason": outcome.reason,
        "notes": outcome.notes,
        "unfit": outcome.unfit,
        "by mode": outcome.by_mode,
        "split": known and known.split,
        "leaks": known and known.leaks,
        "moves": known and known.moves,
    }


def outcomes(make: Callable[[], Any], **settings: Any) -> dict[str, dict[str, Any]]:
    """What a check of a fresh subject says of every nesting; the subject's own exception, where it fails un-nested."""
    case = make()
    more = {**PAIRS, **getattr(case, "settings", {}), **settings}
    try:
        report = check(case.subject, *case.args, kwargs=getattr(case, "kwargs", {}), **more)
    except Exception as error:
        return {"un-nested": {"raised": re.sub(r"0x[0-9a-f]+", "", repr(error))}}
    return {str(outcome.nesting): facts(outcome) for outcome in report.outcomes}


def differing(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    return {name: (one.get(name), other.get(name)) for name in [*one, *other] if one.get(name) != other.get(name)}


class StepOfPair:
    """One of the steps of the report on donated pointers."""

    def __init__(self, step: Callable[..., Any]) -> None:
        self.subject, self.args = step, (bugs.Pair(64),)


REPORTS: dict[str, Callable[[], Any]] = {
    "4520": lambda: Case(bugs.report_4520(nnx.Rngs(0)), bugs.inputs_4520()),
    "4819": lambda: Case(bugs.autoregressive_decode, (bugs.report_4819(nnx.Rngs(0), True, True), *bugs.inputs_4819())),
    "scan_over_remat": lambda: Case(bugs.call_twice, (bugs.ScanOverRemat(nnx.Rngs(0)), *bugs.inputs_scan_over_remat())),
    "step_in_place": lambda: StepOfPair(bugs.step_in_place),
    "step_other_dtype": lambda: StepOfPair(bugs.step_other_dtype),
    "step_drops_one": lambda: StepOfPair(bugs.step_drops_one),
}
CORPUS: dict[str, Callable[[], Any]] = {
    **{f"healthy {name}": make for name, make in HEALTHY.items()},
    **{f"leaky {name}": twins.leaky for name, twins in LEAKY.items() if twins.leaks},
    **{f"twin {name}": twins.healthy for name, twins in LEAKY.items()},
    **{f"report {name}": make for name, make in REPORTS.items()},
    **{f"wild {name}": make for name, make in WILD.items()},
}
FEW = ("healthy batch_norm_train", "leaky variable_metadata")
"""One that holds and one that does not: these run with every suite, all of them in ``nox -s calibrate``."""


def same_with_and_without(make: Callable[[], Any], **settings: Any) -> None:
    fast, slow = outcomes(make, **settings), outcomes(make, shortcuts="off", **settings)
    assert not differing(fast, slow)
    assert len(fast) > 1 or "raised" in fast["un-nested"] or fast["un-nested"]["verdict"] != "held"


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in FEW if name in CORPUS])
def test_one_that_holds_and_one_that_does_not_say_the_same(name):
    same_with_and_without(CORPUS[name], transforms="jit,scan,eval_shape", styles="argument,closure", max_examples=1)


@pytest.mark.full
@pytest.mark.parametrize("name", CORPUS)
def test_every_subject_says_the_same(name):
    same_with_and_without(CORPUS[name])


def without_values(name: str) -> Callable[[], Case]:
    def make() -> Case:
        case = HEALTHY[name]()
        return Case(case.subject, jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), case.args))

    return make


@pytest.mark.full
@pytest.mark.parametrize("name", HEALTHY)
def test_every_model_says_the_same_under_further_transforms_in_every_mode_and_without_values(name):
    further = ("jit", *FURTHER)
    same_with_and_without(HEALTHY[name], transforms=further, sweep="chains", styles="argument,functional")
    if FLAX >= (0, 12, 7):  # flax before has one mode
        same_with_and_without(HEALTHY[name], modes="graph_no_updates,tree", sweep="singles", max_examples=0)
    same_with_and_without(without_values(name), sweep="chains")
