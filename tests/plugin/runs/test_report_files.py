"""``--nnx-report`` in a run: what is written, and what is said where it cannot be; with workers of xdist in tests/system/processes/test_runs.py."""

import json
import shutil
from xml.etree import ElementTree as ET

import pytest

from pytest_nnxcheck.reporting import html_page, report

MIXED = """
@marked
def test_pair(nnx_wrap):
    model = nnx_wrap(Model(tracers=has("jit", "scan")))
    assert model(3) == 3

@marked
def test_holds(nnx_wrap):
    assert nnx_wrap(Model())(3) == 3

def test_plain():
    pass
"""


@pytest.fixture
def summary(pytester, monkeypatch):
    """A step of GitHub Actions, with the file of its summary."""
    summary = pytester.path / "summary.md"
    summary.touch()
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(summary))
    return summary


def written(pytester, name="report.json"):
    return json.loads((pytester.path / name).read_text(encoding="utf-8"))


def heads(pytester):
    return {test["nodeid"].partition("::")[2]: test for test in written(pytester)["tests"]}


def junit(pytester):
    cases = ET.parse(pytester.path / "junit.xml").iter("testcase")
    return {case.get("name"): {each.get("name"): each.get("value") for each in case.iter("property")} for case in cases}


def test_files_properties_and_summary_tell_the_same(run_inner, pytester, summary):
    asked = [f"--nnx-report=out/deep er/report.{kind}" for kind in ("json", "html", "md")]
    result = run_inner(MIXED, *asked, "--junitxml=junit.xml")
    result.assert_outcomes(passed=2, failed=1)
    result.stdout.fnmatch_lines(["-* nnx report: out/deep er/report.json -*"])
    folder = pytester.path / "out" / "deep er"
    assert sorted(path.name for path in folder.iterdir()) == ["report.html", "report.json", "report.md"]
    found = written(pytester, "out/deep er/report.json")
    assert [(test["nodeid"], test["outcome"], test["verdict"]) for test in found["tests"]] == [
        ("test_inner.py::test_holds", "passed", "held"),
        ("test_inner.py::test_pair", "failed", "violated"),
    ]
    assert {nesting["nodeid"] for nesting in found["nestings"]} == {test["nodeid"] for test in found["tests"]}
    assert sum(len(nesting["violations"]) for nesting in found["nestings"]) == 2
    assert found["run"]["exit_status"] == 1
    holds, pair = found["tests"]
    assert holds["failed_at"] is None
    assert pair["place"] == {"file": "test_inner.py", "line": 5}
    assert pair["failed_at"] == {"file": "test_inner.py", "line": 8}
    assert pair["message"].startswith("nnx invariant broken: tracers")
    assert "nnx_wrap" not in pair["message"]
    assert f"<title>1 of 2 tests failed - {pytester.path.name} - nnx invariants</title>" in (
        folder / "report.html"
    ).read_text("utf-8")
    assert "| `test_inner.py::test_pair` | tracers | `jit > scan` |" in (folder / "report.md").read_text("utf-8")
    properties = junit(pytester)
    assert properties["test_pair"]["nnx_verdict"] == "violated"
    assert properties["test_holds"]["nnx_verdict"] == "held"
    assert (properties["test_holds"]["nnx_peak"], properties["test_holds"]["nnx_budget"]) == ("5000", "8000")
    assert properties["test_plain"] == {}
    assert summary.read_text("utf-8").count("## ✗ nnx invariants: 1 of 2 tests failed") == 1


ENDS = """
import unittest

@marked
def test_own(nnx_wrap):
    assert nnx_wrap(Model())(3) == 4, "é <b>"

@marked
@pytest.mark.xfail
def test_xfails(nnx_wrap):
    assert nnx_wrap(Model())(3) == 4

@marked
def test_skips(nnx_wrap):
    nnx_wrap(Model())(3)
    pytest.skip("no reason")

@marked
def test_checks_nothing(nnx_wrap):
    pass

@pytest.fixture
def broken():
    raise OSError("no data")

@marked
def test_has_no_data(nnx_wrap, broken):
    pass

@pytest.fixture
def late():
    yield
    raise OSError("cannot tidy up")

@marked
def test_is_untidy(nnx_wrap, late):
    nnx_wrap(Model())(3)

@pytest.mark.nnx_invariants(devices=1000)
def test_is_large(nnx_wrap):
    pass
"""


