"""The memory baseline in whole runs: created, compared, updated, stale, of another stamp; never written by a run that failed."""

import os
import signal
import subprocess
import sys
import time

import pytest

from pytest_nnxcheck.core.settings import DEFAULTS
from pytest_nnxcheck.reporting import baseline_file
from pytest_nnxcheck.runner import strategies

PEAKS = "peaks.txt"
TITLE = "=+ nnx memory baseline =+"
OK = "@marked(max_examples=0)\ndef test_x(nnx_wrap): nnx_wrap(Model())(1)\n"
CHAINS = [nesting for nesting in strategies.sweep(DEFAULTS) if len(nesting) > 2]
GROWN = OK.replace("Model()", "Model(percent=110)")
UPDATE, NEW_ONLY = "--nnx-baseline-update", "--nnx-baseline-update-new-only"


@pytest.fixture
def peaks(pytester):
    return pytester.path / PEAKS


@pytest.fixture
def run(run_inner):
    """Run a suite against peaks.txt; a run in this process would inherit that warnings are errors."""

    def start(source, *args, **more):
        return run_inner(source, f"--nnx-baseline={PEAKS}", "-Wdefault", *args, **more)

    return start


def section(result):
    """The lines of our section of the summary."""
    lines = result.outlines
    start = next((n for n, line in enumerate(lines) if "= nnx memory baseline =" in line), None)
    if start is None:
        return []
    end = next(n for n, line in enumerate(lines[start + 1 :], start + 1) if line.startswith("="))
    return lines[start + 1 : end]


def edit(path, old, new):
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


# --- create, pass, grow, update ------------------------------------------------------------------------------------------


def test_created_then_passed(run, peaks):
    result = run(OK, UPDATE)
    result.assert_outcomes(passed=1)
    assert section(result) == ["peaks.txt is written, 18 entries: 18 new"]
    known = baseline_file.read(peaks, PEAKS)
    assert {nesting: entry.peak for (_, nesting), entry in known.entries.items()} == {
        "jit": 2000,
        "jit[functional]": 2000,
        "jit[closure]": 2000,
        "jit[jax_closure]": 2000,
        "jit > call_first": 3000,
        **{str(nesting): 1000 * (len(nesting) + 1) for nesting in CHAINS},
    }
    before = peaks.read_bytes()
    result = run(OK)
    result.assert_outcomes(passed=1)
    assert section(result) == ["peaks.txt: 18 nestings compared"]
    assert peaks.read_bytes() == before


def test_growth_beyond_the_tolerance_fails_and_says_what_grew(run, peaks):
    run(OK, UPDATE)
    before = peaks.read_bytes()
    result = run(GROWN)
    result.assert_outcomes(failed=1)
    head = result.outlines.index("nnx memory baseline exceeded                       test_inner.py::test_x")
    assert result.outlines[head + 1 : head + 6] == [
        "  nesting     jit                                    smallest of 18 that grew, 18 compared",
        "  peak        2200 B, was 2000 B: +200 B (+10.0 %), tolerance 5%",
        "  temporaries 1900 B, was 1700 B: +200 B (+11.8 %)",
        "  buffer      + 1900 B temporary uint8[1900] dot   model.py:7",
        "  buffer      - 1700 B temporary uint8[1700] dot",
    ]
    result.stdout.fnmatch_lines(
        [
            "  accept      pytest test_inner.py::test_x --nnx-baseline peaks.txt --nnx-baseline-update",
            "  replay      pytest test_inner.py::test_x --nnx-baseline peaks.txt --nnx-nesting jit",
            "FAILED test_inner.py::test_x - Failed: nnx memory baseline exceeded*",
        ]
    )
    assert section(result) == ["peaks.txt: 18 nestings compared, 18 grew by more than 5%"]
    assert peaks.read_bytes() == before
    run(GROWN, "--nnx-nesting=jit").assert_outcomes(failed=1)
    run(GROWN, "--nnx-memory-tolerance=10%").assert_outcomes(passed=1)
    run(OK.replace("Model()", "Model(percent=105)")).assert_outcomes(passed=1)
    run(OK.replace("Model()", "Model(percent=105)"), "--nnx-memory-tolerance=0%").assert_outcomes(failed=1)


