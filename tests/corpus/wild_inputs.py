"""What models are called with: inputs of every kind."""

from __future__ import annotations

import dataclasses
import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from healthy import WIDTH, Case, assign, numbers, rngs
from wild_cases import TOKENS, X, subject
from wild_training import Mlp


@subject
def integer_tokens_and_none():
    def forward(model, tokens, mask=None, labels=None):
        return model(tokens).sum() if mask is None else model(tokens)[mask]

    return Case(forward, (nnx.Embed(10, WIDTH, rngs=rngs()), TOKENS, None))


@subject
def keys_of_both_kinds():
    def forward(model, x, key, raw, keys):
        noise = jax.random.normal(key, x.shape) + jax.random.normal(raw, x.shape)
        return model(x + noise) + jax.vmap(lambda key: jax.random.normal(key, (4,)))(keys), jax.random.split(key)[0]

    keys = jax.random.split(jax.random.key(2), 3)
    return Case(
        forward, (nnx.Linear(WIDTH, 4, rngs=rngs()), numbers(X), jax.random.key(0), jax.random.PRNGKey(1), keys)
    )


@subject
def numpy_and_python_inputs():
    def forward(model, x, tokens, flags, rate, count, names, names_array):
        assert names == ["a", "b"]
        return model(x) * rate * count + tokens.sum() + flags.sum()

    x = np.ones(X, np.float64)
    return Case(
        forward,
        (
            nnx.Linear(WIDTH, 4, rngs=rngs()),
            x,
            np.arange(3, dtype=np.int64),
            np.array([True, False]),
            np.float32(0.1),
            3,
            ["a", "b"],
            np.array(["a", "b"]),
        ),
    )


@subject
def empty_and_scalar_arrays():
    def forward(model, x, nothing, scalar, z):
        return model(x) * scalar, nothing, z * 2

    arrays = (numbers(X), jnp.zeros((0, 4)), jnp.asarray(2.0), jnp.ones(2, jnp.complex64))
    return Case(forward, (nnx.Linear(WIDTH, 4, rngs=rngs()), *arrays))


@subject
def dict_batch_with_none():
    def loss(model, batch):
        assert batch["name"] == "train"
        return ((model(batch["x"]) - batch["y"]) ** 2).mean()

    batch = {"x": numbers(X), "y": numbers((3, 4)), "weights": None, "name": "train"}
    return Case(loss, (nnx.Linear(WIDTH, 4, rngs=rngs()), batch))


@subject
def dict_with_keys_of_several_types():
    def forward(model, batch):
        return model(batch["x"]) + batch[0]

    return Case(forward, (nnx.Linear(WIDTH, 4, rngs=rngs()), {"x": numbers(X), 0: jnp.float32(1)}))


@dataclasses.dataclass
class Batch:
    x: Any
    y: Any
    weights: Any = None
    name: str = "train"

    def __post_init__(self):
        assert self.x.ndim == 2


@subject
def batch_as_plain_dataclass():
    def loss(model, batch):
        assert batch.name == "train"
        return ((model(batch.x) - batch.y) ** 2).mean(), batch

    return Case(loss, (nnx.Linear(WIDTH, 4, rngs=rngs()), Batch(numbers(X), numbers((3, 4)))))


@subject
def rngs_as_argument():
    def forward(model, rngs, x):
        return model(x, rngs=rngs) + jax.random.normal(rngs.noise(), x.shape)

    return Case(forward, (nnx.Dropout(0.5), nnx.Rngs(0, dropout=1, noise=2), numbers(X)))


@subject
def states_as_arguments():
    model = Mlp(rngs())
    graphdef, params, rest = nnx.split(model, nnx.Param, ...)

    def forward(params, rest, x):
        model = nnx.merge(graphdef, params, rest)
        return model(x), nnx.state(model, nnx.BatchStat)

    return Case(forward, (params, rest, numbers(X)))


@subject
def variable_as_argument():
    def count(counter, x):
        assign(counter, counter[...] + 1)
        return x * counter[...]

    return Case(count, (nnx.Variable(jnp.float32(0)), numbers(X)))


class Attributes(dict):
    __getattr__ = dict.__getitem__


@subject
def subclass_of_dict():
    return Case(
        lambda model, batch: Attributes(y=model(batch.x)),
        (nnx.Linear(WIDTH, 4, rngs=rngs()), Attributes(x=numbers(X), n=1)),
    )


@subject
def namespace():
    return Case(
        lambda batch: batch.model(batch.x),
        (types.SimpleNamespace(model=nnx.Linear(WIDTH, 4, rngs=rngs()), x=numbers(X)),),
    )