def test_every_end_of_a_test_is_told(run_inner, pytester):
    run_inner(ENDS, "--nnx-report=report.json", "--nnx-report=report.html", "--nnx-report=report.md")
    found = heads(pytester)
    told = {
        name: (test["outcome"], test["verdict"], test["message"].partition("\n")[0]) for name, test in found.items()
    }
    reason = told.pop("test_is_large")
    assert reason[:2] == ("skipped", "")
    assert "needs 1000 devices" in reason[2]
    assert told == {
        "test_own": ("failed", "failed", "AssertionError: é <b>"),
        "test_xfails": ("xfailed", "failed", "AssertionError: assert 3 == 4"),
        "test_skips": ("skipped", "held", "no reason"),
        "test_checks_nothing": ("failed", "", told["test_checks_nothing"][2]),
        "test_has_no_data": ("error", "", "OSError: no data"),
        "test_is_untidy": ("error", "held", told["test_is_untidy"][2]),
    }
    assert "cannot tidy up" in found["test_is_untidy"]["message"]


def test_only_the_last_run_of_a_test_counts(run_inner, pytester):
    pytest.importorskip("pytest_rerunfailures")
    source = "N = []\n@marked\ndef test_again(nnx_wrap):\n    assert nnx_wrap(Model())(3) == 3\n    if not N:\n        N.append(1)\n        raise OSError\n"
    run_inner(source, "--nnx-report=report.json", "--reruns=1").assert_outcomes(passed=1)
    (test,) = written(pytester)["tests"]
    assert (test["outcome"], test["verdict"]) == ("passed", "held")


def test_a_run_without_marked_tests_writes_an_empty_report_and_no_summary(run_inner, pytester, summary):
    assert run_inner("def test_plain(): pass\n", "--nnx-report=report.json").ret == 0
    assert written(pytester)["tests"] == []
    assert summary.read_text() == ""
    assert run_inner("def test_plain(): pass\n", "--nnx-report=other.json", "--collect-only").ret == 0
    assert not (pytester.path / "other.json").exists()


@pytest.mark.parametrize(
    "typed, said",
    [
        ("file/report.json", "cannot write file/report.json: *; write the name of a file in a folder *"),
        ("folder.json", "cannot write folder.json: it is a folder; write the name of a file *"),
        ("/proc/report.json", "cannot write /proc/report.json: *; write the name of a file *"),
    ],
)
def test_a_path_that_cannot_be_written_stops_the_run_at_once(run_inner, pytester, typed, said):
    (pytester.path / "file").touch()
    (pytester.path / "folder.json").mkdir()
    result = run_inner(MIXED, f"--nnx-report={typed}")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines([f"ERROR: option --nnx-report: {said}"])
    assert "Traceback" not in result.stdout.str() + result.stderr.str()
    assert not (pytester.path / "report.json").exists()


def test_a_write_that_fails_at_the_end_fails_the_run_and_loses_nothing_else(run_inner, pytester):
    source = MIXED.replace('has("jit", "scan")', "has('no such layer')")
    source += "\ndef test_in_the_way():\n    import pathlib, shutil\n    shutil.rmtree('gone'); pathlib.Path('gone').touch()\n"
    result = run_inner(source, "--nnx-report=gone/report.json", "--nnx-report=report.json")
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.assert_outcomes(passed=4)
    result.stdout.fnmatch_lines(
        [
            "-* nnx report: report.json -*",
            "=* nnx report =*",
            "ERROR option --nnx-report: cannot write gone/report.json: *",
        ]
    )
    assert len(written(pytester)["tests"]) == 2
    assert "Traceback" not in result.stdout.str()


def broken(*given, **more):
    raise RuntimeError("<what>")


def test_a_page_that_cannot_be_made_is_told_and_loses_nothing_else(run_inner, pytester, monkeypatch):
    monkeypatch.setattr(html_page, "render", broken)
    result = run_inner(MIXED, "--nnx-report=a.html", "--nnx-report=report.json")
    result.assert_outcomes(passed=2, failed=1)
    result.stdout.fnmatch_lines(["ERROR option --nnx-report: cannot make a.html: RuntimeError: <what>"])
    assert len(written(pytester)["tests"]) == 2


def test_a_test_that_cannot_be_told_of_is_told_by_name(run_inner, pytester, monkeypatch):
    monkeypatch.setattr(report, "record", broken)
    result = run_inner(MIXED, "--nnx-report=report.json")
    result.assert_outcomes(passed=2, failed=1)
    told = {name: (test["outcome"], test["message"]) for name, test in heads(pytester).items()}
    assert told["test_pair"] == ("failed", "nnx report: cannot record this test: RuntimeError: <what>")


