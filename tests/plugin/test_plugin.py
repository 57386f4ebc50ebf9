"""Marked tests, run: verdicts, the text of a failure, the terminal summary, and other plugins."""

import os
import re
import subprocess
import sys
from pathlib import Path

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
        "E       nnx invariant broken: tracers                      test_inner.py::test_pair",
        "E         nesting     jit > scan                             smallest of 30 tried; 2 violated, 28 held; 12 not run, --nnx-all runs them",
        "E         tracers     tracers is broken",
        "E         leaked      model.kernel   Param float32[3,32,32]",
        "E         hint        do it otherwise",
        "E         holds       jit, scan, jit > scan[functional], jit[functional] > scan, and 2 more   (nearest, of 6 tried)",
        "E         way         un-nested held, scan held, jit > scan violated",
        "E         replay      pytest test_inner.py::test_pair --nnx-nesting 'jit > scan'",
    ]
    result.stdout.fnmatch_lines(
        [
            ">       assert model(3) == 3",
            "test_inner.py:8: TracerResidue",
            "FAILED test_inner.py::test_pair - nnx invariant broken: tracers",
        ]
    )
    assert "hypothesis" not in "\n".join(result.outlines[result.outlines.index("") + 4 :]).lower()


def test_the_replay_line_replays(run_inner):
    result = run_inner(PAIR)
    line = next(line for line in result.outlines if " replay " in line)
    option = re.search(r"--nnx-nesting '(.*)'", line)[1]
    again = run_inner(PAIR + "    assert RUNS == ['jit > scan']\n", "--nnx-nesting", option)
    again.assert_outcomes(failed=1)
    again.stdout.fnmatch_lines(["E * nesting * jit > scan * replayed, no other was tried"])
    again.stdout.fnmatch_lines(["test_inner.py::test_pair  1 nesting: 1 violated; *"])


def test_replay_of_a_nesting_that_holds_runs_it_alone(run_inner):
    source = PAIR + "\ndef test_ran():\n    assert RUNS == ['remat > scan[closure]']\n"
    run_inner(source, "--nnx-nesting=remat > scan[closure]").assert_outcomes(passed=2)
    run_inner(source.replace("remat > scan[closure]", "un-nested"), "--nnx-nesting=un-nested").assert_outcomes(passed=2)


def test_the_replay_line_repeats_the_options_of_the_run(run_inner):
    """Those that say how a nesting is judged; what says which nestings are run is of no use to one."""
    judged = ("--nnx-memory-budget=2x", "--nnx-invariants", "tracers,memory")
    chosen = ("--nnx-styles", "argument,functional", "--nnx-sweep=pairs", "--nnx-max-examples=1", "--nnx-max-depth=2")
    result = run_inner(PAIR, *judged, *chosen, "--nnx-shortcuts=off", "--nnx-transforms=jit,scan", "--nnx-all")
    result.stdout.fnmatch_lines(
        ["*replay *test_pair --nnx-invariants tracers,memory --nnx-memory-budget 2x --nnx-nesting 'jit > scan'"]
    )


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
        ["E *if the body depends on randomness, make it repeat itself: the nesting may not be the cause"]
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


def test_a_swallowed_violation_still_fails(run_inner):
    source = (
        "@marked\ndef test_x(nnx_wrap):\n    try: nnx_wrap(Model(memory=has('jit')))(3)\n    except Exception: pass\n"
    )
    result = run_inner(source)
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["FAILED test_inner.py::test_x - nnx invariant broken: memory"])


@pytest.mark.parametrize("body", ["pass", "nnx_wrap(Model())", "Model()(3)"])
def test_a_body_that_checks_nothing_fails(run_inner, body):
    source = f"N = []\n@marked\ndef test_x(nnx_wrap):\n    N.append(1)\n    {body}\ndef test_ran():\n    assert len(N) == 1\n"
    result = run_inner(source)
    result.assert_outcomes(failed=1, passed=1)
    result.stdout.fnmatch_lines(["nnx nothing was checked: the test never called an object that nnx_wrap returned"])


def test_every_nesting_rejected_fails(run_inner):
    source = "@marked(styles='closure')\ndef test_x(nnx_wrap):\n    nnx_wrap(Model(rejected=lambda n: len(n) > 0))(3)\n"
    result = run_inner(source)
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        ["nnx nothing was checked: every nesting was rejected (TraceContextError: other trace level), *"]
    )


def test_a_subject_that_cannot_be_called(run_inner):
    result = run_inner("@marked\ndef test_x(nnx_wrap):\n    nnx_wrap(3)\n")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        [
            ">       nnx_wrap(3)",
            "E *CheckError: nnx_wrap got int 3, which cannot be called: wrap a module with a __call__, *",
        ]
    )


def test_bad_use_shows_the_users_line_once(run_inner):
    result = run_inner(
        "@marked\ndef test_x(nnx_wrap):\n    nnx_wrap(Model(bad='kernel is deleted'))(3)\n\ndef test_ran():\n    assert len(RUNS) == 1\n"
    )
    result.assert_outcomes(failed=1, passed=1)
    result.stdout.fnmatch_lines(
        [">       nnx_wrap(Model(bad='kernel is deleted'))(3)", "E *CheckError: kernel is deleted"]
    )


def test_several_wrapped_objects_the_worst_verdict_counts(run_inner):
    source = """
@marked(all=True)
def test_x(nnx_wrap):
    healthy, leaky = nnx_wrap(Model()), nnx_wrap(Model(tracers=has("vmap")))
    assert leaky(healthy(3)) == 3
"""
    result = run_inner(source)
    result.stdout.fnmatch_lines(["test_inner.py::test_x  39 nestings: 8 violated, 31 held; *"])


