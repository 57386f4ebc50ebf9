"""The three invariants: an observation (and the bound it is held against) in, violations out. Nothing here knows pytest."""

from __future__ import annotations

from pytest_nnxcheck.invariants.donation import donation
from pytest_nnxcheck.invariants.memory import Bound, memory
from pytest_nnxcheck.invariants.tracers import tracers

__all__ = ["Bound", "donation", "memory", "tracers"]
