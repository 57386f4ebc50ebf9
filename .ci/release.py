"""Make the commit and the tag of a release: ``nox -s release -- 0.2.0``.

Where CHANGELOG.md has no section for the version, towncrier makes one of the files in changelog.d, and the version is written into pyproject.toml
and into the constraints of the downstream example. The section is the message of the tag, and so the notes of the release. Nothing is pushed.
"""

from __future__ import annotations

import argparse
import re
import subprocess
from pathlib import Path

CHANGELOG = Path("CHANGELOG.md")
VERSIONS = {
    Path("pyproject.toml"): re.compile(r'^(version = ")[^"]+(?=")', re.MULTILINE),
    Path("examples/downstream/constraints.txt"): re.compile(r"^(pytest-nnxcheck==)\S+", re.MULTILINE),
}
"""The files that name the version, each with the text before it."""


def main() -> None:
    """Release the version of the command line from the current folder, the root of a checkout without changes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("version", type=version)
    wanted = parser.parse_args().version
    if changes := output("git", "status", "--porcelain"):
        parser.error(f"commit or stash these changes first:\n{changes}")
    if not notes(wanted):
        run("towncrier", "build", "--yes", "--version", wanted)
        for path, pattern in VERSIONS.items():
            path.write_text(pattern.sub(rf"\g<1>{wanted}", path.read_text()))
        run("git", "commit", "--quiet", "--all", "--message", f"Release {wanted}")
    run("git", "tag", "--annotate", f"v{wanted}", "--cleanup", "verbatim", "--message", notes(wanted))
    print(f"Tagged v{wanted}. `git push --follow-tags` starts the workflow that publishes it.")  # noqa: T201 - a command


def version(text: str) -> str:
    """A version such as 0.2.0 or 0.2.0rc1, as it is in pyproject.toml and in the tag behind its `v`."""
    if not re.fullmatch(r"\d+\.\d+\.\d+(rc\d+)?", text):
        msg = f"{text!r} is no version such as 0.2.0 or 0.2.0rc1"
        raise argparse.ArgumentTypeError(msg)
    return text


def notes(released: str) -> str:
    """The section of a version in CHANGELOG.md, empty if there is none."""
    section = re.search(rf"^## {re.escape(released)} \(.*?(?=^## |\Z)", CHANGELOG.read_text(), re.DOTALL | re.MULTILINE)
    return section[0].strip() if section else ""


def run(*command: str) -> None:
    subprocess.run(command, check=True)


def output(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


if __name__ == "__main__":
    main()
