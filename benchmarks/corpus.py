"""What must fail: the leaks of the tests, and the public reports that fail on every version."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

from flax import nnx

from benchmarks.children import ROOT

sys.path.insert(0, str(ROOT / "tests" / "corpus"))
import bugs
from leaky import LEAKY

Call = tuple[Callable[..., Any], tuple[Any, ...]]


def scan_over_remat() -> Call:
    """google/flax#4871 as it lives on: a scan over rematerialized layers copies their parameters."""
    return bugs.call_twice, (bugs.ScanOverRemat(nnx.Rngs(0)), *bugs.inputs_scan_over_remat())


def leaky(name: str) -> Call:
    """A leak of the tests."""
    case = LEAKY[name].leaky()
    return case.subject, case.args


CASES: dict[str, Callable[[], Call]] = {
    "step_other_dtype": lambda: (bugs.step_other_dtype, (bugs.Pair(64),)),
    "step_drops_one": lambda: (bugs.step_drops_one, (bugs.Pair(64),)),
    "scan_over_remat": scan_over_remat,
    **{name: partial(leaky, name) for name in LEAKY},
}
"""Name -> factory; the cheap ones first, for a short run."""
