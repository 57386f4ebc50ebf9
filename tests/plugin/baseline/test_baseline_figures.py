"""The figures of a baseline: of another stamp, of nestings that are drawn, and of a real model."""

import json

import pytest
from baselines import BOTH, GROWN, NEW_ONLY, OK, PEAKS, RENAMED, UPDATE, entries, section, sizes


def edit(path, old, new):
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


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
        f"{PEAKS}: 19 nestings compared, 19 grew by more than 5%",
    ]
    result = run(BOTH, NEW_ONLY)
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    assert section(result)[-1].startswith(f"{PEAKS} is not written: its entries are of another stamp, jax 0.1.2 -> ")
    assert peaks.read_bytes() == before
    assert section(run(GROWN, UPDATE)) == [f"{PEAKS} is written, 19 entries: 19 changed"]
    assert json.loads(peaks.read_text())["run"]["stamp"]["jax"] == jax.__version__


# --- targets -------------------------------------------------------------------------------------------------------------

JIT = "@marked(max_examples=0, sweep='singles', transforms='jit', styles='argument')\ndef test_x(nnx_wrap): nnx_wrap(Model(MORE))(1)\n"
ON_V5E = JIT.replace("MORE", "on_target=4000")


def on_v5e(path):
    return [[tuple(on.values()) for on in entry.get("targets", [])] for entry in entries(path).values()]


def test_peaks_on_targets_are_added_and_those_of_another_compiler_not_compared(run, peaks):
    run(JIT.replace("MORE", ""), UPDATE)
    compared = f"{PEAKS}: 1 nesting compared"
    new = f"1 peak on targets not in {PEAKS}: --nnx-baseline-update-new-only adds them"
    assert section(run(ON_V5E)) == [compared, new]
    assert section(run(ON_V5E, NEW_ONLY)) == [compared, f"{PEAKS} is written, 1 entry: 1 changed"]
    assert on_v5e(peaks) == [[("v5e", 4000, "libtpu 0.0.50.1")]]
    grown = ON_V5E.replace("4000", "4400")
    result = run(grown)
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["  v5e         4400 B, was 4000 B: +400 B (+10.0 %), tolerance 5%"])
    edit(peaks, "libtpu 0.0.50.1", "libtpu 0.0.40")
    result = run(grown)
    result.assert_outcomes(passed=1)
    differs = f"{PEAKS} has peaks of another compiler, v5e libtpu 0.0.40 -> libtpu 0.0.50.1; "
    advice = "not compared: --nnx-baseline-any-stamp compares all the same, --nnx-baseline-update measures them anew"
    assert section(result) == [differs + advice, compared]
    run(grown, "--nnx-baseline-any-stamp").assert_outcomes(failed=1)


def test_on_a_target_too_it_is_told_what_shrank_and_the_cpu_is_compared_beside_it(run, peaks):
    run(ON_V5E, UPDATE)
    less = run(ON_V5E.replace("4000", "2000"))
    assert section(less) == [
        f"{PEAKS}: 1 nesting compared",
        "1 nesting shrank by more than 5%: --nnx-baseline-update keeps the gain",
    ]
    more = ON_V5E.replace("on_target", "percent=110, on_target").replace("'singles'", "'pairs'")
    run(more.replace("4000", "4400")).stdout.fnmatch_lines(
        ["  peak        2200 B, was 2000 B: *", "  v5e         4400 B, was 4000 B: *"]
    )
    run(more.replace("percent=110, ", ""), UPDATE)
    again = run(more.replace("4000", "4400"))
    again.stdout.fnmatch_lines(
        [
            "  also grew   jit > jit   3300 B, was 3000 B: +300 B (+10.0 %), v5e",
            "              4400 B, was 4000 B: +400 B (+10.0 %)",
        ]
    )


@pytest.mark.parametrize("stamp, kept", [("", [[("h100", 4000, "libtpu 0.0.50.1")]]), ("jax", [[]])])
def test_a_run_without_a_target_leaves_its_peaks_where_the_stamp_is_the_same(run, peaks, stamp, kept):
    run(ON_V5E, UPDATE)
    edit(peaks, '"v5e"', '"h100"')
    assert section(run(JIT.replace("MORE", ""))) == [f"{PEAKS}: 1 nesting compared"]
    if stamp:
        edit(peaks, '"jax": "', '"jax": "0')
    run(JIT.replace("MORE", "percent=120"), UPDATE)
    assert (on_v5e(peaks), sizes(peaks)) == (kept, {"jit": 2400})


