"""Workers of xdist: one run in which baseline, expected failures, reports, modes and JUnit come out as in a run of one process.

What crosses is tested in tests/unit/test_worker_data.py; what reports make of a crash and of an interruption stands at the end.
"""

import json
from types import SimpleNamespace
from xml.etree import ElementTree as ET

import pytest

from pytest_nnxcheck import compat
from pytest_nnxcheck.plugin import reports
from pytest_nnxcheck.reporting import records

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


@pytest.mark.slow
def test_two_workers_leave_what_one_process_does(run_inner, pytester, actions):
    pytest.importorskip("xdist")
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


def test_a_worker_writes_no_report(publisher, tmp_path):
    publisher.is_worker, publisher.targets = True, (reports.Target(tmp_path / "r.json", "r.json", "option"),)
    session = SimpleNamespace(config=SimpleNamespace(getoption=lambda name: False), exitstatus=0)
    assert [*publisher.pytest_sessionfinish(session)] == [None]
    assert not (tmp_path / "r.json").exists()
    publisher.is_worker = False
    assert [*publisher.pytest_sessionfinish(session)] == [None]
    assert (tmp_path / "r.json").exists()


# --- crash and interruption ----------------------------------------------------------------------------------------------


@pytest.fixture
def publisher(pytester, inner_args):
    """The controller's publisher of a run."""
    return reports.Publisher(pytester.parseconfig(*inner_args), (), None, {})


def stopped_in(nodeid, nestings=1):
    test = records.empty_test(nodeid)
    test["outcome"] = "interrupted"
    return {"test": test, "nestings": [{}] * nestings}


def crash(nodeid):
    """The report that xdist writes of a test in which its worker crashed, or was interrupted."""
    return SimpleNamespace(nodeid=nodeid, when="???", failed=True, longreprtext="worker 'gw0' crashed while running it")


def test_a_crash_is_an_error_of_its_test(publisher):
    publisher.pytest_runtest_logreport(crash("a::x"))
    test = publisher.tests["a::x"]["test"]
    assert (test["outcome"], test["message"]) == ("error", "worker 'gw0' crashed while running it")


def test_an_interrupted_test_is_not_lost_nor_called_a_crash(publisher):
    publisher.absorb([stopped_in("a::x")])
    publisher.pytest_runtest_logreport(crash("a::x"))
    assert publisher.tests["a::x"]["test"]["outcome"] == "interrupted"
    assert publisher.tests["a::x"]["test"]["message"] == ""


def test_what_a_test_told_when_it_ended_stays(publisher):
    publisher.absorb([stopped_in("a::x", nestings=2)])
    publisher.absorb([stopped_in("a::x", nestings=1), stopped_in("a::y", nestings=0)])
    assert {nodeid: len(found["nestings"]) for nodeid, found in publisher.tests.items()} == {"a::x": 2, "a::y": 0}