def test_an_update_accepts_the_growth(run, peaks):
    run(OK, UPDATE)
    result = run(GROWN, UPDATE)
    result.assert_outcomes(passed=1)
    assert section(result) == ["peaks.txt is written, 18 entries: 18 changed"]
    run(GROWN).assert_outcomes(passed=1)
    result = run(OK)
    result.assert_outcomes(passed=1)
    assert section(result) == [
        "peaks.txt: 18 nestings compared",
        "18 nestings shrank by more than 5%: --nnx-baseline-update keeps the gain",
    ]


def test_the_ini_file_names_file_and_tolerance(run_inner, pytester):
    (pytester.path / "ci dir").mkdir()
    pytester.makeini("[pytest]\nnnx_baseline = ci dir/päks.txt\nnnx_memory_tolerance = 12%\n")
    result = run_inner(OK, UPDATE, "--rootdir=.")
    assert section(result) == ["ci dir/päks.txt is written, 18 entries: 18 new"]
    assert (pytester.path / "ci dir" / "päks.txt").exists()
    run_inner(GROWN).assert_outcomes(passed=1)
    result = run_inner(GROWN, "--nnx-memory-tolerance=9%")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        ["  accept      pytest test_inner.py::test_x --nnx-memory-tolerance 9% --nnx-baseline-update"]
    )


def test_what_broke_an_invariant_is_not_in_the_baseline(run, peaks):
    source = OK.replace("max_examples=0", "max_examples=0, expected_failures={'vmap': 'x'}").replace(
        "Model()", "Model(memory=has('jit', 'vmap'))"
    )
    run(source, UPDATE).assert_outcomes(passed=1)
    assert "jit > scan" in peaks.read_text()
    assert "vmap" not in peaks.read_text()
    # An entry whose nesting is expected to fail by now is neither compared nor stale.
    run(OK, UPDATE)
    result = run(source)
    result.assert_outcomes(passed=1)
    assert result.ret == 0
    assert section(result) == ["peaks.txt: 11 nestings compared"]


def test_an_expected_failure_of_the_user_is_no_growth(run, peaks):
    run(OK, UPDATE)
    before = peaks.read_bytes()
    result = run("@pytest.mark.xfail(strict=True)\n" + GROWN)
    result.assert_outcomes(xfailed=1)
    assert run("@pytest.mark.xfail\n" + OK, UPDATE).ret == 0
    assert peaks.read_bytes() == before
    more = GROWN.replace("max_examples=0", "max_examples=0, transforms='jit,scan,cond'")
    assert run("@pytest.mark.xfail\n" + more, NEW_ONLY).ret == 0
    assert peaks.read_bytes() == before, "what failed is not added"


# --- new, and stale ------------------------------------------------------------------------------------------------------


def test_what_is_new_passes_and_is_added_where_asked(run, peaks):
    run(OK, UPDATE)
    before = peaks.read_text()
    both = OK + OK.replace("test_x", "test_y")
    result = run(both)
    result.assert_outcomes(passed=2)
    assert section(result) == [
        "peaks.txt: 18 nestings compared",
        "18 nestings not in peaks.txt: --nnx-baseline-update-new-only adds them",
    ]
    result = run(GROWN + OK.replace("test_x", "test_y"), NEW_ONLY)
    result.assert_outcomes(failed=1, passed=1)
    assert section(result)[-1] == "peaks.txt is not written: 1 test failed"
    assert peaks.read_text() == before
    result = run(both, NEW_ONLY)
    assert section(result) == ["peaks.txt: 18 nestings compared", "peaks.txt is written, 36 entries: 18 new"]
    assert peaks.read_text() == before + before.partition("devices: 1\n")[2].replace("test_x", "test_y")


RENAMED = OK.replace("test_x", "test_new")
ERROR = "ERROR peaks.txt has stale entries, --nnx-baseline-update removes them:"
STALE = [
    ERROR,
    "  test_inner.py::test_x: there is no such test",
]


