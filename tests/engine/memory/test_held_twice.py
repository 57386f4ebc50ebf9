"""Advice on leaves of the state of which the call holds all once more: each operation with its cure, and healthy calls that do without."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from checking import line, some
from flax import nnx
from healthy import assign, rngs
from rewritten_leaves import ALONE, CHANGES, Codebook, KeyCache, Ring
from wild_training import optimizer_of, step_on_squares

from pytest_nnxcheck import check
from pytest_nnxcheck.core.peak import Buffer
from pytest_nnxcheck.invariants.advice import Sizes, advice
from pytest_nnxcheck.jaxprs.waste import TWICE, HeldTwice

JAX = jax.__version_info__[:2]
JIT = {"nesting": "jit"}


class Fused(nnx.Module):
    """Queries, keys and values in one product: of kernels that each call joins, or of one kernel."""

    def __init__(self, *, wastes):
        shapes = [(128, 128)] * 3 if wastes else [(128, 384)]
        for name, shape in zip("qkv", shapes, strict=False):
            setattr(self, name, nnx.Param(jnp.ones(shape)))

    def __call__(self, x):
        if not hasattr(self, "v"):
            return x @ self.q[...]
        return x @ jnp.concatenate([self.q[...], self.k[...], self.v[...]], -1)  # joins


class Decodes(nnx.Module):
    """Scans over the caches of its layers: hands each layer its own, or carries all of them."""

    def __init__(self, *, wastes):
        self.cache, self.wastes = nnx.Cache(jnp.zeros((4, 64, 64))), wastes

    def __call__(self, x):
        def layer(h, cache):
            cache = cache.at[3].set(h)
            return jnp.tanh(cache @ h) @ cache, cache

        def carries(carry, number):
            caches = carry[1].at[number, 3].set(carry[0])
            return (jnp.tanh(caches[number] @ carry[0]) @ caches[number], caches), None

        if self.wastes:
            h, after = jax.lax.scan(layer, x, self.cache[...])  # stacks
        else:
            (h, after), _ = jax.lax.scan(carries, (x, self.cache[...]), jnp.arange(4))
        assign(self.cache, after)
        return h


class Cuts(nnx.Module):
    """Writes keys and values into one cache: into two halves that it joins again, or into the whole."""

    def __init__(self, *, wastes):
        self.cache, self.position = nnx.Cache(jnp.zeros((2, 4096, 32))), nnx.Cache(jnp.int32(0))
        self.wastes = wastes

    def __call__(self, row):
        position, cache = self.position[...], self.cache[...]
        assign(self.position, position + 1)
        if self.wastes:
            keys = jax.lax.dynamic_update_slice(cache[0], row[None], (position, 0))
            values = jax.lax.dynamic_update_slice(cache[1], 2 * row[None], (position, 0))
            assign(self.cache, jnp.stack([keys, values]))  # joins again
            return keys.mean(0) + values.mean(0)
        rows = jnp.stack([row, 2 * row])[:, None]
        assign(self.cache, jax.lax.dynamic_update_slice(cache, rows, (0, position, 0)))
        return self.cache[...].mean(1).sum(0)


class Moves(nnx.Module):
    """Moves its kernel and says how far: as a whole, or row by row."""

    def __init__(self, *, wastes):
        self.kernel, self.wastes = nnx.Param(jnp.ones((256, 256))), wastes

    def __call__(self, x):
        def row(number, carry):
            kernel, total = carry
            kernel, old = jax.lax.optimization_barrier((kernel, kernel[number]))
            new = 0.9 * old + 0.1 * x[number] * x
            return kernel.at[number].set(new), total + jnp.sum((new - old) ** 2)

        old = self.kernel[...]
        if self.wastes:
            assign(self.kernel, 0.9 * old + 0.1 * jnp.outer(x, x))
            return jnp.linalg.norm(self.kernel[...] - old)  # needs both
        new, total = jax.lax.fori_loop(0, 256, row, (old, jnp.float32(0)))
        assign(self.kernel, new)
        return jnp.sqrt(total)


def scanned(w, x, **how):
    return jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, w, **how)[0]


def two_at_a_time(w, x):
    return jax.lax.scan(lambda h, w: (jnp.tanh(jnp.tanh(h @ w[0]) @ w[1]), None), x, w)[0]


ORDER = (1, 0, 3, 2, 5, 4, 7, 6)
ORDERS = {
    "reversed": lambda w, x: scanned(w[::-1], x),
    "transposed": lambda w, x: scanned(w.swapaxes(1, 2), x),
    "permuted": lambda w, x: scanned(w[jnp.array(ORDER)], x),
    "interleaved": lambda w, x: two_at_a_time(w.reshape(2, 4, 64, 64).swapaxes(0, 1), x),
}
INSIDE = {
    "reversed": lambda w, x: scanned(w, x, reverse=True),
    "transposed": lambda w, x: jax.lax.scan(lambda h, w: (jnp.tanh(h @ w.T), None), x, w)[0],
    "permuted": lambda w, x: jax.lax.scan(lambda h, k: (jnp.tanh(h @ w[k]), None), x, jnp.array(ORDER))[0],
    "interleaved": lambda w, x: jax.lax.scan(
        lambda h, k: (jnp.tanh(jnp.tanh(h @ w[k]) @ w[k + 4]), None), x, jnp.arange(4)
    )[0],
}


class Stacked(nnx.Module):
    def __init__(self, call):
        self.w, self.call = nnx.Param(jnp.ones((8, 64, 64))), call

    def __call__(self, x):
        return self.call(self.w[...], x)


CASES = {
    "fused": ("joined", Fused, jnp.ones((4, 128)), "192.0 KiB: all of model.k and 2 more"),
    "decodes": ("stacked anew", Decodes, jnp.ones(64), "64.0 KiB: all of model.cache"),
    "cuts": ("cut and joined again", Cuts, jnp.ones(32), "1.0 MiB: all of model.cache"),
    "moves": ("old and new at once", Moves, jnp.ones(256), "256.0 KiB: all of model.kernel"),
    "ring": ("read, then written", lambda *, wastes: Ring("row", "row", ordered=not wastes), jnp.ones(64), "256.0 KiB: all of model.rows"),
    **{name: ("permuted" if name == "permuted" else "reordered", lambda *, wastes, name=name: Stacked((ORDERS if wastes else INSIDE)[name]), jnp.ones((4, 64)), "128.0 KiB: all of model.w") for name in ORDERS},
}  # fmt: skip
MARKS = {
    "fused": "# joins",
    "decodes": "# stacks",
    "cuts": "# joins again",
    "moves": "# needs both",
}
OLDER_XLA_COPIES = ("moves", "ring")
"""Which way of writing it makes no difference to, since it heeds no barrier."""


@pytest.mark.slow
@pytest.mark.parametrize("name", some(CASES, {"fused", "cuts", "moves", "ring", "reversed"}))
def test_what_is_held_twice_is_told_with_its_line_and_the_cure_saves_it(name):
    operation, subject, x, told = CASES[name]
    wasteful, cured = check(subject(wastes=True), x, **JIT), check(subject(wastes=False), x, **JIT)
    (piece,) = wasteful.advice
    assert piece.startswith(f"{told} once more, {TWICE[operation]}")
    if name in MARKS:
        assert piece.endswith(f" ({line(subject, MARKS[name])})")
    assert cured.advice == ()
    if JAX >= (0, 12) or name not in OLDER_XLA_COPIES:
        (before, after) = (report.outcomes[0].evidence.split.peak for report in (wasteful, cured))
        assert after < before - 60_000


def test_every_operation_is_cured():
    casts = {"cast for a loop", "widened"}  # see `wasteful` and `test_waste`
    assert {operation for operation, *_ in CASES.values()} == {*TWICE} - casts


class Attends(nnx.Module):
    def __init__(self, dtype):
        sizes = {"num_heads": 4, "in_features": 64, "qkv_features": 64, "out_features": 64}
        self.attention = nnx.MultiHeadAttention(**sizes, decode=True, dtype=dtype, rngs=rngs())
        self.attention.init_cache((4, 512, 64), dtype=dtype)

    def __call__(self, x):
        return self.attention(x)


HEALTHY = {
    **{name: lambda change=change: (Codebook(change), jnp.ones(256)) for name, change in {**CHANGES, **ALONE}.items()},
    **{f"cache in {dtype.__name__}": lambda dtype=dtype: (KeyCache(dtype), jnp.ones((2, 1, 64)), 3) for dtype in (jnp.float32, jnp.bfloat16, jnp.float16)},
    "attention": lambda: (Attends(jnp.float32), jnp.ones((4, 1, 64))),
    "attention in bfloat16": lambda: (Attends(jnp.bfloat16), jnp.ones((4, 1, 64), jnp.bfloat16)),
    "adam": lambda: (step_on_squares, *optimizer_of(nnx.Linear(256, 256, rngs=rngs())), jnp.ones((8, 256))),
    "batch norm": lambda: (nnx.BatchNorm(1 << 16, rngs=rngs()), jnp.ones((4, 1 << 16))),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", some(HEALTHY, {"branch", "shift", "cache in bfloat16", "attention in bfloat16", "adam"})
)
def test_a_healthy_call_that_writes_large_leaves_gets_no_advice(name):
    subject, *args = HEALTHY[name]()
    report = check(subject, *args, **JIT, memory_advice="fail")
    assert report.ok, str(report)


# --- the rules, on figures


THREE = [("temporary", "float32[50000]")] * 3


def pieces(*facts, live=(("temporary", "float32[50000]"),) * 2, state=1_000_000):
    held = [Buffer(200_000, shape, kind, "copy", ("m.py:9",)) for kind, shape in live]
    told = advice(held, facts, ["model.w", "model.v", "x"], Sizes(state, 1000, 1000, leaves=2))
    return [(piece.names, piece.bytes) for piece in told]


def fact(*leaves, line="m.py:2", types=("float32[50000]",), size=200_000, operation="joined"):
    return HeldTwice(leaves, operation, line, types, size)


def test_leaves_count_from_a_quarter_of_the_state_on_and_inputs_do_not():
    assert pieces(fact(0), state=800_000) == [(("model.w",), 200_000)]
    assert pieces(fact(0), state=800_001) == []
    assert pieces(fact(2), fact(0, 2), fact(2, operation="permuted"), state=800_000) == []


def test_an_input_counts_reversed_or_transposed_from_a_quarter_of_all_that_goes_in_and_comes_out():
    assert pieces(fact(2, operation="reordered"), state=798_000) == [(("x",), 200_000)]
    assert pieces(fact(2, operation="reordered"), state=798_001) == []


def test_the_leaves_of_a_line_are_one_piece():
    both = [(("model.w", "model.v"), 400_000)]
    assert pieces(fact(0), fact(1), fact(0), live=THREE) == pieces(fact(0, 1, size=400_000)) == both
    assert pieces(fact(0), fact(1, line="m.py:3")) == []


def test_no_more_counts_than_the_temporaries_of_these_types_hold():
    assert pieces(fact(0, size=300_000, types=("float32[7]", "float32[50000]"))) == [(("model.w",), 300_000)]
    assert pieces(fact(0), fact(1), live=[("temporary", "float32[50000]")], state=800_000) == [
        (("model.w", "model.v"), 200_000)
    ]
    for kind, shape in (("temporary", "float32[7]"), ("output", "float32[50000]")):
        assert pieces(fact(0, size=300_000), live=[(kind, shape)] * 2) == []
