"""What the nestings of a test raised: which exceptions steer the test, and which one is shown."""

from __future__ import annotations

import sys
import unittest
from collections.abc import Callable, Iterator

import hypothesis

from pytest_nnxcheck.core.errors import InvariantViolation
from pytest_nnxcheck.core.nesting import Nesting


def flatten(error: BaseException) -> Iterator[BaseException]:
    """The members of a group, and of the groups in it."""
    if isinstance(error, BaseExceptionGroup):
        for member in error.exceptions:
            yield from flatten(member)
    else:
        yield error


def plainest(errors: list[BaseException], nesting_of: Callable[[BaseException], Nesting]) -> BaseException:
    """The error to show: a violation before any other, of the most serious invariant, then the one of the smallest nesting."""

    def key(error: BaseException) -> tuple[bool, object]:
        if isinstance(error, InvariantViolation):
            return (False, error.outcome.rank)
        return (True, nesting_of(error).plainness)

    return min(errors, key=key)


def passes_through(error: BaseException) -> bool:
    """Whether the exception steers the test, instead of failing it: Ctrl-C, skip, xfail, hypothesis' own."""
    if isinstance(error, unittest.SkipTest | hypothesis.errors.UnsatisfiedAssumption):
        return True
    pytest = sys.modules.get("pytest")
    if pytest is not None and isinstance(error, pytest.fail.Exception):
        return isinstance(error, pytest.xfail.Exception)
    return not isinstance(error, Exception)
