"""The memory baseline in whole runs: created, compared, updated, stale, of another stamp; never written by a run that failed.

What is decided is tested in tests/unit/reporting/test_baseline_policy.py, a run with workers of xdist in test_workers.py.
"""

import json

import pytest

from pytest_nnxcheck.core.settings import DEFAULTS, TABLE, merge, names, parse_given
from pytest_nnxcheck.plugin import progress, selection
from pytest_nnxcheck.reporting import baseline_file
from pytest_nnxcheck.runner import strategies

PEAKS = "peaks.jsonl"
OK = "@marked(max_examples=0)\ndef test_x(nnx_wrap): nnx_wrap(Model())(1)\n"
CHAINS = [nesting for nesting in strategies.sweep(DEFAULTS) if len(nesting) > 2]
GROWN = OK.replace("Model()", "Model(percent=110)")
RENAMED = OK.replace("test_x", "test_new")
BOTH = RENAMED + OK.replace("test_x", "test_other")
UPDATE, NEW_ONLY = "--nnx-baseline-update", "--nnx-baseline-update-new-only"


@pytest.fixture
def peaks(pytester):
    return pytester.path / PEAKS


@pytest.fixture
def run(run_inner):
    """Run a suite against peaks.jsonl; a run in this process would inherit that warnings are errors."""

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


def entries(path):
    return baseline_file.read(path, PEAKS).entries


def sizes(path):
    return {nesting: entry.peak for (_, nesting), entry in entries(path).items()}


def edit(path, old, new):
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


# --- create, pass, grow, update ------------------------------------------------------------------------------------------


def test_created_then_passed_then_grown_then_accepted(run, peaks):
    result = run(OK, UPDATE)
    result.assert_outcomes(passed=1)
    assert section(result) == [f"{PEAKS} is written, 18 entries: 18 new"]
    assert sizes(peaks) == {
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
    assert section(result) == [f"{PEAKS}: 18 nestings compared"]
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
            f"  accept      pytest test_inner.py::test_x --nnx-baseline {PEAKS} --nnx-baseline-update",
            f"  replay      pytest test_inner.py::test_x --nnx-baseline {PEAKS} --nnx-nesting jit",
            "FAILED test_inner.py::test_x - Failed: nnx memory baseline exceeded*",
        ]
    )
    assert section(result) == [f"{PEAKS}: 18 nestings compared, 18 grew by more than 5%"]
    run(GROWN, "--nnx-nesting=jit").assert_outcomes(failed=1)
    run(GROWN, "--nnx-memory-tolerance=10%").assert_outcomes(passed=1)
    assert peaks.read_bytes() == before
    assert section(run(GROWN, UPDATE)) == [f"{PEAKS} is written, 18 entries: 18 changed"]
    run(GROWN).assert_outcomes(passed=1)
    assert "18 nestings shrank by more than 5%: --nnx-baseline-update keeps the gain" in section(run(OK))


def test_the_ini_file_names_file_and_tolerance(run_inner, pytester):
    (pytester.path / "ci dir").mkdir()
    pytester.makeini("[pytest]\nnnx_baseline = ci dir/päks.jsonl\nnnx_memory_tolerance = 12%\n")
    result = run_inner(OK, UPDATE, "--rootdir=.")
    assert section(result) == ["ci dir/päks.jsonl is written, 18 entries: 18 new"]
    assert (pytester.path / "ci dir" / "päks.jsonl").exists()
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
    assert "jit > remat > scan > eval_shape" in peaks.read_text()
    assert "vmap" not in peaks.read_text()
    # An entry whose nesting is expected to fail by now is neither compared nor stale.
    run(OK, UPDATE)
    result = run(source)
    assert result.ret == 0
    assert section(result) == [f"{PEAKS}: 12 nestings compared"]


def test_an_expected_failure_of_the_user_is_no_growth(run, peaks):
    run(OK, UPDATE)
    before = peaks.read_bytes()
    run("@pytest.mark.xfail(strict=True)\n" + GROWN).assert_outcomes(xfailed=1)
    assert run("@pytest.mark.xfail\n" + OK, UPDATE).ret == 0
    more = GROWN.replace("max_examples=0", "max_examples=0, transforms='jit,scan,cond'")
    assert run("@pytest.mark.xfail\n" + more, NEW_ONLY).ret == 0
    assert peaks.read_bytes() == before, "what failed is not added"


