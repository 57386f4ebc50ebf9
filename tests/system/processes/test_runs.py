"""Runs in processes of their own: with workers of xdist all comes out as in one process, under options of pytest too, and Ctrl-C loses nothing.

A worker that crashes is in tests/plugin/runs/test_workers.py.
"""

import json
import sys
from xml.etree import ElementTree as ET

import pytest
import watched

from pytest_nnxcheck.compat import flax_modes

MODES = ["--nnx-modes=current,tree"] if "tree" in flax_modes.modes() else []
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

@pytest.mark.xfail(strict=True)
@marked(max_examples=0, invariants="mine")
def test_own(nnx_wrap): nnx_wrap(Model(mine=has("scan")))(1)

def test_plain(): pass
"""
)
HANDS_IN = """
from pytest_nnxcheck import Invariant

def pytest_nnx_invariants(config):
    return [Invariant("mine", lambda call: [])]
"""
KNOWN = """
["test_inner.py::test_gone"]
memory = "x"
["*::test_known"]
memory = "jax#926"
"jit > jit > jit > jit > jit" = "deep"
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
    names = [*MODES, "--nnx-baseline=peaks.json", "-Wdefault"]
    run_inner(SUITE.replace("@pytest.mark.xfail", ""), *names, "--nnx-baseline-update").assert_outcomes(passed=2)
    before = (pytester.path / "peaks.json").read_bytes()

    def outcome(*workers, **more):
        (pytester.path / "peaks.json").write_bytes(before)
        actions.write_text("")
        known = ["--nnx-expected-failures=known.toml", "--nnx-baseline-update-new-only"]
        files = ["--nnx-report=report.json", "--junitxml=junit.xml"]
        result = run_inner(LATER, *names, *known, *files, *workers, conftest=HANDS_IN, **more)
        result.assert_outcomes(passed=3, xfailed=5, warnings=2)
        assert result.ret == 0
        cases = ET.parse(pytester.path / "junit.xml").iter("testcase")
        properties = {
            case.get("name"): {p.get("name"): p.get("value") for p in case.iter("property")} for case in cases
        }
        report = json.loads((pytester.path / "report.json").read_text(encoding="utf-8"))
        starts = ("peaks.json", "test_inner.py::")
        told = [line for line in result.outlines if line.startswith(starts) or "nestings" in line]
        warned = sorted(line.partition("known.toml")[2] for line in result.outlines if "Warning: " in line)
        assert actions.read_text("utf-8").count("## ") == 1
        return (pytester.path / "peaks.json").read_bytes(), without_times(report), properties, sorted(told), warned

    peaks, report, properties, told, warned = alone = outcome("-p", "no:xdist")
    assert outcome("-n2", subprocess=True) == alone
    # The run that both are like has all that it is to show.
    assert {*before.splitlines()[2:-2]} < {*peaks.splitlines()}
    assert peaks.count(b"test_known") > 0 < peaks.count(b'"drawn": true')
    assert len(report["tests"]) == 7
    assert "mine" in {violation["invariant"] for nesting in report["nestings"] for violation in nesting["violations"]}
    assert sum(len(nesting["violations"]) for nesting in report["nestings"]) > 6
    assert properties["test_holds"]["nnx_verdict"] == "held"
    assert properties["test_holds"].get("nnx_modes") == ("current passed, tree passed" if MODES else None)
    assert properties["test_plain"] == {}
    assert any("compared, " in line and " grew by more than 5%" in line for line in told)
    assert any("is written, " in line and " new" in line for line in told)
    assert [line.split(":")[1] for line in warned] == ["2", "4"]


LEFT = """
@pytest.mark.parametrize("number", range(30))
def test_model(number):
    poison(MODEL) if number == 17 else use(MODEL)

MODEL = Net()

"""


