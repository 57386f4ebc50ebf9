"""What is written to a baseline: a part of it; nothing by a run that failed, or whose file or options are bad."""

import json

import pytest
from baselines import BOTH, ERROR, GROWN, NEW_ONLY, OK, PEAKS, RENAMED, UPDATE, entries, section

# --- partial updates, and runs that must not write -----------------------------------------------------------------------


def test_a_partial_update_keeps_the_rest_and_what_the_file_is_by_now(run, peaks):
    run(BOTH, UPDATE)
    source = BOTH.replace("Model()", "Model(percent=120)", 1)
    source += f"def test_y():\n    import pathlib\n    p = pathlib.Path({str(peaks)!r})\n    p.write_text(p.read_text().replace('3000', '3001').replace('2700', '2701').replace('2700', '2701'))\n"
    result = run(source, UPDATE, "--nnx-nesting=jit", "-k", "new or test_y")
    assert section(result) == [f"{PEAKS} is written, 38 entries: 1 changed"]
    peak = {(test[-5:], nesting): entry["peak"] for (test, nesting), entry in entries(peaks).items()}
    assert [peak["t_new", "jit"], peak["other", "jit"]] == [2400, 2000]
    assert [peak["t_new", "jit > call_first"], peak["other", "jit > call_first"]] == [3001, 3001]


FEW = "@marked(max_examples=0, transforms='jit', styles='argument')\ndef test_x(nnx_wrap): nnx_wrap(Model())(1)\n"
PAIR = FEW + FEW.replace("test_x", "test_y")


def peaks_of(path):
    return {(test[-6:], nesting): entry["peak"] for (test, nesting), entry in entries(path).items()}


def test_an_update_replaces_the_tests_that_passed_and_keeps_the_others(run, peaks):
    run(PAIR, UPDATE)
    passed = FEW.replace("Model()", "Model(percent=120)").replace("'jit'", "'jit,vmap'")
    result = run(f"{passed}@pytest.mark.skip\n{FEW.replace('test_x', 'test_y')}", UPDATE)
    assert section(result) == [f"{PEAKS} is written, 5 entries: 1 new, 2 changed"]
    kept = {("test_y", "jit"): 2000, ("test_y", "jit > call_first"): 3000}
    new = {("test_x", "jit"): 2400, ("test_x", "jit > call_first"): 3600, ("test_x", "jit > vmap > vmap"): 4800}
    assert peaks_of(peaks) == new | kept


def test_new_only_adds_and_changes_nothing(run, peaks):
    run(FEW, UPDATE)
    more = PAIR.replace("Model()", "Model(percent=80)").replace("'jit'", "'jit,vmap'", 1)
    run(more, NEW_ONLY)
    old = {("test_x", "jit"): 2000, ("test_x", "jit > call_first"): 3000}
    new = {("test_x", "jit > vmap > vmap"): 3200, ("test_y", "jit"): 1600, ("test_y", "jit > call_first"): 2400}
    assert peaks_of(peaks) == old | new
    grown = run(FEW.replace("Model()", "Model(percent=120)"), NEW_ONLY, "-k", "test_x")
    grown.assert_outcomes(failed=1)
    assert section(grown)[0] == f"{PEAKS}: 2 nestings compared, 2 grew by more than 5%"


def test_a_replay_leaves_it_open_whether_hypothesis_draws_its_nesting(run, peaks):
    run(FEW.replace("max_examples=0", "max_examples=9"), UPDATE)
    drawn = {nesting for (_, nesting), entry in entries(peaks).items() if "drawn" in entry}
    assert drawn
    grown = FEW.replace("Model()", "Model(percent=120)")
    for nesting in (min(drawn), "jit", "jit > vmap"):
        run(grown, UPDATE, f"--nnx-nesting={nesting}")
    marked = {nesting for (_, nesting), entry in entries(peaks).items() if "drawn" in entry}
    assert marked == drawn | {"jit > vmap"}, "of a new one nobody knows yet"


def test_of_a_test_that_fails_after_all_only_what_was_compared_is_told(run, peaks):
    run(FEW, UPDATE)
    torn = "@pytest.fixture\ndef torn():\n    yield\n    raise ValueError\n" + FEW.replace(
        "nnx_wrap)", "nnx_wrap, torn)"
    )
    wider = torn.replace("Model()", "Model(percent=80)").replace("'jit'", "'jit,vmap'")
    assert section(run(wider)) == [f"{PEAKS}: 2 nestings compared"]
    healthy = wider.replace("raise ValueError", "pass")
    assert len(section(run(healthy))) == 3, "what shrank, and what is new"