def test_what_is_new_passes_and_is_added_where_asked(run, peaks):
    run(OK, UPDATE)
    before = peaks.read_text()
    more = OK.replace("test_x", "test_y")
    compared = f"{PEAKS}: 18 nestings compared"
    result = run(OK + more)
    result.assert_outcomes(passed=2)
    assert section(result) == [compared, f"18 nestings not in {PEAKS}: --nnx-baseline-update-new-only adds them"]
    result = run(GROWN + more, NEW_ONLY)
    result.assert_outcomes(failed=1, passed=1)
    assert section(result)[-1] == f"{PEAKS} is not written: 1 test failed"
    assert peaks.read_text() == before
    assert section(run(OK + more, NEW_ONLY)) == [compared, f"{PEAKS} is written, 36 entries: 18 new"]
    assert peaks.read_text() == before + before.partition("\n")[2].replace("test_x", "test_y")


# --- stale ---------------------------------------------------------------------------------------------------------------

ERROR = f"ERROR {PEAKS} has stale entries, --nnx-baseline-update removes them:"
STALE = [ERROR, "  test_inner.py::test_x: there is no such test"]


def test_a_renamed_test_leaves_a_stale_entry(run, peaks):
    run(OK, UPDATE)
    before = peaks.read_bytes()
    for args in ([], [NEW_ONLY]):
        result = run(RENAMED, *args)
        result.assert_outcomes(passed=1)
        assert result.ret == pytest.ExitCode.TESTS_FAILED
        assert [line for line in section(result) if line in STALE] == STALE
        assert peaks.read_bytes() == before
    assert section(result)[-1].startswith(f"{PEAKS} is not written: it has stale entries")
    for args in (["-k", "new"], ["--nnx-nesting=jit"], ["--collect-only"]):
        assert ERROR not in run(RENAMED, *args).outlines
    result = run(RENAMED, UPDATE)
    assert section(result) == [f"{PEAKS} is written, 18 entries: 18 new, 18 removed"]
    assert run(RENAMED).ret == 0


@pytest.mark.parametrize(
    "args, narrowed, covered",
    [
        ((), False, True),
        (("test_inner.py",), False, True),
        (("-k", "new or other"), True, True),
        (("-m", "nnx_invariants"), True, True),
        (("-m", "not slow"), False, True),  # which the ini file always takes out
        (("--deselect=test_inner.py::test_new",), True, True),
        (("test_inner.py::test_new",), False, False),
        (("--ignore=other",), False, False),
        (("--lf",), False, False),
        (("other",), False, False),
    ],
)
def test_what_a_command_line_leaves_out(pytester, inner_args, args, narrowed, covered):
    pytester.makeini("[pytest]\naddopts = -m 'not slow'\nmarkers = slow\n")
    pytester.makepyfile(test_inner="")
    pytester.mkdir("other")
    config = pytester.parseconfig(*inner_args, *args)
    assert selection.narrowed(config) == narrowed
    assert selection.Selection.of(config).covers("test_inner.py") == covered


def test_a_nesting_that_does_not_run_any_more_is_stale(run, peaks):
    run(OK, UPDATE)
    fewer = OK.replace("max_examples=0", "max_examples=0, transforms='jit,vmap'")
    result = run(fewer)
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    assert section(result)[2:] == [
        ERROR,
        f"  test_inner.py::test_x: did not run under {', '.join(sorted(map(str, CHAINS)))}",
    ]
    # The command line asks for less, this once.
    assert run(OK, "--nnx-transforms=jit,vmap").ret == 0
    assert run(fewer, "--nnx-nesting=jit").ret == 0
    assert run(fewer, UPDATE).ret == 0
    assert "jit > scan" not in peaks.read_text()
    assert run(fewer).ret == 0


OTHERWISE = {
    "invariants": "memory",
    "transforms": "jit,vmap",
    "styles": "argument",
    "modes": "tree",
    "max_depth": 2,
    "effort": "quick",
    "max_examples": 0,
    "sweep": "singles",
    "shortcuts": "off",
    "all": "on",
    "memory_budget": "2x",
    "memory_advice": "fail",
    "donate": "none",
    "on_rejection": "fail",
    "devices": 2,
    "on_too_few_devices": "fail",
    "expected_failures": {"jit": "known"},
    "nesting": "jit",
}
"""Each setting of a check, otherwise than by default."""


@pytest.mark.parametrize("name", names("check"))
def test_a_setting_narrows_a_run_that_leaves_out_nestings_by_it(name):
    usual, count = progress.planned(DEFAULTS)
    planned, others = progress.planned(merge(parse_given({name: OTHERWISE[name]}, str)))
    assert TABLE[name].narrows == (others < count or not {*usual} <= {*planned})


def test_a_test_that_is_there_is_not_stale_whatever_became_of_it(run, peaks):
    run(OK, UPDATE)
    for source, status in {
        "@pytest.mark.skip\n" + OK: 0,
        "@pytest.mark.xfail\n" + GROWN: 0,
        "pytest.skip('all', allow_module_level=True)\n" + OK: pytest.ExitCode.NO_TESTS_COLLECTED,
        OK.replace("nnx_wrap(Model", "raise ValueError(Model"): 1,
    }.items():
        result = run(source)
        assert ERROR not in result.outlines
        assert result.ret == status
    assert section(run("def test_x(): pass\n"))[-2:] == STALE


