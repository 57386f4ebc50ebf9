"""Every name of hypothesis that is not public: the attributes that its decorators set on a test."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class HypothesisTest:
    """A test as hypothesis sees it."""

    body: Callable[..., Any]
    """The innermost function."""
    drawn: dict[str, Any] | None
    """The strategies of ``@given`` by argument; `None` without one."""
    examples: tuple[Any, ...]
    """The values of ``@example``, in the order in which they run."""
    settings: Any
    """The settings of ``@settings``; `None` without it."""
    seeded: bool
    """The test has a ``@seed``."""
    attributes: dict[str, Any]
    """The attributes that a copy of the test must carry for ``@seed`` and ``@reproduce_failure`` to work."""


def hypothesis_test(test: Callable[..., Any]) -> HypothesisTest:
    """Take a test function apart into the attributes that hypothesis' decorators set on it.

    Only ``hypothesis.inner_test`` is documented. The strategies of ``@given``, the values of ``@example`` and the
    ``@settings`` of a test have no public reader, and without them a test with its own ``@given`` could not be run with
    a nesting drawn beside its arguments. Tried on hypothesis 6.100 and 6.170.
    """
    handle = getattr(test, "hypothesis", None)
    own = (
        "_hypothesis_internal_settings_applied",
        "hypothesis_explicit_examples",
        "hypothesis",
        "is_hypothesis_test",
        "__wrapped__",
        "__wrapped_target",
    )
    return HypothesisTest(
        body=test if handle is None else handle.inner_test,
        drawn=None if handle is None else dict(handle._given_kwargs),
        # hypothesis runs them from the last to the first: decorators apply from the bottom up.
        examples=tuple(reversed(getattr(test, "hypothesis_explicit_examples", ()))),
        settings=getattr(test, "_hypothesis_internal_use_settings", None),
        seeded=getattr(test, "_hypothesis_internal_use_seed", None) is not None,
        attributes={name: value for name, value in vars(test).items() if name not in own},
    )
