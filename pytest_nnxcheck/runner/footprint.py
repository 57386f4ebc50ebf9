"""The process while tests run: its resident size stays flat, and Python's garbage collector is held back inside a nesting.

Where tests have left it grown, programs of jax that nobody needs any more are dropped.

jax keeps every program that it has compiled, and every jaxpr. glibc keeps the pages even of what was freed.
At load this imports the standard library only.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import sys
from collections.abc import Iterator
from pathlib import Path

GROWTH = 1.25
"""How much larger than after the last time the process may be at the end of a test."""
LEAST = 64 * 2**20
"""Growth that is not worth the time: what comes next compiles its small programs once more."""


class Footprint:
    """The size of this process when it was last looked after; 0 before the first test, and where it is unknown."""

    def __init__(self) -> None:
        self.size = 0

    def begin(self) -> None:
        """A test starts. What it imports is not of its making, so that the first one is measured from here."""
        self.size = self.size or resident()

    def end(self) -> bool:
        """A test has ended: drop what jax keeps, if the process has grown. Whether it was dropped.

        Caches of the user's code are not touched; his jitted functions trace once more.
        """
        grown = resident() - self.size
        jax = sys.modules.get("jax")
        if jax is None or not self.size or grown < LEAST or grown < (GROWTH - 1) * self.size:
            return False
        jax.clear_caches()
        gc.collect()
        trim()
        self.size = resident()
        return True


OF_PROCESS = Footprint()


def resident() -> int:
    """Bytes of this process in memory; 0 where the system does not say."""
    try:
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    except (OSError, ValueError, IndexError):
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")


def trim() -> None:
    """Give freed pages back to the system: glibc's own call; other C libraries do so by themselves, or have no call for it."""
    with contextlib.suppress(OSError, AttributeError, TypeError):
        ctypes.CDLL(None).malloc_trim(0)


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
