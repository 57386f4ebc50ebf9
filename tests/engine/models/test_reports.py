"""The public reports, found on the versions they were reported on: nothing is told to the check but the model."""

from __future__ import annotations

import bugs
import jax
import jax.numpy as jnp
import pytest
from checking import broken, call, full, near, some, text
from flax import nnx
from healthy import FLAX
from probes import remat_writes_captured

from pytest_nnxcheck import check

JAX = jax.__version_info__[:2]
OLD_FLAX = FLAX < (0, 10, 7)
CLOSURE = "eval_shape[closure]"
COPYING = "jit[functional] > call_first > scan[jax_closure]"
COMBINATIONS = [
    (False, True),
    (True, False),
    *(pytest.param(both, both, marks=pytest.mark.slow) for both in (False, True)),
]


def rngs() -> nnx.Rngs:
    return nnx.Rngs(0)


# google/flax#4520


@pytest.mark.skipif(not OLD_FLAX, reason="flax 0.10.2 leaks in silence, later versions refuse")
@pytest.mark.parametrize("nesting", [CLOSURE, "eval_shape[jax_closure]"])
def test_4520_leaves_tracers_in_the_backbone(nesting):
    found = call(bugs.report_4520(rngs()), *bugs.inputs_4520(), nesting=nesting)
    assert broken(found) == ["tracers"]
    rows = found.outcome.violations[0].details
    leaked = [row.split()[0] for label, row in rows if label == "leaked"]
    assert leaked == ["model.backbone.bias", "model.backbone.kernel"]
    assert ("leaked by", nesting) in rows
    assert "bugs.py" in text(found)


@pytest.mark.skipif(OLD_FLAX, reason="flax 0.10.2 leaks in silence")
def test_4520_is_rejected_and_leaves_the_state_clean():
    model = bugs.report_4520(rngs())
    found = call(model, *bugs.inputs_4520(), nesting=CLOSURE)
    assert found.outcome.verdict == "rejected"
    assert "different trace level" in found.outcome.reason
    assert not any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(nnx.state(model)))


@pytest.mark.skipif(not OLD_FLAX, reason="flax 0.10.2 leaks in silence")
def test_4520_is_found_by_a_check_that_names_no_nesting():
    report = check(bugs.report_4520(rngs()), *bugs.inputs_4520(), sweep="probes", max_examples=0)
    assert {str(outcome.nesting) for outcome in report.outcomes if outcome.violations} >= {CLOSURE}


# google/flax#4871


@pytest.mark.skipif(not OLD_FLAX, reason="flax 0.10.2 copies in silence, later versions refuse")
@pytest.mark.parametrize("x", [0, 0.0])
def test_4871_holds_its_parameters_twice_after_a_first_call(x):
    model = bugs.report_4871(rngs())
    found = call(model, x, nesting=COPYING)
    assert broken(found) == ["memory"]
    assert "copy of model.blocks.param" in text(found)
    assert "the program holds 1.00 extra copies of its state" in text(found)
    assert 1.9 * 8_000_000 < found.outcome.peak < 2.1 * 8_000_000


@pytest.mark.skipif(not OLD_FLAX, reason="flax 0.10.2 copies in silence")
@pytest.mark.parametrize("call_first, copies", [(True, "1.00"), (False, "")])
def test_4871_own_run_of_a_state_copies_it_after_a_first_call(call_first, copies):
    model = nnx.eval_shape(lambda: bugs.report_4871(rngs()))
    run = bugs.run_4871(model, call_first)
    found = call(run, nnx.state(model), jax.ShapeDtypeStruct((), jnp.float32), nesting="jit")
    assert broken(found) == (["memory"] if copies else [])
    assert f"the program holds {copies} extra copies of its state" in text(found) or not copies


@pytest.mark.skipif(not OLD_FLAX, reason="flax 0.10.2 copies in silence")
def test_4871_holds_its_parameters_once_without_a_first_call():
    found = call(bugs.report_4871(rngs()), 0.0, nesting="jit[functional] > scan[jax_closure]")
    assert found.outcome.verdict == "held"
    assert found.outcome.peak < 1.01 * 8_000_000
    assert "scan[jax_closure] left tracers in model.blocks.param" in text(found)


