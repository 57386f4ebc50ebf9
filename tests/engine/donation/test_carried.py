"""Inputs that come back in another dtype, and are handed in again: a note. What is cast, decoded, or comes back as it was is quiet."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
import pytest
from checking import FEW, line
from flax import nnx

from pytest_nnxcheck import check

X = jnp.ones((2, 4))
PARAMS = {"w": jnp.ones((4, 4)), "b": jnp.zeros(4)}
ADAM = optax.adam(1e-3)
HALF = jnp.bfloat16


def to(dtype, tree):
    return jax.tree.map(lambda leaf: leaf.astype(dtype) if jnp.issubdtype(leaf.dtype, jnp.floating) else leaf, tree)


def loss(params, x):
    return ((x @ params["w"] + params["b"]) ** 2).mean()


def step(params, opt_state, x):
    updates, opt_state = ADAM.update(jax.grad(loss)(params, x), opt_state, params)
    return optax.apply_updates(params, updates), opt_state


def step_in_half(params, opt_state, x):
    params, opt_state = step(params, opt_state, x)
    return params, to(HALF, opt_state)


def counted(opt_state, x):
    return {"m": 0.9 * opt_state["m"] + x.mean(), "count": opt_state["count"] + 1.0}


def written(cache, x):
    return x, jax.lax.dynamic_update_slice(cache.astype(HALF), x.astype(HALF), (0, 0))


def decode(x, cache):
    keys, values = cache
    return x, (keys.at[0].set(x[0]).astype(HALF), values.at[0].set(x[0]))


def decode_named(x, cache):
    return x, {name: written(value, x)[1] for name, value in cache.items()}


def whole_state(state, x):
    return state | {"opt": counted(state["opt"], x)}, x


class Carry(NamedTuple):
    h: jax.Array
    c: jax.Array


def recurs(layer, carry, x):
    h = jnp.tanh(layer(x) + carry.h)
    return Carry(h, carry.c + h), h


def moments(params, opt_state, gradients):
    """The parameters and the gradients have the names of each moment."""
    updates, opt_state = ADAM.update(gradients, opt_state, params)
    return optax.apply_updates(params, updates), opt_state


def normalized(norm, batch):
    return {"image": (batch["image"].astype(jnp.float32) - norm.mean[...]) / 2.0, "label": batch["label"] + 1}


def scaled(norm, batch):
    return {"image": batch["image"] * norm.scale[...], "label": batch["label"]}


def two_results(layer, x):
    y = layer(x)
    return y, y.sum()


def layer():
    return nnx.Linear(4, 4, rngs=nnx.Rngs(0))


def norm():
    return nnx.BatchNorm(4, rngs=nnx.Rngs(0))


def notes(subject, *args, **settings):
    report = check(subject, *args, **{**FEW, "transforms": "jit", **settings})
    assert report.ok
    return [note for note in report.notes if "handed in again" in note]


TABLE, HALVES = jnp.zeros((8, 4)), jnp.zeros((2, 4), HALF)
COUNTED = {"m": jnp.ones(3), "count": jnp.zeros((), jnp.int32)}


@pytest.mark.parametrize(
    "call, said",
    [
        (lambda: (step_in_half, PARAMS, ADAM.init(PARAMS), X), "opt_state[0].mu['b'], opt_state[0].nu['b'] go in as"),
        (lambda: (counted, COUNTED, X), "opt_state['count'] goes in as int32[] and comes back as float32[]"),
        (lambda: (written, TABLE, X), "cache goes in as float32[8,4] and comes back as bfloat16[8,4]"),
        (lambda: (decode, X, (TABLE, TABLE)), "cache[0] goes in as float32[8,4] and comes back as bfloat16[8,4]"),
        (lambda: (decode_named, X, {"k": TABLE, "v": TABLE}), "cache['k'], cache['v'] go in as float32[8,4]"),
        (lambda: (whole_state, {"opt": COUNTED, "params": PARAMS}, X), "state['opt']['count'] goes in as int32[]"),
        (lambda: (written, TABLE.astype(jnp.int8), X), "cache goes in as int8[8,4] and comes back as bfloat16[8,4]"),
        (lambda: (recurs, layer(), Carry(HALVES, HALVES), X), "carry.h, carry.c go in as bfloat16[2,4]"),
        (
            lambda: (nnx.LSTMCell(4, 4, rngs=nnx.Rngs(0)), (HALVES, HALVES), X),
            "carry[0], carry[1] go in as bfloat16[2,4]",
        ),
        (lambda: (nnx.GRUCell(4, 4, rngs=nnx.Rngs(0)), HALVES, X), "carry goes in as bfloat16[2,4]"),
        # Some releases of optax widen the second moments too.
        (lambda: (moments, PARAMS, ADAM.init(to(HALF, PARAMS)), PARAMS), "opt_state[0].mu['b']"),
    ],
)
def test_an_input_that_comes_back_in_another_dtype(call, said):
    (note, *_) = notes(*call())
    assert note.startswith(said)
    assert "compile the call a second time, and its buffer cannot be donated" in note


def test_the_note_has_the_line():
    (note,) = notes(counted, COUNTED, X)
    assert f"at {line(counted, '+ 1.0')}:" in note


def test_of_what_is_donated_the_donation_is_judged():
    settings = {**FEW, "transforms": "jit", "donate": "state,cache"}
    report = check(decode_named, X, {"k": TABLE, "v": TABLE}, **settings)
    assert not report.ok
    assert not any("handed in again" in note for note in report.notes)


def gradients(params, x):
    return to(jnp.float32, jax.grad(loss)(params, x))


def average(params, ema):
    return jax.tree.map(lambda new, old: 0.9 * old + 0.1 * new, params, ema)


def mixed(params, x):
    return jax.tree.map(lambda leaf: (leaf.astype(HALF) * x.mean().astype(HALF)).astype(leaf.dtype), params)


def masters(params, x):
    params = jax.tree.map(lambda leaf: leaf - 0.1 * x.mean(), params)
    return params, to(HALF, params)


def decoded(batch, key):
    noise = jax.random.normal(key, batch["image"].shape)
    return {"image": batch["image"] / 255 + noise, "label": batch["label"]}


BATCH = {"image": jnp.zeros((2, 4), jnp.uint8), "label": jnp.zeros(2, jnp.int32)}
IN_HALF = {"image": HALVES, "label": jnp.zeros(2, jnp.int32)}
QUIET = {
    "images that are cast first": lambda: (normalized, norm(), IN_HALF),
    "images beside a label": lambda: (scaled, norm(), IN_HALF),
    "a layer in full": lambda: (layer(), HALVES),
    "two results of a layer": lambda: (two_results, layer(), HALVES),
    "a pair of inputs": lambda: (lambda layer, pair: (layer(pair[0]), layer(pair[1])), layer(), (HALVES, HALVES)),
    "a step": lambda: (step, PARAMS, ADAM.init(PARAMS), X),
    "a step in half": lambda: (step, to(HALF, PARAMS), ADAM.init(to(HALF, PARAMS)), X.astype(HALF)),
    "gradients": lambda: (gradients, to(HALF, PARAMS), X),
    "an average in full": lambda: (average, to(HALF, PARAMS), PARAMS),
    "half inside alone": lambda: (mixed, PARAMS, X),
    "copies in half": lambda: (masters, PARAMS, X),
    "a cast": lambda: (lambda params: to(HALF, params), PARAMS),
    "images": lambda: (decoded, BATCH, jax.random.key(0)),
    "a cache that grows": lambda: (lambda cache, x: {"k": jnp.concatenate([cache["k"], x]).astype(HALF)}, {"k": X}, X),
    "a cache": lambda: (lambda cache, x: {"k": cache["k"].at[0].set(x[0])}, {"k": TABLE}, X),
    "a layer in half": lambda: (nnx.Linear(4, 4, dtype=HALF, rngs=nnx.Rngs(0)), X),
    "a residual": lambda: (lambda x, residual: (x + residual).astype(HALF), X, X),
    "a mask": lambda: (lambda x, mask: jnp.where(mask, x, 0), X, jnp.ones((2, 4), bool)),
    "a comparison": lambda: (lambda logits, label: logits.argmax(1) == label, X, jnp.zeros(2, jnp.int32)),
    "a quantized cache": lambda: (
        lambda c, x: {"k": c["k"].at[0].set(x[0].astype(jnp.int8))},
        {"k": TABLE.astype(jnp.int8)},
        X,
    ),
}


@pytest.mark.parametrize("name", QUIET)
def test_what_is_no_carry_or_keeps_its_dtype(name):
    assert notes(*QUIET[name]()) == []
