"""How models are called: decoding steps, flags, keywords and defaults."""

from __future__ import annotations

import dataclasses
import enum
import functools
from typing import Any, NamedTuple

import flax
import jax
import jax.numpy as jnp
import optax
from flax import nnx
from healthy import WIDTH, assign, numbers, rngs
from wild_cases import Case, X, subject

# --- decoding


class KvAttention(nnx.Module):
    """One head of attention over a cache that is handed in and handed back."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.query = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.key = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.value = nnx.Linear(WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x, keys, values, position):
        keys = jax.lax.dynamic_update_slice_in_dim(keys, self.key(x), position, axis=1)
        values = jax.lax.dynamic_update_slice_in_dim(values, self.value(x), position, axis=1)
        seen = jnp.arange(keys.shape[1]) <= position
        weights = jax.nn.softmax(jnp.where(seen, self.query(x) @ keys.swapaxes(1, 2), -1e9))
        return weights @ values, keys, values


class Cache(NamedTuple):
    keys: Any
    values: Any
    position: Any


@flax.struct.dataclass
class StructCache:
    keys: Any
    values: Any
    position: Any
    layout: str = flax.struct.field(pytree_node=False, default="bth")


@functools.partial(jax.tree_util.register_dataclass, data_fields=["keys", "values", "position"], meta_fields=["layout"])
@dataclasses.dataclass
class RegisteredCache:
    keys: Any
    values: Any
    position: Any
    layout: str = "bth"


@dataclasses.dataclass(frozen=True)
class PlainCache:
    keys: Any
    values: Any
    position: Any
    layout: str = "bth"


@dataclasses.dataclass(frozen=True, slots=True)
class SlottedCache:
    keys: Any
    values: Any
    position: Any


def empty_cache(kind=Cache):
    return kind(jnp.zeros((2, 6, WIDTH)), jnp.zeros((2, 6, WIDTH)), jnp.int32(0))


def decode(model, x, cache):
    out, keys, values = model(x, cache.keys, cache.values, cache.position)
    return out, type(cache)(keys, values, cache.position + 1)


def decoding(kind):
    return Case(decode, (KvAttention(rngs()), numbers((2, 1, WIDTH)), empty_cache(kind)))


@subject
def cache_in_the_module():
    layer = nnx.MultiHeadAttention(num_heads=2, in_features=WIDTH, decode=True, rngs=rngs())
    layer.init_cache((2, 6, WIDTH))

    def decode_step(model, token, *, deterministic):
        return model(token, deterministic=deterministic)[:, 0].argmax(-1)

    return Case(decode_step, (layer, numbers((2, 1, WIDTH))), {"deterministic": True})


@subject
def cache_as_named_tuple():
    return decoding(Cache)


@subject
def cache_as_struct_dataclass():
    return decoding(StructCache)


@subject
def cache_as_registered_dataclass():
    return decoding(RegisteredCache)


@subject
def cache_as_plain_dataclass():
    return decoding(PlainCache)


@subject
def cache_as_slotted_dataclass():
    return decoding(SlottedCache)


@subject
def cache_as_list_of_pairs():
    def step(models, x, caches):
        new = []
        for model, cache in zip(models, caches, strict=True):
            x, *pair = model(x, *cache, 0)
            new.append(tuple(pair))
        return x, new

    cache = empty_cache()
    return Case(step, ([KvAttention(rngs()), KvAttention(rngs())], numbers((2, 1, WIDTH)), [cache[:2], cache[:2]]))


@subject
def cache_as_module_beside():
    class KvCache(nnx.Module):
        def __init__(self):
            self.keys, self.values = nnx.Cache(jnp.zeros((2, 6, WIDTH))), nnx.Cache(jnp.zeros((2, 6, WIDTH)))
            self.position = nnx.Cache(jnp.int32(0))

    def step(model, x, cache):
        out, keys, values = model(x, cache.keys[...], cache.values[...], cache.position[...])
        assign(cache.keys, keys)
        assign(cache.values, values)
        assign(cache.position, cache.position[...] + 1)
        return out

    return Case(step, (KvAttention(rngs()), numbers((2, 1, WIDTH)), KvCache()))


@subject
def cache_as_state_beside():
    layer = nnx.MultiHeadAttention(num_heads=2, in_features=WIDTH, decode=True, rngs=rngs())
    layer.init_cache((2, 6, WIDTH))
    graphdef, cache, rest = nnx.split(layer, nnx.Cache, ...)

    def step(graphdef, cache, rest, token):
        model = nnx.merge(graphdef, cache, rest)
        out = model(token)
        return out, nnx.state(model, nnx.Cache)

    return Case(step, (graphdef, cache, rest, numbers((2, 1, WIDTH))))


@subject
def lstm_carry():
    cell = nnx.LSTMCell(WIDTH, 4, rngs=rngs())

    def step(cell, carry, x):
        (h, c), y = cell(carry, x)
        return (h, c), y

    return Case(step, (cell, (jnp.zeros((2, 4)), jnp.zeros((2, 4))), numbers((2, WIDTH))))


@subject
def generation_loop_inside():
    def generate(model, x, cache, steps):
        outputs = []
        for _ in range(steps):
            x, cache = decode(model, x, cache)
            outputs.append(x)
        return jnp.concatenate(outputs, axis=1), cache

    return Case(generate, (KvAttention(rngs()), numbers((2, 1, WIDTH)), empty_cache()), {"steps": 2})


# --- flags, keywords, defaults


class Mode(enum.Enum):
    MEAN = "mean"
    LAST = "last"


def pooled(model, x, *, mode=Mode.LAST, train=False, dtype=jnp.float32, scale=1.0, shape=None, activation=nnx.relu):
    y = activation(model(x.astype(dtype))) * scale
    y = y.mean(0) if mode is Mode.MEAN or mode == "mean" else y[-1]
    y = y * 2 if train else y
    return y if shape is None else y.reshape(shape)


@subject
def flags_and_keywords():
    flags = {
        "mode": "mean",
        "train": True,
        "dtype": jnp.bfloat16,
        "scale": 0.5,
        "shape": (2, -1),
        "activation": jnp.tanh,
    }
    return Case(pooled, (nnx.Linear(WIDTH, 4, rngs=rngs()),), {"x": numbers(X), **flags})


@subject
def enum_flag():
    return Case(pooled, (nnx.Linear(WIDTH, 4, rngs=rngs()), numbers(X)), {"mode": Mode.MEAN})


@subject
def defaults_alone():
    return Case(pooled, (nnx.Linear(WIDTH, 4, rngs=rngs()), numbers(X)))


@subject
def star_args_of_models():
    def ensemble(x, *models, **weights):
        return sum(model(x) * weights[f"w{index}"] for index, model in enumerate(models))

    models = [nnx.BatchNorm(WIDTH, rngs=rngs()) for _ in range(2)]
    return Case(ensemble, (numbers(X), *models), {"w0": jnp.float32(0.3), "w1": 0.7})


@subject
def dict_of_models():
    def gan(models, z):
        return models["critic"](models["generator"](z))

    return Case(gan, ({name: nnx.Linear(WIDTH, WIDTH, rngs=rngs()) for name in ("generator", "critic")}, numbers(X)))


@subject
def unhashable_config():
    class Config:
        __hash__ = None

        def __init__(self):
            self.names = {"a", "b"}
            self.table = {"layers": [1, 2], 3: "x"}

        def __eq__(self, other):
            raise RuntimeError("configurations are not compared")

        def __repr__(self):
            raise RuntimeError("nor shown")

    def forward(model, x, config, names):
        return model(x) * len(config.names) * len(names)

    return Case(forward, (nnx.Linear(WIDTH, 4, rngs=rngs()), numbers(X), Config(), {"c"}))


@subject
def optax_transformation_as_argument():
    def step(model, tx, opt_state, x):
        grads = nnx.grad(lambda model: model(x).mean())(model)
        params = nnx.state(model, nnx.Param)
        updates, opt_state = tx.update(grads, opt_state, params)
        nnx.update(model, optax.apply_updates(params, updates))
        return opt_state

    model, tx = nnx.Linear(WIDTH, 4, rngs=rngs()), optax.adam(1e-3)
    return Case(step, (model, tx, tx.init(nnx.state(model, nnx.Param)), numbers(X)))
