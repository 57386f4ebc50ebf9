"""Whose local variables watch mode looks at when a function returns."""

from __future__ import annotations

import functools
import sys

import pytest

from pytest_nnxcheck.watch import leftovers
from pytest_nnxcheck.watch.monitor import Monitor

pytestmark = pytest.mark.skipif(sys.version_info < (3, 12), reason="returns are seen from Python 3.12 on")


class Model:
    pass


def wraps(function):
    @functools.wraps(function)
    def run():
        of_decorator = Model()
        return function(), of_decorator

    return run


def hides(function):
    def run():
        of_decorator = Model()
        return function(), of_decorator

    return run


def looks(test):
    """The names of the local variables that were looked at, for each look."""
    monitor, seen = Monitor(), []
    monitor.start()
    try:
        with monitor.of(leftovers.bodies(test), lambda variables: seen.append({*variables})):
            test()
    finally:
        monitor.stop()
    return seen


@wraps
def wrapped_helper():
    of_helper = Model()
    return [of_helper]


@hides
def hidden_helper():
    of_helper = Model()
    return [of_helper]


def written():
    model = Model()
    wrapped_helper()
    hidden_helper()
    return model


def test_of_a_decorated_test_only_the_function_that_was_written_is_looked_into():
    """A decorator that checks types is on every helper as well: its code returns thousands of times in a test."""
    assert looks(wraps(written)) == looks(wraps(wraps(written))) == looks(written) == [{"model"}]


def test_under_a_decorator_that_hides_the_function_it_is_the_outermost_call():
    assert looks(hides(written)) == [{"of_decorator"}]


def test_each_call_of_the_test_itself_is_looked_into():
    """Hypothesis calls it once for each example."""

    @functools.wraps(written)
    def thrice():
        return [written() for _ in range(3)]

    assert looks(thrice) == [{"model"}] * 3
