"""A reference is held once: what a loop over references copies is found, and what reads them in place holds none."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from references import needs_refs

from pytest_nnxcheck.compat import staging
from pytest_nnxcheck.core.peak import Copies
from pytest_nnxcheck.jaxprs.copies import TracedProgram, copies_in
from pytest_nnxcheck.xla.buffers import split_of

WIDTH, LAYERS = 256, 8
STACK = WIDTH * WIDTH * LAYERS * 4


def copies(f, *arguments, donate=()):
    """The copies of its first argument that ``f`` holds."""
    staged = []
    staging.staged_jit(jax.jit, f, staged.append, keep_unused=True, donate_argnums=donate)(*arguments)
    program = TracedProgram.of(
        staged[0].traced.jaxpr,
        jax.tree.leaves(staged[0].arguments),
        staged[0].donated,
    )
    held = split_of(staged[0].traced.lower().compile())
    return copies_in(program, held, STACK, lambda jitted: split_of(jitted.lower(*program.arguments).compile()))


def block(x, w):
    return x + jnp.tanh(x @ w[...])


def over_references(stack, x):
    return jax.lax.scan(lambda x, w: (block(x, w), None), x, stack)[0]


def over_references_in_remat(stack, x):
    return jax.lax.scan(lambda x, w: (jax.checkpoint(lambda x: block(x, w))(x), None), x, stack)[0]


def by_index(stack, x):
    return jax.lax.fori_loop(0, LAYERS, lambda i, x: block(x, stack[i]), x)


def cache(stack, x):
    def body(i, x):
        stack[i] = jnp.tanh(stack[0] @ stack[i])
        return x + stack[i].sum()

    return jax.lax.fori_loop(0, LAYERS, body, x)


def in_a_branch(stack, x):
    def write():
        stack[0] = stack[1]

    jax.lax.cond(x[0, 0] > 0, write, lambda: None)
    return x


@needs_refs
@pytest.mark.parametrize(
    "f, handed_back",
    [(over_references, 1), (over_references_in_remat, 1), (by_index, 0), (cache, 0), (in_a_branch, 0)],
)
def test_a_scan_over_references_copies_them_and_a_loop_that_indexes_does_not(f, handed_back):
    stack = jax.ShapeDtypeStruct((LAYERS, WIDTH, WIDTH), jnp.float32, is_ref=True)

    def twice(stack, x):
        return f(stack, x) + f(stack, 2 * x)

    for program in (f, twice):
        found = copies(program, stack, jnp.ones((4, WIDTH)))
        assert round(found.handed_back / STACK, 1) == handed_back, found


def over_groups(groups, x):
    return jax.lax.scan(lambda x, stack: (over_references(stack, x), None), x, groups)[0]


def groups_by_index(groups, x):
    return jax.lax.fori_loop(0, LAYERS, lambda i, x: block(x, groups[i // 4, i % 4]), x)


@needs_refs
@pytest.mark.parametrize("f, handed_back", [(over_groups, 0.5), (groups_by_index, 0)])
def test_a_scan_in_a_scan_over_references_copies_each_group_once_more(f, handed_back):
    """The forwarded program holds one of the two groups too: the outer scan takes it out."""
    groups = jax.ShapeDtypeStruct((LAYERS // 4, 4, WIDTH, WIDTH), jnp.float32, is_ref=True)
    found = copies(f, groups, jnp.ones((4, WIDTH)))
    assert round(found.handed_back / STACK, 1) == handed_back, found


class Layers(nnx.Module):
    def __init__(self, loop):
        self.loop = loop
        self.kernel = nnx.Param(jnp.ones((LAYERS, WIDTH, WIDTH)) / WIDTH, ref=True)

    def __call__(self, x):
        return self.loop(self.kernel.get_raw_value(), x)


def put_back(stack, x, *, shift):
    """An array in a carry of which each step takes a slice, and puts it where it was, or elsewhere."""

    def body(carry, i):
        stack, x = carry
        w = jax.lax.dynamic_index_in_dim(stack, i, keepdims=False)
        stack = jax.lax.dynamic_update_index_in_dim(stack, w, (i + shift) % LAYERS if shift else i, 0)
        return (stack, block(x, w)), None

    steps = jnp.arange(LAYERS, dtype=jnp.uint32)  # a signed number is made positive twice, for each of the two
    (stack, x), _ = jax.lax.scan(body, (stack, x), steps)
    return stack.sum() + x


def test_a_slice_that_is_put_back_is_its_array_and_one_that_is_moved_is_not():
    stack, x = jnp.ones((LAYERS, WIDTH, WIDTH)), jnp.ones((4, WIDTH))
    found = copies(lambda stack, x: put_back(stack, x, shift=0), stack, x)
    assert found.handed_back > 0.9 * STACK
    assert copies(lambda stack, x: put_back(stack, x, shift=1), stack, x) == Copies()
