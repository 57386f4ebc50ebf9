"""Check Flax NNX models under generated nestings of jax transforms.

The names are imported when they are asked for: loading the pytest plugin must not import jax, flax or hypothesis.
PYTEST_DONT_REWRITE: the plugin imports this package before pytest could rewrite its assertions.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pytest_nnxcheck.api import Wrap, Wrapped, assert_invariants, check
    from pytest_nnxcheck.core.errors import (
        CheckError,
        DonationLost,
        InvariantViolation,
        MemoryBudgetExceeded,
        ParityLost,
        TracerResidue,
        UnexpectedPass,
    )
    from pytest_nnxcheck.core.facts import NestedCall
    from pytest_nnxcheck.core.nesting import Layer, Nesting
    from pytest_nnxcheck.core.outcome import Breach, Outcome, Violation
    from pytest_nnxcheck.extension import Invariant, register_invariant
    from pytest_nnxcheck.plugin.known_failures import ExpectedFailuresWarning
    from pytest_nnxcheck.reporting.report import Report
    from pytest_nnxcheck.transforms.custom import register_transform

    __version__: str

__all__ = [
    "Breach",
    "CheckError",
    "DonationLost",
    "ExpectedFailuresWarning",
    "Invariant",
    "InvariantViolation",
    "Layer",
    "MemoryBudgetExceeded",
    "NestedCall",
    "Nesting",
    "Outcome",
    "ParityLost",
    "Report",
    "TracerResidue",
    "UnexpectedPass",
    "Violation",
    "Wrap",
    "Wrapped",
    "__version__",
    "assert_invariants",
    "check",
    "register_invariant",
    "register_transform",
]

_ROOMS = {
    "Wrap": "api",
    "Wrapped": "api",
    "assert_invariants": "api",
    "check": "api",
    "Breach": "core.outcome",
    "Invariant": "extension",
    "NestedCall": "core.facts",
    "register_invariant": "extension",
    "Layer": "core.nesting",
    "Outcome": "core.outcome",
    "Violation": "core.outcome",
    "Nesting": "core.nesting",
    "Report": "reporting.report",
    "register_transform": "transforms.custom",
    "ExpectedFailuresWarning": "plugin.known_failures",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    if name == "__version__":
        from importlib.metadata import version

        return version("pytest-nnxcheck")
    return getattr(importlib.import_module(f"{__name__}.{_ROOMS.get(name, 'core.errors')}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
