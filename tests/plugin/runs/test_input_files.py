"""Files that a run reads: what is no file is refused and not waited for, and no content of one ends in a traceback of ours."""

import os
import socket
from pathlib import Path

import pytest

HOLDS = "@marked(max_examples=0)\ndef test_x(nnx_wrap): nnx_wrap(Model())(1)\n"
OPTIONS = ("--nnx-baseline", "--nnx-expected-failures")
NO_FILE = "it is a pipe, a device or a socket, and no file"


def put(kind, path):
    """Something that is no file, and where it is."""
    if kind == "a device":
        return "/dev/zero"
    if kind == "a pipe":
        os.mkfifo(path)
    elif kind == "a link to a pipe":
        os.mkfifo(f"{path}.pipe")
        path.symlink_to(f"{path}.pipe")
    elif kind == "a socket":
        there = Path.cwd()
        os.chdir(path.parent)  # a path of a socket has a hundred characters at most
        try:
            with socket.socket(socket.AF_UNIX) as made:
                made.bind(path.name)
        finally:
            os.chdir(there)
    else:
        path.mkdir()
    return path.name


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="there are no pipes here")
@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("kind", ["a pipe", "a link to a pipe", "a device", "a socket", "a folder"])
def test_what_is_no_file_is_refused_and_not_waited_for(run_inner, pytester, option, kind):
    name = put(kind, pytester.path / "input")
    result = run_inner(HOLDS, option, name)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    why = "Is a directory" if kind == "a folder" else NO_FILE
    result.stderr.fnmatch_lines([f"ERROR: *option {option}: cannot read {name}: {why}"])


DEEP = [
    ("known.toml", "a = " + "[" * 100_000, "known.toml"),
    ("known.toml", '["x"]\na = ' + "{b=" * 100_000, "known.toml"),
    ("peaks.json", '{"a": ' + "[" * 100_000, "peaks.json:1: it is JSON that nobody can read"),
    ("peaks.json", "[" * 100_000, "peaks.json:1: this is no report of pytest-nnxcheck"),
]


@pytest.mark.parametrize("name, text, said", DEEP, ids=["arrays", "tables", "report", "no report"])
def test_brackets_nested_too_deeply_are_no_internal_error(run_inner, pytester, name, text, said):
    (pytester.path / name).write_text(text)
    option = dict(zip(("peaks.json", "known.toml"), OPTIONS, strict=True))[name]
    result = run_inner(HOLDS, f"{option}={name}")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines([f"ERROR: option {option}: {said}*"])


def test_files_are_read(run_inner, pytester):
    (pytester.path / "known.toml").write_text('["*::test_x"]\nmemory = "x"\n')
    (pytester.path / "link.toml").symlink_to("known.toml")
    known = HOLDS.replace("Model()", "Model(memory=has('jit'))")
    run_inner(known, "--nnx-expected-failures=link.toml").assert_outcomes(passed=1)
    run_inner(HOLDS, "--nnx-baseline=peaks.json", "--nnx-baseline-update").assert_outcomes(passed=1)
    run_inner(HOLDS, "--nnx-baseline=peaks.json").assert_outcomes(passed=1)
