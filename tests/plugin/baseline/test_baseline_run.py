"""The memory baseline in whole runs: created, compared, updated, stale.

A run with workers of xdist is in tests/system/processes/test_runs.py.
"""

import pytest
from baselines import ERROR, GROWN, NEW_ONLY, OK, PEAKS, RENAMED, UPDATE, entries, section, sizes

from pytest_nnxcheck.core.settings import DEFAULTS, TABLE, merge, names, parse_given
from pytest_nnxcheck.plugin import baseline
from pytest_nnxcheck.runner import strategies

CHAINS = [nesting for nesting in strategies.sweep(DEFAULTS) if len(nesting) > 2]


# --- create, pass, grow, update ------------------------------------------------------------------------------------------


def test_created_then_passed_then_grown_then_accepted(run, peaks, golden):
    result = run(OK, UPDATE)
    result.assert_outcomes(passed=1)
    assert section(result) == [f"{PEAKS} is written, 19 entries: 19 new"]
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
    assert section(result) == [f"{PEAKS}: 19 nestings compared"]
    result = run(GROWN)
    result.assert_outcomes(failed=1)
    first = result.outlines.index("nnx memory baseline exceeded")
    golden("baseline_exceeded.txt", "\n".join(result.outlines[first : first + 16]).partition("\n=")[0] + "\n")
    result.stdout.fnmatch_lines(["FAILED test_inner.py::test_x - Failed: nnx memory baseline exceeded*"])
    assert section(result) == [f"{PEAKS}: 19 nestings compared, 19 grew by more than 5%"]
    run(GROWN, "--nnx-nesting=jit").assert_outcomes(failed=1)
    run(GROWN, "--nnx-memory-tolerance=10%").assert_outcomes(passed=1)
    assert peaks.read_bytes() == before
    assert section(run(GROWN, UPDATE)) == [f"{PEAKS} is written, 19 entries: 19 changed"]
    run(GROWN).assert_outcomes(passed=1)
    assert "19 nestings shrank by more than 5%: --nnx-baseline-update keeps the gain" in section(run(OK))


def test_the_ini_file_names_file_and_tolerance(run_inner, pytester):
    (pytester.path / "ci dir").mkdir()
    pytester.makeini("[pytest]\nnnx_baseline = ci dir/päks.jsonl\nnnx_memory_tolerance = 12%\n")
    result = run_inner(OK, UPDATE, "--rootdir=.")
    assert section(result) == ["ci dir/päks.jsonl is written, 19 entries: 19 new"]
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
    assert "jit > scan > remat > while_loop" in peaks.read_text()
    assert "vmap" not in peaks.read_text()
    # An entry whose nesting is expected to fail by now is neither compared nor stale.
    run(OK, UPDATE)
    result = run(source)
    assert result.ret == 0
    assert section(result) == [f"{PEAKS}: 11 nestings compared"]


def test_an_expected_failure_of_the_user_is_no_growth(run, peaks):
    run(OK, UPDATE)
    before = peaks.read_bytes()
    run("@pytest.mark.xfail(strict=True)\n" + GROWN).assert_outcomes(xfailed=1)
    assert run("@pytest.mark.xfail\n" + OK, UPDATE).ret == 0
    more = GROWN.replace("max_examples=0", "max_examples=0, transforms='jit,scan,cond'")
    assert run("@pytest.mark.xfail\n" + more, NEW_ONLY).ret == 0
    assert peaks.read_bytes() == before, "what failed is not added"


# --- stale ---------------------------------------------------------------------------------------------------------------
STALE = [ERROR, "  test_inner.py::test_x: there is no such test"]


@pytest.mark.slow
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
    assert section(result) == [f"{PEAKS} is written, 19 entries: 19 new, 19 removed"]
    assert run(RENAMED).ret == 0


@pytest.mark.parametrize(
    "args, is_narrowed, covered",
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
        (("--nnx-nesting=jit",), True, True),
        (("-o", "nnx_transforms=jit"), True, True),
        (("--nnx-profile=few",), True, True),
        (("--nnx-profile=budget",), False, True),
        (("--nnx-profile=ci",), False, True),  # it names the baseline, and always goes with it
        (("--nnx-check=models:Block",), False, True),
        (("--nnx-baseline-update",), False, True),
        (("other",), False, False),
    ],
)
def test_what_a_command_line_leaves_out(pytester, inner_args, args, is_narrowed, covered):
    tables = {"few": "transforms = jit", "budget": "memory_budget = 2x", "ci": "transforms = jit\nbaseline = p"}
    profiles = "".join(f"[pytest-nnxcheck.profiles.{name}]\n{text}\n" for name, text in tables.items())
    pytester.makeini(f"[pytest]\naddopts = -m 'not slow'\nmarkers = slow\n{profiles}")
    pytester.makepyfile(test_inner="")
    pytester.mkdir("other")
    config = pytester.parseconfig(*inner_args, *args)
    assert baseline.is_narrowed(config) == is_narrowed
    assert baseline.Selection.of(config).covers("test_inner.py") == covered


@pytest.mark.slow
def test_a_nesting_that_does_not_run_any_more_is_stale(run, peaks, monkeypatch):
    run(OK, UPDATE)
    fewer = OK.replace("max_examples=0", "max_examples=0, transforms='jit,vmap'")
    result = run(fewer)
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    assert section(result)[2:] == [
        ERROR,
        f"  test_inner.py::test_x: did not run under {', '.join(sorted(map(str, CHAINS)))}",
    ]
    assert run(fewer, "test_inner.py::test_x").ret == 0, "a test alone says nothing of the file"
    # The command line asks for less, this once.
    assert run(OK, "--nnx-transforms=jit,vmap").ret == 0
    assert run(OK, "-o", "nnx_transforms=jit,vmap").ret == 0
    with monkeypatch.context() as environment:
        environment.setenv("PYTEST_ADDOPTS", "--nnx-transforms jit,vmap")
        assert run(OK).ret == 0
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
    "target": "v5e",
    "target_strict": "on",
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
    usual, count = strategies.planned(DEFAULTS)
    planned, others = strategies.planned(merge(parse_given({name: OTHERWISE[name]}, str)))
    assert TABLE[name].narrows == (others < count or not {*usual} <= {*planned})


@pytest.mark.slow
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


GROUPED = """
def pytest_collection_modifyitems(items):
    for item in items:
        if hasattr(item, "_nodeid"):
            item._nodeid += "@group"
"""
"""A conftest that adds to node ids, as older versions of xdist do for --dist=loadgroup where pytest lets them."""


def test_a_test_whose_node_id_changes_after_its_collection_has_its_entries(run, peaks):
    assert run(OK, UPDATE, conftest=GROUPED).ret == 0
    assert {test for test, _ in entries(peaks)} == {"test_inner.py::test_x"}
    assert section(run(OK, conftest=GROUPED)) == [f"{PEAKS}: 19 nestings compared"]
    assert section(run(GROWN, conftest=GROUPED)) == [f"{PEAKS}: 19 nestings compared, 19 grew by more than 5%"]
