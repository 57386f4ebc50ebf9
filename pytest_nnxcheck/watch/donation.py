"""Donated buffers that JAX could not use: it warns where it compiles the program, and names types alone. The leaves are found by them.

The warning goes on to pytest as it came. One that the test expects (`pytest.warns`), turns into an error or ignores is not seen here.
"""

from __future__ import annotations

import contextlib
import re
import sys
import warnings
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from types import FrameType
from typing import Any

from pytest_nnxcheck.watch import frames
from pytest_nnxcheck.watch.leftovers import MOST_OBJECTS

_TEXT = "Some donated buffers were not usable:"
_TYPE = re.compile(r"\b([\w<>]+)\[([^\]]*)\]")


@dataclass(frozen=True, slots=True)
class Unused:
    """So many donated buffers of a type that no output could take over, the leaves that may be meant, and the line that called the program."""

    type: str
    count: int
    leaves: tuple[str, ...]
    line: str


@contextlib.contextmanager
def noted() -> Iterator[list[Unused]]:
    """Gather what JAX warns of. ``warnings.showwarning`` is documented as the place to put one's own; the one before is called all the same."""
    unused: list[Unused] = []
    before = warnings.showwarning

    def show(message: Warning | str, *args: Any, **more: Any) -> None:
        if str(message).startswith(_TEXT):
            unused.extend(_read(str(message), sys._getframe(1)))  # noqa: SLF001 - documented, and faster than `inspect`
        before(message, *args, **more)

    warnings.showwarning = show
    try:
        yield unused
    finally:
        if warnings.showwarning is show:
            warnings.showwarning = before


def types_in(text: str) -> tuple[str, ...]:
    """The types of a warning, ``float32[4,8]``, without the axes that arrays are sharded over; jax 0.4 writes ``ShapedArray(...)`` around each."""
    listed = text.removeprefix(_TEXT).partition("\nSee ")[0]
    return tuple(f"{kind}[{re.sub(r'@[^,]*', '', shape)}]" for kind, shape in _TYPE.findall(listed))


def _read(text: str, frame: FrameType | None) -> Iterator[Unused]:
    users = [*frames.of_user(frame)]
    arrays = _arrays(users)
    for kind, count in Counter(types_in(text)).items():
        yield Unused(kind, count, tuple(path for path, type_ in arrays if type_ == kind), frames.line(users))


def _arrays(users: list[FrameType]) -> list[tuple[str, str]]:
    """(path, type) of the arrays that the user's local variables lead to."""
    from pytest_nnxcheck.compat.arrays import describe
    from pytest_nnxcheck.inspection.walk import walk

    seen = walk(frames.local_variables(users), MOST_OBJECTS)
    return [(path, describe(array)) for path, array in seen.arrays]
