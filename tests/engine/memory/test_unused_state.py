"""Advice on state that the call neither reads nor writes: a second model, an optimizer, a cache beside the one that is used."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import optax
import pytest
from checking import some
from flax import nnx
from healthy import assign, rngs
from probes import value_of
from wild_training import apply_gradients, make_optimizer

from pytest_nnxcheck import check

WIDTH = 256
X = jnp.ones((2, WIDTH))
JIT = {"nesting": "jit"}


def linear(width=WIDTH):
    return nnx.Linear(WIDTH, width, rngs=rngs())


class Decoder(nnx.Module):
    """A layer, and one that the call does not use."""

    def __init__(self, spare=WIDTH) -> None:
        self.out, self.spare = linear(), linear(spare)

    def __call__(self, x):
        return self.out(x)


def normed():
    """A layer, a norm that keeps its statistics, and a dropout."""
    return nnx.Sequential(linear(), nnx.BatchNorm(WIDTH, rngs=rngs()), nnx.Dropout(0.5, rngs=rngs()))


class Adapted(nnx.Module):
    """A frozen layer beside what is trained."""

    def __init__(self) -> None:
        self.frozen, self.lora = linear(), nnx.LoRA(WIDTH, 4, WIDTH, rngs=rngs())

    def __call__(self, x):
        return self.frozen(x) + self.lora(x)


class Cached(nnx.Module):
    """Writes a token into its cache, or into the one that a server hands in."""

    def __init__(self) -> None:
        self.linear, self.cache = linear(), nnx.Cache(jnp.zeros((WIDTH, WIDTH)))

    def __call__(self, x, cache=None):
        cache = self.cache if cache is None else cache
        assign(cache, cache[...].at[0].set(x[0]))
        return self.linear(x)


by_flax = nnx.jit(lambda model, x: model(x))


def looped(model, x):
    return nnx.scan(lambda carry, _: ((carry[0], carry[0](carry[1])), None), length=3, in_axes=(nnx.Carry, None))(
        (model, x), None
    )[0][1]


def until(model, x):
    def body(carry):
        number, model, x = carry
        return number + 1, model, model(x)

    return nnx.while_loop(lambda carry: carry[0] < 3, body, (0, model, x))[2]


def branched(model, x):
    return nnx.cond(x.sum() > 0, lambda model, x: model(x), lambda model, x: x, model, x)


def trained():
    model = Adapted()
    optimizer = make_optimizer(model, optax.adam(1e-3), nnx.LoRAParam)

    def step(model, optimizer, x):
        loss = nnx.value_and_grad(lambda model: (model(x) ** 2).sum(), argnums=nnx.DiffState(0, nnx.LoRAParam))
        apply_gradients(optimizer, model, loss(model)[1])

    return step, model, optimizer


UNUSED = {
    "a layer": (lambda model, x: model(x), Decoder, "model.spare"),
    "of a method's model": (None, Decoder, "model.spare"),
    "inside a jit": (by_flax, Decoder, "model.spare"),
    "inside a remat": (nnx.remat(Decoder.__call__), Decoder, "self.spare"),
    "carried by a scan": (looped, Decoder, "model.spare"),
    "handed to branches": (branched, Decoder, "model.spare"),
    "in a list": (lambda models, x: models[1](x), lambda: [linear(), linear()], "models[0]"),
    "in a node's list": (lambda model, x: model.layers[0](x), lambda: nnx.Sequential(linear(), linear(), linear()), "model.layers[1], model.layers[2]"),
    "all": (lambda model, x: x + 1, Decoder, "model"),
    "all of several": (lambda models, x: x + 1, lambda: [linear(), linear()], "models[0], models[1]"),
    "computed in vain": (lambda model, x: (model.spare(x), model(x))[1], Decoder, "model.spare"),
}  # fmt: skip


@pytest.mark.parametrize(
    "name",
    some(
        UNUSED, {"a layer", "of a method's model", "carried by a scan", "in a list", "all of several"}, pytest.mark.slow
    ),
)
def test_what_the_call_neither_reads_nor_writes_is_named_by_its_whole_parts(name):
    function, make, names = UNUSED[name]
    report = check(function, make(), X, **JIT) if function else check(make(), X, **JIT)
    assert report.ok
    (piece,) = report.advice
    size = 2 if name == "all" or "," in names else 1
    assert piece == f"{257 * size:.1f} KiB: the call neither reads nor writes {names}; hand it only what it uses"


@pytest.mark.skipif(jax.__version_info__ < (0, 12), reason="jax before 0.12 drops nothing of what a while loop carries")
def test_what_a_while_loop_carries_through_is_unused():
    (piece,) = check(until, Decoder(), X, **JIT).advice
    assert "neither reads nor writes model.spare" in piece


def test_a_cache_beside_the_one_that_a_server_hands_in():
    cache = nnx.Cache(jnp.zeros((WIDTH, WIDTH)))
    (piece,) = check(Cached(), X, cache, **JIT).advice
    assert piece.startswith("256.0 KiB: the call neither reads nor writes model.cache;")
    assert check(Cached(), X, **JIT).advice == ()


class Trainer:
    """A plain object with two models: its method takes one, and its own jit would be handed that alone."""

    def __init__(self):
        self.model, self.ema = linear(), linear()

    def evaluate(self, x):
        return self.model(x)


def eval_mode():
    model = normed()
    model.eval()
    return model


HEALTHY = {
    "train mode": lambda: check(normed(), X, **JIT),
    "eval mode": lambda: check(eval_mode(), X, **JIT),
    "adapted": lambda: check(Adapted(), X, **JIT),
    "adapted, trained": lambda: check(*trained(), X, **JIT),
    "returned": lambda: check(lambda model, x: (model(x), model.spare.kernel[...] * 1), Decoder(), X, **JIT),
    "swapped": lambda: check(swapped, Decoder(), X, **JIT),
    "overwritten": lambda: check(overwrites, Decoder(), X, **JIT),
    "less than a tenth": lambda: check(Decoder(spare=25), X, **JIT),
    "of a plain object": lambda: check(Trainer().evaluate, X, **JIT),
    "of a plain object that is handed in": lambda: check(lambda trainer, x: trainer.evaluate(x), Trainer(), X, **JIT),
}


def overwrites(model, x):
    assign(model.spare.kernel, jnp.zeros((WIDTH, WIDTH)))
    return model(x)


def swapped(model, x):
    out, spare = model.out.kernel[...], model.spare.kernel[...]
    assign(model.out.kernel, spare)
    assign(model.spare.kernel, out)
    return model(x)


@pytest.mark.parametrize("name", some(HEALTHY, {"eval mode", "adapted, trained", "overwritten"}, pytest.mark.slow))
def test_state_that_the_call_uses_or_little_that_it_does_not_is_no_advice(name):
    assert [piece for piece in HEALTHY[name]().advice if "neither reads" in piece] == []


def test_nothing_of_two_objects_is_used():
    model = linear()
    (piece,) = check(lambda model, other, x: x * 2, model, linear(), X, **JIT).advice
    assert "neither reads nor writes model, other;" in piece


@pytest.mark.slow
def test_from_a_tenth_of_the_state_on():
    (piece,) = check(Decoder(spare=66), X, **JIT).advice
    assert "model.spare" in piece
    assert check(Decoder(spare=28), X, **JIT).advice == ()  # a tenth, and less than 64 KiB


class Trees(nnx.Module):
    """A Variable that holds two arrays, of which the call reads one, or none."""

    def __init__(self) -> None:
        self.pair = nnx.Variable({"a": jnp.ones(WIDTH), "b": jnp.ones((WIDTH, WIDTH))})
        self.linear = linear()

    def __call__(self, x):
        return self.linear(x)

    def adds(self, x):
        pair = value_of(self.pair)
        return self.linear(x) + pair["a"]


def test_a_variable_is_unused_as_a_whole_or_not_at_all():
    assert check(Trees().adds, X, **JIT).advice == ()
    (piece,) = check(Trees(), X, **JIT).advice
    assert "neither reads nor writes model.pair;" in piece
