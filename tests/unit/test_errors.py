"""Which of the exceptions of a test's nestings is shown."""

from __future__ import annotations

import pytest

from pytest_nnxcheck import Nesting, Outcome, TracerResidue
from pytest_nnxcheck.core.text import first_line
from pytest_nnxcheck.runner.execution import passes_through, plainest


def violation(nesting):
    return TracerResidue("tracers remain", Outcome(Nesting.parse(nesting), "violated"))


def test_of_several_exceptions_a_violation_comes_before_others_and_the_smallest_nesting_first():
    own, large, small = ValueError("of the body"), violation("jit > scan > remat"), violation("jit > scan")
    assert plainest([own, large], lambda _: Nesting.parse("jit")) is large
    assert plainest([large, small], lambda _: Nesting()) is small
    raised = {ValueError("far"): Nesting.parse("jit > scan"), ValueError("near"): Nesting.parse("jit")}
    assert str(plainest([*raised], raised.__getitem__)) == "near"


def test_an_exception_that_steers_a_test_passes_through():
    steers = (KeyboardInterrupt(), pytest.exit.Exception("x"), pytest.skip.Exception("x"), pytest.xfail.Exception("x"))
    assert all(map(passes_through, steers))
    assert not any(map(passes_through, (ValueError("x"), pytest.fail.Exception("x"))))


def test_an_exception_in_one_line():
    assert first_line(TypeError("first\nsecond")) == "TypeError: first"
    assert first_line(TypeError()) == "TypeError"
    assert first_line(AssertionError("\nNot equal to tolerance")) == "AssertionError: Not equal to tolerance"


def test_a_heading_goes_on_with_what_is_below_it():
    differs = f"{'carry input and carry output must have equal types, ' * 3}but they differ:"
    assert first_line(TypeError(f"{differs}\n\n  x has type int8.\n\nRevise it.")) == (
        f"TypeError: {differs} x has type int8."
    )
    assert first_line(ValueError("Traceback:\n  File x")) == "ValueError: Traceback:"


def test_a_line_that_opens_a_bracket_goes_on_until_it_is_closed():
    """Messages of flax show modules, whose repr has a line for each attribute."""
    shown = "cannot take Linear( # Param: 6 (24 B)\n  bias=None,\n  kernel=Param((2, 3))\n) here\nbut there"
    assert first_line(ValueError(shown)) == (
        "ValueError: cannot take Linear( # Param: 6 (24 B) bias=None, kernel=Param((2, 3)) ) here"
    )
    assert not first_line(ValueError("f(\n" + "x" * 500 + "\ny)")).endswith("y)")


def test_a_graph_node_that_flax_refuses_is_named_by_its_type():
    """Its repr has the values of its arrays, and says no more of the refusal."""
    refused = "Cannot extract graph node from different trace level, got Param( # 16 (64 B)\n  value=Array([0., 0.], dtype=float32)\n)"
    assert first_line(ValueError(refused)) == (
        "ValueError: Cannot extract graph node from different trace level, got Param"
    )
    own = "Trying to extract graph node from different trace level, got <app.Model object at 0x7f>"
    assert first_line(ValueError(own)).endswith("trace level, got app.Model")
    assert first_line(ValueError("wanted 3, got Array([0.])")) == "ValueError: wanted 3, got Array([0.])"
