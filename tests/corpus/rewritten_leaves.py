"""Large leaves that a call gives another value, as a whole or a row of it, and the same where the old value is needed beside the new one."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from healthy import assign


class Codebook(nnx.Module):
    """One large leaf that a call gives another value as a whole."""

    def __init__(self, change):
        self.change, self.book, self.step = change, nnx.Cache(jnp.ones((256, 256))), nnx.Cache(jnp.int32(0))

    def __call__(self, x):
        y = x @ self.book[...]
        assign(self.step, self.step[...] + 1)
        assign(self.book, self.change(self.book[...], self.step[...] % 100 == 0, x))
        return y


CHANGES = {
    "branch": lambda book, due, x: jax.lax.cond(
        due, lambda book: book / jnp.linalg.norm(book), lambda book: book, book
    ),
    "choice": lambda book, due, x: jnp.where(
        due & (jnp.abs(book).max(0) < 1e-3), jax.random.normal(jax.random.key(0), book.shape), book
    ),
    "shift": lambda book, due, x: jnp.concatenate([book[1:], x[None]]),
}
ALONE = {"moved": lambda book, due, x: jnp.tanh(book) * 0.9}
"""For which XLA inserts no copy, where nothing reads the old values afterwards."""


class Rereads(Codebook):
    """Needs the old values beside the new ones."""

    def __init__(self, change, reread):
        super().__init__(change)
        self.reread = reread

    def __call__(self, x):
        old = self.book[...]
        super().__call__(x)
        return self.reread(old, self.book[...], x)


REREADS = (
    lambda old, new, x: jnp.linalg.norm(new - old),
    lambda old, new, x: jnp.tanh(old @ jnp.tanh(new @ x)),
    jax.jit(lambda old, new, x: jnp.tanh(old @ jnp.tanh(new @ x)) @ old),
)


READS = {
    "row": lambda rows, place, x: rows[place],
    "rows": lambda rows, place, x: rows[jnp.array([1, 5]) + place],
    "all": lambda rows, place, x: jnp.argmax(rows @ x),
}
WRITES = {
    "row": lambda rows, place, x: rows.at[place].set(x),
    "slice": lambda rows, place, x: jax.lax.dynamic_update_slice(rows, x[None], (place, 0)),
}


class Ring(nnx.Module):
    """Hands out what it reads of its rows, and puts another in the place of the oldest."""

    def __init__(self, read, write, *, ordered=False):
        self.read, self.write, self.ordered = read, write, ordered
        self.rows, self.oldest = nnx.Cache(jnp.zeros((1024, 64))), nnx.Cache(jnp.int32(0))

    def __call__(self, x):
        rows, oldest = self.rows[...], self.oldest[...]
        read = READS[self.read](rows, oldest, x)
        if self.ordered:
            rows, read = jax.lax.optimization_barrier((rows, read))
        assign(self.rows, WRITES[self.write](rows, oldest, x))
        assign(self.oldest, (oldest + 1) % 1024)
        return read


class KeyCache(nnx.Module):
    """A step of decoding: writes a row of its cache in place, and reads all of it; or reads after that what it was before as well."""

    def __init__(self, dtype, *, reads_before=False):
        self.keys = nnx.Cache(jnp.zeros((2, 2048, 64), dtype))
        self.reads_before = reads_before

    def __call__(self, x, at):
        before = self.keys[...]
        keys = jax.lax.dynamic_update_slice(before, x.astype(before.dtype), (0, at, 0))
        assign(self.keys, keys)
        scores = jnp.einsum("bsd,bd->bs", keys, x[:, 0].astype(keys.dtype))
        if not self.reads_before:
            return scores
        return jnp.einsum("bsd,bd->bs", before, jnp.einsum("bs,bsd->bd", jnp.tanh(scores), keys))


class Moves(nnx.Linear):
    """Moves its kernel, and returns how far."""

    def __call__(self, x):
        old = self.kernel[...]
        assign(self.kernel, old + 0.1 * jnp.outer(x[0], x[0]))
        return jnp.linalg.norm(self.kernel[...] - old)


class Table(nnx.Module):
    """Rows that each step of a scan gathers, and scatters back; ``late`` reads old rows where the new ones are there already."""

    def __init__(self, late):
        self.rows, self.late = nnx.Cache(jnp.ones((64, 512))), late

    def __call__(self, x):
        def body(table, places):
            old = table.rows[...]
            new = old.at[places].set(old[places] * 0.9 + x)
            assign(table.rows, new)
            return table, jnp.tanh(old[places + 1]).sum() + new.sum(0) if table.late else x

        return nnx.scan(body, in_axes=(nnx.Carry, 0), out_axes=(nnx.Carry, 0))(self, jnp.arange(12).reshape(4, 3))[1]


BOOK = (jnp.ones(256),)
KEYS = (jnp.ones((2, 1, 64)), jnp.int32(3))
REWRITTEN = {
    "norm of an update": (lambda: Moves(256, 256, rngs=nnx.Rngs(0)), (jnp.ones((2, 256)),)),
    **{f"book, {name}": (lambda change=change: Codebook(change), BOOK) for name, change in CHANGES.items()},
    **{
        f"book, {name}, read again by {number}": (lambda change=change, reread=reread: Rereads(change, reread), BOOK)
        for number, reread in enumerate(REREADS)
        for name, change in {**CHANGES, **ALONE}.items()
    },
    **{
        f"ring, {read}, {write}": (lambda read=read, write=write: Ring(read, write), (jnp.ones(64),))
        for read in READS
        for write in WRITES
    },
    **{
        f"keys, {dtype.__name__}, {before}": (
            lambda dtype=dtype, before=before: KeyCache(dtype, reads_before=before),
            KEYS,
        )
        for dtype in (jnp.float32, jnp.bfloat16, jnp.float16)
        for before in (False, True)
    },
    **{f"table, {late}": (lambda late=late: Table(late), (jnp.ones(512),)) for late in (False, True)},
}
"""Large leaves that a call gives another value, as a whole or in part, some of them needed old and new at once."""
