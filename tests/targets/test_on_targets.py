"""What the compilers of targets judge: each way to break on one, with its healthy twin, and which programs are compiled for them."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from bugs import ScanOverRemat, cures, inputs_scan_over_remat
from checking import flat
from flax import nnx
from healthy import assign

from pytest_nnxcheck import check, largest
from pytest_nnxcheck.compat import targets
from pytest_nnxcheck.core.chips import parse_target
from pytest_nnxcheck.engine import on_targets
from pytest_nnxcheck.invariants.donation import LostOnTarget
from pytest_nnxcheck.invariants.memory import CopiedOnTarget, DoesNotFit, OverBudgetOnTarget

JAX = jax.__version_info__
BOTH = ("v5e", "h100")
TOLD = ("v5e", "h100") if JAX >= (0, 6) else ("v5e",)
"""The targets whose compilers tell totals: that of a GPU does not on jax 0.5."""
tells_aliases = pytest.mark.skipif(JAX < (0, 10), reason="before jax 0.10 the compiler of a GPU tells no aliases")
FEW = {"sweep": "singles", "styles": "argument", "transforms": "jit", "max_examples": 0}


def checked(subject, *args, **settings):
    return check(subject, *args, **{**FEW, "target": BOTH, **settings})


def found(report, kind):
    """The targets on which something of a kind is broken."""
    return {each.on.target for violation in report.violations for each in violation.findings if isinstance(each, kind)}


def compiled(report):
    """The nestings whose programs were compiled for targets."""
    return {str(outcome.nesting) for outcome in report.outcomes if outcome.evidence and outcome.evidence.targets}


def on(report, name):
    """What one target makes of the plain jit."""
    (outcome,) = (each for each in report.outcomes if str(each.nesting) == "jit")
    return next(each for each in outcome.evidence.targets if each.target == name)


# --- each way to break, and its twin


def linear(width):
    return nnx.eval_shape(lambda: nnx.Linear(width, 2 * width, use_bias=False, rngs=nnx.Rngs(0)))


def test_a_program_fits_or_not():
    x = lambda width: jax.ShapeDtypeStruct((8, width), jnp.float32)  # noqa: E731
    large = checked(linear(100_000), x(100_000))
    assert found(large, DoesNotFit) == {*TOLD}
    text = flat(str(large))
    assert "the program does not fit a v5e: it needs more than 15.75 GiB" in text
    assert ("does not fit an h100: peak 74.5 GiB of 59.33 GiB" in text) == ("h100" in TOLD)
    assert ("the 75 % of the memory that jax takes by default" in text) == ("h100" in TOLD)
    assert found(checked(linear(60_000), x(60_000)), DoesNotFit) == {"v5e"}
    small = checked(linear(1000), x(1000))
    assert small.ok
    assert "fits v5e: " in str(small)


MIB = 2**20
tells_kernels = pytest.mark.skipif(JAX < (0, 10), reason="before jax 0.10 a target's program has no kernels of Triton")


@tells_kernels
def test_a_product_may_take_a_workspace_and_whole_arrays_on_the_device():
    def room(call, target="h100"):
        model = nnx.eval_shape(lambda: nnx.Linear(1024, 1024, use_bias=False, rngs=nnx.Rngs(0)))
        there = on(checked(call, model, jax.ShapeDtypeStruct((2048, 1024), jnp.float32), target=target), target)
        return there.most - there.peak

    assert room(lambda model, x: model(x)) == 32 * MIB
    assert room(lambda model, x: model(x), target="a100") == 4 * MIB
    assert room(lambda model, x: model(nnx.relu(x))) == (32 + 8) * MIB  # the operand
    assert room(lambda model, x: nnx.relu(model(x))) == (32 + 8) * MIB  # the result
    assert room(lambda model, x: x + 1) == 0


@tells_kernels
def test_where_that_exceeds_the_limit_the_program_may_not_fit(monkeypatch):
    call = (lambda model, x: model(x), linear(10_000), jax.ShapeDtypeStruct((8, 10_000), jnp.float32))
    peak = on(checked(*call, target="h100"), "h100").peak
    for room, words in ((16, "may not fit h100: "), (48, "fits h100: ")):
        share = (peak + room * MIB) / parse_target("h100").chip.memory
        monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", repr(share))
        report = checked(*call, target="h100")
        assert report.ok
        assert f"; {words}" in str(report)
        assert largest(lambda _: call, target="h100", high=1).size == (1 if words.startswith("fits") else 0)


class Padded(nnx.Module):
    """A TPU pads the last axis of the kernel to 128 elements."""

    def __init__(self, shape):
        self.kernel = nnx.Param(jnp.zeros(shape))

    def __call__(self, x):
        return self.kernel[...] * x


def test_a_budget_in_bytes_bounds_the_peak_of_a_target():
    x = jnp.ones(())
    report = checked(Padded((64, 64, 8, 8, 3)), x, memory_budget="9MB")
    assert found(report, OverBudgetOnTarget) == {"v5e"}
    assert "on v5e is over the budget of 8.6 MiB" in str(report)
    assert checked(Padded((64, 64, 8, 8, 3)), x, memory_budget="64MB").ok
    assert checked(Padded((48, 128, 128)), x, memory_budget="9MB").ok


def test_what_a_call_ends_with_must_fit_whatever_the_compiler_of_a_tpu_counts(monkeypatch):
    layer, x = nnx.Linear(256, 256, rngs=nnx.Rngs(0)), jnp.ones((8, 256))
    monkeypatch.setattr(targets, "limit_of", lambda chip: (256 * 256 * 4, 1.0))
    assert found(checked(layer, x, target="v5e"), DoesNotFit) == {"v5e"}
    monkeypatch.setattr(targets, "limit_of", lambda chip: (2 * 256 * 256 * 4, 1.0))
    assert checked(layer, x, target="v5e").ok


def test_a_multiple_of_the_expected_peak_is_not_judged_on_a_target():
    report = checked(Padded((64, 64, 8, 8, 6)), jnp.ones(()), memory_budget="1.2x")
    assert report.ok
    (outcome,) = (each for each in report.outcomes if str(each.nesting) == "jit")
    assert on(report, "v5e").peak > outcome.budget


def test_copies_are_found_on_each_compiler_and_the_cure_has_none():
    report = checked(ScanOverRemat(nnx.Rngs(0), depth=8, width=256), *inputs_of(256))
    assert found(report, CopiedOnTarget) == {*TOLD}
    for name in TOLD:
        assert on(report, name).copies >= 0.99 * on(report, name).state
    for cure in cures():
        cured = checked(ScanOverRemat(nnx.Rngs(0), cure, depth=8, width=256), *inputs_of(256))
        assert cured.ok, str(cured)
        assert {on(cured, name).copies for name in BOTH} == {0}


def test_a_budget_of_the_users_replaces_the_rule_on_copies():
    assert checked(ScanOverRemat(nnx.Rngs(0), depth=8, width=256), *inputs_of(256), memory_budget="1GB").ok


def inputs_of(width):
    (x, *rest) = inputs_scan_over_remat()
    return jnp.ones((*x.shape[:-1], width), x.dtype), *rest


class Two(nnx.Module):
    def __init__(self):
        self.a, self.b = nnx.Variable(jnp.zeros((33, 7))), nnx.Variable(jnp.zeros((33, 7)))


def flatten(two):
    """On the CPU the flat array takes the buffer of the other leaf, on a TPU it has other tiles."""
    assign(two.a, (two.a[...] + 1).reshape(-1))


def add(two):
    assign(two.a, two.a[...] + 1)


@tells_aliases
def test_a_donated_leaf_loses_its_buffer_on_a_target_alone():
    report = checked(flatten, Two(), invariants="donation")
    assert found(report, LostOnTarget) == {"v5e"}
    assert "1 of 2 donated leaves loses its buffer on v5e: two.b" in str(report)
    kept = checked(add, Two(), invariants="donation")
    assert kept.ok
    assert {(on(kept, name).donated, on(kept, name).lost) for name in BOTH} == {(2, ())}


def widen(two):
    assign(two.a, two.a[...].astype(jnp.bfloat16))


@tells_aliases
def test_what_is_lost_on_the_cpu_as_well_is_counted():
    report = checked(widen, Two(), invariants="donation")
    assert not report.ok
    assert not found(report, LostOnTarget)
    assert {on(report, name).lost_too for name in BOTH} == {1}
    assert "1 loses its buffer there and on the CPU" in str(report)


# --- what is compiled, and what is not


def test_by_default_the_plain_jit_and_what_broke_are_compiled_for_targets():
    model, x = nnx.Linear(8, 8, rngs=nnx.Rngs(0)), jnp.ones((2, 8))
    assert compiled(check(model, x, effort="quick", target="v5e")) == {"jit"}
    assert compiled(check(model, x, effort="quick", target="v5e", styles="functional")) == {"jit[functional]"}
    assert compiled(check(model, x, target="v5e", nesting="jit > scan")) == {"jit > scan"}
    thorough = check(model, x, target="v5e", effort="thorough", sweep="short", max_examples=0)
    assert compiled(thorough) > {"jit", "jit[closure]"}
    broken = check(model, x, effort="quick", target="v5e", memory_budget="0.25x", transforms="jit,scan", all=True)
    assert {"jit", "jit[functional]", "jit > scan"} <= compiled(broken)


def test_without_a_jit_outside_nothing_is_compiled_and_a_note_says_so():
    report = check(nnx.Linear(8, 8, rngs=nnx.Rngs(0)), jnp.ones((2, 8)), target="v5e", transforms="scan")
    assert not compiled(report)
    assert "no program was compiled for v5e: no nesting with an outer jit was run" in report.notes


def test_nothing_is_judged_in_silence():
    model, x = nnx.Linear(8, 8, rngs=nnx.Rngs(0)), jnp.ones((2, 8))
    unjudged = check(model, x, target="v5e", sweep="probes", max_examples=0, styles="argument")
    assert "no program was compiled for v5e: no nesting with an outer jit was run" in unjudged.notes
    tracers = checked(model, x, target="v5e", invariants="tracers")
    assert "no program was compiled for v5e: neither memory nor donation is asserted" in tracers.notes
    assert compiled(check(model, x, effort="quick", target="v5e", styles="closure")) == {"jit[closure]"}


def test_constants_count_on_each_target():
    large = jnp.asarray(np.random.default_rng(1).standard_normal((512, 512), np.float32))
    report = checked(
        lambda model, x: model(x) @ large, nnx.Linear(8, 512, rngs=nnx.Rngs(0)), jnp.ones((2, 8)), memory_budget="8MiB"
    )
    assert report.ok
    assert {name: on(report, name).peak > large.nbytes for name in TOLD} == dict.fromkeys(TOLD, True)


@pytest.mark.parametrize("share, limit", [("0.9", 71.20), ("inf", 59.33), ("0", 59.33), ("-1", 59.33), ("abc", 59.33)])
def test_the_share_of_the_memory_is_that_of_the_environment(monkeypatch, share, limit):
    monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", share)
    assert round(targets.limit_of(parse_target("h100").chip)[0] / 2**30, 2) == limit


def test_the_backend_of_the_user_stays_what_it_was():
    before = jax.devices(), jax.default_backend()
    checked(nnx.Linear(8, 8, rngs=nnx.Rngs(0)), jnp.ones((2, 8)))
    assert (jax.devices(), jax.default_backend()) == before


def calls_back(model, x):
    return jax.pure_callback(lambda y: y, jax.ShapeDtypeStruct(x.shape, x.dtype), model(x))


def test_what_cannot_be_lowered_for_a_target_is_left_out_with_a_reason():
    report = checked(calls_back, nnx.Linear(8, 8, rngs=nnx.Rngs(0)), jnp.ones((2, 8)))
    assert report.ok
    assert all(on(report, name).left_out for name in BOTH)
    assert any(
        note.startswith("not checked on v5e: the program calls Python code while it runs: ") for note in report.notes
    )


def test_a_far_larger_peak_is_noted():
    report = checked(Padded((64, 64, 8, 8, 6)), jnp.ones(()))
    assert any(note.startswith("the un-nested peak on v5e is ") for note in report.notes), report.notes


# --- the compilers are asked no more than once


def test_facts_are_kept_for_the_next_run(pytester, inner_args, monkeypatch):
    pytester.makepyfile(
        """
        import jax.numpy as jnp
        import pytest
        from flax import nnx
        from pytest_nnxcheck.compat import targets

        @pytest.mark.nnx_invariants(effort="quick", target="v5e,h100")
        def test_linear(nnx_wrap):
            nnx_wrap(nnx.Linear(8, 8, rngs=nnx.Rngs(0)))(jnp.ones((2, 8)))
        """
    )
    first = pytester.runpytest_inprocess(*inner_args, "-p", "no:randomly")
    first.assert_outcomes(passed=1)
    kept = {path: path.read_text("utf-8") for path in pytester.path.rglob("*-target.json")}
    assert len(kept) == 2
    with monkeypatch.context() as without_compilers:
        without_compilers.setattr(targets, "compiled_for", None)
        second = pytester.runpytest_inprocess(*inner_args, "-p", "no:randomly")
    second.assert_outcomes(passed=1)
    second.stdout.fnmatch_lines(
        ["*fits v5e: *; fits h100: *" if "h100" in TOLD else "*fits v5e: *; compiles for h100*"]
    )
    for path, text in kept.items():
        path.write_text(text.replace('"fits": true', '"fits": false'), "utf-8")
    pytester.runpytest_inprocess(*inner_args, "-p", "no:randomly").assert_outcomes(passed=1)
    assert {path: path.read_text("utf-8") for path in kept} == kept


def test_the_default_effort_is_asked_where_the_fast_one_is_not_the_last_word(monkeypatch):
    asked = []
    real = targets.compiled_for
    monkeypatch.setattr(
        targets, "compiled_for", lambda *given, effort: asked.append(effort) or real(*given, effort=effort)
    )
    checked(nnx.Linear(8, 8, rngs=nnx.Rngs(0)), jnp.ones((2, 8)), target="v5e")
    assert asked == ["O0"]
    asked.clear()
    checked(linear(100_000), jax.ShapeDtypeStruct((8, 100_000), jnp.float32), target="v5e")
    assert asked[:2] == ["O0", "default"]
    asked.clear()
    monkeypatch.setattr(on_targets, "NEAR", 0.0)
    report = checked(nnx.Linear(16, 16, rngs=nnx.Rngs(0)), jnp.ones((2, 16)), target="v5e")
    assert asked == ["O0", "default"]
    assert on(report, "v5e").effort == "default"