@pytest.mark.skipif(not OLD_FLAX, reason="flax 0.10.2 leaks in silence")
@pytest.mark.parametrize("nesting", ["jit > scan[jax_closure]", "jit > call_first > scan[jax_closure]"])
def test_4871_blames_the_scan_where_the_state_is_returned(nesting):
    found = call(bugs.report_4871(rngs()), 0.0, nesting=nesting)
    assert broken(found) == ["tracers"]
    assert ("leaked by", "scan[jax_closure]") in found.outcome.violations[0].details


@pytest.mark.skipif(OLD_FLAX, reason="flax 0.10.2 copies in silence")
def test_4871_is_rejected():
    found = call(bugs.report_4871(rngs()), 0.0, nesting=COPYING)
    assert found.outcome.verdict == "rejected"


@pytest.mark.skipif(not OLD_FLAX, reason="flax 0.10.2 leaks in silence")
@pytest.mark.parametrize("nesting", ["un-nested", "remat", "jit"])
def test_4871_own_run_with_an_integer_names_the_path(nesting):
    """Jax 0.5.3 traces it, with a parameter that nobody passes: what is only traced must not count as held."""
    model = bugs.report_4871(rngs())
    found = call(bugs.run_4871(model, call_first=False), nnx.state(model), 0, nesting=nesting)
    assert found.outcome.verdict == "failed"
    assert isinstance(found.error, jax.errors.UnexpectedTracerError)
    assert "blocks.param" in text(found)
    assert "captured merged (Report4871)" in text(found)


# A scan over nnx.remat, the live form of google/flax#4871


@pytest.mark.parametrize("how", bugs.cures())
@pytest.mark.parametrize("nesting", ["jit", "jit > call_first", *full("jit[functional]", "jit > scan", "jit > vmap")])
def test_a_cured_scan_holds(nesting, how):
    found = call(bugs.call_twice, bugs.ScanOverRemat(rngs(), how), *bugs.inputs_scan_over_remat(), nesting=nesting)
    assert found.outcome.verdict == "held", text(found)


def test_one_call_in_the_subject_is_enough_for_the_sweep():
    report = check(bugs.ScanOverRemat(rngs()), *bugs.inputs_scan_over_remat(), max_examples=0, styles="functional")
    assert [str(outcome.nesting) for outcome in report.outcomes if outcome.violations] == [
        "jit[functional] > call_first"
    ]


# google/flax#4819


@pytest.mark.parametrize("remat, scan", COMBINATIONS)
def test_4819_decoding_with_the_model_captured_and_in_the_carry_that_the_hint_names(remat, scan):
    model, inputs = bugs.report_4819(rngs(), remat, scan), bugs.inputs_4819()
    assert call(bugs.autoregressive_decode_in_carry, model, *inputs).outcome.verdict == "held"
    found = call(bugs.autoregressive_decode, model, *inputs)
    if not (remat or scan):
        assert found.outcome.verdict == "held"
        return
    # Where flax does not refuse, it leaks: 0.10.2 always, later versions with remat alone.
    silent = OLD_FLAX or (remat_writes_captured() and not scan)
    assert found.outcome.verdict == ("violated" if silent else "failed")
    assert "different trace level" in str(found.error) or silent
    assert f"while_loop at {near(bugs.__file__)}:" in text(found)
    assert "captured model (Report4819)" in text(found)
    assert "nnx.while_loop(cond, body, (model, x))" in text(found)


@pytest.mark.parametrize("remat, scan", COMBINATIONS)
def test_4819_the_model_itself_under_while_loop(remat, scan):
    model, inputs = bugs.report_4819(rngs(), remat, scan), bugs.inputs_4819()
    assert call(model, *inputs, nesting="while_loop").outcome.verdict == "held"
    assert call(model, *inputs, nesting="while_loop[functional]").outcome.verdict == "held"
    captured = call(model, *inputs, nesting="while_loop[closure]")
    silent = OLD_FLAX or (remat_writes_captured() and not scan)
    expected = ("violated" if silent else "rejected") if remat or scan else "held"
    assert captured.outcome.verdict == expected


