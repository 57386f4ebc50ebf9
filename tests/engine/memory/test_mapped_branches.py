"""A branch under vmap: chosen by a mapped value, jax runs all of them, with the weights repeated for each element."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from checking import broken, call, hint, text
from flax import nnx

X = jnp.ones((4, 128))


class Experts(nnx.Module):
    """Three layers, of which an index chooses one."""

    def __init__(self):
        self.first, self.second, self.third = (nnx.Linear(128, 128, rngs=nnx.Rngs(seed)) for seed in range(3))

    def functions(self):
        return [
            lambda experts, x: experts.first(x),
            lambda experts, x: experts.second(x),
            lambda experts, x: experts.third(x),
        ]

    def switched(self, x, index):
        return nnx.switch(index, self.functions(), self, x)

    def switched_by_jax(self, x, index):
        return jax.lax.switch(index, [self.first, self.second, self.third], x)

    def chosen(self, x, index):
        return jnp.stack([function(self, x) for function in self.functions()])[index]


@pytest.mark.skipif(jax.__version_info__ < (0, 6), reason="older XLA fuses what is repeated into its use")
@pytest.mark.parametrize("name", ["switched", pytest.param("switched_by_jax", marks=pytest.mark.slow)])
def test_a_branch_that_vmap_maps_repeats_its_weights_and_results_that_are_chosen_do_not(name):
    found = call(getattr(Experts(), name), X, jnp.int32(1), nesting="jit > vmap")
    assert broken(found) == ["memory"], text(found)
    assert found.outcome.violations[0].hint == hint("mapped branch")
    assert call(getattr(Experts(), name), X, jnp.int32(1), nesting="jit").outcome.verdict == "held"
    held = call(Experts().chosen, X, jnp.int32(1), nesting="jit > vmap")
    assert held.outcome.verdict == "held", text(held)
