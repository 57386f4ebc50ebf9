"""Calls that need more memory than they have to, each with a twin that computes the same and does not: what advice is about.

Some compilers write much of it in place, so each is here in a form that XLA for the CPU spends memory on.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from healthy import Case, assign, node_list, rngs
from jax.ad_checkpoint import checkpoint_name


@dataclass(frozen=True)
class Cause:
    """Factories of a wasteful call and of its twin, the words of the advice, and the line that it names: a text in the source of a function."""

    wasteful: Callable[[], Case]
    cured: Callable[[], Case]
    words: str
    line: tuple[Callable[..., Any], str]
    spends: bool = True
    """False where the twin needs no less memory on the CPU."""
    since: tuple[int, int] = (0, 4)
    """The first version of jax that it is found with: XLA before jax 0.12 makes no bfloat16 on the CPU."""


# --- the forward part saves more than it was given


def mean_loss(head, x, targets):
    return optax.softmax_cross_entropy_with_integer_labels(head(x), targets).mean()


def loss_in_a_loop(head, x, targets):
    chunks = zip(jnp.split(x, 8), jnp.split(targets, 8), strict=True)
    return sum(mean_loss(head, *chunk) for chunk in chunks) / 8


def loss_in_a_scan(head, x, targets):
    graphdef, weights = nnx.split(head)

    @jax.checkpoint
    def add(weights, total, chunk):
        return total + mean_loss(nnx.merge(graphdef, weights), *chunk), None

    chunks = x.reshape(8, 64, 32), targets.reshape(8, 64)
    return jax.lax.scan(lambda total, chunk: add(weights, total, chunk), jnp.float32(0), chunks)[0] / 8


def gradient_of(loss):
    head = nnx.Linear(32, 512, rngs=rngs())
    return Case(nnx.grad(loss), (head, jnp.ones((512, 32)), jnp.zeros(512, int)))


class Deep(nnx.Module):
    """The gradient of a loop over layers that saves all of each, or what it carries."""

    def __init__(self, *, wastes):
        self.w, self.wastes = nnx.Param(jnp.ones((8, 32, 32)) / 32), wastes

    def loss(self, x):
        def body(h, w):
            return jnp.cos(jnp.sin(jnp.tanh(h @ w))), None

        return jax.lax.scan(body if self.wastes else jax.checkpoint(body), x, self.w[...])[0].sum()

    def __call__(self, x):
        return nnx.value_and_grad(Deep.loss)(self, x)


# --- remats whose values are computed again at once


def block(rate, x):
    step = jax.checkpoint(lambda x, _: (x + jnp.sin(rate * x) + jnp.cos(rate * x), None))
    return jax.lax.scan(step, x, length=16)[0]


def blocks_in_a_loop(rate, x):
    for _ in range(8):
        x = jax.checkpoint(block)(rate, x)
    return x.sum()


def blocks_in_a_scan(rate, x):
    return jax.lax.scan(lambda x, _: (jax.checkpoint(block)(rate, x), None), x, length=8)[0].sum()


def simulation(run):
    return Case(lambda rate, x: jax.grad(run)(rate[...], x), (nnx.Param(jnp.float32(0.8)), jnp.ones(2048)))


# --- a choice between all of an array and the same with a row written


def attend(w, x, keys):
    return jnp.tanh(jnp.dot(w, nnx.softmax(keys @ x) @ keys))


def loop_for_each(w, starts, lengths):
    def one(x, length):
        def body(carry):
            i, x, keys = carry
            return i + 1, attend(w, x, keys), keys.at[i].set(x)

        return jax.lax.while_loop(lambda carry: carry[0] < length, body, (0, x, jnp.zeros((256, 64))))[1]

    return jax.vmap(one)(starts, lengths)


def loop_for_all(w, starts, lengths):
    def body(carry):
        i, x, keys = carry
        running = (i < lengths)[:, None]
        after = jax.vmap(attend, (None, 0, 0))(w, x, keys)
        return i + 1, jnp.where(running, after, x), keys.at[:, i].set(jnp.where(running, x, keys[:, i]))

    return jax.lax.while_loop(lambda carry: (carry[0] < lengths).any(), body, (0, starts, jnp.zeros((4, 256, 64))))[1]


def generation(generate):
    args = nnx.Param(jnp.eye(64)), jnp.ones((4, 64)), jnp.arange(4)
    return Case(lambda w, starts, lengths: generate(w[...], starts, lengths), args)


def branch_for_each(cache, starts, due):
    def one(keys, x, due, step):
        return jax.lax.cond(due, lambda keys: keys.at[step].set(attend(1, x, keys)), lambda keys: keys, keys)

    def every(cache, step):
        return jax.vmap(one, (0, 0, 0, None))(cache, starts, due, step), None

    assign(cache, jax.lax.scan(every, cache[...], jnp.arange(8))[0])


def row_for_each(cache, starts, due):
    def every(cache, step):
        row = jnp.where(due[:, None], jax.vmap(attend, (None, 0, 0))(1, starts, cache), cache[:, step])
        return cache.at[:, step].set(row), None

    assign(cache, jax.lax.scan(every, cache[...], jnp.arange(8))[0])


def writes(write):
    return Case(write, (nnx.Cache(jnp.ones((4, 512, 64))), jnp.ones((4, 64)), jnp.array([True, False, True, True])))


# --- weights in another dtype, and inputs in another order, before a loop


def decode(model, x):
    return jax.lax.scan(lambda x, _: (model(x), None), x, length=8)[0]


class Decoder(nnx.Module):
    """Layers whose weights are kept as float32, or as they are used."""

    def __init__(self, kept):
        options = {"dtype": jnp.bfloat16, "param_dtype": kept, "rngs": rngs()}
        self.layers = node_list(nnx.Linear(256, 256, **options) for _ in range(8))

    def __call__(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


class Layers(nnx.Module):
    """Scans over a stack of bfloat16 layers in float32: cast before the scan, or inside it."""

    def __init__(self, *, wastes):
        self.w, self.wastes = nnx.Param(jnp.ones((8, 64, 64), jnp.bfloat16)), wastes

    def __call__(self, x):
        w = self.w[...].astype(jnp.float32) if self.wastes else self.w[...]
        return jax.lax.scan(lambda h, w: (jnp.tanh(h @ w.astype(jnp.float32)), None), x, w)[0]


def smoother(layer):
    return lambda later, now: (jnp.tanh(layer(later)) + now, later)


def smooth_reversed(layer, x):
    return jax.lax.scan(smoother(layer), x[-1], x[::-1])[1][::-1]


def smooth(layer, x):
    return jax.lax.scan(smoother(layer), x[-1], x, reverse=True)[1]


def by_time(layer, x):
    return jax.lax.scan(lambda h, now: (jnp.tanh(layer(h) + now), None), x[:, 0], x.swapaxes(0, 1))[0]


def by_time_inside(layer, x):
    def step(t, h):
        return jnp.tanh(layer(h) + jax.lax.dynamic_index_in_dim(x, t, 1, keepdims=False))

    return jax.lax.fori_loop(0, x.shape[1], step, x[:, 0])


def sequence(call, *shape):
    return Case(call, (nnx.Linear(64, 64, rngs=rngs()), jnp.ones((*shape, 64))))


# --- a policy for values that have no name


def trains_with_policy(name):
    def layer(w, x):
        return jnp.sin(checkpoint_name(jnp.sin(x @ w), "hidden")) @ w

    policy = jax.checkpoint_policies.save_only_these_names(name)

    def call(w, x):
        return jax.grad(lambda w: jax.checkpoint(layer, policy=policy)(w, x).sum())(w[...])

    return Case(call, (nnx.Param(jnp.ones((64, 64))), jnp.ones((8, 64))))


# --- outputs of a scan that nobody reads


class Steps(nnx.Module):
    """Takes the last of many steps: of a stack of all, or of the carry."""

    def __init__(self, *, wastes):
        self.w, self.wastes = nnx.Param(jnp.ones((64, 64))), wastes

    def __call__(self, x):
        def body(h, _):
            h = jnp.tanh(h @ self.w[...])
            return h, h if self.wastes else None

        last, every = jax.lax.scan(body, x, None, length=100)
        return every[-1] if self.wastes else last


WASTEFUL: dict[str, Cause] = {
    "saved by a line": Cause(
        lambda: gradient_of(loss_in_a_loop),
        lambda: gradient_of(loss_in_a_scan),
        "1.0 MiB: a line that runs several times saves it for the backward pass, more than state, inputs and outputs together",
        (mean_loss, "softmax_cross_entropy"),
    ),
    "saved by a scan": Cause(
        lambda: Case(Deep(wastes=True), (jnp.ones((64, 32)),)),
        lambda: Case(Deep(wastes=False), (jnp.ones((64, 32)),)),
        "KiB: the steps of a scan save it for the backward pass, more than state, inputs and outputs together",
        (Deep, "jax.checkpoint(body)"),
    ),
    "computed again at once": Cause(
        lambda: simulation(blocks_in_a_loop),
        lambda: simulation(blocks_in_a_scan),
        "KiB: several remats compute their values again at once",
        (block, "length=16"),
    ),
    "loop under vmap": Cause(
        lambda: generation(loop_for_each),
        lambda: generation(loop_for_all),
        "256.0 KiB float32[4,256,64]: a loop under vmap selects in each step all that it carries",
        (loop_for_each, "jax.lax.while_loop"),
    ),
    "branch under vmap": Cause(
        lambda: writes(branch_for_each),
        lambda: writes(row_for_each),
        "512.0 KiB float32[4,512,64]: a choice between an array with a part written and the array without holds both",
        (branch_for_each, "jax.lax.cond"),
    ),
    "weights cast": Cause(
        lambda: Case(decode, (Decoder(jnp.float32), jnp.ones((2, 256), jnp.bfloat16))),
        lambda: Case(decode, (Decoder(jnp.bfloat16), jnp.ones((2, 256), jnp.bfloat16))),
        "1.0 MiB: all of model.layers[0].kernel and 15 more once more, in another dtype, cast before a loop",
        (decode, "jax.lax.scan"),
        since=(0, 12),
    ),
    "stack cast": Cause(
        lambda: Case(Layers(wastes=True), (jnp.ones((4, 64)),)),
        lambda: Case(Layers(wastes=False), (jnp.ones((4, 64)),)),
        "128.0 KiB: all of model.w once more, in another dtype, cast before a loop",
        (Layers, "astype(jnp.float32) if"),
    ),
    "input reversed": Cause(
        lambda: sequence(smooth_reversed, 1024),
        lambda: sequence(smooth, 1024),
        "256.0 KiB: all of x once more, in another order for a loop; run that with reverse=True",
        (smooth_reversed, "x[::-1]"),
    ),
    "input transposed": Cause(
        lambda: sequence(by_time, 4, 512),
        lambda: sequence(by_time_inside, 4, 512),
        "512.0 KiB: all of x once more, in another order for a loop",
        (by_time, "swapaxes"),
    ),
    "policy without a name": Cause(
        lambda: trains_with_policy("attention"),
        lambda: trains_with_policy("hidden"),
        "the policy of a remat is for values of the name 'attention', and no value of the call has one, where there are 'hidden'",
        (trains_with_policy, "jax.checkpoint(layer"),
        spends=False,
    ),
    "steps stacked": Cause(
        lambda: Case(Steps(wastes=True), (jnp.ones((16, 64)),)),
        lambda: Case(Steps(wastes=False), (jnp.ones((16, 64)),)),
        "400.0 KiB float32[100,16,64]: a scan stacks its outputs, and only one step is read; carry that one",
        (Steps, "length=100)"),
    ),
}
