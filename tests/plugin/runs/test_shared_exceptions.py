"""One exception object that is raised in several tests, or under several nestings, as jax raises some of its own: each test shows its own rows."""

import operator

import jax.numpy as jnp
import pytest
from flax import nnx

from pytest_nnxcheck import assert_invariants
from pytest_nnxcheck.runner import execution
from pytest_nnxcheck.subject import profile

SUITE = """
KEPT = ValueError("the same object")
KEPT.add_note("a note of the user's own")
few = marked(effort="quick", styles="argument")

@few
@pytest.mark.parametrize("name", ["first", "second"])
def test_nested(nnx_wrap, name):
    nnx_wrap(Model())(name)
    if RUNS[-1] != "un-nested":
        raise KEPT

@few
def test_un_nested(nnx_wrap):
    nnx_wrap(Model())(3)
    raise KEPT

@few
@marked(transforms="scan,vmap", all=True)
def test_of_two(nnx_wrap):
    nnx_wrap(Model())(3)
    if RUNS[-1] in ("scan", "vmap"):
        raise KEPT
"""


@pytest.mark.slow
def test_each_test_shows_its_own_rows_and_the_plainest_nesting_that_raises(run_inner):
    result = run_inner(SUITE)
    result.assert_outcomes(failed=4)
    # Not those of the short summary, where pytest repeats the message in CI.
    lines = [line for line in result.outlines if line.startswith("E ")]
    replays = [line.split()[3:] for line in lines if " replay " in line]
    assert [words[0].rpartition("::")[2].strip("'") for words in replays] == [
        "test_nested[first]",
        "test_nested[second]",
        "test_of_two",
    ]
    assert sum("a note of the user's own" in line for line in lines) == 4
    rows = [line.split() for line in lines]
    assert [row[2] for row in rows if row[1:2] == ["nesting"]][-1] == "scan"
    assert [row[-2:] for row in rows if row[1:2] == ["steps"]][-1] == ["scan", "raises"]


def test_notes_of_the_user_and_of_hypothesis_stay():
    error = ValueError("x")
    error.add_note("the user's")
    execution.add_notes(error, ["ours", ""])
    error.add_note("Falsifying example: test_x(n=1)")
    execution.drop_own_notes(error)
    assert error.__notes__ == ["the user's", "Falsifying example: test_x(n=1)"]
    execution.drop_own_notes(ValueError("without any"))


def test_an_exception_of_ours_says_so_and_nothing_of_the_users_object(monkeypatch):
    monkeypatch.setattr(profile, "state_of", operator.attrgetter("no_such_name"))
    with pytest.raises(AttributeError) as raised:
        assert_invariants(nnx.Linear(2, 2, rngs=nnx.Rngs(0)), jnp.ones((1, 2)), effort="quick")
    (note,) = raised.value.__notes__
    assert "a fault of pytest-nnxcheck, and not of your code" in note
    assert "pytest_nnxcheck/subject/profile.py:" in note


def test_an_exception_of_the_users_code_is_none_of_ours(monkeypatch):
    class Wrong(nnx.Module):
        def __call__(self, x):
            return x.no_such_name

    with pytest.raises(AttributeError) as raised:
        assert_invariants(Wrong(), jnp.ones((1, 2)), effort="quick")
    assert "a fault of pytest-nnxcheck" not in str(raised.value.__notes__)
    with pytest.raises(TypeError) as raised:  # raised in a call of ours, of the user's function
        assert_invariants(lambda x: x, jnp.ones((1, 2)), jnp.ones((1, 2)), effort="quick")
    assert "a fault of pytest-nnxcheck" not in str(getattr(raised.value, "__notes__", ""))
