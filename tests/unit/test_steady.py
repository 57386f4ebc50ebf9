"""What one run of a suite says of a test is compared word for word, but for the little that may differ."""

import shlex
from pathlib import Path

import pytest
import steady

TEST = "test_mixed.py::test_breaks_tracers[list]"
LANE = Path("/lane-1")
BROKEN = "nnx invariant broken: tracers    test_mixed.py::test_breaks_tracers_list"


def said(outcome: str, program: str = "", seconds: float = 1.0, place: Path = LANE) -> steady.Said:
    """What is kept of a run that has the test alone."""
    name = TEST.partition("::")[2]
    junit = f'<testsuite><testcase classname="test_mixed" name="{name}">{outcome}</testcase></testsuite>'
    row = {"nodeid": TEST, "seconds": seconds, "program": program, "place": f"{place}/test_mixed.py:3"}
    report = {"tests": [row], "nestings": [row]}
    return {test: steady.same(text, place) for test, text in steady.said_in(junit, report).items()}


def failed(text: str) -> str:
    return f'<failure message="short">{text}</failure>'


def test_seconds_folders_and_the_home_of_programs_may_differ():
    one = said(failed(BROKEN), ".pytest_cache/d/nnxcheck/test-a/jit.py")
    other = said(failed(BROKEN), "temporary/nnxcheck-b1_x/test-a/jit.py", 2.5, Path("/lane-0"))
    third = said(failed(BROKEN), "/lane-1/temporary/nnxcheck-b1_x/test-a/jit.py")
    assert steady.differences(one, other) == steady.differences(one, third) == []


@pytest.mark.parametrize(
    "other",
    [said(""), said(failed(f"{BROKEN}, 2 tried")), said(failed(BROKEN), "program-of-another-nesting.py"), {}],
    ids=["verdict", "message", "report", "test that did not run"],
)
def test_anything_else_is_a_difference(other):
    (text,) = steady.differences(said(failed(BROKEN)), other)
    assert text.startswith("--- ")


@pytest.mark.parametrize(
    "name, outcome, right",
    [
        ("test_holds_x", "passed\ntests: ", True),
        ("test_holds_x", "failure\nImportError\ntests: ", False),
        ("test_breaks_memory_x", "failure\nnnx invariant broken: memory  x\ntests: ", True),
        ("test_breaks_memory_x", "failure\nnnx invariant broken: tracers  x\ntests: ", False),
        ("test_breaks_memory_x", "passed\ntests: ", False),
        ("test_raises_x", "failure\nConcretizationTypeError\ntests: ", True),
        ("test_raises_x", "failure\nImportError\ntests: ", False),
    ],
)
def test_a_test_must_end_as_its_name_says(name, outcome, right):
    assert steady.ends_as_named(f"test_mixed.py::{name}", outcome) is right


def test_ways_repeat_and_differ():
    ways = [steady.Way(number) for number in range(50)]
    tests = list("abcdefgh")
    assert ways[0].order(tests) == tests
    assert steady.Way(7).command(tests, []) == ways[7].command(tests, [])
    assert len({shlex.join(way.command(tests, [])) for way in ways}) == 50
    assert {(way.workers, way.cache) for way in ways[:12]} == {(n, cache) for n in (0, 2) for cache in steady.CACHES}
    assert {way.jax_compiles_anew for way in ways[:12]} == {True, False}