def test_watched_workers_blame_the_same_tests(pytester, inner_args):
    pytester.makepyfile(test_left=watched.HEAD + LEFT)
    pytester.makeini("[pytest]\nnnx_watch = fail\n")
    result = pytester.runpytest_subprocess(*inner_args, "-p", "no:randomly", "-n2")
    failed = {line.split(" - ")[0].split()[1] for line in result.outlines if line.startswith("FAILED")}
    assert failed == {"test_left.py::test_model[17]"}
    result.stdout.fnmatch_lines(
        ["test_left.py::test_model?17?  tracers in *", "30 tests watched: 1 left tracers behind*"]
    )


def test_workers_say_the_same_of_a_bad_marker(run_inner):
    result = run_inner("\n@marked(max_depth=0)\ndef test_x(nnx_wrap): pass\n", "-n2", subprocess=True)
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines(["nnx_invariants marker at test_inner.py:5: max_depth=0 is not *"])
    assert "Traceback" not in result.stdout.str() + result.stderr.str()
    assert "INTERNALERROR" not in result.stdout.str()


HOLDS = """
@marked(max_examples=0)
def test_holds(nnx_wrap):
    assert nnx_wrap(Model())(3) == 3
"""
PAIR = """
@marked
def test_pair(nnx_wrap):
    model = nnx_wrap(Model(tracers=has("jit", "scan")))
    assert model(3) == 3
"""


LOADED = ("-p", "no:hypothesispytest", "--strict-markers", "-W", "error")
OTHERS = [("-n0",), ("-n2",), ("-p", "no:cacheprovider"), ("--import-mode=importlib",), ("--assert=plain",)]


@pytest.mark.parametrize(
    "args", [LOADED, *(pytest.param(args, marks=pytest.mark.full) for args in OTHERS)], ids=" ".join
)
def test_the_same_verdicts_whatever_runs_them(run_inner, args):
    result = run_inner(PAIR + HOLDS, *args, subprocess=True)
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(
        [
            "*nnx invariants*",
            "test_inner.py::test_holds  40 nestings: 40 passed; worst peak 4.9 KiB (jit > scan > scan > vmap), budget 7.8 KiB",
            "test_inner.py::test_pair  30 nestings: 2 failed, 28 passed, 13 not run",
            "FAILED test_inner.py::test_pair - nnx tracers: tracers is broken",
        ]
    )
    assert "Warning" not in result.stdout.str() + result.stderr.str()


