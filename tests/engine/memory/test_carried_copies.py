"""What a loop carries and writes a part of in each step: a copy of it that XLA inserts there is one of the leaf that it began with."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from checking import broken, call, text
from flax import nnx
from healthy import assign
from rewritten_leaves import ALONE, CHANGES, REREADS, Codebook, Rereads

from pytest_nnxcheck.core.text import format_bytes
from pytest_nnxcheck.reporting import hints

ROWS, WIDTH, STEPS = 64, 512, 4
SIZE = ROWS * WIDTH * 4
JAX = jax.__version_info__[:2]


class Table(nnx.Module):
    """Rows that each step gathers, and scatters back; ``late`` reads old rows where the new ones are there already."""

    def __init__(self, late):
        self.rows, self.late = nnx.Cache(jnp.ones((ROWS, WIDTH))), late
        self.decay = nnx.Param(jnp.float32(0.9))  # which nnx.remat hands back: the advice on that is not for the rows

    def step(self, x, places):
        old = self.rows[...]
        new = old.at[places].set(old[places] * self.decay[...] + x)
        assign(self.rows, new)
        return jnp.tanh(old[places + 1]).sum() + new.sum(0) if self.late else x

    def in_nnx_scan(self, x, places):
        body = lambda table, places: (table, nnx.remat(Table.step)(table, x, places))  # noqa: E731
        return nnx.scan(body, in_axes=(nnx.Carry, 0), out_axes=(nnx.Carry, 0))(self, places)[1]

    def in_jax_scan(self, x, places):
        graphdef, state = nnx.split(self)

        def body(state, places):
            table = nnx.merge(graphdef, state)
            y = table.step(x, places)
            return nnx.state(table), y

        state, ys = jax.lax.scan(body, state, places)
        nnx.update(self, state)
        return ys


X = jnp.ones(WIDTH)
PLACES = jnp.arange(STEPS * 3).reshape(STEPS, 3)


@pytest.mark.parametrize("loop", ["in_nnx_scan", "in_jax_scan"])
def test_the_copy_of_what_a_loop_gathers_from_after_it_scattered_is_named_and_judged(loop):
    table = Table(late=True)
    found = call(getattr(table, loop), X, PLACES, nesting="jit")
    assert broken(found) == ["memory"], text(found)
    assert found.outcome.violations[0].summary == "the program holds 1.0 more copies of its state at the peak"
    assert found.outcome.violations[0].hint == ""
    row = next(row for label, row in found.outcome.violations[0].details if label == "buffer")
    assert row.startswith(
        f"{format_bytes(SIZE)} temporary float32[{ROWS},{WIDTH}] copy   copy of model.rows by while, copy"
    )
    held = call(getattr(Table(late=False), loop), X, PLACES, nesting="jit")
    assert held.outcome.verdict == "held", text(held)


class Decoder(nnx.Module):
    """Writes a key into its cache, and attends over all of it; ``looks_back``: over that which was there before, too."""

    def __init__(self, *, looks_back=False):
        self.looks_back = looks_back
        self.keys, self.position = nnx.Cache(jnp.zeros((ROWS, WIDTH))), nnx.Cache(jnp.int32(0))

    def step(self, x):
        position, before = self.position[...], self.keys[...]
        assign(self.keys, jax.lax.dynamic_update_slice(self.keys[...], x[None], (position, 0)))
        assign(self.position, position + 1)
        y = jnp.tanh(jax.nn.softmax(self.keys[...] @ x) @ self.keys[...])
        return jnp.tanh(before @ y) @ before if self.looks_back else y

    def __call__(self, x):
        body = lambda carry: (carry[0], carry[0].step(carry[1]), carry[2] + 1)  # noqa: E731
        return nnx.while_loop(lambda carry: carry[2] < STEPS, body, (self, x, 0))[1]


NOTE = "1.0 copies of the state not judged: XLA inserts them for leaves of which the call writes a part, and reads nothing that was there before"


@pytest.mark.parametrize("nesting", ["jit", "jit[functional]", "jit > scan", "jit > while_loop"])
@pytest.mark.parametrize("made", ["step", "__call__"])
def test_a_cache_that_is_decoded_into_is_no_copy_of_the_users_though_older_xla_makes_one(made, nesting):
    found = call(getattr(Decoder(), made), X, nesting=nesting)
    assert found.outcome.verdict == "held", text(found)
    copied = JAX < (0, 7) and nesting in ("jit", "jit[functional]")
    assert not copied or NOTE in text(found)


def test_a_cache_of_which_the_old_values_are_read_after_the_write_is_copied():
    found = call(Decoder(looks_back=True).step, X, nesting="jit")
    assert broken(found) == ["memory"], text(found)
    assert "copy of model.keys by" in text(found)


@pytest.mark.parametrize("name", CHANGES)
@pytest.mark.parametrize("nesting", ["jit", "jit[functional]"])
def test_a_copy_that_donation_alone_asks_for_is_a_note(name, nesting):
    """Undonated, the output is the second buffer: the peak is the same."""
    found = call(Codebook(CHANGES[name]), jnp.ones(256), nesting=nesting)
    assert found.outcome.verdict == "held", text(found)
    assert "so that donation saves nothing of them" in text(found)


@pytest.mark.parametrize("name", ["shift", "moved"])
@pytest.mark.parametrize("reread", REREADS)
def test_one_that_the_call_asks_for_counts(name, reread):
    found = call(Rereads({**CHANGES, **ALONE}[name], reread), jnp.ones(256), nesting="jit")
    assert broken(found) == ["memory"], text(found)


class Whitening(nnx.Module):
    """Keeps an average of the covariance, which it uses before or after it is renewed."""

    def __init__(self, *, late):
        self.scale, self.covariance, self.late = nnx.Param(jnp.ones(256)), nnx.BatchStat(jnp.eye(256)), late

    def __call__(self, x):
        old = self.covariance[...]
        assign(self.covariance, 0.9 * old + 0.1 * (x.T @ x))
        return (x * self.scale[...]) @ (old if self.late else self.covariance[...])


class Normed(nnx.Module):
    """Writes its kernel in place, as a weight norm does."""

    def __init__(self):
        self.kernel = nnx.Param(jnp.ones((256, 512)))

    def __call__(self, x):
        assign(self.kernel, self.kernel[...] / jnp.linalg.norm(self.kernel[...], axis=0))
        return x @ self.kernel[...]


@pytest.mark.parametrize(
    "nesting", ["jit > grad", "jit > grad > remat", "jit > grad > remat > cond", "jit > grad > switch"]
)
@pytest.mark.parametrize(
    "made", [Normed, lambda: Whitening(late=True), lambda: Whitening(late=False)], ids=["norm", "late", "early"]
)
def test_what_xla_copies_at_a_remat_of_a_leaf_that_is_made_anew_is_not_the_users(made, nesting):
    """Undonated, the output is the second buffer; under a remat the copy has the name of its barrier."""
    found = call(made(), jnp.ones((32, 256)), nesting=nesting)
    assert found.outcome.verdict == "held", text(found)


def test_what_is_returned_beside_the_module_that_has_it_is_a_copy():
    layer = nnx.Linear(256, 256, rngs=nnx.Rngs(0))
    found = call(lambda layer, x: (layer(x), nnx.state(layer)), layer, X[:256], nesting="jit")
    assert broken(found) == ["memory"], text(found)
    assert found.outcome.violations[0].hint == hints.hint("returned")
    assert call(lambda layer, x: layer(x), layer, X[:256], nesting="jit").outcome.verdict == "held"


def test_parameters_that_a_loop_replaces_are_no_copy():
    """A value that is computed of all that is carried is a new one."""

    class Decays(nnx.Module):
        def __init__(self):
            self.rows = nnx.Param(jnp.ones((ROWS, WIDTH)))

        def __call__(self, x):
            def body(carry):
                model, x, n = carry
                y = jnp.tanh(model.rows[...] @ x) @ model.rows[...]
                assign(model.rows, model.rows[...] * 0.9 + y)
                return model, jnp.tanh(model.rows[...].sum(0)) + y, n + 1

            return nnx.while_loop(lambda carry: carry[2] < STEPS, body, (self, x, 0))[1]

    found = call(Decays(), X, nesting="jit")
    assert found.outcome.verdict == "held", text(found)
