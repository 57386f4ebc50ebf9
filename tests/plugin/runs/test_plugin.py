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


def failure_of(result):
    return [line for line in result.outlines if line.startswith("E ")]


def test_a_healthy_model_passes(run_inner):
    result = run_inner(HOLDS)
    result.assert_outcomes(passed=1)
    summary = r"test_inner.py::test_holds  \d+ nestings: \d+ held; worst peak \d\.\d KiB of 7\.8 KiB \(jit.*\)"
    result.stdout.re_match_lines_random([r"=+ nnx invariants =+", summary])


def test_a_failure_reads_as_designed(run_inner):
    result = run_inner(PAIR)
    result.assert_outcomes(failed=1)
    assert failure_of(result) == [
        "E       nnx invariant broken: tracers",
        "E         test        test_inner.py::test_pair",
        "E         nesting     jit > scan   smallest of 30 tried; 2 violated, 28 held; 13",
        "E                     not run, --nnx-all runs them",
        "E         tracers     tracers is broken",
        "E         leaked      model.kernel   Param float32[3,32,32]",
        "E         hint        do it otherwise",
        "E         holds       jit, scan, jit > scan[functional], jit[functional] > scan,",
        "E                     and 2 more   (nearest, of 6 tried)",
        "E         way         un-nested held, scan held, jit > scan violated",
        "E         replay      pytest test_inner.py::test_pair --nnx-nesting 'jit > scan'",
    ]
    result.stdout.fnmatch_lines(
        [
            ">       assert model(3) == 3",
            "test_inner.py:8: TracerResidue",
            "FAILED test_inner.py::test_pair - nnx tracers: tracers is broken",
        ]
    )
    assert "hypothesis" not in "\n".join(result.outlines[result.outlines.index("") + 4 :]).lower()


def test_a_body_that_skips_says_why_and_no_more(run_inner):
    source = "@marked\ndef test_x(nnx_wrap): pytest.skip('no weights')\n"
    result = run_inner(source, "-rs")
    result.assert_outcomes(skipped=1)
    assert result.outlines[-2:-1] == ["SKIPPED [1] test_inner.py:5: no weights"]


def test_the_replay_line_replays_with_the_options_that_judge(run_inner):
    result = run_inner(PAIR, "--nnx-memory-budget=2x", "--nnx-sweep=pairs", "--nnx-max-examples=1", "--nnx-max-depth=2")
    line = next(line for line in result.outlines if " replay " in line)
    assert line.endswith("test_pair --nnx-memory-budget 2x --nnx-nesting 'jit > scan'")
    again = run_inner(
        PAIR + "    assert RUNS == ['jit > scan']\n", "--nnx-nesting", re.search(r"--nnx-nesting '(.*)'", line)[1]
    )
    again.assert_outcomes(failed=1)
    again.stdout.fnmatch_lines(["E * nesting * jit > scan   replayed, no other was tried"])
    again.stdout.fnmatch_lines(["test_inner.py::test_pair  1 nesting: 1 violated; *"])


def test_replay_of_a_nesting_that_holds_runs_it_alone(run_inner):
    for nesting in ("remat > scan[closure]", "un-nested"):
        source = PAIR + f"\ndef test_ran():\n    assert RUNS == ['{nesting}']\n"
        run_inner(source, f"--nnx-nesting={nesting}").assert_outcomes(passed=2)


def test_a_replay_needs_none_of_the_transforms_that_the_run_named(run_inner):
    source = "@marked\ndef test_x(nnx_wrap):\n    nnx_wrap(Model(tracers=has('cond')))(3)\n"
    result = run_inner(source, "--nnx-transforms=jit,cond")
    (option,) = {re.search(r"test_x --nnx-nesting (\S+)", line)[1] for line in result.outlines if " replay " in line}
    run_inner(source, "--nnx-nesting", option).assert_outcomes(failed=1)


def test_the_users_own_failure_is_his_own(run_inner):
    source = "@marked\ndef test_own(nnx_wrap):\n    assert nnx_wrap(Model())(3) == 4\n    \ndef test_ran():\n    assert RUNS == ['un-nested']\n"
    result = run_inner(source)
    result.assert_outcomes(failed=1, passed=1)
    result.stdout.fnmatch_lines(
        [
            ">       assert nnx_wrap(Model())(3) == 4",
            "E *assert 3 == 4",
            "test_inner.py::test_own  1 nesting: 1 failed*",
        ]
    )
    assert "replay" not in result.stdout.str()


def test_a_failure_under_a_nesting_names_it(run_inner):
    result = run_inner(
        "@marked\ndef test_x(nnx_wrap):\n    assert nnx_wrap(Model(failed=has('scan', 'vmap')))(3) == 3\n"
    )
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


def test_an_assertion_that_depends_on_randomness_is_explained(run_inner):
    source = "N = []\n@marked\ndef test_x(nnx_wrap):\n    N.append(nnx_wrap(Model())(3))\n    assert len(N) != 30\n"
    result = run_inner(source)
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        ["E *if the body depends on randomness, make it repeat itself:", "E *the nesting may not be the cause"]
    )


