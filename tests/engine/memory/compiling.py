"""Programs compiled as the plugin judges them, and what is read of their memory."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from pytest_nnxcheck.compat import compile_cache
from pytest_nnxcheck.xla.buffers import read

P = jnp.ones((64, 128))
X = jnp.ones((128,))


def compile_(function, *args, donate=(), options=None):
    with compile_cache.judged_compiles():
        return jax.jit(function, donate_argnums=donate, keep_unused=True).lower(*args).compile(compiler_options=options)


def memory_of(function, *args, donate=()):
    return read(compile_(function, *args, donate=donate))


def stacked_again(p, x):
    """A scan hands every slice back unchanged, and the stack that it makes is used afterwards."""
    x, again = lax.scan(lambda x, row: (jnp.tanh(x + row), row), x, p)
    return lax.scan(lambda x, row: (jnp.tanh(x + row), None), x, again)[0], again
