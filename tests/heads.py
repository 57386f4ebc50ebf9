"""What the heads of jax and flax change: two JUnit files are compared, and the difference goes to the summary page. Run by ``nox -s heads``."""

from __future__ import annotations

import argparse
import os
import sys
import xml.etree.ElementTree as ET
from importlib.metadata import version
from pathlib import Path


def failures(junit: Path) -> dict[str, str]:
    """The tests that failed or could not run, each with the first line that says why."""
    cases = ET.parse(junit).getroot().iter("testcase")
    broken = {
        f"{case.get('classname')}::{case.get('name')}": row
        for case in cases
        for row in case
        if row.tag in {"failure", "error"}
    }
    return {name: (row.get("message") or "").partition("\n")[0] for name, row in sorted(broken.items())}


def difference(released: dict[str, str], heads: dict[str, str], versions: str) -> str:
    """The summary page, as Markdown: what fails on the heads alone comes first."""
    new = {name: why for name, why in heads.items() if name not in released}
    lines = [f"## Heads of jax and flax: {len(new)} tests fail that pass on the releases", "", versions, ""]
    for title, rows in (
        ("Fail on the heads alone", new),
        ("Fail on the releases alone", {name: why for name, why in released.items() if name not in heads}),
        ("Fail on both", {name: why for name, why in heads.items() if name in released}),
    ):
        if rows:
            lines += [f"### {title}", "", *(f"* `{name}`: {why}" for name, why in rows.items()), ""]
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("released", type=Path)
    parser.add_argument("heads", type=Path)
    arguments = parser.parse_args()
    released, heads = failures(arguments.released), failures(arguments.heads)
    text = difference(released, heads, ", ".join(f"{name} {version(name)}" for name in ("jax", "jaxlib", "flax")))
    print(text)
    if page := os.environ.get("GITHUB_STEP_SUMMARY"):
        with Path(page).open("a", encoding="utf-8") as file:
            file.write(text)
    return int(bool(heads.keys() - released.keys()))


if __name__ == "__main__":
    sys.exit(main())