OF_ANOTHER_STAMP = {
    "one did not run": (PAIR, ["-k", "test_x"], "and 1 test in it did not run (test_inner.py::test_y): run all of them"),
    "several": (FEW.replace("test_x", "test_z"), ["-k", "test_z"], "and 2 tests in it did not run (test_inner.py::test_x, ...): run all *"),
    "a replay": (PAIR, ["--nnx-nesting=jit"], "and 2 tests in it did not run (test_inner.py::test_x, ...): run all of them"),
}  # fmt: skip


@pytest.mark.parametrize("source, args, reason", OF_ANOTHER_STAMP.values(), ids=OF_ANOTHER_STAMP)
def test_entries_of_two_stamps_are_never_in_one_file(run, peaks, source, args, reason):
    run(PAIR, UPDATE)
    old = peaks.read_text().replace('"jax": "', '"jax": "0')
    peaks.write_text(old)
    result = run(source, UPDATE, *args)
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.stdout.fnmatch_lines([f"{PEAKS} is not written: its stamp would change, jax 0* -> *, {reason}"])
    assert peaks.read_text() == old


def test_another_stamp_is_written_from_a_run_of_all_tests_without_those_that_were_skipped(run, peaks):
    run(PAIR, UPDATE)
    peaks.write_text(peaks.read_text().replace('"jax": "', '"jax": "0'))
    result = run(f"{FEW}@pytest.mark.skip\n{FEW.replace('test_x', 'test_y')}", UPDATE)
    assert section(result) == [f"{PEAKS} is written, 2 entries: 2 removed"]


def test_a_run_that_measured_nothing_writes_no_new_file_and_leaves_an_old_one(run, peaks):
    nothing = "def test_plain(): pass\n"
    assert section(run(nothing, UPDATE)) == [f"{PEAKS} is not written: no test that uses nnx_wrap passed"]
    run(FEW, UPDATE)
    before = peaks.read_text()
    assert section(run("@pytest.mark.skip\n" + FEW, UPDATE)) == [f"{PEAKS} is written, 2 entries: nothing changed"]
    assert peaks.read_text() == before


FAILS = {
    "def test_bad(): assert 0\n": "1 test failed",
    "@pytest.fixture\ndef f(): yield; raise ValueError\ndef test_bad(f): pass\n": "1 test failed",
    "def test_bad(): pytest.exit('enough', returncode=0)\n": "the run was interrupted",
}


@pytest.mark.parametrize("bad, reason", FAILS.items(), ids=range(len(FAILS)))
def test_a_run_that_failed_or_was_interrupted_writes_nothing(run, peaks, bad, reason):
    result = run(OK + bad, UPDATE)
    assert section(result) == [f"{PEAKS} is not written: {reason}"]
    assert not peaks.exists()


def test_where_the_collection_broke_nothing_is_written_or_stale(run, pytester, peaks):
    run(OK, UPDATE)
    before = peaks.read_bytes()
    pytester.makepyfile(test_broken="import no_such_module\n")
    assert ERROR not in run(RENAMED, "--continue-on-collection-errors").outlines
    for args in ([], ["--continue-on-collection-errors"]):
        result = run(GROWN, UPDATE, *args)
        assert section(result) == [f"{PEAKS} is not written: not every test could be collected"]
        assert result.ret != 0
    assert peaks.read_bytes() == before


def test_a_run_that_another_plugin_fails_writes_nothing(run, peaks):
    fails = "import pytest\ndef pytest_sessionfinish(session): session.exitstatus = 7\n"
    assert section(run(OK, UPDATE, conftest=fails)) == [f"{PEAKS} is not written: the run failed (exit status 7)"]
    assert not peaks.exists()


def test_a_place_that_is_lost_during_the_run_loses_no_result(run_inner, pytester):
    pytester.mkdir("there")
    source = OK + "def test_y():\n    import os\n    os.rename('there', 'gone')\n"
    result = run_inner(source, f"--nnx-baseline=there/{PEAKS}", UPDATE)
    result.assert_outcomes(passed=2)
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    assert section(result) == [f"there/{PEAKS} is not written: No such file or directory; the file is unchanged"]


# --- the form of 0.1.0, and any report ---


