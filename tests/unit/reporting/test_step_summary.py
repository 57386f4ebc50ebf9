"""The summary page of a step of GitHub Actions: where it is, and that it fits."""

import documents
import pytest

from pytest_nnxcheck.reporting.pages import markdown


@pytest.mark.parametrize(
    "environ", [{}, {"GITHUB_ACTIONS": "false", "GITHUB_STEP_SUMMARY": "x"}, {"GITHUB_STEP_SUMMARY": "x"}]
)
def test_elsewhere_there_is_no_summary(environ):
    assert markdown.step_summary(environ) is None


def test_the_summary_is_added_to_what_is_there(tmp_path):
    file = tmp_path / "summary.md"
    file.write_text("# Before\n")
    assert markdown.step_summary({"GITHUB_ACTIONS": "true", "GITHUB_STEP_SUMMARY": str(file)}) == file
    markdown.append(file, documents.mixed())
    assert file.read_text().startswith("# Before\n\n## ✗ nnx invariants: 1 of 2 tests failed\n")
    markdown.append(file, documents.mixed())
    assert file.read_text().count("## ✗ nnx") == 2


@pytest.mark.parametrize("there", [0, 1024 * 1024 - 3_000, 1024 * 1024 - 10, 2 * 1024 * 1024])
def test_the_summary_never_grows_over_what_github_takes(tmp_path, there):
    file = tmp_path / "summary.md"
    file.write_bytes(b"x" * there)
    tests = [
        documents.ended(f"t.py::test_{n:04}", documents.BROKEN, end="failed", message="é" * 9_000) for n in range(100)
    ]
    markdown.append(file, documents.document(*tests))
    assert file.stat().st_size <= max(there, markdown.STEP)
    assert (file.stat().st_size > there) == (there < 1024 * 1024 - 10)
