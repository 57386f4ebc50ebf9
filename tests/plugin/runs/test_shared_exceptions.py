"""One exception object that is raised in several tests, or under several nestings, as jax raises some of its own: each test shows its own rows."""

from pytest_nnxcheck.runner import errors

RAISE = """
KEPT = ValueError("the same object")
KEPT.add_note("a note of the user's own")

@marked(effort="quick", styles="argument")
@pytest.mark.parametrize("name", ["first", "second"])
def test_x(nnx_wrap, name):
    nnx_wrap(Model())(name)
    if RUNS[-1] != "un-nested":
        raise KEPT
"""


def test_a_test_shows_no_rows_of_the_one_before(run_inner):
    result = run_inner(RAISE)
    result.assert_outcomes(failed=2)
    # Not those of the short summary, where pytest repeats the message in CI.
    lines = [line for line in result.stdout.str().splitlines() if line.startswith("E ")]
    for name in ("first", "second"):
        assert sum(f"test_x[{name}]' --nnx-nesting" in line for line in lines) == 1
    assert sum("a note of the user's own" in line for line in lines) == 2


ALONE = """
KEPT = ValueError("the same object")

@marked(effort="quick", styles="argument")
def test_nested(nnx_wrap):
    nnx_wrap(Model())(3)
    if RUNS[-1] != "un-nested":
        raise KEPT

@marked(effort="quick", styles="argument")
def test_un_nested(nnx_wrap):
    nnx_wrap(Model())(3)
    raise KEPT
"""


def test_a_test_that_raises_un_nested_has_no_nesting(run_inner):
    result = run_inner(ALONE)
    result.assert_outcomes(failed=2)
    assert sum(line.split()[:2] == ["E", "nesting"] for line in result.stdout.str().splitlines()) == 1


OF_SEVERAL = """
KEPT = ValueError("the same object")

@marked(effort="quick", styles="argument", transforms="scan,vmap")
def test_x(nnx_wrap):
    nnx_wrap(Model())(3)
    if RUNS[-1] in ("scan", "vmap"):
        raise KEPT
"""


def test_the_plainest_of_the_nestings_that_raise_it_is_named(run_inner):
    result = run_inner(OF_SEVERAL, "--nnx-all")
    result.assert_outcomes(failed=1)
    rows = [line.split() for line in result.stdout.str().splitlines()]
    assert [row[2] for row in rows if row[:2] == ["E", "nesting"]] == ["scan"]
    assert [row[-2:] for row in rows if row[:2] == ["E", "way"]] == [["scan", "failed"]]


def test_notes_of_the_user_and_of_hypothesis_stay():
    error = ValueError("x")
    error.add_note("the user's")
    errors.add_notes(error, ["ours", ""])
    error.add_note("Falsifying example: test_x(n=1)")
    errors.drop_own_notes(error)
    assert error.__notes__ == ["the user's", "Falsifying example: test_x(n=1)"]
    errors.drop_own_notes(ValueError("without any"))
