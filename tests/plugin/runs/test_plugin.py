"""Marked tests, run: verdicts, the text of a failure, the terminal summary, and other plugins."""

import re

import pytest

HOLDS = "@marked\ndef test_holds(nnx_wrap):\n    assert nnx_wrap(Model())(3) == 3\n"
PAIR = """
@marked
def test_pair(nnx_wrap):
    model = nnx_wrap(Model(tracers=has("jit", "scan")))
    assert model(3) == 3
"""


def test_a_healthy_model_passes(run_inner, pytester):
    result = run_inner(HOLDS, "--junitxml=out.xml")
    result.assert_outcomes(passed=1)
    summary = r"test_inner.py::test_holds  \d+ nestings: \d+ passed; worst peak \d\.\d KiB \(jit.*\), budget 7\.8 KiB"
    result.stdout.re_match_lines_random([r"=+ nnx invariants =+", summary])
    xml = (pytester.path / "out.xml").read_text()
    assert re.search(r'<property name="nnx_held" value="\d+" ?/>', xml)
    assert '<property name="nnx_peak"' in xml


def test_a_failure_reads_as_designed(run_inner):
    result = run_inner(PAIR)
    result.assert_outcomes(failed=1)
    assert [line for line in result.outlines if line.startswith("E ")] == [
        "E       nnx invariant broken: tracers",
        "E         test        test_inner.py::test_pair",
        "E         nesting     jit > scan   the smallest of 2 that fail",
        "E         tracers     tracers is broken",
        "E         hint        do it otherwise",
        "E         leaked      model.kernel   Param float32[3,32,32]",
        "E         passes      jit, scan, jit > scan[functional], jit[functional] > scan,",
        "E                     and 2 more   (of 6 similar nestings)",
        "E         steps       un-nested passes, scan passes, jit > scan fails",
        "E         tried       30 nestings: 2 failed, 28 passed; 13 more not run,",
        "E                     --nnx-all runs them",
        "E         replay      pytest test_inner.py::test_pair --nnx-nesting 'jit > scan'",
    ]
    where = [">       assert model(3) == 3", "test_inner.py:8: TracerResidue"]
    result.stdout.fnmatch_lines([*where, "FAILED test_inner.py::test_pair - nnx tracers: tracers is broken"])
    assert "hypothesis" not in "\n".join(result.outlines[result.outlines.index("") + 4 :]).lower()


def test_the_replay_line_replays_with_the_options_that_judge(run_inner):
    source = PAIR.replace('"scan"', '"cond"')
    run = ["--nnx-transforms=jit,cond", "--nnx-sweep=pairs", "--nnx-max-examples=1", "--nnx-max-depth=2"]
    result = run_inner(source, "--nnx-memory-budget=2x", *run)
    line = next(line for line in result.outlines if " replay " in line)
    assert line.endswith("test_pair --nnx-memory-budget 2x --nnx-nesting 'jit > cond'")
    again = run_inner(
        source + "    assert RUNS == ['jit > cond']\n", "--nnx-nesting", re.search(r"--nnx-nesting '(.*)'", line)[1]
    )
    again.assert_outcomes(failed=1)
    again.stdout.fnmatch_lines(["E * nesting * jit > cond   replayed, no other was run"])
    again.stdout.fnmatch_lines(["test_inner.py::test_pair  1 nesting: 1 failed"])


def test_the_users_own_failure_is_his_own(run_inner):
    own = "@marked\ndef test_own(nnx_wrap):\n    assert nnx_wrap(Model())(3) == 4\n"
    result = run_inner(f"{own}def test_ran():\n    assert RUNS == ['un-nested']\n")
    result.assert_outcomes(failed=1, passed=1)
    lines = [
        ">       assert nnx_wrap(Model())(3) == 4",
        "E *assert 3 == 4",
        "test_inner.py::test_own  1 nesting: 1 raised*",
    ]
    result.stdout.fnmatch_lines(lines)
    assert "replay" not in result.stdout.str()


def test_a_failure_under_a_nesting_names_it(run_inner):
    call = "assert nnx_wrap(Model(failed=has('scan', 'vmap')))(3) == 3"
    result = run_inner(f"@marked\ndef test_x(nnx_wrap):\n    {call}\n")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        [
            ">   * assert nnx_wrap(*",
            "E   *TypeError: scan body must return a carry",
            "E    *nesting     scan > vmap *un-nested, the same test body passed",
            "E    *replay      pytest test_inner.py::test_x --nnx-nesting 'scan > vmap'",
            "FAILED test_inner.py::test_x - TypeError: scan body must return a carry",
        ]
    )


def test_a_test_that_does_not_repeat_itself_is_explained(run_inner):
    source = """
from hypothesis import given, strategies as st
N, M = [], []
@marked
def test_x(nnx_wrap):
    N.append(nnx_wrap(Model())(3))
    assert len(N) != 30
@marked
@given(x=st.integers())
def test_flaky(nnx_wrap, x):
    M.append(nnx_wrap(Model())(x))
    assert len(M) != 41
"""
    result = run_inner(source)
    result.assert_outcomes(failed=2)
    said = ["E *the body runs many times with the same fixtures: *", "E *the nesting may not be the cause"]
    flaky = "*nnxcheck: the test did not do the same thing twice, with the same arguments and the same nesting.*"
    result.stdout.fnmatch_lines([*said, flaky])


