"""What a terminal of 80 columns shows: rows that fit, paths from the root, the leaf in the short summary, a line for each nesting."""

import json
import re
import shlex
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

from pytest_nnxcheck.core.text import row

MODEL = """
import jax.numpy as jnp
from flax import nnx

LOG = [{}]


class Layer(nnx.Module):
    def __init__(self):
        self.linear = nnx.Linear(4, 4, kernel_init=nnx.initializers.ones_init(), rngs=nnx.Rngs(0))

    def __call__(self, x, keep=True):
        y = self.linear(x)
        if keep:
            LOG[0]["mean of y"] = y.mean()
        return y
"""
TESTS = """
import jax.numpy as jnp
import pytest
from net.layer import Layer


@pytest.mark.nnx_invariants(transforms="jit", styles="argument", max_examples=0)
@pytest.mark.parametrize("keep", [False, True], ids=["ok", "bad"])
def test_layer(nnx_wrap, keep):
    with pytest.MonkeyPatch.context() as patch:
        for key in ("A", "B"):
            patch.setenv(key, "1")
            assert nnx_wrap(lambda layer, x: layer(x, keep))(Layer(), jnp.ones((2, 4))).shape == (2, 4)
"""
LEAF = "LOG[0]['mean of y']"
OF_NESTING = re.compile(r"  .{21} .{10} .{8} s   \S.*")
ANY_COLOUR = re.compile(r"\x1b\[[\d;]*m|#x1B")


