"""Surroundings of a call, which its check changes and puts back: objects, counters, random numbers, arrays of NumPy, output, traces of jitted functions."""

from __future__ import annotations

import contextlib
import copy
import functools
import io
import itertools
import logging
import random
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np

from pytest_nnxcheck.compat import jits
from pytest_nnxcheck.subject.subject import bind
from pytest_nnxcheck.walk.raw_access import class_name
from pytest_nnxcheck.walk.walk import Walk, walk
from pytest_nnxcheck.watch.calls import SuiteCall


@contextlib.contextmanager
def unchanged(call: SuiteCall) -> Iterator[str]:
    """Put back at the end what a check changes. Gives the type of what the call leads to and can be read once; empty if there is nothing."""
    subject = bind(call.subject, call.args, call.kwargs)
    seen = walk(subject.roots(subject.state))
    disabled = logging.root.manager.disable
    put_back = [*states_of([random, np.random, *seen.seen.values()]), *contents_of(seen)]
    with (
        warnings.catch_warnings(),
        contextlib.redirect_stdout(io.StringIO()),
        contextlib.redirect_stderr(io.StringIO()),
        jits.traced_apart([call.subject, *seen.seen.values()]),
    ):
        warnings.simplefilter("ignore")
        read_once = copied_iterators(seen)
        logging.disable(logging.CRITICAL)
        try:
            yield read_once
        finally:
            logging.disable(disabled)
            seen.places.restore()
            for restore in put_back:
                with contextlib.suppress(ValueError):  # the call made an array read-only, or resized it
                    restore()


def states_of(objects: Iterable[Any]) -> Iterator[Callable[[], None]]:
    """Functions that put back the states of generators of random numbers, of Python and NumPy; their modules hold one each."""
    for each in objects:
        if issubclass(type(each), random.SystemRandom):  # it has no state
            continue
        if each is random or issubclass(type(each), random.Random):
            yield functools.partial(each.setstate, each.getstate())
        elif each is np.random or issubclass(type(each), np.random.RandomState):
            yield functools.partial(each.set_state, each.get_state())
        elif issubclass(type(each), np.random.Generator | np.random.BitGenerator):
            bits = each.bit_generator if issubclass(type(each), np.random.Generator) else each
            yield functools.partial(setattr, bits, "state", bits.state)


def contents_of(seen: Walk) -> Iterator[Callable[[], None]]:
    """Functions that put back the numbers of arrays of NumPy, which code may write in place."""
    for _, array in seen.arrays:
        if type(array) is np.ndarray and array.flags.writeable:
            yield functools.partial(np.copyto, array, array.copy())


def copied_iterators(seen: Walk) -> str:
    """Let the check read copies of endless iterators. Returns the type of one that it cannot copy, or that has an end; empty if there is none."""
    left = {id(value): value for value in seen.seen.values() if is_iterator(value)}
    for _, kind, place, held in seen.places:
        if any(map(is_endless, held)):
            kind.write(place, [copy.copy(value) if is_endless(value) else value for value in held])
            left = {number: value for number, value in left.items() if not any(value is each for each in held)}
    return next((class_name(type(value)) for value in left.values()), "")


def is_iterator(value: object) -> bool:
    """True for an iterator of Python itself, which keeps its position where nobody can put it back."""
    return type(value).__module__ in ("builtins", "itertools") and issubclass(type(value), Iterator)


def is_endless(value: object) -> bool:
    """True for an iterator that has no end, so that a check may read a copy as often as it likes."""
    return issubclass(type(value), itertools.count | itertools.cycle | itertools.repeat)
