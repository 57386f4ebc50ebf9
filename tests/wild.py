"""Subjects as model authors write them: training and decoding steps, flags, containers, outputs of every kind.

`WILD` maps a name to a factory of a fresh `Case`. Under the defaults each holds, or is rejected with a reason; none may end
in an exception of the plugin's own. `LEFT_OUT` gives the reason for every name that the installed flax does not have.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import flax
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from healthy import FLAX, WIDTH, assign, node_list, numbers, rngs
from wild_training import TRAINING, Attention, Case, Mlp, batch_of, optimizer_of, step_of

TOKENS = jnp.array([[0, 3, 5], [7, 1, 0]], jnp.int32)
X = (3, WIDTH)

WILD: dict[str, Callable[[], Case]] = dict(TRAINING)
LEFT_OUT: dict[str, str] = {}


def subject(factory: Callable[[], Case]) -> Callable[[], Case]:
    """File a factory under its name."""
    WILD[factory.__name__] = factory
    return factory


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


# --- inputs


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


# --- code


@subject
def partial_of_keywords():
    model = nnx.Linear(WIDTH, 4, rngs=rngs())
    return Case(functools.partial(functools.partial(pooled, model), mode="mean", train=True), (numbers(X),))


@subject
def bound_method():
    layer = nnx.Embed(10, WIDTH, rngs=rngs())
    return Case(layer.attend, (numbers(X),))


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


@subject
def class_method():
    return Case(Heads.make_and_apply, (Heads(rngs()), numbers(X)))


@subject
def static_method():
    return Case(Heads.apply, (Heads(rngs()), numbers(X)))


@subject
def jitted_method():
    return Case(Heads(rngs()).jitted, (numbers(X),))


@subject
def jitted_method_with_a_flag():
    return Case(functools.partial(Heads(rngs()).flagged, train=True), (numbers(X),))


@subject
def rematted_method():
    return Case(Heads(rngs()).rematted, (numbers(X),))


@subject
def unbound_method():
    return Case(Heads.__call__ if "__call__" in vars(Heads) else Heads.rematted, (Heads(rngs()), numbers(X)))


@subject
def jit_of_a_step():
    return Case(nnx.jit(step_of(), donate_argnames=("model",)), (*optimizer_of(Mlp(rngs())), batch_of()))


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


class Trainer:
    """No graph node: a plain object that holds the model, its optimizer and a history of Python numbers."""

    def __init__(self, tied=False):
        self.model, self.optimizer = optimizer_of(Mlp(rngs()))
        self.models = {"eval": self.model, "ema": Mlp(rngs())}
        self.calls = 0
        self.names = ["loss"]
        self.step_fn = step_of()

    def step(self, batch):
        self.calls += 1
        return {name: self.step_fn(self.model, self.optimizer, batch) for name in self.names}

    def __call__(self, x):
        return self.models["eval"](x) - self.models["ema"](x)


@subject
def method_of_a_trainer():
    return Case(Trainer().step, (batch_of(),))


@subject
def callable_object_that_holds_models():
    return Case(Trainer(), (numbers(X),))


@subject
def trainer_as_argument():
    return Case(lambda trainer, batch: trainer.step(batch), (Trainer(), batch_of()))


@dataclasses.dataclass
class TrainState:
    model: Any
    optimizer: Any
    ema: Any = None
    epoch: int = 0


@subject
def train_state_as_plain_dataclass():
    def step(state, batch):
        return step_of()(state.model, state.optimizer, batch)

    return Case(step, (TrainState(*optimizer_of(Mlp(rngs()))), batch_of()))


# --- outputs


@subject
def text_none_and_numbers():
    def forward(model, x):
        return {"y": model(x), "name": "linear", "none": None, "count": 3, "nested": (None, [x.shape, 1.5, True])}

    return Case(forward, (nnx.Linear(WIDTH, 4, rngs=rngs()), numbers(X)))


@subject
def nothing_returned():
    def forward(model, x):
        model(x)

    return Case(forward, (nnx.BatchNorm(WIDTH, rngs=rngs()), numbers(X)))


@subject
def the_models_returned():
    def step(model, optimizer, batch):
        loss = step_of()(model, optimizer, batch)
        return model, optimizer, loss

    return Case(step, (*optimizer_of(Mlp(rngs())), batch_of()))


@subject
def new_nodes_returned():
    def forward(model, x):
        keys = nnx.Rngs(jax.random.key(0))
        return nnx.Linear(WIDTH, 4, rngs=keys), nnx.Cache(model(x)), keys

    return Case(forward, (nnx.Linear(WIDTH, 4, rngs=rngs()), numbers(X)))


@subject
def parts_of_the_model_returned():
    def forward(model, x):
        return model.layers[0], model.layers[0].kernel, model(x)

    return Case(forward, (Mlp(rngs()), numbers(X)))


@subject
def states_returned():
    def forward(model, x):
        y = model(x)
        return y, nnx.split(model), nnx.state(model, nnx.BatchStat)

    return Case(forward, (nnx.BatchNorm(WIDTH, rngs=rngs()), numbers(X)))


class Output(NamedTuple):
    logits: Any
    aux: Any = None


@subject
def named_tuple_returned():
    def forward(model, x):
        return Output(model(x))

    return Case(forward, (nnx.Linear(WIDTH, 4, rngs=rngs()), numbers(X)))


@subject
def plain_dataclass_returned():
    def forward(model, x):
        return TrainState(model, {"y": [model(x)]}, ema=Batch(x, x), epoch=3)

    return Case(forward, (nnx.Linear(WIDTH, 4, rngs=rngs()), numbers(X)))


# --- state that comes and goes


class Sows(nnx.Module):
    def __init__(self, rngs):
        self.linear = nnx.Linear(WIDTH, 4, rngs=rngs)

    def __call__(self, x):
        y = self.linear(x)
        self.sow(nnx.Intermediate, "hidden", y)
        return y


@subject
def sow():
    return Case(Sows(rngs()), (numbers(X),))


@subject
def sow_and_pop():
    def forward(model, x):
        y = model(x)
        return y, nnx.pop(model, nnx.Intermediate)

    return Case(forward, (Sows(rngs()), numbers(X)))


class LazyCache(nnx.Module):
    def __init__(self, rngs):
        self.linear = nnx.Linear(WIDTH, 4, rngs=rngs)

    def __call__(self, x):
        y = self.linear(x)
        if not hasattr(self, "last"):
            self.last = nnx.Cache(jnp.zeros_like(y))
        assign(self.last, self.last[...] * 0.5 + y)
        return self.last[...]


@subject
def cache_at_the_first_call():
    return Case(LazyCache(rngs()), (numbers(X),))


@subject
def cache_made_by_the_call():
    layer = nnx.MultiHeadAttention(num_heads=2, in_features=WIDTH, decode=True, rngs=rngs())

    def step(model, x):
        model.init_cache((2, 6, WIDTH))
        return model(x)

    return Case(step, (layer, numbers((2, 1, WIDTH))))


class Growing(nnx.Module):
    """A cache that concatenates: another shape after every call."""

    def __init__(self, rngs):
        self.linear = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.seen = nnx.Cache(jnp.zeros((2, 1, WIDTH)))

    def __call__(self, x):
        assign(self.seen, jnp.concatenate([self.seen[...], self.linear(x)], axis=1))
        return self.seen[...].mean(1)


@subject
def growing_cache():
    """Donated, it is a violation: a buffer of another size cannot be reused."""
    return Case(Growing(rngs()), (numbers((2, 1, WIDTH)),), settings={"donate": "none"})


@subject
def switched_to_evaluation_by_the_call():
    class Net(nnx.Module):
        def __init__(self, rngs):
            self.norm = nnx.BatchNorm(WIDTH, rngs=rngs)
            self.dropout = nnx.Dropout(0.5, rngs=rngs)

        def __call__(self, x):
            return self.dropout(self.norm(x))

    def evaluate(model, x):
        model.eval()
        return model(x)

    return Case(evaluate, (Net(rngs()), numbers(X)))


@subject
def attention_with_weights_sown():
    layer = Attention(rngs())
    return Case(lambda model, x: (model(x), x.shape), (layer, numbers((2, 4, WIDTH))))


@subject
def weak_types():
    class Weak(nnx.Module):
        def __init__(self):
            self.scale = nnx.Param(jnp.asarray(1.0))
            self.steps = nnx.Variable(jnp.asarray(0))

        def __call__(self, x):
            assign(self.steps, self.steps[...] + 1)
            assign(self.scale, self.scale[...] * x.mean())
            return x * self.scale[...], 2.0 * self.steps[...]

    return Case(Weak(), (numbers(X),))


@subject
def variables_that_hold_trees():
    class Tree(nnx.Module):
        def __init__(self):
            self.pair = nnx.Variable({"a": jnp.ones(WIDTH), "b": (jnp.zeros(()), jnp.ones(2, jnp.int32))})

        def __call__(self, x):
            pair = self.pair.get_value() if FLAX >= (0, 12) else self.pair.value
            assign(self.pair, {"a": pair["a"] + 1, "b": pair["b"]})
            return x * pair["a"]

    return Case(Tree(), (numbers(X),))


@subject
def an_array_beside_the_variables():
    class Table(nnx.Module):
        def __init__(self):
            self.frequencies = jnp.arange(WIDTH, dtype=jnp.float32)
            self.mask = np.ones(WIDTH, np.float32)
            self.linears = node_list([nnx.Linear(WIDTH, WIDTH, rngs=rngs())])

        def __call__(self, x):
            return self.linears[0](x * self.frequencies * self.mask)

    return Case(Table(), (numbers(X),))


if FLAX < (0, 12):
    LEFT_OUT["an_array_beside_the_variables"] = "flax before 0.12 has no plain arrays in a module"


@subject
def an_array_beside_the_variables_that_changes():
    class Counter(nnx.Module):
        def __init__(self):
            self.count = jnp.zeros((), jnp.int32)

        def __call__(self, x):
            self.count = self.count + 1
            return x * self.count

    return Case(Counter(), (numbers(X),))


if FLAX < (0, 12):
    LEFT_OUT["an_array_beside_the_variables_that_changes"] = "flax before 0.12 has no plain arrays in a module"


@subject
def a_callback():
    def forward(model, x):
        jax.debug.callback(lambda y: None, x)
        return model(x)

    return Case(forward, (nnx.Linear(WIDTH, 4, rngs=rngs()), numbers(X)))


for _name in LEFT_OUT:
    WILD.pop(_name, None)