def test_flaky_is_explained(run_inner):
    source = """
from hypothesis import given, strategies as st
N = []
@marked
@given(x=st.integers())
def test_x(nnx_wrap, x):
    N.append(nnx_wrap(Model())(x))
    assert len(N) != 41
"""
    result = run_inner(source)
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        ["*nnxcheck: the test did not do the same thing twice, with the same arguments and the same nesting.*"]
    )


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


def test_what_fails_and_what_is_said_of_it(run_inner):
    source = "RAN = []\n"
    for number, body in enumerate(FAILS):
        source += (
            f"@marked(styles='closure,argument')\ndef test_{number}(nnx_wrap):\n    RAN.append({number})\n    {body}\n"
        )
    source += "def test_ran():\n    assert [RAN.count(number) for number in range(4)] == [1, 1, 1, 1]\n"
    result = run_inner(source)
    result.assert_outcomes(failed=len(FAILS), passed=1)
    for line in FAILS.values():
        result.stdout.fnmatch_lines([line])
    result.stdout.fnmatch_lines([">       nnx_wrap(Model(bad='kernel is deleted'))(3)", ">       nnx_wrap(3)"])
    assert result.outlines.count(CHECKED_NOTHING) == 3


def test_several_wrapped_objects_the_worst_verdict_counts(run_inner):
    source = """
@marked(all=True)
def test_x(nnx_wrap):
    healthy, leaky = nnx_wrap(Model()), nnx_wrap(Model(tracers=has("vmap")))
    assert leaky(healthy(3)) == 3
"""
    result = run_inner(source)
    result.stdout.fnmatch_lines(["test_inner.py::test_x  40 nestings: 9 violated, 31 held; *"])


def test_what_was_left_out_is_said_once(run_inner):
    source = "@marked(max_examples=0)\ndef test_x(nnx_wrap):\n    nnx_wrap(Model(adds_state=True, rejected=has('eval_shape[closure]')))(3)\n"
    result = run_inner(source, "-v")
    result.stdout.fnmatch_lines(
        [
            "test_inner.py::test_x  * nestings: * held, 6 not supported by flax; worst peak *",
            "    the call adds model.hidden, which no loop can carry: argument scan, vmap,",
            "      while_loop left out",
            "    closure refused by this flax, as for every module that a call changes, or",
            "      hands to a transform of its own: eval_shape[[]closure] raises",
            "      TraceContextError: other trace level; drawn no more",
        ],
        consecutive=True,
    )
    assert "see -v for what was left out" in run_inner(source).stdout.str()


def test_results_reach_junit(run_inner, pytester):
    run_inner(HOLDS, "--junitxml=out.xml")
    xml = (pytester.path / "out.xml").read_text()
    assert re.search(r'<property name="nnx_held" value="\d+" ?/>', xml)
    assert '<property name="nnx_peak"' in xml


def test_switched_off(run_inner, inner_args):
    if inner_args:
        pytest.skip("only an installed plugin can be switched off by name")
    result = run_inner("def test_x(): pass\n", "-p", "no:nnxcheck", "--help")
    assert "--nnx-" not in result.stdout.str()


def test_of_a_test_that_is_run_again_the_last_attempt_is_told(run_inner):
    """What passes first puts the category of what passed before that of what is run again."""
    pytest.importorskip("pytest_rerunfailures")
    source = (
        "N = []\n@marked\ndef test_a(nnx_wrap): nnx_wrap(Model())(3)\n"
        "@marked\ndef test_b(nnx_wrap):\n    N.append(1)\n    broken = len(N) < 5\n"
        "    nnx_wrap(Model(tracers=lambda n: broken and str(n) == 'jit'))(3)\n"
    )
    result = run_inner(source, "--reruns=2")
    result.assert_outcomes(passed=2)
    result.stdout.fnmatch_lines(["test_inner.py::test_b  * nestings: * held; *"])
    assert not [line for line in result.outlines if line.startswith("test_inner.py::test_b  ") and "violated" in line]


def test_a_rerun_starts_afresh(run_inner, pytester):
    pytest.importorskip("pytest_rerunfailures")
    source = "N = []\n@marked\ndef test_x(nnx_wrap):\n    N.append(1)\n    broken = len(N) < 5\n    nnx_wrap(Model(tracers=lambda n: broken and str(n) == 'jit'))(3)\n"
    result = run_inner(source, "--reruns=2", "--junitxml=out.xml")
    result.stdout.fnmatch_lines(["test_inner.py::test_x  * nestings: * held; *", "*1 passed, 1 rerun*"])
    assert len([line for line in result.outlines if line.startswith("test_inner.py::test_x  ")]) == 1
    # Once an attempt; how many attempts are written is pytest's affair.
    attempts = (pytester.path / "out.xml").read_text().split("<testcase")[1:]
    assert {attempt.count('name="nnx_nestings"') for attempt in attempts} == {1}
