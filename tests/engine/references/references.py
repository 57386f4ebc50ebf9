"""Calls of models whose state is in references, one nesting at a time."""

from __future__ import annotations

from typing import Any

import checking
import pytest
from flax import nnx

from pytest_nnxcheck import Nesting
from pytest_nnxcheck.checks.check_call import Checked
from pytest_nnxcheck.compat import flax_modes

needs_refs = pytest.mark.skipif(not flax_modes.takes_refs(), reason="this jax and flax take no models in references")
ALL = ("tracers", "memory", "donation", "parity")


def in_refs(model: Any) -> Any:
    """The model with every Variable in a reference."""
    return nnx.with_vars(model, ref=True)


def call(subject: Any, *args: Any, nesting: str, **settings: Any) -> Checked:
    """``subject(*args)`` under one nesting, in the mode that it names, with every invariant of values too."""
    with flax_modes.flax_mode(Nesting.parse(nesting).mode):
        return checking.call(subject, *args, nesting=nesting, **{"invariants": ALL, **settings})
