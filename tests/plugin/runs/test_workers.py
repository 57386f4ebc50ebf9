"""Workers of xdist: what the controller makes of what they send, of a crash and of an interruption; further runs in tests/system/processes/test_runs.py."""

import json

import pytest

SUITE = """
import os

@pytest.mark.parametrize("number", range(3))
@marked(max_examples=0, transforms="jit")
def test_holds(nnx_wrap, number):
    nnx_wrap(Model())(1)

@marked(max_examples=0, transforms="jit")
def test_ends(nnx_wrap):
    nnx_wrap(Model())(1)
    END
"""


WORKER = """
import pytest
@pytest.hookimpl(tryfirst=True)
def pytest_configure(config): config.workerinput = {}
"""


def test_a_worker_writes_no_file(run_inner, pytester):
    """Its controller does: of all workers."""
    asked = [
        "--nnx-report=report.json",
        "--nnx-baseline=peaks.json",
        "--nnx-baseline-update",
        "-p",
        "no:rerunfailures",
    ]
    for conftest, files in ((WORKER, []), ("", ["peaks.json", "report.json"])):
        run_inner(SUITE.replace("END", ""), *asked, conftest=conftest).assert_outcomes(passed=4)
        assert sorted(path.name for path in pytester.path.glob("*.json")) == files


@pytest.mark.slow
@pytest.mark.parametrize(
    "end, outcome, said, nestings",
    [("os._exit(1)", "error", "crashed while running", 0), ("pytest.exit('enough')", "interrupted", "", 1)],
    ids=["crash", "interruption"],
)
def test_a_test_that_stops_its_worker_takes_no_other_with_it(run_inner, pytester, end, outcome, said, nestings):
    pytest.importorskip("xdist")
    asked = [
        "--nnx-report=report.json",
        "--nnx-baseline=peaks.json",
        "--nnx-baseline-update",
        "-n1",
        "--max-worker-restart=0",
    ]
    result = run_inner(SUITE.replace("END", end), *asked, subprocess=True)
    assert result.ret != 0
    report = json.loads((pytester.path / "report.json").read_text(encoding="utf-8"))
    ends = {test["nodeid"].partition("::")[2]: test for test in report["tests"]}
    assert {name: test["outcome"] for name, test in ends.items()} == {
        **{f"test_holds[{number}]": "passed" for number in range(3)},
        "test_ends": outcome,
    }
    assert said in ends["test_ends"]["message"]
    assert sum(each["nodeid"].endswith("test_ends") for each in report["nestings"]) == nestings
    result.stdout.fnmatch_lines(["peaks.json is not written: *"])
    assert not (pytester.path / "peaks.json").exists()
