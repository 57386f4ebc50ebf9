"""No false alarm on targets: healthy models of real layers, small and wide, as the compilers of a TPU and a GPU make them."""

from __future__ import annotations

import healthy
import jax
import pytest
from healthy import HEALTHY

from pytest_nnxcheck import check

TARGETS = "v5e,h100"
WIDE = 160
"""A square kernel of this width is above the 64 KiB from which memory is judged."""


@pytest.fixture(params=[healthy.WIDTH, WIDE])
def width(request, monkeypatch):
    for name, value in {"WIDTH": request.param, "BATCH": (3, request.param), "SEQUENCE": (2, 4, request.param)}.items():
        monkeypatch.setattr(healthy, name, value)


@pytest.mark.parametrize("model", sorted(HEALTHY))
def test_a_healthy_model_breaks_nothing_on_a_target(model, width):
    case = HEALTHY[model]()
    report = check(case.subject, *case.args, effort="quick", target=TARGETS)
    assert report.ok, str(report)
    measured = [outcome.evidence for outcome in report.outcomes if outcome.evidence]
    on_targets = [on for evidence in measured for on in evidence.targets]
    assert [on.target for on in on_targets] == TARGETS.split(",")
    assert all(on.fits and not on.left_out for on in on_targets), on_targets
    assert all(on.peak for on in on_targets) or jax.__version_info__ < (0, 6), on_targets