@pytest.mark.parametrize("workers", [[], pytest.param(["-n2"], marks=pytest.mark.full)])
def test_a_renamed_test_leaves_a_stale_entry(run, peaks, workers):
    run(OK, UPDATE)
    before = peaks.read_bytes()
    for extra in (workers, [NEW_ONLY, *workers]):
        result = run(RENAMED, *extra, subprocess=bool(workers))
        result.assert_outcomes(passed=1)
        assert result.ret == pytest.ExitCode.TESTS_FAILED
        assert [line for line in section(result) if line in STALE] == STALE
        assert peaks.read_bytes() == before
    assert section(run(RENAMED, NEW_ONLY))[-1] == "peaks.txt is not written: the run failed (exit status 1)"
    result = run(RENAMED, *workers, UPDATE, subprocess=bool(workers))
    assert result.ret == 0
    assert section(result) == ["peaks.txt is written, 18 entries: 18 new, 18 removed"]
    assert run(RENAMED).ret == 0


BOTH = RENAMED + OK.replace("test_x", "test_other")


@pytest.mark.parametrize(
    "args, told",
    [
        ((), True),
        (("test_inner.py",), True),
        (("--nnx-sweep=singles",), True),
        (("-k", "new or other"), False),
        (("-m", "nnx_invariants"), False),
        (("--deselect=test_inner.py::test_new",), False),
        (("test_inner.py::test_new",), False),
        (("--ignore=other",), False),
        (("--nnx-nesting=jit",), False),
        (("--collect-only",), False),
        (("other",), False),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else None,
)
def test_only_a_full_run_knows_that_a_test_is_gone(run, pytester, args, told):
    run(OK, UPDATE)
    pytester.mkdir("other").joinpath("test_there.py").write_text("def test_there(): pass\n")
    result = run(BOTH, *args)
    assert (ERROR in result.outlines) == told
    assert result.ret == (pytest.ExitCode.TESTS_FAILED if told else 0)


def test_what_the_ini_file_always_takes_out_is_no_partial_run(run, pytester):
    pytester.makeini("[pytest]\naddopts = -m 'not slow'\nmarkers = slow\n")
    source = OK + "@pytest.mark.slow\n" + OK.replace("test_x", "test_slow")
    run(source, UPDATE, "-m", "")
    result = run(source)
    assert result.ret == 0
    assert section(result) == ["peaks.txt: 18 nestings compared"]
    assert "test_inner.py::test_x: there is no such test" in run(source.replace("test_x", "test_z")).stdout.str()


def test_a_nesting_that_does_not_run_any_more_is_stale(run, peaks):
    run(OK, UPDATE)
    fewer = OK.replace("max_examples=0", "max_examples=0, transforms='jit,vmap'")
    result = run(fewer)
    result.assert_outcomes(passed=1)
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    assert section(result)[1:] == [
        "1 nesting not in peaks.txt: --nnx-baseline-update-new-only adds them",
        "ERROR peaks.txt has stale entries, --nnx-baseline-update removes them:",
        f"  test_inner.py::test_x: did not run under {', '.join(sorted(map(str, CHAINS)))}",
    ]
    # The command line asks for less, this once.
    assert run(OK, "--nnx-transforms=jit,vmap").ret == 0
    assert run(fewer, "--nnx-nesting=jit").ret == 0
    assert run(fewer, UPDATE).ret == 0
    assert "jit > scan" not in peaks.read_text()
    assert run(fewer).ret == 0


def test_a_test_that_is_there_is_not_stale_whatever_became_of_it(run, pytester):
    run(OK, UPDATE)
    for source in (
        "@pytest.mark.skip\n" + OK,
        "@pytest.mark.xfail\n" + GROWN,
        "pytest.skip('all', allow_module_level=True)\n" + OK,
    ):
        result = run(source)
        assert ERROR not in result.stdout.str()
        assert result.ret in {0, pytest.ExitCode.NO_TESTS_COLLECTED}
        assert "test_inner.py::test_x | jit | 2000 B" in (pytester.path / PEAKS).read_text()
    assert ERROR not in run(OK.replace("nnx_wrap(Model", "raise ValueError(Model")).stdout.str()
    unmarked = run("def test_x(): pass\n")
    assert unmarked.ret == pytest.ExitCode.TESTS_FAILED
    assert section(unmarked)[-2:] == STALE


def test_nothing_is_stale_where_the_collection_broke(run, pytester):
    run(OK, UPDATE)
    before = (pytester.path / PEAKS).read_bytes()
    pytester.makepyfile(test_broken="import no_such_module\n")
    assert ERROR not in run(RENAMED, "--continue-on-collection-errors").stdout.str()
    for args in ([], ["--continue-on-collection-errors"]):
        result = run(GROWN, UPDATE, *args)
        assert section(result) == ["peaks.txt is not written: not every test could be collected"]
        assert result.ret != 0
    assert (pytester.path / PEAKS).read_bytes() == before


# --- partial updates, and runs that must not write -----------------------------------------------------------------------


def test_a_partial_update_keeps_the_rest(run, peaks):
    run(BOTH, UPDATE)
    changed = BOTH.replace("Model()", "Model(percent=120)")
    result = run(changed, UPDATE, "-k", "other")
    assert section(result) == ["peaks.txt is written, 36 entries: 18 changed"]
    assert "test_new | jit | 2000 B" in peaks.read_text()
    result = run(changed, UPDATE, "--nnx-nesting=jit", "-k", "new")
    assert section(result) == ["peaks.txt is written, 36 entries: 1 changed"]
    assert "test_new | jit | 2400 B" in peaks.read_text()
    assert "test_new | jit > call_first | 3000 B" in peaks.read_text()


FAILS = {
    "def test_bad(): assert 0\n": "1 test failed",
    "@pytest.fixture\ndef f(): raise ValueError\ndef test_bad(f): pass\n": "1 test failed",
    "@pytest.fixture\ndef f(): yield; raise ValueError\ndef test_bad(f): pass\n": "1 test failed",
    "def test_bad(): raise KeyboardInterrupt\n": "the run was interrupted",
    "def test_bad(): pytest.exit('enough', returncode=0)\n": "the run was interrupted",
}


@pytest.mark.parametrize("bad, reason", FAILS.items(), ids=range(len(FAILS)))
def test_a_run_that_failed_or_was_interrupted_writes_nothing(run, peaks, bad, reason):
    run(OK, UPDATE)
    before = peaks.read_bytes()
    result = run(GROWN + bad, UPDATE, subprocess="interrupted" in reason)
    assert section(result) == [f"peaks.txt is not written: {reason}"]
    assert peaks.read_bytes() == before
    if "exit" not in bad:
        assert result.ret != 0


def test_a_run_that_another_plugin_fails_writes_nothing(run, peaks):
    fails = "import pytest\ndef pytest_sessionfinish(session): session.exitstatus = 7\n"
    result = run(OK, UPDATE, conftest=fails)
    assert section(result) == ["peaks.txt is not written: the run failed (exit status 7)"]
    assert not peaks.exists()


@pytest.mark.full
def test_a_worker_that_crashed_writes_nothing(run, peaks):
    result = run(OK + "def test_bad():\n    import os\n    os._exit(3)\n", UPDATE, "-n2", subprocess=True)
    assert section(result) == ["peaks.txt is not written: 1 test failed"]
    assert not peaks.exists()


def test_a_run_with_nothing_to_write(run, peaks):
    result = run("def test_plain(): pass\n", UPDATE)
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    assert section(result) == ["peaks.txt is not written: no test that uses nnx_wrap passed"]
    assert run(OK, UPDATE, "--collect-only").ret == 0
    assert not peaks.exists()


def test_kill_in_the_middle_loses_nothing(run, pytester, peaks, inner_args):
    run(OK, UPDATE)
    before = peaks.read_bytes()
    hangs = GROWN + "def test_z():\n    import pathlib, time\n    pathlib.Path('there').touch()\n    time.sleep(600)\n"
    run(hangs, "--collect-only")
    command = [sys.executable, "-m", "pytest", *inner_args, f"--nnx-baseline={PEAKS}", UPDATE]
    with subprocess.Popen(command, cwd=pytester.path, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        wait_for(pytester.path / "there", process)
        process.send_signal(signal.SIGKILL)
    assert process.returncode == -signal.SIGKILL
    assert peaks.read_bytes() == before
    assert not list(pytester.path.glob("*.tmp"))
    run(OK).assert_outcomes(passed=1)


def wait_for(path, process):
    for _ in range(1200):
        if path.exists():
            return
        assert process.poll() is None, "the run ended before it was killed"
        time.sleep(0.1)
    process.kill()
    pytest.fail("the run never came to its last test")


# --- several processes ---------------------------------------------------------------------------------------------------

MANY = """
import os
@marked(max_examples=6, transforms="jit,scan")
@pytest.mark.parametrize("case", ["a | b", "日本", "two\\nlines", "x"])
@pytest.mark.xdist_group("ab")
def test_x(nnx_wrap, case): nnx_wrap(Model(percent=int(os.environ.get("PERCENT", "100")) + len(case)))(1)
@marked(max_examples=2, sweep="singles")
def test_y(nnx_wrap): nnx_wrap(Model(percent=int(os.environ.get("PERCENT", "100"))))(1)
"""


def test_two_workers_write_one_whole_file(run, peaks, monkeypatch):
    run(MANY, UPDATE)
    alone, count = peaks.read_bytes(), len(read(peaks).entries)
    assert any(entry.drawn for entry in read(peaks).entries.values())
    peaks.unlink()
    # Not by --dist=loadgroup: it adds to the node ids of older pytest, from which hypothesis takes its seed.
    result = run(MANY, UPDATE, "-n2", subprocess=True)
    assert result.ret == 0
    assert section(result) == [f"peaks.txt is written, {count} entries: {count} new"]
    assert peaks.read_bytes() == alone
    monkeypatch.setenv("PERCENT", "110")
    result = run(MANY, "-n2", subprocess=True)
    result.assert_outcomes(failed=5)
    assert section(result) == [f"peaks.txt: {count} nestings compared, {count} grew by more than 5%"]


def read(path):
    return baseline_file.read(path, PEAKS)


# --- the stamp -----------------------------------------------------------------------------------------------------------


def jax_version():
    import jax

    return jax.__version__


def test_another_stamp_is_compared_only_where_asked(run, peaks):
    run(OK, UPDATE)
    edit(peaks, f"# jax: {jax_version()}\n", "# jax: 0.1.2\n")
    before = peaks.read_bytes()
    differs = f"peaks.txt is of another stamp, jax 0.1.2 -> {jax_version()}; "
    result = run(GROWN)
    result.assert_outcomes(passed=1)
    assert section(result) == [
        differs
        + "nothing was compared: --nnx-baseline-any-stamp compares all the same, --nnx-baseline-update measures all anew"
    ]
    assert run(RENAMED).ret == 0
    result = run(GROWN, "--nnx-baseline-any-stamp")
    result.assert_outcomes(failed=1)
    assert section(result) == [
        differs + "compared all the same (--nnx-baseline-any-stamp)",
        "peaks.txt: 18 nestings compared, 18 grew by more than 5%",
    ]
    result = run(BOTH, NEW_ONLY)
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    assert section(result)[-1].startswith("peaks.txt is not written: its entries are of another stamp, jax 0.1.2 -> ")
    assert peaks.read_bytes() == before
    assert section(run(GROWN, UPDATE)) == ["peaks.txt is written, 18 entries: 18 changed"]
    assert f"# jax: {jax_version()}\n" in peaks.read_text()


def test_a_partial_update_under_another_stamp_is_refused(run, peaks):
    run(BOTH, UPDATE)
    edit(peaks, f"# jax: {jax_version()}\n", "# jax: 0.1.2\n")
    before = peaks.read_bytes()
    result = run(BOTH, UPDATE, "-k", "other")
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    (line,) = section(result)
    assert line == (
        f"peaks.txt is not written: its stamp would change, jax 0.1.2 -> {jax_version()}, and 1 test in it did not run"
        " (test_inner.py::test_new): run all of them"
    )
    assert peaks.read_bytes() == before


def test_simulated_devices_are_in_the_stamp(run, peaks):
    run(OK, UPDATE, "--nnx-devices=3", subprocess=True)
    assert "# devices: 3\n" in peaks.read_text()
    assert "is of another stamp, devices 3 -> 1; nothing was compared" in section(run(OK))[0]


# --- draws ---------------------------------------------------------------------------------------------------------------

DRAWS = """
import os
@marked(max_examples=6, transforms="jit")
def test_x(nnx_wrap): nnx_wrap(Model(percent=int(os.environ.get("DRAWN", "100")) if len(RUNS) >= 6 else 100))(1)
"""


def test_another_edition_of_the_test_draws_others_and_none_is_stale(run, peaks):
    run(DRAWS, UPDATE)
    entries = read(peaks).entries
    edited = DRAWS.replace("(1)\n", "(1 + 1)\n")
    result = run(edited)
    assert result.ret == 0
    _, new = section(result)
    assert new.endswith(" not in peaks.txt: --nnx-baseline-update-new-only adds them")
    assert run(edited, UPDATE).ret == 0
    assert read(peaks).entries != entries
    swept = {key for key, entry in entries.items() if not entry.drawn}
    assert swept == {key for key, entry in read(peaks).entries.items() if not entry.drawn}


def test_drawn_nestings_are_compared(run, peaks, monkeypatch):
    run(DRAWS, UPDATE)
    monkeypatch.setenv("DRAWN", "110")
    result = run(DRAWS)
    result.assert_outcomes(failed=1)
    drawn = sum(entry.drawn for entry in read(peaks).entries.values())
    assert section(result) == [f"peaks.txt: {6 + drawn - 1} nestings compared, {drawn} grew by more than 5%"]


def test_draws_that_vary_are_neither_kept_nor_called_new(run, peaks):
    run(DRAWS, UPDATE, "--hypothesis-seed=1")
    assert len(read(peaks).entries) == 5
    assert not any(entry.drawn for entry in read(peaks).entries.values())
    result = run(DRAWS, "--hypothesis-seed=2")
    assert section(result) == ["peaks.txt: 5 nestings compared"]
    run(DRAWS, UPDATE)
    assert any(entry.drawn for entry in read(peaks).entries.values())
    assert run(DRAWS, "--hypothesis-seed=2").ret == 0


GIVEN = """
from hypothesis import given, strategies as st
@given(size=st.integers(100, 900))
@marked(max_examples=20, transforms='jit,scan')
def test_x(nnx_wrap, size): nnx_wrap(Model(percent=size))(1)
"""


def test_with_arguments_of_the_users_only_the_sweep_is_kept(run, peaks):
    run(GIVEN, UPDATE)
    entries = read(peaks).entries
    # The sweep runs with the simplest arguments; what hypothesis draws afterwards is larger.
    assert {nesting: entry.peak for (_, nesting), entry in entries.items()} == {
        **{f"jit{style}": 2000 for style in ("", "[functional]", "[closure]", "[jax_closure]")},
        "jit > call_first": 3000,
        "jit > scan > scan": 4000,
    }
    result = run(GIVEN, "--hypothesis-seed=5")
    assert result.ret == 0
    assert section(result) == ["peaks.txt: 6 nestings compared"]
    run(GIVEN.replace("100, 900", "107, 900")).assert_outcomes(failed=1)


def test_of_several_examples_the_first_is_kept(run, peaks):
    source = GIVEN.replace("@given", "@example(size=150)\n@example(size=800)\n@given").replace(
        "given, s", "given, example, s"
    )
    run(source.replace("jit,scan", "jit"), UPDATE)
    assert {entry.peak for entry in read(peaks).entries.values()} == {3000, 4500}


# --- hostile names, bad files --------------------------------------------------------------------------------------------

HOSTILE = r"""
IDS = ["a | b", "tab\there", "two\nlines", "quote\"'", "[x]", "日本", "semi;colon", " # ", "<<<<<<< HEAD", "back\\slash", "::x"]
@marked(max_examples=0, sweep="probes", transforms="jit", styles="argument,closure")
@pytest.mark.parametrize("case", IDS, ids=IDS)
def test_x(nnx_wrap, case): nnx_wrap(Model())(1)
"""


@pytest.mark.parametrize("escaped", [True, False])
def test_hostile_ids_round_trip(run, peaks, escaped):
    option = "disable_test_id_escaping_and_forfeit_all_rights_to_community_support"
    args = [] if escaped else [f"--override-ini={option}=true"]
    result = run(HOSTILE, UPDATE, *args)
    assert result.ret == 0
    assert len(read(peaks).entries) == 11
    assert len(peaks.read_text(encoding="utf-8").splitlines()) == 18
    result = run(HOSTILE, *args)
    assert result.ret == 0
    assert section(result) == ["peaks.txt: 11 nestings compared"]


def test_paths_with_spaces_and_accents(run_inner, pytester):
    folder = pytester.mkdir("mödels of mine")
    run_inner(OK)
    (pytester.path / "test_inner.py").rename(folder / "test_ä b.py")
    args = ("--nnx-baseline=mödels of mine/the päks.txt", "-Wdefault")
    for extra in ([UPDATE], []):
        result = pytester.runpytest("-p", "no:randomly", *args, *extra, *plugin_args(pytester))
        result.assert_outcomes(passed=1)
    assert "mödels of mine/test_ä b.py::test_x | jit | 2000 B" in (folder / "the päks.txt").read_text(encoding="utf-8")


def plugin_args(pytester):
    from importlib.metadata import entry_points

    return [] if "nnxcheck" in entry_points(group="pytest11").names else ["-p", "pytest_nnxcheck.plugin.hooks"]


USAGE = {
    "foreign": (
        "[project]\nname = 'x'\n",
        (),
        "option --nnx-baseline: peaks.txt:1: this is no baseline of pytest-nnxcheck, it starts with '[[]project]': name another file, or *",
    ),
    "foreign, to be updated": (
        "[project]\n",
        (UPDATE,),
        "option --nnx-baseline: peaks.txt:1: this is no baseline of *",
    ),
    "empty": (
        "",
        (),
        "option --nnx-baseline: peaks.txt:1: this is no baseline of pytest-nnxcheck, it starts with an empty line: *",
    ),
    "conflict": (
        "<<<<<<< HEAD\n",
        (),
        "option --nnx-baseline: peaks.txt:1: a merge conflict, '<<<<<<< HEAD': take either side, *",
    ),
    "missing": (
        None,
        (),
        "option --nnx-baseline: there is no file peaks.txt: write it with --nnx-baseline-update, from a run of all tests",
    ),
    "both": (
        None,
        (UPDATE, NEW_ONLY),
        "options --nnx-baseline-update and --nnx-baseline-update-new-only: *give one of them",
    ),
    "tolerance": (
        None,
        ("--nnx-memory-tolerance=5",),
        "option --nnx-memory-tolerance: memory_tolerance='5' is not a percentage, *",
    ),
}


@pytest.mark.parametrize("text, args, message", USAGE.values(), ids=USAGE)
def test_a_bad_file_or_option_stops_the_run_before_it_starts(run, peaks, text, args, message):
    if text is not None:
        peaks.write_text(text)
    workers = "-n2" if text == "" else "-n0"
    result = run("raise SystemExit('collected')\n", workers, *args, subprocess=workers == "-n2")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines([f"ERROR: {message}"])
    assert "Traceback" not in result.stderr.str() + result.stdout.str()
    assert peaks.exists() == (text is not None)
    assert text is None or peaks.read_text() == text


@pytest.mark.parametrize("args", [("--help",), ("--collect-only",), ("--markers",)], ids=" ".join)
def test_who_only_asks_needs_no_file(run, peaks, args):
    result = run(OK, *args)
    assert result.ret == 0
    assert "there is no file" not in result.stdout.str() + result.stderr.str()


@pytest.mark.parametrize("option", [UPDATE, NEW_ONLY, "--nnx-baseline-any-stamp"])
def test_an_option_of_no_baseline(run_inner, option):
    result = run_inner(OK, option)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(
        [f"ERROR: option {option}: of which file? Add --nnx-baseline PATH, or nnx_baseline to the ini file"]
    )


@pytest.mark.parametrize(
    "path, reason",
    [
        ("no/peaks.txt", "No such file or directory"),
        ("conftest.py/peaks.txt", "Not a directory"),
        ("/proc/peaks.txt", "*"),
    ],
)
def test_a_place_where_nothing_can_be_written_is_told_before_the_run(run_inner, path, reason):
    result = run_inner("raise SystemExit('collected')\n", f"--nnx-baseline={path}", UPDATE)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines([f"ERROR: option --nnx-baseline: cannot * {path}: {reason}"])
    assert "Traceback" not in result.stderr.str()


@pytest.mark.skipif(os.geteuid() == 0, reason="permissions do not bind root")
def test_a_read_only_folder(run_inner, pytester):
    folder = pytester.mkdir("locked")
    folder.chmod(0o555)
    result = run_inner(OK, "--nnx-baseline=locked/peaks.txt", UPDATE)
    result.stderr.fnmatch_lines(["ERROR: option --nnx-baseline: cannot write locked/peaks.txt: Permission denied"])


def test_a_place_that_is_lost_during_the_run_loses_no_result(run_inner, pytester):
    pytester.mkdir("there")
    source = OK + "def test_y():\n    import os\n    os.rename('there', 'gone')\n"
    result = run_inner(source, "--nnx-baseline=there/peaks.txt", UPDATE)
    result.assert_outcomes(passed=2)
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    assert section(result) == ["there/peaks.txt is not written: No such file or directory, what was there is as it was"]


def test_a_file_that_changes_during_the_run_is_taken_up(run, peaks):
    run(BOTH, UPDATE)
    source = (
        BOTH.replace("Model()", "Model(percent=120)", 1)
        + f"def test_y():\n    import pathlib\n    p = pathlib.Path({str(peaks)!r})\n    p.write_text(p.read_text().replace('test_other | jit | 2000 B = 200 arguments', 'test_other | jit | 2001 B = 201 arguments'))\n"
    )
    run(source, UPDATE, "-k", "new or test_y")
    assert "test_other | jit | 2001 B = 201 arguments" in peaks.read_text()
    assert "test_new | jit | 2400 B" in peaks.read_text()


# --- the real engine -----------------------------------------------------------------------------------------------------

REAL = """
import jax.numpy as jnp, pytest
from flax import nnx
WIDTH = {width}
@pytest.mark.nnx_invariants(max_examples=2, transforms="jit,scan", styles="argument")
def test_mlp(nnx_wrap):
    mlp = nnx.Sequential(nnx.Linear(64, WIDTH, rngs=nnx.Rngs(0)), nnx.relu, nnx.Linear(WIDTH, 64, rngs=nnx.Rngs(1)))
    assert nnx_wrap(mlp)(jnp.ones((8, 64))).shape == (8, 64)
"""


def test_a_real_model_that_grows_by_a_tenth(pytester, inner_args):
    def start(width, *args):
        pytester.makepyfile(test_real=REAL.replace("{width}", str(width)))
        return pytester.runpytest_inprocess(*inner_args, f"--nnx-baseline={PEAKS}", "-Wdefault", *args)

    start(64, UPDATE).assert_outcomes(passed=1)
    text = (pytester.path / PEAKS).read_text()
    known = read(pytester.path / PEAKS)
    assert known.entries["test_real.py::test_mlp", "jit"].split.arguments >= 2 * 64 * 64 * 4
    assert known.entries["test_real.py::test_mlp", "jit"].buffers
    result = start(64)
    result.assert_outcomes(passed=1)
    assert result.ret == 0
    start(64, UPDATE)
    assert (pytester.path / PEAKS).read_text() == text, "the same figures in every run"
    result = start(72)
    result.assert_outcomes(failed=1)
    result.stdout.re_match_lines(
        [
            r"nnx memory baseline exceeded +test_real.py::test_mlp",
            r"  nesting     jit +smallest of \d+ that grew, \d+ compared",
            r"  peak        \d+ B, was \d+ B: \+\d+ B \(\+1\d\.\d %\), tolerance 5%",
            r"  arguments   \d+ B, was \d+ B: \+\d+ B",
            r"  buffer      \+ .*float32\[8,72\]",
        ]
    )