# --- partial updates, and runs that must not write -----------------------------------------------------------------------


def test_a_partial_update_keeps_the_rest_and_what_the_file_is_by_now(run, peaks):
    run(BOTH, UPDATE)
    source = BOTH.replace("Model()", "Model(percent=120)", 1)
    source += f"def test_y():\n    import pathlib\n    p = pathlib.Path({str(peaks)!r})\n    p.write_text(p.read_text().replace('3000', '3001').replace('2700', '2701').replace('2700', '2701'))\n"
    result = run(source, UPDATE, "--nnx-nesting=jit", "-k", "new or test_y")
    assert section(result) == [f"{PEAKS} is written, 36 entries: 1 changed"]
    peak = {(test[-5:], nesting): entry.peak for (test, nesting), entry in entries(peaks).items()}
    assert [peak["t_new", "jit"], peak["other", "jit"]] == [2400, 2000]
    assert [peak["t_new", "jit > call_first"], peak["other", "jit > call_first"]] == [3001, 3001]


FAILS = {
    "def test_bad(): assert 0\n": "1 test failed",
    "@pytest.fixture\ndef f(): raise ValueError\ndef test_bad(f): pass\n": "1 test failed",
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


def test_a_run_with_nothing_to_write(run, peaks):
    result = run("def test_plain(): pass\n", UPDATE)
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    assert section(result) == [f"{PEAKS} is not written: no test that uses nnx_wrap passed"]
    assert run(OK, UPDATE, "--collect-only").ret == 0
    assert not peaks.exists()


def test_a_place_that_is_lost_during_the_run_loses_no_result(run_inner, pytester):
    pytester.mkdir("there")
    source = OK + "def test_y():\n    import os\n    os.rename('there', 'gone')\n"
    result = run_inner(source, f"--nnx-baseline=there/{PEAKS}", UPDATE)
    result.assert_outcomes(passed=2)
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    assert section(result) == [f"there/{PEAKS} is not written: No such file or directory, what was there is as it was"]


# --- the stamp -----------------------------------------------------------------------------------------------------------


def test_another_stamp_is_compared_only_where_asked(run, peaks):
    import jax

    run(OK, UPDATE)
    edit(peaks, f'"jax": "{jax.__version__}"', '"jax": "0.1.2"')
    before = peaks.read_bytes()
    differs = f"{PEAKS} is of another stamp, jax 0.1.2 -> {jax.__version__}; "
    result = run(GROWN)
    result.assert_outcomes(passed=1)
    assert [line.partition("nothing")[0] for line in section(result)] == [differs]
    assert run(RENAMED).ret == 0
    result = run(GROWN, "--nnx-baseline-any-stamp")
    result.assert_outcomes(failed=1)
    assert section(result) == [
        differs + "compared all the same (--nnx-baseline-any-stamp)",
        f"{PEAKS}: 18 nestings compared, 18 grew by more than 5%",
    ]
    result = run(BOTH, NEW_ONLY)
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    assert section(result)[-1].startswith(f"{PEAKS} is not written: its entries are of another stamp, jax 0.1.2 -> ")
    assert peaks.read_bytes() == before
    assert section(run(GROWN, UPDATE)) == [f"{PEAKS} is written, 18 entries: 18 changed"]
    assert json.loads(peaks.read_text().splitlines()[0])["jax"] == jax.__version__


# --- draws ---------------------------------------------------------------------------------------------------------------

DRAWS = """
import os
@marked(max_examples=6, transforms="jit")
def test_x(nnx_wrap): nnx_wrap(Model(percent=int(os.environ.get("DRAWN", "100")) if len(RUNS) >= 6 else 100))(1)
"""


def test_drawn_nestings_are_compared_and_another_edition_draws_others(run, peaks, monkeypatch):
    run(DRAWS, UPDATE)
    before = entries(peaks)
    drawn = {key for key, entry in before.items() if entry.drawn}
    assert drawn
    monkeypatch.setenv("DRAWN", "110")
    result = run(DRAWS)
    result.assert_outcomes(failed=1)
    assert section(result) == [f"{PEAKS}: {len(before)} nestings compared, {len(drawn)} grew by more than 5%"]
    monkeypatch.delenv("DRAWN")
    edited = DRAWS.replace("(1)\n", "(1 + 1)\n")
    result = run(edited)
    assert result.ret == 0, "none is stale"
    assert section(result)[1].endswith(f" not in {PEAKS}: --nnx-baseline-update-new-only adds them")
    assert run(edited, UPDATE).ret == 0
    assert entries(peaks) != before
    assert before.keys() - drawn == {key for key, entry in entries(peaks).items() if not entry.drawn}


def test_draws_that_vary_are_neither_kept_nor_called_new(run, peaks):
    run(DRAWS, UPDATE, "--hypothesis-seed=1")
    assert [entry.drawn for entry in entries(peaks).values()] == [False] * 5
    result = run(DRAWS, "--hypothesis-seed=2")
    assert section(result) == [f"{PEAKS}: 5 nestings compared"]
    run(DRAWS, UPDATE)
    assert any(entry.drawn for entry in entries(peaks).values())
    assert run(DRAWS, "--hypothesis-seed=2").ret == 0


GIVEN = """
from hypothesis import example, given, strategies as st
@given(size=st.integers(100, 900))
@marked(max_examples=20, transforms='jit,scan')
def test_x(nnx_wrap, size): nnx_wrap(Model(percent=size))(1)
"""


def test_with_arguments_of_the_users_only_the_sweep_is_kept(run, peaks):
    run(GIVEN, UPDATE)
    # The sweep runs with the simplest arguments; what hypothesis draws afterwards is larger.
    assert sizes(peaks) == {
        **{f"jit{style}": 2000 for style in ("", "[functional]", "[closure]", "[jax_closure]")},
        "jit > call_first": 3000,
        "jit > scan > scan": 4000,
    }
    result = run(GIVEN, "--hypothesis-seed=5")
    assert result.ret == 0
    assert section(result) == [f"{PEAKS}: 6 nestings compared"]
    run(GIVEN.replace("100, 900", "107, 900")).assert_outcomes(failed=1)
    examples = GIVEN.replace("@given", "@example(size=150)\n@example(size=800)\n@given").replace("jit,scan", "jit")
    run(examples, UPDATE)
    assert {*sizes(peaks).values()} == {3000, 4500}, "of several examples the first is kept"


# --- hostile names, bad files --------------------------------------------------------------------------------------------

HOSTILE = r"""
IDS = ["a | b", "tab\there", "two\nlines", "quote\"'", "[x]", "日本", " # ", "<<<<<<< HEAD", "back\\slash", "::x", "\x1b[31m"]
@marked(max_examples=0, sweep="probes", transforms="jit", styles="argument,closure")
@pytest.mark.parametrize("case", IDS, ids=IDS)
def test_x(nnx_wrap, case): nnx_wrap(Model())(1)
"""


def test_hostile_ids_round_trip(run, peaks):
    option = "disable_test_id_escaping_and_forfeit_all_rights_to_community_support"
    args = [f"--override-ini={option}=true"]
    assert run(HOSTILE, UPDATE, *args).ret == 0
    assert len(entries(peaks)) == 11
    assert len(peaks.read_text(encoding="utf-8").splitlines()) == 12
    result = run(HOSTILE, *args)
    assert result.ret == 0
    assert section(result) == [f"{PEAKS}: 11 nestings compared"]


USAGE = {
    "format 1": ("# pytest-nnxcheck memory baseline, format 1\n", (), f"{PEAKS}:1: this is format 1 of the baseline, *"),
    "format 1, to be updated": ("# pytest-nnxcheck memory baseline, format 1\n", (UPDATE,), f"{PEAKS}:1: this is format 1 *"),
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


OF_WHICH = "option {}: of which file? Add --nnx-baseline PATH, or nnx_baseline to the ini file"
OPTIONS = {
    **{(option,): OF_WHICH.format(option) for option in (UPDATE, NEW_ONLY, "--nnx-baseline-any-stamp")},
    (f"--nnx-baseline={PEAKS}", UPDATE, NEW_ONLY): (
        f"options {UPDATE} and {NEW_ONLY}: the second leaves alone what the first replaces, give one of them"
    ),
    ("--nnx-memory-tolerance=5",): "option --nnx-memory-tolerance: memory_tolerance='5' is not a percentage, *",
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


def test_a_real_model_that_grows_by_a_tenth(pytester, inner_args, peaks):
    def start(width, *args):
        pytester.makepyfile(test_real=REAL.replace("{width}", str(width)))
        return pytester.runpytest_inprocess(*inner_args, f"--nnx-baseline={PEAKS}", "-Wdefault", *args)

    start(64, UPDATE).assert_outcomes(passed=1)
    text, known = peaks.read_text(), entries(peaks)["test_real.py::test_mlp", "jit"]
    assert known.split.arguments >= 2 * 64 * 64 * 4
    assert known.buffers
    assert start(64, UPDATE).ret == 0
    assert peaks.read_text() == text, "the same figures in every run"
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