def test_a_summary_that_cannot_be_written_fails_no_run(run_inner, pytester, monkeypatch, summary):
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(pytester.path / "no" / "file.md"))
    result = run_inner("@marked\ndef test_holds(nnx_wrap):\n    nnx_wrap(Model())(3)\n")
    assert result.ret == 0
    result.stdout.fnmatch_lines(["ERROR cannot write the summary of the step: No such file or directory"])


@pytest.mark.slow
@pytest.mark.parametrize(
    "option, unseen", [("--nnx-report=a.html", "{'jax', 'flax'}"), ("-q", "{'pytest_nnxcheck.plugin.reports', 'jax'}")]
)
def test_reports_import_no_jax_and_nothing_where_none_is_asked_for(pytester, inner_args, option, unseen):
    pytester.makepyfile(f"def test_plain():\n    import sys\n    assert not {unseen} & sys.modules.keys()\n")
    result = pytester.runpytest_subprocess(*inner_args, "-p", "no:hypothesispytest", option)
    result.assert_outcomes(passed=1)


def test_the_report_has_the_status_that_other_plugins_gave_the_run(run_inner, pytester):
    last = "@__import__('pytest').hookimpl(trylast=True)\n"
    late = f"{last}def pytest_sessionfinish(session):\n    session.exitstatus = 1\n"
    assert run_inner("def test_plain(): pass\n", "--nnx-report=report.json", conftest=late).ret == 1
    assert written(pytester)["run"]["exit_status"] == 1


@pytest.mark.skipif(int(pytest.__version__.partition(".")[0]) < 9, reason="subtests came with pytest 9")
@pytest.mark.parametrize("tracers", ["", "tracers=has('jit')"])
def test_a_test_with_subtests_has_all_its_nestings(run_inner, pytester, tracers):
    source = f"""
@marked
def test_x(nnx_wrap, subtests):
    model = nnx_wrap(Model({tracers}))
    with subtests.test("a"):
        assert model(3) == 3
"""
    result = run_inner(source, "--nnx-report=report.json")
    head = heads(pytester)["test_x"]
    assert head["verdict"] == ("violated" if tracers else "held")
    assert head["counts"]["held"] >= 1
    assert len(written(pytester)["nestings"]) >= 4
    result.stdout.fnmatch_lines(["test_inner.py::test_x * nestings: *"])


PYPROJECT = '[project]\nname = "decoder"\n'


def head_of_run(pytester, run_inner, monkeypatch, *options, sha=""):
    if sha:
        monkeypatch.setenv("GITHUB_SHA", sha)
    else:
        monkeypatch.delenv("GITHUB_SHA", raising=False)
    run_inner("def test_plain(): pass\n", "--nnx-report=report.json", "--nnx-report=report.html", *options)
    run = written(pytester)["run"]
    return run["project"], run["commit"], (pytester.path / "report.html").read_text("utf-8")


@pytest.mark.parametrize(
    "pyproject, name",
    [(PYPROJECT, "decoder"), ("[project]\nname = 3\n", ""), ("[tool]\n", ""), ("project = [", ""), (None, "")],
    ids=["named", "no_text", "unnamed", "no_toml", "none"],
)
def test_a_report_names_the_project(pytester, run_inner, monkeypatch, pyproject, name):
    (pytester.path / "own.ini").write_text("[pytest]\n")
    if pyproject is not None:
        (pytester.path / "pyproject.toml").write_text(pyproject)
    # With an ini file of its own, pytest does not stop at a pyproject.toml that is no TOML.
    project, commit, page = head_of_run(pytester, run_inner, monkeypatch, "-c", "own.ini")
    assert (project, commit) == (name or pytester.path.name, "")
    assert f'<p class="project">{project} · nnx invariants</p>' in page


def test_a_report_names_the_commit(pytester, run_inner, monkeypatch):
    if shutil.which("git") is None:
        pytest.skip("needs git")
    pytester.run("git", "init", "-q")
    assert head_of_run(pytester, run_inner, monkeypatch)[1] == ""  # none yet
    who = ["-c", "user.name=a", "-c", "user.email=a@b.c"]
    pytester.run("git", *who, "commit", "-q", "--allow-empty", "-m", "first")
    (sha,) = pytester.run("git", "rev-parse", "HEAD").outlines
    assert head_of_run(pytester, run_inner, monkeypatch)[1] == sha
    _, commit, page = head_of_run(pytester, run_inner, monkeypatch, sha="f" * 40)
    assert commit == "f" * 40
    assert f' at <code title="{commit}">ffffffffff</code> · nnx invariants</p>' in page
