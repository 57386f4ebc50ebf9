"""What GitHub Actions is told: commands that no text can end, at the right file and line, and a summary that fits."""

import re
from pathlib import Path

import documents
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_nnxcheck.reporting import github
from pytest_nnxcheck.reporting.records import plain

COMMAND = re.compile(r"::error (?P<properties>[^:]*)::(?P<message>.*)")
HOSTILE = st.lists(
    st.sampled_from(["\n", "\r", "%", "%0A", ":", "::", ",", "=", "::error ::", "é", "x"]), max_size=8
).map("".join)


def unescaped(text: str) -> str:
    for code, char in (("%2C", ","), ("%3A", ":"), ("%0A", "\n"), ("%0D", "\r"), ("%25", "%")):
        text = text.replace(code, char)
    return text


def told(found, root="/repo", workspace="/repo"):
    (line,) = github.commands(documents.document(found), Path(root), Path(workspace))
    match = COMMAND.fullmatch(line)
    properties = dict(part.split("=", 1) for part in match["properties"].split(","))
    return {name: unescaped(value) for name, value in properties.items()}, unescaped(match["message"])


def failing(message="nnx invariant broken: memory                  t.py::t\n  nesting     jit", **more):
    return documents.ended("t.py::t", documents.BROKEN, end="failed", message=message, **more)


def test_the_failing_line_is_annotated():
    properties, message = told(failing(failed_at={"file": "tests/t.py", "line": 7}))
    assert properties == {"file": "tests/t.py", "line": "7", "title": "nnx invariant broken: memory"}
    assert message.splitlines()[1] == "  nesting     jit"


def test_without_a_failing_line_the_test_is_annotated():
    assert told(failing())[0]["line"] == "3"
    assert "file" not in told(failing(place=None))[0]


def test_the_file_is_named_from_the_top_of_the_checkout(tmp_path):
    root = tmp_path / "repo" / "sub folder"
    root.mkdir(parents=True)
    place = {"file": "tests/t.py", "line": 7}
    assert told(failing(failed_at=place), root, root.parent)[0]["file"] == "sub folder/tests/t.py"
    assert told(failing(failed_at=place), root, tmp_path / "elsewhere")[0]["file"] == f"{root}/tests/t.py"


@given(HOSTILE, HOSTILE)
def test_no_text_ends_a_command(words, file):
    properties, message = told(failing(plain(f"x{words}"), failed_at={"file": plain(f"a{file}b"), "line": 1}))
    assert message == plain(f"x{words}")
    assert properties["file"] == plain(f"a{file}b")
    assert properties["title"] == plain(f"x{words}").partition("\n")[0].partition("  ")[0]


def test_github_shows_ten():
    tests = [documents.ended(f"t.py::t{n}", documents.BROKEN, end="failed") for n in range(30)]
    assert len(list(github.commands(documents.document(*tests), Path(), Path()))) == 10
    assert list(github.commands(documents.document(documents.ended("t.py::t")), Path(), Path())) == []


@pytest.mark.parametrize("environ", [{}, {"GITHUB_ACTIONS": "false"}, {"GITHUB_STEP_SUMMARY": "x"}])
def test_elsewhere_nothing_is_told(environ):
    assert github.Actions.of(environ) is None


def test_the_summary_is_added_to_what_is_there(tmp_path):
    file = tmp_path / "summary.md"
    file.write_text("# Before\n")
    actions = github.Actions.of({"GITHUB_ACTIONS": "true", "GITHUB_STEP_SUMMARY": str(file)})
    assert len(actions.tell(documents.mixed(), tmp_path)) == 1
    text = file.read_text()
    assert text.startswith("# Before\n\n## ✗ nnx invariants: 1 of 2 tests failed\n")
    actions.tell(documents.mixed(), tmp_path)
    assert file.read_text().count("## ✗ nnx") == 2


@pytest.mark.parametrize("there", [0, 1024 * 1024 - 3_000, 1024 * 1024 - 10, 2 * 1024 * 1024])
def test_the_summary_never_grows_over_what_github_takes(tmp_path, there):
    file = tmp_path / "summary.md"
    file.write_bytes(b"x" * there)
    tests = [
        documents.ended(f"t.py::test_{n:04}", documents.BROKEN, end="failed", message="é" * 9_000) for n in range(100)
    ]
    github.append(file, documents.document(*tests))
    assert file.stat().st_size <= max(there, github.SUMMARY)
    assert (file.stat().st_size > there) == (there < 1024 * 1024 - 10)


def test_a_summary_that_cannot_be_written_is_told(tmp_path):
    actions = github.Actions.of({"GITHUB_ACTIONS": "true", "GITHUB_STEP_SUMMARY": str(tmp_path / "no" / "file.md")})
    lines = actions.tell(documents.mixed(), tmp_path)
    assert lines[-1].startswith("nnx report: cannot write the summary of the step: No such file")
