"""Donated buffers that could not be reused. JAX warns when it lowers the program, by types; the leaves are found by their types.

From jax 0.8 on it does not warn if an output has as many elements, whatever their size. `widened` finds the outputs that are wider, such as a
float32 that got into a bfloat16 step. A narrower one, such as a quantized one, is meant: its buffer was donated to be freed.

The warning goes on to pytest. A warning that the test expects (`pytest.warns`), turns into an error or ignores is not seen here.
"""

from __future__ import annotations

import contextlib
import re
import sys
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from types import FrameType
from typing import Any

from pytest_nnxcheck.watch import frames
from pytest_nnxcheck.watch.leftovers import MOST_OBJECTS

_TEXT = "Some donated buffers were not usable:"
_TYPE = re.compile(r"\b([\w<>]+)\[([^\]]*)\]")


@dataclass(frozen=True, slots=True)
class UnusedBuffers:
    """Donated buffers of one type that no output could take over."""

    type: str
    count: int
    leaves: tuple[str, ...]
    """The arrays of that type that local variables lead to: these may be meant."""
    line: str
    """The line that called the program."""
    new: str = ""
    """The dtype of an output of as many elements, where there is one."""


@contextlib.contextmanager
def noted() -> Iterator[list[UnusedBuffers]]:
    """Gather the warnings of JAX. ``warnings.showwarning`` is documented as replaceable; the one before is called too."""
    unused: list[UnusedBuffers] = []
    before = warnings.showwarning

    def show(message: Warning | str, *args: Any, **more: Any) -> None:
        if str(message).startswith(_TEXT):
            types = Counter((kind, "") for kind in types_in(str(message)))
            users = [*frames.of_user(sys._getframe(1))]  # noqa: SLF001 - documented, and faster than `inspect`
            unused.extend(unused_buffers(types, users))
        before(message, *args, **more)

    warnings.showwarning = show
    try:
        yield unused
    finally:
        if warnings.showwarning is show:
            warnings.showwarning = before


def types_in(text: str) -> tuple[str, ...]:
    """The types in a warning, ``float32[4,8]``, without the axes of a mesh. jax 0.4 writes ``ShapedArray(...)`` around each."""
    listed = text.removeprefix(_TEXT).partition("\nSee ")[0]
    return tuple(f"{kind}[{re.sub(r'@[^,]*', '', shape)}]" for kind, shape in _TYPE.findall(listed))


def unused_buffers(types: Counter[tuple[str, str]], users: list[FrameType]) -> Iterator[UnusedBuffers]:
    """The buffers of each type, with the leaves that may be meant. A key of ``types`` is (type, dtype of an output or empty)."""
    if not types:
        return
    from pytest_nnxcheck.compat.arrays import describe
    from pytest_nnxcheck.walk.walk import walk

    found = walk(frames.local_variables(users), MOST_OBJECTS).arrays
    arrays = [(path, describe(array)) for path, array in found]
    for (kind, new), count in types.items():
        yield UnusedBuffers(
            kind, count, tuple(path for path, type_ in arrays if type_ == kind), frames.line(users), new
        )


def widened(closed: Any, donated: tuple[bool, ...]) -> Counter[tuple[str, str]]:
    """Count the donated inputs for which a program has an output of as many elements only in a wider dtype.

    A key is (type of the input, wider dtype).
    """
    from pytest_nnxcheck.compat import staging
    from pytest_nnxcheck.compat.arrays import describe

    jaxpr = staging.open_jaxpr(closed)
    outputs = [var.aval for var in jaxpr.outvars if hasattr(var.aval, "dtype")]
    left = []
    for var, is_donated in zip(jaxpr.invars, donated, strict=True):
        if not is_donated or not hasattr(var.aval, "dtype"):
            continue
        same = next((out for out in outputs if (out.shape, out.dtype) == (var.aval.shape, var.aval.dtype)), None)
        if same is None:
            left.append(var.aval)
        else:
            outputs.remove(same)
    types: Counter[tuple[str, str]] = Counter()
    for aval in left:
        as_many = next((out for out in outputs if out.size == aval.size), None)
        if as_many is not None:
            outputs.remove(as_many)
            if as_many.dtype.itemsize > aval.dtype.itemsize:
                types[describe(aval), str(as_many.dtype)] += 1
    return types


def merged(warned: Iterable[UnusedBuffers], seen: Iterable[UnusedBuffers]) -> tuple[UnusedBuffers, ...]:
    """The warnings of jax and what `widened` saw. Of one type, the latter says more."""
    warned, seen = [*warned], [*seen]
    if not (warned or seen):  # a suite without jax stays without it
        return ()
    from pytest_nnxcheck.compat import compile_events

    types = {buffers.type for buffers in warned}
    more = [buffers for buffers in seen if buffers.type in types or not compile_events.warns_of_widened()]
    types = {buffers.type for buffers in more}
    return tuple(dict.fromkeys([*(buffers for buffers in warned if buffers.type not in types), *more]))
