"""The hook `pytest_nnx_invariants`: which tests an invariant is asserted in, where it may be named, and what is said of a bad one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

HANDS_IN = """
from pytest_nnxcheck import Breach, Invariant

def judge(call):
    return []

def pytest_nnx_invariants(config):
    return [Invariant("mine", judge{more})]
"""
TEST = """
@marked(max_examples=0{settings})
def test_x(nnx_wrap):
    nnx_wrap(Model(mine=has("scan")))(1)
"""


@pytest.fixture
def hand_in(run_inner):
    """Run one test, which breaks `mine`, where a conftest.py hands that in."""

    def run(*args, more="", settings="", conftest=HANDS_IN, **how):
        return run_inner(TEST.format(settings=settings), *args, conftest=conftest.replace("{more}", more), **how)

    return run


@pytest.mark.parametrize(
    "how, options",
    [
        ({"settings": ", invariants='mine'"}, []),
        ({}, ["--nnx-invariants=mine,tracers"]),
        ({}, ["-o", "nnx_invariants=mine"]),
        ({"more": ", default=True"}, []),
    ],
)
def test_it_is_asserted_where_it_is_named_or_on_by_default(hand_in, how, options):
    result = hand_in(*options, **how)
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["E*nnx invariant broken: mine", "E*test *test_inner.py::test_x", "E*mine is broken"])
    typed = "--nnx-invariants mine,tracers " if "tracers" in str(options) else ""
    result.stdout.fnmatch_lines([f"*replay*pytest test_inner.py::test_x {typed}--nnx-nesting scan"])
    result.stdout.fnmatch_lines(["FAILED test_inner.py::test_x - nnx mine: mine is broken"])
    assert result.ret == pytest.ExitCode.TESTS_FAILED


@pytest.mark.parametrize(
    "how", [{}, {"more": ", default=True", "settings": ", invariants='tracers'"}, {"settings": ", invariants='memory'"}]
)
def test_it_is_not_asserted_elsewhere(hand_in, how):
    hand_in(**how).assert_outcomes(passed=1)


@pytest.mark.parametrize(
    "how, options, origin",
    [
        ({"settings": ", invariants='mien'"}, [], "nnx_invariants marker at test_inner.py:*: "),
        ({}, ["--nnx-invariants=mien"], "option --nnx-invariants: "),
        ({}, ["-o", "nnx_invariants=mien"], "ini option nnx_invariants*: "),
    ],
)
def test_a_slip_names_it_with_the_origin(hand_in, how, options, origin):
    result = hand_in(*options, **how)
    lines = result.stdout.lines + result.stderr.lines
    assert any("unknown invariant 'mien', did you mean 'mine'?" in line for line in lines)
    (result.stdout if how else result.stderr).fnmatch_lines([f"*{origin}unknown invariant*"])
    assert result.ret == (pytest.ExitCode.INTERRUPTED if how else pytest.ExitCode.USAGE_ERROR)
    assert "Traceback" not in "\n".join(lines)


BAD = {
    "'mine'": "returned 'mine', write a list: [Invariant('name', function)]",
    "Invariant('mine', judge)": "returned Invariant(",
    "['mine']": "got 'mine', write pytest_nnxcheck.Invariant(",
    "[Invariant('x', 3)]": "the function of the invariant 'x' is 3",
    "[Invariant('memory', judge)]": "'memory' is the name of an invariant",
    "1 / 0": "raised ZeroDivisionError: division by zero",
    "[Invariant('x', judge), Invariant('x', lambda call: [])]": "the invariant 'x' is handed in twice, from conftest.py:8 and from conftest.py:12",
}


@pytest.mark.parametrize("returned, message", BAD.items())
def test_what_cannot_be_handed_in_ends_the_run_with_a_sentence(hand_in, returned, message):
    given = HANDS_IN.replace('[Invariant("mine", judge{more})]', returned)
    result = hand_in(conftest=given)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    assert any(line.startswith("ERROR: ") and message in line for line in result.stderr.lines), result.stderr.str()
    assert "Traceback" not in result.stderr.str()


@pytest.fixture
def below(run_inner, pytester):
    """Run the test twice: beside no conftest.py, and in a folder that has one."""

    def run(conftest):
        folder = pytester.mkdir("below")
        (folder / "conftest.py").write_text(conftest)
        head = "import pytest\nfrom fake_engine import Model, has\nmarked = pytest.mark.nnx_invariants\n"
        (folder / "test_below.py").write_text(head + TEST.format(settings=""))
        return run_inner(TEST.format(settings=""), "--import-mode=importlib")

    return run


def test_a_conftest_further_down_hands_in_for_the_tests_below_it_alone(below):
    result = below(HANDS_IN.replace("{more}", ", default=True"))
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(["FAILED below/test_below.py::test_x - nnx mine: mine is broken"])


def test_a_bad_one_further_down_is_an_error_of_collection(below):
    result = below("def pytest_nnx_invariants(config):\n    return 3\n")
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines(["*pytest_nnx_invariants (below/conftest.py:1) returned 3, write a list*"])


def test_what_one_run_handed_in_is_forgotten_after_it(hand_in):
    hand_in("--nnx-invariants=mine").assert_outcomes(failed=1)
    assert hand_in("--nnx-invariants=mine", conftest="").ret == pytest.ExitCode.USAGE_ERROR


def test_it_is_expected_to_fail_by_marker_and_by_file(hand_in, pytester):
    known = ", invariants='mine', expected_failures={'mine': 'known'}"
    hand_in(settings=known).assert_outcomes(passed=1)
    pytester.path.joinpath("known.toml").write_text('["test_inner.py::*"]\nmine = "known"\n')
    hand_in("--nnx-expected-failures=known.toml", settings=", invariants='mine'").assert_outcomes(passed=1)
    hand_in(settings=", invariants='mine', expected_failures={'mien': 'x'}").assert_outcomes(errors=1)


def test_reports_hold_it(hand_in, pytester):
    jsonschema = pytest.importorskip("jsonschema")
    schema = json.loads((Path(__file__).parents[3] / "docs" / "report.schema.json").read_text())
    files = [f"--nnx-report=out.{kind}" for kind in ("json", "html", "md")]
    hand_in(*files, more=", default=True").assert_outcomes(failed=1)
    document = json.loads((pytester.path / "out.json").read_text())
    jsonschema.validate(document, schema)
    broken = [each for each in document["nestings"] if each["violations"]]
    assert [(each["nesting"], each["violations"][0]["invariant"]) for each in broken] == [("scan", "mine")]
    assert document["tests"][0]["settings"]["invariants"] == "tracers,updates,memory,donation,mine"
    assert all("mine" in (pytester.path / name).read_text() for name in ("out.html", "out.md"))
