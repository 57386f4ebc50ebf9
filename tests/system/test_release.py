"""The command that makes a release: it writes the changelog and the version, commits, and tags; nothing is pushed."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FILES = ("pyproject.toml", "CHANGELOG.md", "examples/downstream/constraints.txt", ".ci/release.py")


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    """A repository with the files of a release, and a towncrier that writes one section."""
    checkout = tmp_path / "checkout"
    for name in FILES:
        (checkout / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, checkout / name)
    towncrier = tmp_path / "bin" / "towncrier"
    towncrier.parent.mkdir()
    towncrier.write_text(
        f"#!{sys.executable}\n"
        "import sys, pathlib\n"
        "log = pathlib.Path('CHANGELOG.md')\n"
        "log.write_text(log.read_text().replace('\\n## ', f'\\n## {sys.argv[-1]} (2030-01-01)\\n\\n- A new thing.\\n\\n## ', 1))\n"
    )
    towncrier.chmod(0o755)
    monkeypatch.setenv("PATH", str(towncrier.parent), prepend=":")
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", "/dev/null")
    of_git(checkout, "init", "--quiet")
    of_git(checkout, "config", "user.name", "A")
    of_git(checkout, "config", "user.email", "a@example.org")
    of_git(checkout, "add", "--all")
    of_git(checkout, "commit", "--quiet", "--message", "first")
    return checkout


def release(checkout: Path, version: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, ".ci/release.py", version]
    return subprocess.run(command, cwd=checkout, capture_output=True, text=True, check=False)


def of_git(checkout: Path, *command: str) -> str:
    return subprocess.run(["git", *command], cwd=checkout, capture_output=True, text=True, check=True).stdout


def test_a_release_is_a_commit_with_the_version_and_a_tag_with_the_notes(checkout):
    assert release(checkout, "9.9.0").returncode == 0
    assert 'version = "9.9.0"' in of_git(checkout, "show", "v9.9.0:pyproject.toml")
    assert "pytest-nnxcheck==9.9.0" in of_git(checkout, "show", "v9.9.0:examples/downstream/constraints.txt")
    notes = of_git(checkout, "tag", "--list", "--format=%(contents)", "v9.9.0")
    assert notes.strip() == "## 9.9.0 (2030-01-01)\n\n- A new thing."


def test_a_version_that_the_changelog_has_is_tagged_as_it_is(checkout):
    before = of_git(checkout, "rev-parse", "HEAD")
    assert release(checkout, "0.1.0").returncode == 0
    assert of_git(checkout, "rev-parse", "v0.1.0^{commit}") == before
    assert "The first release." in of_git(checkout, "tag", "--list", "--format=%(contents)", "v0.1.0")


@pytest.mark.parametrize(
    "version, change, said",
    [("next", False, "'next' is no version such as 0.2.0"), ("9.9.0", True, "commit or stash these changes first")],
    ids=["no version", "a change that is not committed"],
)
def test_a_release_that_cannot_be_made_says_why(checkout, version, change, said):
    if change:
        (checkout / "CHANGELOG.md").write_text("changed\n")
    refused = release(checkout, version)
    assert refused.returncode == 2
    assert said in refused.stderr
