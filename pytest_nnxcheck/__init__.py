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
        UpdateLost,
    )
    from pytest_nnxcheck.core.facts import NestedCall
    from pytest_nnxcheck.core.nesting import Layer, Nesting
    from pytest_nnxcheck.core.outcome import Breach, Outcome, Violation
    from pytest_nnxcheck.extension import Invariant, register_invariant
    from pytest_nnxcheck.fitting import Largest, largest
    from pytest_nnxcheck.plugin.baseline import ExpectedFailuresWarning
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
    "Largest",
    "Layer",
    "MemoryBudgetExceeded",
    "NestedCall",
    "Nesting",
    "Outcome",
    "ParityLost",
    "Report",
    "TracerResidue",
    "UnexpectedPass",
    "UpdateLost",
    "Violation",
    "Wrap",
    "Wrapped",
    "__version__",
    "assert_invariants",
    "check",
    "largest",
    "register_invariant",
    "register_transform",
]

_NAMES = {
    "api": ("Wrap", "Wrapped", "assert_invariants", "check"),
    "core.facts": ("NestedCall",),
    "core.nesting": ("Layer", "Nesting"),
    "core.outcome": ("Breach", "Outcome", "Violation"),
    "extension": ("Invariant", "register_invariant"),
    "fitting": ("Largest", "largest"),
    "plugin.baseline": ("ExpectedFailuresWarning",),
    "reporting.report": ("Report",),
    "transforms.custom": ("register_transform",),
}
"""The names by their module; all others are exceptions."""


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    if name == "__version__":
        from importlib.metadata import version

        return version("pytest-nnxcheck")
    home = next((module for module, names in _NAMES.items() if name in names), "core.errors")
    return getattr(importlib.import_module(f"{__name__}.{home}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
