"""The memory of the process while tests run: it stays flat, and Python's garbage collector waits inside a nesting.

jax keeps every program that it has compiled, and every jaxpr; glibc keeps even freed pages. Where the process has grown over tests, both
are dropped. At load this imports the standard library only.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

GROWTH = 1.25
"""The factor by which the process may grow from one time to the next: to drop programs costs compiles later."""
LEAST = 64 * 2**20
"""Bytes of growth that are not worth the time: small programs would be compiled again."""


class Footprint:
    """The size of this process when programs were last dropped; 0 before the first test, and where it is unknown."""

    def __init__(self) -> None:
        self.size = 0

    def begin(self) -> None:
        """A test starts. Growth is measured from the first one: imports do not count."""
        self.size = self.size or resident()

    def end(self) -> bool:
        """A test has ended: drop what jax keeps if the process has grown. Returns whether it did.

        Caches of the user's code stay; the user's jitted functions trace once more.
        """
        grown = resident() - self.size
        jax = sys.modules.get("jax")
        if jax is None or not self.size or grown < LEAST or grown < (GROWTH - 1) * self.size:
            return False
        jax.clear_caches()
        collect()
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
    """Give freed pages back to the system by a call of glibc; other C libraries do it alone, or have no such call."""
    with contextlib.suppress(OSError, AttributeError, TypeError):
        ctypes.CDLL(None).malloc_trim(0)


YOUNG = 1
"""Generations that are collected after each nesting. A collection of all takes as long as a small nesting: Python decides when."""


@contextlib.contextmanager
def held_back() -> Iterator[None]:
    """Collect nothing inside, and young objects afterwards; a collector that the user has switched off stays off."""
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        collect(YOUNG)


def collect(generation: int = 2) -> None:
    """Collect garbage, and let a Ctrl-C of that time through afterwards.

    Python ignores what a callback of the collector raises, and jax and hypothesis have one each: a `KeyboardInterrupt` in there is lost. pytest alone
    loses it in the same way; but after each nesting we collect, so that a press falls in there often. Python collects at times of its own too: those presses are lost as ever.
    """
    handler = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(handler):
        gc.collect(generation)
        return
    pressed: list[tuple[int, FrameType | None]] = []
    signal.signal(signal.SIGINT, lambda *press: pressed.append(press))
    try:
        gc.collect(generation)
    finally:
        signal.signal(signal.SIGINT, handler)
    if pressed:
        handler(*pressed[0])
