"""State that comes and goes, or is more than one array a Variable."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from healthy import FLAX, WIDTH, Case, assign, node_list, numbers, rngs
from probes import value_of
from wild_cases import WILD, X, subject
from wild_training import Attention

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
            pair = value_of(self.pair)
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


@subject
def an_array_beside_the_variables_that_changes():
    class Counter(nnx.Module):
        def __init__(self):
            self.count = jnp.zeros((), jnp.int32)

        def __call__(self, x):
            self.count = self.count + 1
            return x * self.count

    return Case(Counter(), (numbers(X),))


@subject
def a_callback():
    def forward(model, x):
        jax.debug.callback(lambda y: None, x)
        return model(x)

    return Case(forward, (nnx.Linear(WIDTH, 4, rngs=rngs()), numbers(X)))


@subject
def a_cache_taken_away():
    """Donated, it is a violation: nothing comes back for its buffer. Captured by an eval_shape, the user's own module loses it."""

    class Warm(nnx.Module):
        def __init__(self):
            self.linear = nnx.Linear(WIDTH, 4, rngs=rngs())
            self.cache = nnx.Cache(jnp.ones(3))

        def __call__(self, x):
            if hasattr(self, "cache"):
                del self.cache
            return self.linear(x)

    return Case(Warm(), (numbers(X),), settings={"donate": "none", "styles": "argument,functional"})


if (0, 11) <= FLAX < (0, 12):  # nnx.scan refuses a call that sows and pops
    del WILD["sow_and_pop"]
if FLAX < (0, 12):  # has no plain arrays in a module
    del WILD["an_array_beside_the_variables"], WILD["an_array_beside_the_variables_that_changes"]
