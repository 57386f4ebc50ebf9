"""The package as it was at an earlier commit, beside the one that is measured."""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks.children import ROOT

PACKAGE = "pytest_nnxcheck"


@contextmanager
def library_of(commit: str) -> Iterator[Path]:
    """A folder from which Python imports the package of a commit, and nothing else.

    Tests, examples and benchmarks of that commit stay out of it: both sides measure the subjects of this checkout.
    """
    with tempfile.TemporaryDirectory() as folder:
        checkout, library = Path(folder) / "checkout", Path(folder) / "library"
        git("worktree", "add", "--quiet", "--detach", str(checkout), commit)
        try:
            library.mkdir()
            (library / PACKAGE).symlink_to(checkout / PACKAGE)
            yield library
        finally:
            git("worktree", "remove", "--force", str(checkout))


def git(*words: str) -> None:
    """Run git in this checkout. Raises `SystemExit` with what it said."""
    done = subprocess.run(["git", "-C", str(ROOT), *words], capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"git {' '.join(words)}: {done.stderr.strip()}")