def of_first_form(report):
    """The lines of 0.1.0 that say what a report says."""
    found = json.loads(report)
    lines = [{"pytest-nnxcheck memory baseline": 2, **found["run"]["stamp"]}]
    for each in found["nestings"]:
        labels = [" ".join([held["kind"], held["shape"], held["operation"]]) for held in each["buffers"]]
        buffers = [
            {"bytes": held["bytes"], "label": label, "count": 1}
            for held, label in zip(each["buffers"], labels, strict=True)
        ]
        lines.append(
            {
                "test": each["nodeid"],
                "nesting": each["nesting"],
                "peak": each["peak"],
                "split": each["split"],
                "buffers": buffers,
                "drawn": False,
            }
        )
    return "".join(f"{json.dumps(line)}\n" for line in lines)


def test_a_baseline_of_the_first_form_is_compared_and_rewritten_at_the_next_update(run, peaks):
    run(OK, UPDATE)
    new = peaks.read_text()
    old = of_first_form(new)
    peaks.write_text(old)
    assert section(run(OK)) == [f"{PEAKS}: 19 nestings compared"]
    result = run(GROWN)
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        ["  buffer      + 1900 B temporary *   model.py:7", "  buffer      - 1700 B temporary *"]
    )
    assert peaks.read_text() == old
    said = "it had the form of 0.1.0, and is a report now"
    assert section(run(OK, UPDATE)) == [f"{PEAKS} is written, 19 entries: nothing changed; {said}"]
    assert peaks.read_text() == new


def test_any_earlier_report_is_a_baseline(run, peaks):
    run(OK, f"--nnx-report={PEAKS}", UPDATE)
    run(OK, "--nnx-report=whole.json", UPDATE)
    (peaks.parent / "whole.json").replace(peaks)
    assert section(run(OK)) == [f"{PEAKS}: 19 nestings compared"]
    run(GROWN).assert_outcomes(failed=1)


def test_expected_failures_in_the_file_of_the_baseline_are_read_and_kept(run, peaks):
    known = OK.replace("Model()", "Model(memory=has('jit', 'vmap'))")
    run(OK, UPDATE)
    found = json.loads(peaks.read_text())
    found["tests"] = [{"nodeid": "test_inner.py::*", "expected_failures": [{"key": "memory", "reason": "jax#926"}]}]
    peaks.write_text(json.dumps(found))
    run(known).assert_outcomes(failed=1)
    run(known, f"--nnx-expected-failures={PEAKS}", UPDATE).assert_outcomes(passed=1)
    run(known, f"--nnx-expected-failures={PEAKS}").assert_outcomes(passed=1)


# --- bad files ------------------------------------------------------------------------------------------------------------

USAGE = {
    "format 1, to be updated": ('{"pytest-nnxcheck memory baseline": 1}\n', (UPDATE,), f"{PEAKS}:1: this is a baseline of a version before 0.1.0*"),
    "missing": (None, (), f"there is no file {PEAKS}: write it with --nnx-baseline-update, from a run of all tests"),
    "no folder": (None, (UPDATE, f"--nnx-baseline=no/{PEAKS}"), f"cannot write no/{PEAKS}: No such file or directory"),
}  # fmt: skip


@pytest.mark.parametrize("text, args, message", USAGE.values(), ids=USAGE)
def test_a_bad_file_stops_the_run_before_it_starts(run, peaks, text, args, message):
    if text is not None:
        peaks.write_text(text)
    result = run("raise SystemExit('collected')\n", *args)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines([f"ERROR: option --nnx-baseline: {message}"])
    assert "Traceback" not in result.stderr.str() + result.stdout.str()
    assert (peaks.read_text() if peaks.exists() else None) == text


OF_WHICH = "option {} needs a file: add --nnx-baseline PATH, or nnx_baseline to the ini file"
OPTIONS = {
    **{(option,): OF_WHICH.format(option) for option in (UPDATE, NEW_ONLY, "--nnx-baseline-any-stamp")},
    (f"--nnx-baseline={PEAKS}", UPDATE, NEW_ONLY): (
        f"options {UPDATE} and {NEW_ONLY}: the first replaces every entry, the second keeps them all: give one of them"
    ),
}


@pytest.mark.parametrize(
    "args, message", OPTIONS.items(), ids=lambda value: " ".join(value) if isinstance(value, tuple) else ""
)
def test_options_that_do_not_go_together(run_inner, args, message):
    result = run_inner(OK, *args)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines([f"ERROR: {message}"])


@pytest.mark.parametrize("args", [("--help",), ("--collect-only",), ("--markers",)], ids=" ".join)
def test_who_only_asks_needs_no_file(run, args):
    result = run(OK, *args)
    assert result.ret == 0
    assert "there is no file" not in result.stdout.str() + result.stderr.str()
