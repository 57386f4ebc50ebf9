"""The frames of the user's code that something was called from: the line to name, and the local variables to look into."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from types import CodeType, FrameType

from pytest_nnxcheck.compat.owner import is_of_jax_or_flax, of_frame
from pytest_nnxcheck.core.text import near
from pytest_nnxcheck.watch.roots import Root

_MOST = 8
_CALLERS = ("pytest_pyfunc_call", "pytest_fixture_setup")


def callers(frame: FrameType) -> Iterator[FrameType]:
    """The frames that a frame was called from, the nearest first."""
    outer = frame.f_back
    while outer is not None:
        yield outer
        outer = outer.f_back


def inside_a_transform(frame: FrameType) -> bool:
    """True if jax or flax has called the function of a frame: its tracers are alive then. Other libraries trace by calling jax."""
    return any(map(is_of_jax_or_flax, callers(frame)))


def of_test(frame: FrameType, code: CodeType) -> FrameType | None:
    """The frame of a test's function, by its code, that led to a frame; none where a fixture is in between, which the test asked for by name."""
    inner = itertools.takewhile(lambda outer: outer.f_code.co_name not in _CALLERS, callers(frame))
    return next((outer for outer in inner if outer.f_code is code), None)


def of_user(frame: FrameType | None) -> Iterator[FrameType]:
    """The frames that are the user's, the innermost first, up to where pytest called."""
    count = 0
    while frame is not None and count < _MOST and frame.f_code.co_name not in _CALLERS:
        if of_frame(frame) == "user":
            count += 1
            yield frame
        frame = frame.f_back


def line(users: list[FrameType]) -> str:
    """``path:line (function)`` of the innermost; nothing where there is none."""
    if not users:
        return ""
    code = users[0].f_code
    return near(f"{code.co_filename}:{users[0].f_lineno} ({code.co_name})")


def local_variables(users: Iterable[FrameType]) -> list[Root]:
    """The roots of a walk; pytest keeps parts of an assertion under names that start with ``@``."""
    return [root for frame in users for root in frame.f_locals.items() if not root[0].startswith("@")]
