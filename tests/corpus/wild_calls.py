"""How models are called, what is called, and what comes back: decoding, flags, partials, methods, jitted functions, trainers, outputs."""

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
from healthy import WIDTH, Case, assign, numbers, rngs
from wild_cases import WILD, X, subject
from wild_inputs import Batch
from wild_training import Mlp, TrainState, batch_of, optimizer_of, step_of

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


KINDS = {
    "named_tuple": Cache,
    "struct_dataclass": StructCache,
    "registered_dataclass": RegisteredCache,
    "plain_dataclass": PlainCache,
    "slotted_dataclass": SlottedCache,
}
WILD |= {f"cache_as_{name}": functools.partial(decoding, kind) for name, kind in KINDS.items()}


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


FLAGS = {"mode": "mean", "train": True, "dtype": jnp.bfloat16, "scale": 0.5, "shape": (2, -1), "activation": jnp.tanh}


def linear():
    return nnx.Linear(WIDTH, 4, rngs=rngs())


WILD |= {
    "flags_and_keywords": lambda: Case(pooled, (linear(),), {"x": numbers(X), **FLAGS}),
    "enum_flag": lambda: Case(pooled, (linear(), numbers(X)), {"mode": Mode.MEAN}),
    "defaults_alone": lambda: Case(pooled, (linear(), numbers(X))),
}


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

    return Case(forward, (linear(), numbers(X), Config(), {"c"}))


@subject
def optax_transformation_as_argument():
    def step(model, tx, opt_state, x):
        grads = nnx.grad(lambda model: model(x).mean())(model)
        params = nnx.state(model, nnx.Param)
        updates, opt_state = tx.update(grads, opt_state, params)
        nnx.update(model, optax.apply_updates(params, updates))
        return opt_state

    model, tx = linear(), optax.adam(1e-3)
    return Case(step, (model, tx, tx.init(nnx.state(model, nnx.Param)), numbers(X)))


# --- what is called


class Heads(nnx.Module):
    scale = 2.0

    def __init__(self, rngs):
        self.linear = nnx.Linear(WIDTH, 4, rngs=rngs)

    @classmethod
    def make_and_apply(cls, other, x):
        return other.linear(x) * cls.scale

    @staticmethod
    def apply(model, x):
        return model.linear(x)

    @nnx.jit
    def jitted(self, x):
        return self.linear(x)

    @functools.partial(nnx.jit, static_argnames=("train",))
    def flagged(self, x, *, train):
        return self.linear(x) * (2 if train else 1)

    @nnx.remat
    def rematted(self, x):
        return self.linear(x)


WILD |= {
    "partial_of_keywords": lambda: Case(
        functools.partial(functools.partial(pooled, linear()), mode="mean", train=True), (numbers(X),)
    ),
    "bound_method": lambda: Case(nnx.Embed(10, WIDTH, rngs=rngs()).attend, (numbers(X),)),
    "class_method": lambda: Case(Heads.make_and_apply, (Heads(rngs()), numbers(X))),
    "static_method": lambda: Case(Heads.apply, (Heads(rngs()), numbers(X))),
    "unbound_method": lambda: Case(Heads.rematted, (Heads(rngs()), numbers(X))),
    "rematted_method": lambda: Case(Heads(rngs()).rematted, (numbers(X),)),
    "jitted_method": lambda: Case(Heads(rngs()).jitted, (numbers(X),)),
    "jitted_method_with_a_flag": lambda: Case(functools.partial(Heads(rngs()).flagged, train=True), (numbers(X),)),
    "jit_of_a_step": lambda: Case(
        nnx.jit(step_of(), donate_argnames=("model",)), (*optimizer_of(Mlp(rngs())), batch_of())
    ),
}


@subject
def jax_jit_with_static_names():
    @functools.partial(jax.jit, static_argnames=("graphdef", "power"))
    def forward(graphdef, state, x, *, power):
        model = nnx.merge(graphdef, state)
        return model(x) ** power, nnx.state(model)

    graphdef, state = nnx.split(nnx.BatchNorm(WIDTH, rngs=rngs()))
    return Case(forward, (graphdef, state, numbers(X)), {"power": 2})


@subject
def vmapped_ensemble():
    @nnx.vmap(in_axes=0, out_axes=0)
    def make(key):
        return nnx.Linear(WIDTH, 4, rngs=nnx.Rngs(key))

    forward = nnx.vmap(lambda model, x: model(x), in_axes=(0, None))
    return Case(forward, (make(jax.random.split(jax.random.key(0), 2)), numbers(X)))


# --- outputs


class Output(NamedTuple):
    logits: Any
    aux: Any = None


def nothing(model, x):
    model(x)


def new_nodes(model, x):
    keys = nnx.Rngs(jax.random.key(0))
    return nnx.Linear(WIDTH, 4, rngs=keys), nnx.Cache(model(x)), keys


def trained(model, optimizer, batch):
    loss = step_of()(model, optimizer, batch)
    return model, optimizer, loss


def returning(returned, model=linear):
    return lambda: Case(returned, (model(), numbers(X)))


def batch_norm():
    return nnx.BatchNorm(WIDTH, rngs=rngs())


WILD |= {
    "text_none_and_numbers": returning(
        lambda model, x: {"y": model(x), "name": "linear", "none": None, "nested": (None, [x.shape, 1.5, True])}
    ),
    "nothing_returned": returning(nothing, batch_norm),
    "the_models_returned": lambda: Case(trained, (*optimizer_of(Mlp(rngs())), batch_of())),
    "new_nodes_returned": returning(new_nodes),
    "parts_of_the_model_returned": returning(
        lambda model, x: (model.layers[0], model.layers[0].kernel, model(x)), lambda: Mlp(rngs())
    ),
    "states_returned": returning(
        lambda model, x: (model(x), nnx.split(model), nnx.state(model, nnx.BatchStat)), batch_norm
    ),
    "named_tuple_returned": returning(lambda model, x: Output(model(x))),
    "plain_dataclass_returned": returning(
        lambda model, x: TrainState(model, {"y": [model(x)]}, ema=Batch(x, x), epoch=3)
    ),
    "pullback_returned": returning(lambda model, x: (*jax.vjp(model, x),)),
}

if hasattr(nnx, "jit_partial"):  # from flax 0.12 on
    WILD["jit_partial"] = lambda: Case(
        nnx.jit_partial(step_of(), *optimizer_of(Mlp(rngs())), graph=False), (batch_of(),)
    )
if hasattr(nnx, "cached_partial"):  # after flax 0.10.2
    WILD["cached_partial"] = lambda: Case(
        nnx.cached_partial(nnx.jit(step_of()), *optimizer_of(Mlp(rngs()))), (batch_of(),)
    )
