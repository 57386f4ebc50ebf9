"""Python's garbage collector, held back while a nesting runs: a trace makes millions of objects, and nearly none of them is garbage."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator

YOUNG = 1
"""The generations that are collected after each nesting; Python's own rule says when all are, which takes as long as a small nesting."""


@contextlib.contextmanager
def held_back() -> Iterator[None]:
    """Collect nothing inside, and what is young afterwards; a collector that the user has switched off is left alone."""
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.collect(YOUNG)