STOPPED = """
BODIES = []

@marked(max_examples=0)
def test_stopped(nnx_wrap):
    call = nnx_wrap(Model())
    BODIES.append(1)
    if len(BODIES) > {nestings}:
        os.kill(os.getpid(), signal.SIGINT)
    call(3)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="signals")
@pytest.mark.parametrize("nestings", [0, 20])
def test_ctrl_c_leaves_a_partial_summary_and_a_report_but_no_baseline(run_inner, pytester, monkeypatch, nestings):
    # A background job of a shell starts with the signal ignored.
    head = "import os, signal\nsignal.signal(signal.SIGINT, signal.default_int_handler)\n"
    reports = [f"--nnx-report=report.{kind}" for kind in ("json", "html", "md")]
    asked = [*reports, "--junitxml=junit.xml", "--nnx-baseline=peaks.json", "--nnx-baseline-update"]
    source = head + HOLDS + PAIR + STOPPED.format(nestings=nestings)
    summary = pytester.path / "summary.md"
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(summary))
    result = run_inner(source, *asked, subprocess=True)
    assert result.ret == pytest.ExitCode.INTERRUPTED
    ran = f"{nestings} nestings: {f'{nestings} passed' if nestings else 'none finished'}"
    result.stdout.re_match_lines(
        [
            r"peaks.json is not written: the run was interrupted",
            r"test_inner.py::test_holds  40 nestings: 40 passed; .*",
            r"test_inner.py::test_pair  30 nestings: 2 failed, 28 passed, .*",
            rf"test_inner.py::test_stopped  interrupted after {ran}, {40 - nestings} not run.*",
            r".*KeyboardInterrupt.*",
        ]
    )
    assert "INTERNALERROR" not in result.stdout.str()
    told = json.loads((pytester.path / "report.json").read_text(encoding="utf-8"))["tests"]
    outcomes = {test["nodeid"].partition("::")[2]: test["outcome"] for test in told}
    assert outcomes == {"test_holds": "passed", "test_pair": "failed", "test_stopped": "interrupted"}
    stopped = told[-1]
    assert (stopped["verdict"], stopped["not_run"]) == ("", 40 - nestings), "it has not passed"
    text = stopped["summary"]
    assert text.startswith(f"interrupted after {ran}, {40 - nestings} not run")
    page = (pytester.path / "report.html").read_text(encoding="utf-8")
    assert "<title>1 of 3 tests failed, 1 interrupted - " in page
    assert page.count("■ interrupted") == 1
    assert text in page.replace("&gt;", ">")
    assert (pytester.path / "report.md").read_text(encoding="utf-8") == summary.read_text(encoding="utf-8").rstrip(
        "\n"
    ) + "\n"
    shown = summary.read_text(encoding="utf-8")
    assert shown.startswith("## ✗ nnx invariants: 1 of 3 tests failed, 1 interrupted\n")
    assert "| `test_inner.py::test_stopped` | interrupted |" in shown
    assert f"\n{text}\n" in shown
    cases = {case.get("name"): case for case in ET.parse(pytester.path / "junit.xml").iter("testcase")}
    assert {name: [each.tag for each in case] for name, case in cases.items()} == {
        "test_holds": ["properties"],
        "test_pair": ["properties", "failure"],
        "test_stopped": ["properties", "skipped"],
    }
    assert cases["test_stopped"].find("skipped").get("message") == text
    assert f'name="nnx_not_run" value="{40 - nestings}"' in ET.tostring(cases["test_stopped"], "unicode")
    result.stdout.fnmatch_lines(["=* 1 failed, 1 passed in *"])  # as pytest counts without the plugin
    assert not (pytester.path / "peaks.json").exists()


@pytest.mark.skipif(sys.platform == "win32", reason="signals")
def test_a_test_that_is_interrupted_when_it_runs_again_is_interrupted(run_inner, pytester):
    pytest.importorskip("pytest_rerunfailures")
    source = "@marked(max_examples=0)\ndef test_again(nnx_wrap, request):\n    nnx_wrap(Model())(3)\n"
    source += "    assert request.node.execution_count > 1\n    if len(RUNS) > 20: pytest.exit('enough')\n"
    run_inner(source, "--reruns=1", "--nnx-report=report.json", subprocess=True)
    (test,) = json.loads((pytester.path / "report.json").read_text(encoding="utf-8"))["tests"]
    assert (test["outcome"], test["verdict"]) == ("interrupted", "")


PRESSED = """
import gc, os, signal
signal.signal(signal.SIGINT, signal.default_int_handler)

def press(phase, info):
    if phase == "start" and CALLS:
        gc.callbacks.remove(press)
        os.kill(os.getpid(), signal.SIGINT)

CALLS = []
gc.callbacks.append(press)

@marked(max_examples=0)
def test_stopped(nnx_wrap):
    nnx_wrap(Model())(3)
    CALLS.append(1)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="signals")
@pytest.mark.parametrize("handler, ret", [("default_int_handler", pytest.ExitCode.INTERRUPTED), ("SIG_IGN", 0)])
def test_ctrl_c_during_our_garbage_collection_is_not_lost(run_inner, pytester, handler, ret):
    """Python drops what a callback of the collector raises. A shell's background job, which ignores the signal, runs on."""
    result = run_inner(PRESSED.replace("default_int_handler", handler), "--nnx-report=report.json", subprocess=True)
    assert result.ret == ret
    assert "Unraisable" not in result.stdout.str()
    (test,) = json.loads((pytester.path / "report.json").read_text(encoding="utf-8"))["tests"]
    assert test["outcome"] == ("interrupted" if ret else "passed")