# Donated pointers


@pytest.mark.parametrize("n", [4, 100_000])
@pytest.mark.parametrize(
    "step, lost",
    [
        (bugs.step_in_place, ""),
        (bugs.step_other_dtype, "pair.b   float32[{n}]   its dtype changed: it became bfloat16[{n}]"),
        (bugs.step_drops_one, "pair.b   float32[{n}]   not returned"),
    ],
)
def test_a_step_keeps_its_pointers_or_names_the_one_that_is_lost(step, lost, n):
    found = call(step, bugs.Pair(n), nesting="jit")
    assert broken(found) == ["donation"] * bool(lost), text(found)
    assert lost.format(n=n) in text(found)
    assert "pair.a" not in text(found)


@pytest.mark.parametrize("n", [4, 100_000])
def test_plain_arrays_are_donated_where_asked(n):
    arrays = (jnp.arange(n, dtype=jnp.float32), jnp.ones(n))
    assert call(bugs.arrays_step, *arrays, nesting="jit", donate="all").outcome.verdict == "held"
    other = call(bugs.arrays_step_other_dtype, *arrays, nesting="jit", donate="all")
    assert f"b   float32[{n}]   its dtype changed: an output is bfloat16[{n}]" in text(other)
    dropped = call(bugs.arrays_step_drops_one, *arrays, nesting="jit", donate="all")
    assert "not returned" in text(dropped)
    assert not any(array.is_deleted() for array in arrays)


# jax-ml/jax#926


@pytest.mark.parametrize("donate, times, below_three", [("none", 4.0, "violated"), ("all", 2.0, "held")])
def test_926_ten_convolutions_hold_a_part_less_where_the_input_is_donated(donate, times, below_three):
    (x,) = bugs.inputs_926()
    found = call(bugs.ten_convolutions, x, nesting="jit", donate=donate)
    assert found.outcome.verdict == "held", text(found)
    assert found.outcome.peak / x.nbytes == pytest.approx(times, abs=0.01)
    below = call(bugs.ten_convolutions, x, nesting="jit", donate=donate, memory_budget=3 * x.nbytes)
    assert below.outcome.verdict == below_three


class Buffer(nnx.Variable):
    """A modifiable buffer that is no parameter."""


class SpectralLinear(nnx.Module):
    """A linear layer divided by its largest singular value; the vector of the power iteration is the buffer."""

    def __init__(self):
        self.linear, self.u = nnx.Linear(8, 8, rngs=rngs()), Buffer(jnp.ones(8))

    def __call__(self, x):
        kernel = self.linear.kernel[...]
        v = kernel.T @ self.u[...]
        u = kernel @ (v / jnp.linalg.norm(v))
        bugs.assign(self.u, u / jnp.linalg.norm(u))
        return self.linear(x) / jnp.linalg.norm(u)


class MovingAverage(nnx.Module):
    """A linear layer that keeps an exponential moving average of its outputs in a buffer."""

    def __init__(self):
        self.linear, self.mean = nnx.Linear(8, 8, rngs=rngs()), Buffer(jnp.zeros(8))

    def __call__(self, x):
        y = self.linear(x)
        bugs.assign(self.mean, 0.9 * self.mean[...] + 0.1 * y.mean(0))
        return y - self.mean[...]


BUFFERS = {
    "batch_norm": lambda: nnx.BatchNorm(8, use_running_average=False, rngs=rngs()),
    "spectral_norm": SpectralLinear,
    "moving_average": MovingAverage,
}


@pytest.mark.parametrize("name", some(BUFFERS, ("batch_norm",), pytest.mark.slow))
def test_926_modifiable_buffers_hold_and_keep_their_pointers(name):
    report = check(BUFFERS[name](), jnp.ones((4, 8)), styles="argument", effort="quick")
    assert report.ok, report
    assert sum(outcome.verdict == "held" for outcome in report.outcomes) > 5
