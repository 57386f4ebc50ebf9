"""What is called: partials, methods, jitted functions, trainers; and what comes back from it."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
from flax import nnx
from healthy import WIDTH, numbers, rngs
from wild_calls import pooled
from wild_cases import LEFT_OUT, Case, X, subject
from wild_inputs import Batch
from wild_training import Mlp, batch_of, optimizer_of, step_of

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


@subject
def pullback_returned():
    def pullback(model, x):
        y, back = jax.vjp(model, x)
        return y, back

    return Case(pullback, (nnx.Linear(WIDTH, 4, rngs=rngs()), numbers(X)))


@subject
def cached_partial():
    return Case(nnx.cached_partial(nnx.jit(step_of()), *optimizer_of(Mlp(rngs()))), (batch_of(),))


@subject
def jit_partial():
    step = nnx.jit_partial(step_of(), *optimizer_of(Mlp(rngs())), graph=False)
    return Case(step, (batch_of(),))


if not hasattr(nnx, "jit_partial"):
    LEFT_OUT["jit_partial"] = "nnx.jit_partial came with flax 0.12"
if not hasattr(nnx, "cached_partial"):
    LEFT_OUT["cached_partial"] = "nnx.cached_partial came after flax 0.10.2"
