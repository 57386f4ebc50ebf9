"""The step of action.yml that runs pytest: what its inputs become on the command line, and what it says of those that become nothing."""

import os
import shutil
import subprocess
import textwrap
from pathlib import Path

import pytest

ACTION = Path(__file__).parents[3] / "action.yml"
pytestmark = pytest.mark.skipif(
    not (shutil.which("bash") and shutil.which("xargs")), reason="GitHub's runners have both"
)
DEFAULTS = {"ARGS": "", "EFFORT": "", "MEMORY_BUDGET": "", "TARGET": "", "WATCH": "", "REPORT": "nnx-report"}


def step():
    """The script, as GitHub hands it to bash."""
    _, _, rest = ACTION.read_text("utf-8").partition("      run: |\n")
    lines = rest.splitlines()
    end = next(number for number, line in enumerate(lines) if not line.startswith("        "))
    return textwrap.dedent("\n".join(lines[:end]))


@pytest.fixture
def run(tmp_path):
    """Run the step with inputs; an interpreter of ours says what it is called with."""
    python = tmp_path / "a python"
    python.write_text("#!/bin/sh\nfor word; do printf '<%s>\\n' \"$word\"; done\n")
    python.chmod(0o700)

    def with_inputs(**inputs):
        values = {"PYTHON": str(python), **DEFAULTS, **inputs}
        environment = {**os.environ, **{f"NNX_{name}": value for name, value in values.items()}}
        command = ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", step()]
        return subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=False)

    return with_inputs


@pytest.mark.parametrize(
    "args, words",
    [
        ("", []),
        ("tests -k 'forward or decoding'", ["tests", "-k", "forward or decoding"]),
        ("tests\n  -x", ["tests", "-x"]),
        ('-k "it\'s"', ["-k", "it's"]),
        ("$HOME `touch pwned` $(touch pwned)", ["$HOME", "`touch", "pwned`", "$(touch", "pwned)"]),
    ],
)
def test_arguments_are_split_as_in_a_shell_and_evaluated_nowhere(run, args, words, tmp_path):
    said = run(ARGS=args)
    assert said.returncode == 0, said.stderr
    assert [line[1:-1] for line in said.stdout.splitlines()][6:] == words
    assert not (tmp_path / "pwned").exists()


@pytest.mark.parametrize("report", ["it's $(touch pwned) `touch pwned`", "-x", "a b", "nnx.report"])
def test_a_report_may_have_any_name_that_an_artifact_has(run, report, tmp_path):
    said = run(REPORT=report)
    assert f"<--nnx-report={report}.html>\n" in said.stdout
    assert not (tmp_path / "pwned").exists()


@pytest.mark.parametrize(
    "name, values, told",
    [
        ("ARGS", ["tests/it's", 'tests -k "forward', "-k 'a\nb'"], "args: a quote has no other end on its line"),
        ("REPORT", ["", "..", *(f"a{mark}b" for mark in '/\\":*?|<\n')], "report: write a name without / "),
        ("PYTHON", ["it's"], "python: there is no such interpreter"),
    ],
)
def test_a_bad_input_is_told_in_our_words(run, name, values, told):
    for value in values:
        said = run(**{name: value})
        assert (said.returncode, said.stderr) == (2, ""), value
        assert said.stdout.startswith(f"::error title=pytest-nnxcheck::{told}"), value
