"""Where the corpus of subjects is filed: `WILD` maps a name to a factory of a fresh `Case`."""

from __future__ import annotations

from collections.abc import Callable

import jax.numpy as jnp
from healthy import WIDTH, Case

TOKENS = jnp.array([[0, 3, 5], [7, 1, 0]], jnp.int32)
X = (3, WIDTH)
WILD: dict[str, Callable[[], Case]] = {}


def subject(factory: Callable[[], Case]) -> Callable[[], Case]:
    """File a factory under its name."""
    WILD[factory.__name__] = factory
    return factory
