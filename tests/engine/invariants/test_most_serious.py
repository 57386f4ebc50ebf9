"""Of several invariants that one nesting breaks, the most serious is told first."""

from __future__ import annotations

import pytest

from pytest_nnxcheck import Nesting, Violation
from pytest_nnxcheck.core.facts import Observation
from pytest_nnxcheck.engine import gather
from pytest_nnxcheck.invariants import donation, memory, recompilation, tracers
from pytest_nnxcheck.invariants.case import Judgement
from pytest_nnxcheck.subject.profile import UNKNOWN


@pytest.mark.parametrize(
    "broken", [("tracers", "donation", "memory", "recompilation"), ("donation", "memory"), ("memory",)]
)
def test_tracers_come_before_donation_and_that_before_memory(broken, monkeypatch):
    for module in (recompilation, memory, donation, tracers):
        name = module.__name__.rpartition(".")[2]
        found = Judgement((Violation(name),) if name in broken else ())
        monkeypatch.setattr(module, "judge", lambda case, found=found: found)
    monkeypatch.setattr(gather, "GATHER", dict.fromkeys(gather.GATHER, lambda ran: None))
    ran = gather.Ran(None, UNKNOWN, Observation(Nesting(), None))
    judgement = gather.judged(ran, ("recompilation", "memory", "donation", "tracers"))
    assert tuple(violation.invariant for violation in judgement.violations) == broken