@pytest.fixture
def project(pytester, inner_args, monkeypatch):
    """A model in a folder, its tests in another: run them in ``folder``, with further options."""
    for name in ("NO_COLOR", "FORCE_COLOR", "PY_COLORS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("COLUMNS", "80")
    for name, text in {"net/__init__.py": "", "net/layer.py": MODEL, "tests/test_layer.py": TESTS}.items():
        path = pytester.path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    pytester.makeini(f"[pytest]\npythonpath = {pytester.path}\n")

    def run(*args, folder=".", subprocess=False):
        monkeypatch.chdir(pytester.path / folder)
        start = pytester.runpytest_subprocess if subprocess else pytester.runpytest_inprocess
        result = start(*inner_args, "-p", "no:randomly", *args)
        result.assert_outcomes(passed=1, failed=1)
        return result

    return run


def plain(line):
    return ANY_COLOUR.sub("", line)


@pytest.mark.parametrize("workers", ["-n0", pytest.param("-n2", marks=pytest.mark.full)])
def test_a_failure_in_80_columns(project, pytester, workers):
    files = [f"report.{kind}" for kind in ("json", "html", "md")]
    options = ["-v", "--color=yes", "--junitxml=out.xml", *(f"--nnx-report={name}" for name in files)]
    result = project(workers, *options, subprocess=workers == "-n2")
    coloured = [plain(line) for line in result.outlines]
    lines = [line for line in coloured if line.startswith("E ")]

    # Rows fit and break no word.
    assert [line for line in lines if len(line) > 80 and not re.match(r"E +(test|program|replay) ", line)] == []
    assert lines[0] == "E       nnx invariant broken: tracers", "however deep the call is indented"
    assert f"E         tracers     tracers remain in {LEAF}" in lines
    hint = next(number for number, line in enumerate(lines) if " hint " in line)
    assert lines[hint + 1].startswith("E                     "), "below the text, not below the label"

    # The short summary names the leaf, and each nesting that is counted has a line.
    assert f"FAILED tests/test_layer.py::test_layer[bad] - nnx tracers: {LEAF}" in coloured
    if workers == "-n0":
        nestings = [line for line in map(plain, result.outlines) if OF_NESTING.fullmatch(line)]
        counted = [int(number) for line in coloured for number in re.findall(r"::\S+  (\d+) nestings: ", line)]
        assert (len(counted), sum(counted)) == (2, len(nestings))

    # Files have no colours, and the sentence of a hint in one piece.
    for name in ("out.xml", *files):
        assert not ANY_COLOUR.search((pytester.path / name).read_text(encoding="utf-8")), name
    (failure,) = ET.parse(pytester.path / "out.xml").getroot().iter("failure")
    assert f"nnx tracers: {LEAF}" in failure.attrib["message"]
    assert f"E         tracers     tracers remain in {LEAF}" in failure.text
    report = json.loads(Path("report.json").read_text(encoding="utf-8"))
    violation = next(each for nesting in report["nestings"] for each in nesting["violations"])
    assert "\n" not in violation["hint"]
    assert len(violation["hint"]) > 80


@pytest.mark.slow
@pytest.mark.parametrize(
    "folder, options, start",
    [
        (".", [], ""),
        ("net", ["--rootdir=..", "../tests"], ""),
        (".", ["--rootdir=tests", "-c", "tox.ini", "tests"], "../"),
    ],
    ids=["root", "beside", "another root"],
)
def test_paths_start_from_the_root_and_commands_from_where_one_stands(project, pytester, folder, options, start):
    result = project(*options, "--nnx-report=report.json", "--nnx-report=report.md", folder=folder)
    lines = [line for line in result.outlines if line.startswith("E ")]
    assert not ANY_COLOUR.search(result.stdout.str())
    assert any(f"created at {start}net/layer.py:15 (" in line for line in lines)
    assert not any(str(pytester.path) in line for line in lines)
    (program,) = [line.split()[-1] for line in lines if " program " in line]
    (argument,) = [shlex.split(line)[3].partition("::")[0] for line in lines if " replay " in line]
    assert (pytester.path / folder / program).is_file()
    assert (pytester.path / folder / argument).resolve() == pytester.path / "tests" / "test_layer.py"
    report = json.loads((pytester.path / folder / "report.json").read_text(encoding="utf-8"))
    told = [{**nesting, "program_text": ""} for nesting in report["nestings"]]
    assert str(pytester.path) not in json.dumps([report["tests"], told])
    page = (pytester.path / folder / "report.md").read_text(encoding="utf-8")
    assert str(pytester.path) not in re.sub(r"sys.path\[:0\] = .*", "", page), "but where a program finds its modules"


@pytest.mark.parametrize(
    "whole", ["model.log['a key of it']", "516.0 KiB", "jit[functional] > scan", "src/a-long-name/of-a-file.py:7"]
)
def test_no_line_breaks_in_what_belongs_together(whole):
    for before in range(40, 58):
        lines = row("leaked", f"{'x' * before} {whole} and more").splitlines()
        assert any(whole in line for line in lines)
        assert all(len(line) <= 72 for line in lines)


def test_a_command_stays_on_one_line():
    command = f"pytest {'x' * 80}.py::test_x --nnx-nesting 'jit > scan'"
    assert row("replay", command) == f"  replay      {command}"


def test_a_nesting_that_is_ruled_out_has_a_line_too(run_inner):
    source = "@marked(max_examples=0)\ndef test_x(nnx_wrap):\n    nnx_wrap(Model(rejected=lambda n: n.captures))(1)\n"
    result = run_inner(source, "-v")
    (counted,) = re.findall(r"  (\d+) nestings: ", result.stdout.str())
    shown = [line for line in result.outlines if OF_NESTING.fullmatch(line)]
    assert len(shown) == int(counted)
    assert [line for line in shown if re.match(r"  not supported by flax .* 0\.00 s   .*\[closure\]", line)]


@pytest.mark.slow
@pytest.mark.parametrize("style", ["line", "native"])
def test_other_styles_of_traceback_say_the_same(project, style):
    said = plain(project(f"--tb={style}", "--color=yes").stdout.str())
    assert f"nnx tracers: {LEAF}" in said
    assert style == "line" or "nnx invariant broken: tracers" in said
