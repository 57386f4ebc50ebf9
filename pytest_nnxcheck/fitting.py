"""The largest size of a program that fits a target: the largest batch, or the longest sequence."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from pytest_nnxcheck.api import check
from pytest_nnxcheck.core.catalogue import JIT
from pytest_nnxcheck.core.errors import CheckError
from pytest_nnxcheck.core.on_target import OnTarget
from pytest_nnxcheck.core.text import counted
from pytest_nnxcheck.reporting import target_rows

__tracebackhide__ = True  # pytest shows the frames of the user, not these

FINE = 16
"""The part of the size to which it is found: another step would change the peak by less than XLA does of its own near the limit."""
UNBOUNDED = "1000000GiB"
"""A budget that bounds nothing, so that no copy of the state fails: whether the program fits is the one question."""


@dataclass(frozen=True, slots=True)
class Largest:
    """The largest size that fits, and what was tried on the way."""

    size: int
    """The largest size that fits; 0 if the lowest one does not."""
    tried: Mapping[int, OnTarget]
    """The facts of each size that was tried, in this order: ``fits``, ``may_not_fit``, ``peak``, ``limit``."""

    def __str__(self) -> str:
        words = (f"{size} {target_rows.brief([on])}" for size, on in sorted(self.tried.items()))
        return f"{self.size or 'none'} fits, of {counted(len(self.tried), 'size')} tried: {', '.join(words)}"


def largest(
    make: Callable[[int], Sequence[Any]], *, target: str, low: int = 1, high: int = 2**20, **settings: Any
) -> Largest:
    """Find the largest size that fits a target. ``make(size)`` gives what `check` takes: the subject, and its inputs, abstract best of all.

    The size is doubled from ``low`` until a program does not fit, at most to ``high``, and the gap halved to a sixteenth. ``settings`` are those of `check`.
    Each step compiles a program or two and runs nothing. A size that may not fit a GPU is too large. Near its limit XLA computes values twice to save memory, so that no size can be told from another.

    Raises `CheckError` if the bounds are no sizes, if a call raises, or if the target could not judge a program.
    """
    if not 1 <= low <= high:
        raise CheckError(f"largest(..., low={low}, high={high}): write 1 <= low <= high")
    tried = dict[int, OnTarget]()

    def fits(size: int) -> bool:
        tried[size] = on_target(make(size), target, settings)
        return tried[size].fits and not tried[size].may_not_fit

    best, worst = 0, low
    while fits(worst):
        best = worst
        if worst == high:
            break
        worst = min(2 * worst, high)
    while best and worst - best > max(best // FINE, 1):
        middle = (best + worst) // 2
        best, worst = (middle, worst) if fits(middle) else (best, middle)
    return Largest(best, MappingProxyType(tried))


def on_target(call: Sequence[Any], target: str, settings: Mapping[str, Any]) -> OnTarget:
    """Ask the compiler of a target about the plain jit of one call."""
    only = {"nesting": JIT, "invariants": "memory", "memory_budget": UNBOUNDED, **settings}
    report = check(*call, target=target, **only)
    (outcome,) = report.outcomes
    if outcome.verdict in ("failed", "rejected"):
        raise CheckError(str(report))
    targets = outcome.evidence.targets if outcome.evidence else ()
    if len(targets) != 1 or targets[0].left_out:
        why = "; ".join(on.left_out for on in targets if on.left_out) or "name one target"
        raise CheckError(f"largest(..., target={target!r}): {why}")
    return targets[0]
