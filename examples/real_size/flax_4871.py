"""google/flax#4871 at its real size: 50 layers of 10 000 x 10 000, 20 GB of parameters. Nothing is allocated.

Run it with ``pytest examples/real_size/flax_4871.py`` on jax 0.5.3 and flax 0.10.2: one test fails, by design. Newer versions
of flax refuse the program.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import flax
import jax
import jax.numpy as jnp
import pytest
from flax import nnx

DEPTH, WIDTH, STEPS = 50, 10_000, 200
NUMBER = jax.ShapeDtypeStruct((), jnp.float32)
Wrap = Callable[[Any], Callable[..., Any]]


class Layer(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.param = nnx.Param(jax.random.normal(rngs(), (WIDTH, WIDTH)) / WIDTH)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.param @ x


class Model(nnx.Module):
    """Takes a number, sends a vector of it through the layers, and returns the sum."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        @nnx.split_rngs(splits=DEPTH)
        @nnx.vmap(out_axes=nnx.StateAxes({...: 0}))
        def make_layer(rngs: nnx.Rngs) -> Layer:
            return Layer(rngs)

        self.layers = make_layer(rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        @nnx.scan(in_axes=(nnx.StateAxes({...: 0}), nnx.Carry), out_axes=nnx.Carry)
        def forward(layer: Layer, x: jax.Array) -> jax.Array:
            return layer(x)

        return forward(self.layers, jnp.broadcast_to(x, (WIDTH,))).sum()


def program(call_first: bool) -> tuple[Callable[[Any, jax.Array], jax.Array], Any]:
    """The report's `run(state, x)`, a scan over calls of the model, perhaps after a first call; and the state."""
    graphdef, state = nnx.split(nnx.eval_shape(lambda: Model(nnx.Rngs(0))))

    def run(state: Any, x: jax.Array) -> jax.Array:
        model = nnx.merge(graphdef, state)
        if call_first:
            x = model(x)
        return jax.lax.scan(lambda x, _: (model(x), None), x, None, length=STEPS)[0]

    return run, state


@pytest.mark.skipif(not flax.__version__.startswith("0.10.2"), reason="newer versions of flax refuse the program")
@pytest.mark.nnx_invariants(memory_budget="25GB", transforms="jit", sweep="singles", max_examples=0)
@pytest.mark.parametrize("call_first", [False, True])
def test_run(nnx_wrap: Wrap, call_first: bool) -> None:
    run, state = program(call_first)
    assert nnx_wrap(run)(state, NUMBER).shape == ()


def test_no_weights_were_allocated() -> None:
    """The highest resident size of this whole pytest process, as the kernel counts it."""
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    kilobytes = int(status["VmHWM"].removesuffix("kB"))
    assert kilobytes * 1024 < 1e9
