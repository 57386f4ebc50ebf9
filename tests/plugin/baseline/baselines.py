"""Suites whose peaks are kept in a baseline, and what is read of the file and of the summary."""

import json

PEAKS = "peaks.json"
OK = "@marked(max_examples=0)\ndef test_x(nnx_wrap): nnx_wrap(Model())(1)\n"
GROWN = OK.replace("Model()", "Model(percent=110)")
RENAMED = OK.replace("test_x", "test_new")
BOTH = RENAMED + OK.replace("test_x", "test_other")
UPDATE, NEW_ONLY = "--nnx-baseline-update", "--nnx-baseline-update-new-only"
ERROR = f"ERROR {PEAKS} has stale entries, --nnx-baseline-update removes them:"


def section(result):
    """The lines of our section of the summary."""
    lines = result.outlines
    start = next((n for n, line in enumerate(lines) if "= nnx memory baseline =" in line), None)
    if start is None:
        return []
    end = next(n for n, line in enumerate(lines[start + 1 :], start + 1) if line.startswith("="))
    return lines[start + 1 : end]


def entries(path):
    """The entries of a file, by test and nesting."""
    nestings = json.loads(path.read_text(encoding="utf-8"))["nestings"]
    return {(entry.pop("nodeid"), entry.pop("nesting")): entry for entry in nestings}


def sizes(path):
    return {nesting: entry["peak"] for (_, nesting), entry in entries(path).items()}
