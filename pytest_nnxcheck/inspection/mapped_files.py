"""Arrays that lie in a memory-mapped file, as a checkpoint gives them: their buffer is NumPy's, and donation cannot reuse it.

`jax.device_put` of an aligned NumPy array hands out that array's own memory on the CPU, up to jax 0.6 `jnp.asarray` too. A donated program
marks such an array deleted and puts the new value elsewhere, on all versions; what is checked is a copy, which does not show it. Only a
mapped file can be told by its address: NumPy's memory on the heap looks like any other.
At load this imports the standard library only.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from pathlib import Path

Span = tuple[int, int, str]
"""Half-open range of addresses, and the file that is mapped there."""

MAPS = Path("/proc/self/maps")
_FIELDS = 6


def mapped(pointers: Iterable[tuple[str, int]], spans: list[Span]) -> list[tuple[str, str]]:
    """(name, file) of what lies in a mapped file; ``spans`` are sorted."""
    starts = [start for start, _, _ in spans]
    found = []
    for name, pointer in pointers:
        at = bisect_right(starts, pointer) - 1
        if at >= 0 and pointer < spans[at][1]:
            found.append((name, spans[at][2]))
    return found


def spans_of_process() -> list[Span]:
    """The files that this process has mapped, by address; none where the system does not say (Linux does)."""
    try:
        text = MAPS.read_text(encoding="utf-8", errors="surrogateescape")
    except OSError:
        return []
    return sorted(span for line in text.splitlines() if (span := _span(line)) is not None)


def _span(line: str) -> Span | None:
    """``start-end permissions offset device inode path``: a file has an inode, and no device file is one of weights."""
    parts = line.split(maxsplit=_FIELDS - 1)
    if len(parts) < _FIELDS or parts[4] == "0" or parts[5].startswith("/dev/"):
        return None
    start, _, end = parts[0].partition("-")
    return int(start, 16), int(end, 16), parts[5]
