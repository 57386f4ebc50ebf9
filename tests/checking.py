"""One nesting at a time, as data: what the tests of the engine share."""

from __future__ import annotations

import inspect
import re
import warnings
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from healthy import FLAX, HEALTHY
from probes import keeps_tracers

from pytest_nnxcheck import Layer, Nesting
from pytest_nnxcheck.api import wrap
from pytest_nnxcheck.checks.check_call import Checked, check_call
from pytest_nnxcheck.compat import flax_modes
from pytest_nnxcheck.core import notes
from pytest_nnxcheck.core.catalogue import FURTHER, STYLES, TRANSFORMS, styles_of
from pytest_nnxcheck.core.peak import Buffer
from pytest_nnxcheck.core.settings import merge, parse_given
from pytest_nnxcheck.core.text import near
from pytest_nnxcheck.engine.example import Example
from pytest_nnxcheck.invariants import donation, memory, parity, recompilation, tracers
from pytest_nnxcheck.reporting import violations

SINGLES = [str(Layer(transform, style)) for transform in TRANSFORMS for style in STYLES]

NO_SHARD_MAP = () if hasattr(nnx, "shard_map") else ("argument", "closure")
"""The styles of shard_map that the installed flax has no `nnx.shard_map` for."""
LACKING = [str(Layer("shard_map", style)) for style in NO_SHARD_MAP]
FURTHER_SINGLES = [
    text
    for transform in FURTHER
    for style in styles_of(transform)
    if (text := str(Layer(transform, style))) not in LACKING
]
needs_kept_tracers = pytest.mark.skipif(
    not keeps_tracers(), reason="this flax hands a plain attribute that got a tracer back as an array, or refuses it"
)
has_modes = pytest.mark.skipif(FLAX < (0, 12, 7), reason="flax before 0.12.7 has one mode")
TAKES_REFERENCES = flax_modes.takes_refs()
has_references = pytest.mark.skipif(not TAKES_REFERENCES, reason="this jax and flax take no models in references")
nnx_wrap = wrap
"""What the fixture of this name hands to a test."""
FEW = {"styles": "argument", "sweep": "singles", "max_examples": 0}
"""Settings under which each transform runs once."""


def line(function: Any, fragment: str) -> str:
    """``path:line``, as messages write it, of the line of a function that holds this text."""
    lines, start = inspect.getsourcelines(function)
    (number,) = [start + number for number, each in enumerate(lines) if fragment in each]
    return near(f"{inspect.getsourcefile(function)}:{number}")


HINTS: dict[str, str] = {
    **tracers.CURES,
    **tracers.WITH_OWN_CURE,
    **memory.CURES,
    **donation.CURES,
    "shared": donation.OWN_ARRAYS,
    "grows": donation.GROWS,
    "outlives": tracers.outlives("{holder}"),
    "counted": recompilation.COUNTED,
    "copy": parity.CURES["copy"],
    "flag": parity.CURES["flag"],
    "value": notes.NO_VALUES,
}
"""The hints of findings by their causes."""


def hint(cause: str, **filled: object) -> str:
    """The whole hint for a cause."""
    return HINTS[cause].format(**filled) if filled else HINTS[cause]


def flat(message: str) -> str:
    """A message in one line, wherever its rows break: in pytest's output too."""
    return " ".join(re.sub(r"^E +", "", message, flags=re.MULTILINE).split())


def call(
    subject: Any, *args: Any, nesting: str = "un-nested", example: Example | None = None, **settings: Any
) -> Checked:
    """``subject(*args)`` under one nesting; settings as in the marker."""
    chosen = merge(parse_given(settings, lambda name: f"{name} of the test"))
    found = check_call(subject, args, {}, nesting=Nesting.parse(nesting), settings=chosen, example=example or Example())
    return replace(found, outcome=violations.worded(found.outcome))


def takes_over(before: Any, after: Any) -> bool:
    """Whether the installed jax lets a donated array's buffer be taken over by a result of another type."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        old = jnp.zeros(before.shape, before.dtype)
        pointer = old.unsafe_buffer_pointer()
        # The new value is made of the old one, so that XLA cannot have it beforehand.
        new = jax.jit(lambda old: (old.sum() + jnp.ones(after.shape)).astype(after.dtype), donate_argnums=0)(old)
    return bool(new.unsafe_buffer_pointer() == pointer)


def broken(found: Checked) -> list[str]:
    """The invariants that a call broke."""
    return [violation.invariant for violation in found.outcome.violations]


def text(found: Checked) -> str:
    """All that the violations and notes of a call say."""
    rows = [f"{label} {row}" for violation in found.outcome.violations for label, row in violation.details]
    heads = [f"{violation.summary} {violation.hint}" for violation in found.outcome.violations]
    return "\n".join([*heads, *rows, *found.outcome.notes, found.outcome.reason])


OF_EACH_KIND = ("batch_norm_train", "dropout", "linear", "remat_inside", "scan_over_layers", "shared_weights")
"""One model of each kind: statistics, random numbers, no state that changes, a remat, stacked layers, aliases."""


def some(of: Iterable[str], names: Iterable[str], otherwise: pytest.MarkDecorator = pytest.mark.full) -> list[Any]:
    """Forms for ``parametrize``: those that are named in every run, the others where ``full``, or another mark, is asked for."""
    return [name if name in names else pytest.param(name, marks=otherwise) for name in of]


def models(names: Iterable[str] = OF_EACH_KIND, otherwise: pytest.MarkDecorator = pytest.mark.full) -> list[Any]:
    """The same of the healthy models."""
    return some(sorted(HEALTHY), names, otherwise)


def slow(*names: Any) -> list[Any]:
    """Forms for ``parametrize`` that are left to the oldest and the newest row."""
    return [pytest.param(name, marks=pytest.mark.slow) for name in names]


def full(*names: str) -> list[Any]:
    """Forms for ``parametrize`` that are left to ``nox -s calibrate``."""
    return [pytest.param(name, marks=pytest.mark.full) for name in names]


def source(buffer: Buffer) -> str:
    """``path:line`` of the user's innermost frame, empty where there is none."""
    return buffer.stack[0] if buffer.stack else ""
