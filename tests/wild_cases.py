"""Where the corpus of subjects is filed.

`WILD` maps a name to a factory of a fresh `Case`. Under the defaults each holds, or is rejected with a reason; none may end
in an exception of the plugin's own. `LEFT_OUT` gives the reason for every name that the installed flax does not have.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax.numpy as jnp
from healthy import WIDTH

TOKENS = jnp.array([[0, 3, 5], [7, 1, 0]], jnp.int32)
X = (3, WIDTH)


@dataclass(frozen=True)
class Case:
    """A subject and the arguments to call it with; `settings` where the defaults would say something else of it."""

    subject: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)


WILD: dict[str, Callable[[], Case]] = {}
LEFT_OUT: dict[str, str] = {}


def subject(factory: Callable[[], Case]) -> Callable[[], Case]:
    """File a factory under its name."""
    WILD[factory.__name__] = factory
    return factory
