"""Runs with workers of xdist: baseline, expected failures, reports, modes, JUnit and watch mode come out as in a run of one process.

What crosses is tested in tests/unit/test_worker_data.py.
"""

import json
import sys
from xml.etree import ElementTree as ET

import candidates
import pytest
import watched

from pytest_nnxcheck import compat

pytest.importorskip("xdist")

MODES = ["--nnx-modes=current,tree"] if "tree" in compat.modes() else []
SUITE = """
@marked(max_examples=6)
def test_holds(nnx_wrap): nnx_wrap(Model())(1)

@pytest.mark.xfail
@marked(max_examples=0)
def test_grows(nnx_wrap): nnx_wrap(Model())(1)
"""
LATER = (
    SUITE.replace("test_grows(nnx_wrap): nnx_wrap(Model()", "test_grows(nnx_wrap): nnx_wrap(Model(percent=110)")
    + """
@pytest.mark.parametrize("name", ["a|b`c", "größe☃ <script>", "x\\ny \\udcff \\x1b[31m"])
@pytest.mark.xfail(strict=True)
@marked(max_examples=0)
def test_broken(nnx_wrap, name):
    nnx_wrap(Model(tracers=has("jit", "scan"), failed=has("vmap", "vmap")))(1)

@marked(max_examples=0)
def test_known(nnx_wrap): nnx_wrap(Model(memory=has("jit")))(1)

def test_plain(): pass
"""
)
KNOWN = """
["test_inner.py::test_gone"]
memory = "x"
["*::test_known"]
memory = "jax#926"
"jit > jit > jit > jit" = "deep"
"""


@pytest.fixture
def actions(pytester, monkeypatch):
    """A step of GitHub Actions, with the file of its summary."""
    summary = pytester.path / "summary.md"
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(summary))
    return summary


def without_times(found):
    if isinstance(found, dict):
        return {key: without_times(value) for key, value in found.items() if key not in {"seconds", "run"}}
    return [without_times(value) for value in found] if isinstance(found, list) else found


def test_two_workers_leave_what_one_process_does(run_inner, pytester, actions):
    (pytester.path / "known.toml").write_text(KNOWN)
    names = [*MODES, "--nnx-baseline=peaks.jsonl", "-Wdefault"]
    run_inner(SUITE.replace("@pytest.mark.xfail", ""), *names, "--nnx-baseline-update").assert_outcomes(passed=2)
    before = (pytester.path / "peaks.jsonl").read_bytes()

    def outcome(*workers, **more):
        (pytester.path / "peaks.jsonl").write_bytes(before)
        actions.write_text("")
        known = ["--nnx-expected-failures=known.toml", "--nnx-baseline-update-new-only"]
        files = ["--nnx-report=report.json", "--junitxml=junit.xml"]
        result = run_inner(LATER, *names, *known, *files, *workers, **more)
        result.assert_outcomes(passed=3, xfailed=4, warnings=2)
        assert result.ret == 0
        cases = ET.parse(pytester.path / "junit.xml").iter("testcase")
        properties = {
            case.get("name"): {p.get("name"): p.get("value") for p in case.iter("property")} for case in cases
        }
        report = json.loads((pytester.path / "report.json").read_text(encoding="utf-8"))
        told = [
            line
            for line in result.outlines
            if line.startswith(("peaks.jsonl", "test_inner.py::")) or "nestings" in line
        ]
        warned = sorted(line.partition("known.toml")[2] for line in result.outlines if "Warning: " in line)
        assert actions.read_text("utf-8").count("## ") == 1
        return (pytester.path / "peaks.jsonl").read_bytes(), without_times(report), properties, sorted(told), warned

    peaks, report, properties, told, warned = alone = outcome("-p", "no:xdist")
    assert outcome("-n2", subprocess=True) == alone
    # The run that both are like has all that it is to show.
    assert peaks.startswith(before)
    assert peaks.count(b"test_known") > 0 < peaks.count(b'"drawn": true')
    assert len(report["tests"]) == 6
    assert sum(len(nesting["violations"]) for nesting in report["nestings"]) > 6
    assert properties["test_holds"]["nnx_verdict"] == "held"
    assert properties["test_holds"].get("nnx_modes") == ("current held, tree held" if MODES else None)
    assert properties["test_plain"] == {}
    assert any("compared, " in line and " grew by more than 5%" in line for line in told)
    assert any("is written, " in line and " new" in line for line in told)
    assert [line.split(":")[1] for line in warned] == ["2", "4"]


LEFT = """
@pytest.mark.parametrize("number", range(30))
def test_model(number):
    poison(MODEL) if number == 17 else use(MODEL)

MODEL = Net()

def test_large():
    jax.jit(lambda x: x + x)(jnp.ones((128, 128)))
"""


@pytest.mark.skipif(sys.version_info < (3, 12), reason="calls are watched from Python 3.12 on")
def test_watched_workers_blame_the_same_tests_and_send_what_is_to_be_written(pytester, inner_args):
    pytester.makeconftest(candidates.CONFTEST)
    pytester.makepyfile(test_suite=candidates.HEAD + candidates.SURE + candidates.NONE, test_left=watched.HEAD + LEFT)
    pytester.makeini("[pytest]\nnnx_watch = fail\nnnx_memory_budget = 100KiB\n")
    result = pytester.runpytest_subprocess(*inner_args, "-p", "no:randomly", "-n2", "--nnx-mark-candidates=test_marked.py")
    failed = {line.split(" - ")[0].split()[1] for line in result.outlines if line.startswith("FAILED")}
    assert failed == {"test_left.py::test_model[17]", "test_left.py::test_large", "test_suite.py::test_fails"}
    result.stdout.fnmatch_lines(
        [
            "test_left.py::test_large  jit__lambda* peaks at 128.0 KiB, over 100.0 KiB",
            "test_left.py::test_model?17?  tracers in *",
            "* tests watched: 1 left tracers behind, 1 compiled programs over the budget",
        ]
    )
    assert (pytester.path / "test_marked.py").read_text() == candidates.WRITTEN
