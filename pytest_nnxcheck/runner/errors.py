"""Exceptions of the nestings of a test: the ones that steer the test, the one that is shown, and our notes on them."""

from __future__ import annotations

import sys
import unittest
from collections.abc import Callable, Iterable, Iterator

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


class OwnNote(str):
    """A note of ours; the type distinguishes it from notes of the user and of hypothesis."""

    __slots__ = ()


def add_notes(error: BaseException, texts: Iterable[str]) -> None:
    """Add the notes that are not empty to an exception."""
    for text in filter(None, texts):
        error.add_note(OwnNote(text))


def drop_notes(error: BaseException, unwanted: Callable[[str], bool]) -> None:
    """Take notes off an exception."""
    notes = getattr(error, "__notes__", None)
    if isinstance(notes, list):
        notes[:] = [note for note in notes if not unwanted(note)]


def drop_own_notes(error: BaseException) -> None:
    """Take our notes off an exception: jax raises the same object again, in other tests too."""
    drop_notes(error, lambda note: type(note) is OwnNote)


def plainest(errors: list[BaseException], nesting_of: Callable[[BaseException], Nesting]) -> BaseException:
    """The error to show: a violation first, of the most serious invariant, then the error of the smallest nesting."""

    def key(error: BaseException) -> tuple[bool, object]:
        if isinstance(error, InvariantViolation):
            return (False, error.outcome.rank)
        return (True, nesting_of(error).plainness)

    return min(errors, key=key)


def passes_through(error: BaseException) -> bool:
    """True if the exception steers the test instead of failing it: Ctrl-C, skip, xfail, hypothesis' own."""
    if isinstance(error, unittest.SkipTest | hypothesis.errors.UnsatisfiedAssumption):
        return True
    pytest = sys.modules.get("pytest")
    if pytest is not None and isinstance(error, pytest.fail.Exception):
        return isinstance(error, pytest.xfail.Exception)
    return not isinstance(error, Exception)
