"""Python's garbage collector, held back while a nesting runs: a trace makes millions of objects, and nearly none of them is garbage."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator
from dataclasses import dataclass

EVERY = 20
"""Nestings between two collections of everything; young objects are collected after each."""


@dataclass(slots=True)
class Collector:
    """Counts the nestings of one test."""

    nestings: int = 0

    @contextlib.contextmanager
    def held_back(self) -> Iterator[None]:
        """Collect nothing inside, and some of it afterwards; a collector that the user has switched off is left alone."""
        if not gc.isenabled():
            yield
            return
        gc.disable()
        try:
            yield
        finally:
            gc.enable()
            self.nestings += 1
            gc.collect(2 if self.nestings % EVERY == 0 else 1)