@pytest.mark.parametrize(
    "body, said",
    [
        (
            "(tmp_path / 'x').mkdir()",
            ["E *FileExistsError: *", "E *the body runs many times with the same fixtures: *"],
        ),
        ("once()", ["E *RuntimeError: *used once", "E *the body runs many times with the same fixtures: *"]),
        ("(tmp_path / 'x').mkdir(exist_ok=True)", []),
    ],
    ids=["tmp_path", "as pytest-benchmark", "repeats itself"],
)
def test_a_body_that_a_fixture_lets_run_only_once_is_explained(run_inner, body, said):
    source = f"""
@pytest.fixture
def once():
    calls = []
    def once():
        calls.append(1)
        if calls[1:]:
            raise RuntimeError("a fixture that can be used once")
    return once

@marked(max_examples=0)
def test_x(nnx_wrap, tmp_path, once):
    {body}
    nnx_wrap(Model())(3)
"""
    result = run_inner(source)
    result.assert_outcomes(failed=bool(said), passed=not said)
    result.stdout.fnmatch_lines(said)


CHECKED_NOTHING = "nnx nothing was checked: the test never called an object that nnx_wrap returned"
REJECTED = "nnx nothing was checked: every nesting was rejected (TraceContextError: other trace level), *"
FAILS = {  # the body of a test, and a line of the run
    "pass": CHECKED_NOTHING,
    "nnx_wrap(Model())": CHECKED_NOTHING,
    "Model()(3)": CHECKED_NOTHING,
    "nnx_wrap(Model(bad='kernel is deleted'))(3)": "E *CheckError: kernel is deleted",
    "nnx_wrap(3)": "E *CheckError: nnx_wrap got int 3, which cannot be called: wrap a module with a __call__, *",
    "nnx_wrap(Model(rejected=lambda n: n.layers))(3)": REJECTED,
    "try: nnx_wrap(Model(memory=has('jit')))(3)\n    except Exception: pass": "FAILED * - nnx memory: memory is broken",
}


def test_a_test_that_fails_says_why(run_inner):
    source = "RAN = []\n"
    for number, body in enumerate(FAILS):
        head = f"@marked(styles='closure,argument')\ndef test_{number}(nnx_wrap):\n    RAN.append({number})\n"
        source += f"{head}    {body}\n"
    source += "def test_ran():\n    assert [RAN.count(number) for number in range(4)] == [1, 1, 1, 1]\n"
    result = run_inner(source)
    result.assert_outcomes(failed=len(FAILS), passed=1)
    for line in FAILS.values():
        result.stdout.fnmatch_lines([line])
    result.stdout.fnmatch_lines([">       nnx_wrap(Model(bad='kernel is deleted'))(3)", ">       nnx_wrap(3)"])
    result.stdout.no_fnmatch_line("*api.py*")
    assert result.outlines.count(CHECKED_NOTHING) == 3


def test_of_several_wrapped_objects_the_worst_verdict_counts(run_inner):
    source = """
@marked(all=True)
def test_x(nnx_wrap):
    healthy, leaky = nnx_wrap(Model()), nnx_wrap(Model(tracers=has("vmap")))
    assert leaky(healthy(3)) == 3
"""
    result = run_inner(source)
    result.stdout.fnmatch_lines(["test_inner.py::test_x  40 nestings: 9 failed, 31 passed"])


def test_what_was_left_out_is_said_once(run_inner):
    call = "nnx_wrap(Model(adds_state=True, rejected=has('eval_shape[closure]')))(3)"
    source = f"@marked(max_examples=0)\ndef test_x(nnx_wrap):\n    {call}\n"
    result = run_inner(source, "-v")
    result.stdout.fnmatch_lines(
        [
            "test_inner.py::test_x  * nestings: * passed, 6 not supported by flax; worst peak *",
            "    the call adds model.hidden, which no loop can carry: argument scan, vmap,",
            "      while_loop left out",
            "    closure refused by this flax, as for every module that a call changes, or",
            "      hands to a transform of its own: eval_shape[[]closure] raises",
            "      TraceContextError: other trace level; drawn no more",
        ],
        consecutive=True,
    )
    assert "; -v shows notes" in run_inner(source).stdout.str()


def test_a_test_that_is_run_again_starts_afresh_and_its_last_attempt_is_told(run_inner, pytester):
    """Pytest puts the category of what passes before that of what is run again, where a test passes first."""
    pytest.importorskip("pytest_rerunfailures")
    source = (
        "N = []\n@marked\ndef test_a(nnx_wrap): nnx_wrap(Model())(3)\n"
        "@marked\ndef test_b(nnx_wrap):\n    N.append(1)\n    broken = len(N) < 5\n"
        "    nnx_wrap(Model(tracers=lambda n: broken and str(n) == 'jit'))(3)\n"
    )
    result = run_inner(source, "--reruns=2", "--junitxml=out.xml")
    result.stdout.fnmatch_lines(["test_inner.py::test_b  * nestings: * passed; *", "*2 passed, 1 rerun*"])
    assert len([line for line in result.outlines if line.startswith("test_inner.py::test_b  ")]) == 1
    # Once an attempt; how many attempts are written is pytest's affair.
    attempts = (pytester.path / "out.xml").read_text().split("<testcase")[1:]
    assert {attempt.count('name="nnx_nestings"') for attempt in attempts} == {1}
