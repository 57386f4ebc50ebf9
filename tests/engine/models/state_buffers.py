"""The modifiable buffers that jax-ml/jax#926 asks for, as modules."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from healthy import FLAX, assign


class Buffer(nnx.Variable[Any]):
    """A modifiable buffer that is no parameter, as jax-ml/jax#926 asks for."""


class SpectralLinear(nnx.Module):
    """A linear layer divided by its largest singular value; the vector of the power iteration is the buffer."""

    def __init__(self, width: int, rngs: nnx.Rngs) -> None:
        self.linear = nnx.Linear(width, width, rngs=rngs)
        self.u = Buffer(jax.random.normal(rngs.params(), (width,)))

    def __call__(self, x: jax.Array) -> jax.Array:
        kernel = self.linear.kernel[...]
        v = kernel.T @ self.u[...]
        u = kernel @ (v / jnp.linalg.norm(v))
        assign(self.u, u / jnp.linalg.norm(u))
        return self.linear(x) / jnp.linalg.norm(u)


class MovingAverage(nnx.Module):
    """A linear layer that keeps an exponential moving average of its outputs in a buffer."""

    def __init__(self, width: int, rngs: nnx.Rngs, decay: float = 0.9) -> None:
        self.decay = decay
        self.linear = nnx.Linear(width, width, rngs=rngs)
        self.mean = Buffer(jnp.zeros(width))

    def __call__(self, x: jax.Array) -> jax.Array:
        y = self.linear(x)
        assign(self.mean, self.decay * self.mean[...] + (1 - self.decay) * y.mean(0))
        return y - self.mean[...]


def buffers_926(width: int = 8) -> dict[str, nnx.Module]:
    """The three modifiable buffers the report names, as modules ``[batch, width] -> [batch, width]``.

    ``flax_spectral_norm`` is flax's own layer, where it has one.
    """
    modules: dict[str, nnx.Module] = {
        "batch_norm": nnx.BatchNorm(width, use_running_average=False, rngs=nnx.Rngs(0)),
        "spectral_norm": SpectralLinear(width, nnx.Rngs(0)),
        "moving_average": MovingAverage(width, nnx.Rngs(0)),
    }
    if FLAX >= (0, 12):
        linear = nnx.Linear(width, width, rngs=nnx.Rngs(0))
        modules["flax_spectral_norm"] = nnx.SpectralNorm(linear, rngs=nnx.Rngs(0))
    return modules
