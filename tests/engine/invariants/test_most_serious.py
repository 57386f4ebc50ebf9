"""Of several invariants that one nesting breaks, the most serious is told first."""

from __future__ import annotations

import pytest

from pytest_nnxcheck.core.facts import Observation
from pytest_nnxcheck.core.nesting import Nesting
from pytest_nnxcheck.core.outcome import Violation
from pytest_nnxcheck.core.settings import merge
from pytest_nnxcheck.invariants import Case, Judgement, donation, judge, memory, recompilation, tracers


@pytest.mark.parametrize(
    "broken", [("tracers", "donation", "memory", "recompilation"), ("donation", "memory"), ("memory",)]
)
def test_tracers_come_before_donation_and_that_before_memory(broken, monkeypatch):
    for module in (recompilation, memory, donation, tracers):
        name = module.__name__.rpartition(".")[2]
        found = Judgement((Violation(name),) if name in broken else ())
        monkeypatch.setattr(module, "judge", lambda case, found=found: found)
    settings = merge({"invariants": ("recompilation", "memory", "donation", "tracers")})
    judgement = judge(Case(Observation(Nesting(), None), settings))
    assert tuple(violation.invariant for violation in judgement.violations) == broken