def test_what_was_left_out_is_said_once(run_inner):
    source = "@marked(max_examples=0)\ndef test_x(nnx_wrap):\n    nnx_wrap(Model(adds_state=True, rejected=has('eval_shape[closure]')))(3)\n"
    result = run_inner(source, "-v")
    result.stdout.fnmatch_lines(
        [
            "test_inner.py::test_x  * nestings: * held, 6 not supported by flax; worst peak *",
            "    the call adds model.hidden, which no loop can carry: argument scan, vmap,",
            "      while_loop left out",
            "    closure refused by this flax, as for every module whose state changes in the",
            "      call: eval_shape[[]closure] raises TraceContextError: other trace level;",
            "      drawn no more",
        ],
        consecutive=True,
    )
    assert "see -v for what was left out" in run_inner(source).stdout.str()


def test_results_reach_junit(run_inner, pytester):
    run_inner(HOLDS, "--junitxml=out.xml")
    xml = (pytester.path / "out.xml").read_text()
    assert re.search(r'<property name="nnx_held" value="\d+" ?/>', xml)
    assert '<property name="nnx_peak"' in xml


@pytest.mark.parametrize(
    "args",
    [
        ("-n2",),
        ("-p", "no:hypothesispytest"),
        ("--strict-markers", "-W", "error"),
        *(
            pytest.param(args, marks=pytest.mark.full)
            for args in (("-n0",), ("-p", "no:cacheprovider"), ("--import-mode=importlib",), ("--assert=plain",))
        ),
    ],
    ids=" ".join,
)
def test_the_same_verdicts_whatever_runs_them(run_inner, args):
    source = PAIR + HOLDS.replace("@marked", "@marked(max_examples=0)")
    result = run_inner(source, *args, subprocess=True)
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(
        [
            "*nnx invariants*",
            "test_inner.py::test_holds  39 nestings: 39 held; worst peak 4.9 KiB of 7.8 KiB (jit > remat > remat > scan)",
            "test_inner.py::test_pair  30 nestings: 2 violated, 28 held, 12 not run; worst peak *",
            "FAILED test_inner.py::test_pair - nnx invariant broken: tracers",
        ]
    )
    assert "Warning" not in result.stdout.str() + result.stderr.str()


def test_switched_off(run_inner, inner_args):
    if inner_args:
        pytest.skip("only an installed plugin can be switched off by name")
    result = run_inner("def test_x(): pass\n", "-p", "no:nnxcheck", "--help")
    assert "--nnx-" not in result.stdout.str()


def test_a_rerun_starts_afresh(run_inner, pytester):
    pytest.importorskip("pytest_rerunfailures")
    source = "N = []\n@marked\ndef test_x(nnx_wrap):\n    N.append(1)\n    broken = len(N) < 5\n    nnx_wrap(Model(tracers=lambda n: broken and str(n) == 'jit'))(3)\n"
    result = run_inner(source, "--reruns=2", "--junitxml=out.xml")
    result.stdout.fnmatch_lines(["test_inner.py::test_x  * nestings: * held; *", "*1 passed, 1 rerun*"])
    assert len([line for line in result.outlines if line.startswith("test_inner.py::test_x  ")]) == 1
    # Once an attempt; how many attempts are written is pytest's affair.
    attempts = (pytester.path / "out.xml").read_text().split("<testcase")[1:]
    assert {attempt.count('name="nnx_nestings"') for attempt in attempts} == {1}


INTERRUPT = """
@marked(max_examples=0)
def test_stopped(nnx_wrap):
    nnx_wrap(Model())(3)
    if len(RUNS) == 60:
        raise KeyboardInterrupt
"""


def test_ctrl_c_leaves_a_partial_summary(run_inner):
    result = run_inner(HOLDS.replace("@marked", "@marked(max_examples=0)") + INTERRUPT, subprocess=True)
    assert result.ret == pytest.ExitCode.INTERRUPTED
    result.stdout.fnmatch_lines(
        [
            "test_inner.py::test_holds  39 nestings: 39 held; *",
            "test_inner.py::test_stopped  21 nestings: 21 held; *",
            "*KeyboardInterrupt*",
        ]
    )
    assert "INTERNALERROR" not in result.stdout.str()


@pytest.mark.skipif(sys.platform == "win32", reason="signals")
def test_a_real_ctrl_c(pytester, inner_args):
    source = "import os, signal, sys\nsys.path[:0] = [%r, %r]\nimport fake_engine\nfake_engine.install()\n"
    # A background job of a shell starts with the signal ignored.
    source += "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
    here = Path(__file__).parents[1]
    pytester.makeconftest(source % (str(here), str(here.parent)))
    pytester.makepyfile(
        test_inner="import os, signal, pytest\nfrom fake_engine import RUNS, Model\n@pytest.mark.nnx_invariants\ndef test_x(nnx_wrap):\n"
        "    nnx_wrap(Model())(3)\n    if len(RUNS) == 7: os.kill(os.getpid(), signal.SIGINT)\n"
    )
    env = {**os.environ, "PYTHONPATH": str(here.parent)}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *inner_args], capture_output=True, text=True, env=env, check=False
    )
    assert done.returncode == 2
    assert re.search(r"test_inner.py::test_x  \d+ nestings: \d+ held", done.stdout)
