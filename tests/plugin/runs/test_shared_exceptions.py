"""One exception object that is raised in several tests, or under several nestings, as jax raises some of its own: each test shows its own rows."""

from pytest_nnxcheck.runner import errors

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
    errors.add_notes(error, ["ours", ""])
    error.add_note("Falsifying example: test_x(n=1)")
    errors.drop_own_notes(error)
    assert error.__notes__ == ["the user's", "Falsifying example: test_x(n=1)"]
    errors.drop_own_notes(ValueError("without any"))