def test_a_run_for_one_slice_of_a_chip_replaces_the_peaks_of_the_others(run, peaks):
    run(ON_V5E, UPDATE)
    edit(peaks, '"v5e"', '"v5e:2x4"')
    run(ON_V5E, UPDATE)
    assert on_v5e(peaks) == [[("v5e", 4000, "libtpu 0.0.50.1")]]


# --- the tolerance -------------------------------------------------------------------------------------------------------

HUGE = 10**17


@pytest.mark.parametrize(
    "before, now, tolerance, told",
    [
        (2000, 2100, "5%", ""),
        (2000, 2120, "5%", "grew"),
        (2000, 1900, "5%", ""),
        (2000, 1880, "5%", "shrank"),
        (2000, 2000, "0%", ""),
        (HUGE - 1, HUGE, "0%", "grew"),
        (HUGE + 1, HUGE, "0%", "shrank"),
        (0, 2000, "5%", "grew"),
        (1991, 2000, "0.5%", ""),
        (1988, 2000, "0.5%", "grew"),
    ],
)
def test_what_grew_and_what_shrank(run, peaks, before, now, tolerance, told):
    """The peak of the model is 20 B a percent."""
    run(JIT.replace("MORE", ""), UPDATE)
    edit(peaks, '"peak": 2000', f'"peak": {before}')
    result = run(JIT.replace("MORE", f"percent={now // 20}"), f"--nnx-memory-tolerance={tolerance}")
    result.assert_outcomes(failed=told == "grew", passed=told != "grew")
    lines = section(result)
    assert [word for word in ("grew", "shrank") if f" {word} by more than {tolerance}" in "".join(lines)] == [
        told
    ] * bool(told)


# --- draws ---------------------------------------------------------------------------------------------------------------

DRAWS = """
import os
@marked(max_examples=6, transforms="jit")
def test_x(nnx_wrap): nnx_wrap(Model(percent=int(os.environ.get("DRAWN", "100")) if len(RUNS) >= 6 else 100))(1)
"""


@pytest.mark.slow
def test_drawn_nestings_are_compared_and_another_edition_draws_others(run, peaks, monkeypatch):
    run(DRAWS, UPDATE)
    before = entries(peaks)
    drawn = {key for key, entry in before.items() if "drawn" in entry}
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
    assert before.keys() - drawn == {key for key, entry in entries(peaks).items() if "drawn" not in entry}


@pytest.mark.slow
def test_draws_that_vary_are_neither_kept_nor_called_new(run, peaks):
    run(DRAWS, UPDATE, "--hypothesis-seed=1")
    assert ["drawn" in entry for entry in entries(peaks).values()] == [False] * 5
    result = run(DRAWS, "--hypothesis-seed=2")
    assert section(result) == [f"{PEAKS}: 5 nestings compared"]
    run(DRAWS, UPDATE)
    assert any("drawn" in entry for entry in entries(peaks).values())
    assert run(DRAWS, "--hypothesis-seed=2").ret == 0


GIVEN = """
from hypothesis import example, given, strategies as st
@given(size=st.integers(100, 900))
@marked(max_examples=20, transforms='jit,scan')
def test_x(nnx_wrap, size): nnx_wrap(Model(percent=size))(1)
"""


@pytest.mark.slow
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


def test_what_is_drawn_beside_arguments_of_the_users_is_not_compared(run):
    few = GIVEN.replace("transforms='jit,scan'", "transforms='jit', styles='argument', sweep='pairs'")
    run(few, UPDATE)
    run(few.replace("'pairs'", "'singles'")).assert_outcomes(passed=1)  # which draws pairs with other arguments


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


@pytest.mark.slow
def test_a_real_model_that_grows_by_a_tenth(pytester, inner_args, peaks):
    def start(width, *args):
        pytester.makepyfile(test_real=REAL.replace("{width}", str(width)))
        return pytester.runpytest_inprocess(*inner_args, f"--nnx-baseline={PEAKS}", "-Wdefault", *args)

    start(64, UPDATE).assert_outcomes(passed=1)
    text, known = peaks.read_text(), entries(peaks)["test_real.py::test_mlp", "jit"]
    assert known["split"]["arguments"] >= 2 * 64 * 64 * 4
    assert known["buffers"]
    assert start(64, UPDATE).ret == 0
    assert peaks.read_text() == text, "the same figures in every run"
    result = start(72)
    result.assert_outcomes(failed=1)
    result.stdout.re_match_lines(
        [r"  nesting     jit +smallest of \d+ that grew", r"  buffer      \+ .*float32\[8,72\]"]
    )
