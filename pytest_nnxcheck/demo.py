"""A small model with a bug, and its cure: ``pytest --nnx-check pytest_nnxcheck.demo`` shows a check that fails, and one that passes.

The model is a scan over rematerialized blocks, as most language models are. Its program holds one more copy of all parameters (google/flax#4871): flax'
remat returns every parameter as if it had changed.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx


class Block(nnx.Module):
    """One layer."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.linear = nnx.Linear(128, 128, use_bias=False, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        """Apply it."""
        return nnx.tanh(self.linear(x))


class Decoder(nnx.Module):
    """Eight blocks, stacked."""

    def __init__(self, remat: Callable[..., Any], rngs: nnx.Rngs) -> None:
        self.remat = remat

        @nnx.split_rngs(splits=8)
        @nnx.vmap(in_axes=(0,), out_axes=0)
        def make_blocks(rngs: nnx.Rngs) -> Block:
            return Block(rngs)

        self.blocks = make_blocks(rngs)

    def __call__(self, x: Any) -> Any:
        """Apply one block after the other."""

        @nnx.scan(in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
        def forward(block: Block, x: Any) -> Any:
            return self.remat(Block.__call__)(block, x)

        return forward(self.blocks, x)


@functools.cache
def decoder(remat: Callable[..., Any]) -> Decoder:
    """Make the model once for all nestings."""
    return Decoder(remat, nnx.Rngs(0))


def remat(function: Callable[..., Any]) -> Any:
    """The remat of flax as most models write it."""
    return nnx.remat(function)


def remat_without_updates(function: Callable[..., Any]) -> Any:
    """A remat that returns what it computes, and no parameters; flax before 0.12 has it in JAX alone."""
    if "graph_updates" in inspect.signature(nnx.remat).parameters:
        return nnx.remat(function, graph_updates=False)

    def of_arrays(block: Block, x: Any) -> Any:
        graphdef, state = nnx.split(block)
        return jax.checkpoint(lambda state, x: function(nnx.merge(graphdef, state), x))(state, x)

    return of_arrays


def check_remat() -> tuple[Any, ...]:
    """The bug."""
    return decoder(remat), jnp.ones((4, 128))


def check_remat_without_updates() -> tuple[Any, ...]:
    """The cure."""
    return decoder(remat_without_updates), jnp.ones((4, 128))
