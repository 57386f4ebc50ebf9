"""Programs that this CPU cannot lower: a target whose compiler can judges them alone."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from checking import flat
from flax import nnx
from jax.experimental import pallas as pl
from test_on_targets import checked, compiled, found, on

from pytest_nnxcheck import CheckError
from pytest_nnxcheck.invariants.donation import LostOnTarget
from pytest_nnxcheck.invariants.memory import DoesNotFit, OverBudgetOnTarget

pytestmark = pytest.mark.skipif(jax.__version_info__ < (0, 10), reason="older kernels are lowered in another way")
ONE = {"nesting": "jit", "target": "v5e"}


def doubled(x):
    """A kernel of Pallas, called straight."""

    def kernel(x, o):
        o[...] = x[...] * 2

    return pl.pallas_call(kernel, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype))(x)


class Model(nnx.Module):
    def __init__(self, width, rngs):
        self.linear, self.count = nnx.Linear(width, width, rngs=rngs), nnx.Variable(jnp.zeros(()))

    def __call__(self, x):
        self.count.set_value(self.count.get_value() + 1)
        return doubled(self.linear(x))


def model(width, *, abstract):
    make = lambda: (Model(width, nnx.Rngs(0)), jnp.ones((8, width)))  # noqa: E731
    return nnx.eval_shape(make) if abstract else make()


@pytest.mark.parametrize("abstract", [False, True])
def test_the_target_judges_alone_and_the_rest_of_the_nestings_are_traced(abstract):
    report = checked(*model(256, abstract=abstract), transforms="jit,scan,remat", target="v5e")
    assert report.ok, str(report)
    assert compiled(report) == {"jit"}
    there = on(report, "v5e")
    assert 2**18 < there.peak < 2**19
    assert (there.donated, there.lost, there.lost_too) == (3, (), 0)
    assert any(
        note.startswith("judged on v5e alone, since this CPU cannot lower the program: ") for note in report.notes
    )
    assert {str(each.nesting) for each in report.outcomes if each.verdict == "held"} >= {"jit", "scan", "remat"}
    asserted = {name for each in report.outcomes for name in each.asserted}
    assert asserted >= {"tracers", "memory", "donation"}


def test_what_is_too_large_there_fails_and_so_does_a_budget():
    assert found(checked(*model(70_000, abstract=True), **ONE), DoesNotFit) == {"v5e"}
    over = checked(*model(256, abstract=True), **ONE, memory_budget="100KiB")
    assert found(over, OverBudgetOnTarget) == {"v5e"}
    assert "passes with memory_budget=" in flat(str(over))
    assert checked(*model(256, abstract=True), **ONE, memory_budget="1MiB").ok
    assert checked(*model(256, abstract=True), **ONE, memory_budget="0.1x").ok


def halves(model, x):
    """Comes back in half the bytes, so that no output takes the buffer."""
    model.linear.kernel.set_value(doubled(model.linear.kernel.get_value()).astype(jnp.bfloat16))
    return x


def test_a_buffer_that_is_lost_there_fails():
    lost = checked(halves, *model(256, abstract=True), **ONE)
    assert found(lost, LostOnTarget) == {"v5e"}
    assert "model.linear.kernel" in str(lost)
    assert not found(checked(*model(256, abstract=True), **ONE), LostOnTarget)


def test_without_values_a_body_that_reads_them_is_left_out_here(pytester, inner_args):
    pytester.makepyfile(
        """
        import jax.numpy as jnp
        import pytest
        from flax import nnx
        from test_kernels_on_targets import Model

        @pytest.mark.nnx_invariants(transforms="jit", styles="argument", max_examples=0, target="v5e")
        def test_reads(nnx_wrap):
            y = nnx_wrap(Model(256, nnx.Rngs(0)))(jnp.ones((8, 256)))
            assert float(y.sum()) > 0

        @pytest.mark.nnx_invariants(transforms="jit", styles="argument", max_examples=0, target="v5e")
        def test_reads_the_shape(nnx_wrap):
            y = nnx_wrap(Model(256, nnx.Rngs(0)))(jnp.ones((8, 256)))
            assert y.shape == (8, 256)
        """
    )
    result = pytester.runpytest_inprocess(*inner_args, "-p", "no:randomly", "-v")
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(["*nothing was checked*this CPU cannot lower the program*"])


def test_a_target_that_cannot_lower_it_either_says_why():
    report = checked(*model(256, abstract=True), target="h100", transforms="jit,scan")
    assert report.ok
    assert on(report, "h100").left_out
    assert "memory and donation not asserted: this CPU cannot lower the program" in str(report)
    with pytest.raises(CheckError, match="nothing was checked.*this CPU cannot lower the program"):
        checked(*model(256, abstract=True), target="h100", nesting="jit")
