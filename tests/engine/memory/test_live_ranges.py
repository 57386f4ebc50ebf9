"""The live ranges of buffers against the totals of XLA: generated programs on the CPU, and the rules of a GPU on programs written as protos."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from compiling import memory_of
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax
from test_wire_format import instruction, module_of

from pytest_nnxcheck.compat.staging import serialized_hlo_module
from pytest_nnxcheck.core.peak import Live
from pytest_nnxcheck.xla import hlo
from pytest_nnxcheck.xla.hlo import leaves
from pytest_nnxcheck.xla.live_ranges import Held, LiveRanges
from pytest_nnxcheck.xla.reuse import reused

SIZE = 64 * 1024
X = jnp.ones((SIZE,))

STEPS = {
    "elementwise": lambda x: jnp.tanh(x) + 1,
    "sorted": jnp.sort,
    "loop": lambda x: lax.fori_loop(0, 3, lambda i, x: jnp.sort(x) * i, x),
    "scan": lambda x: lax.scan(lambda x, _: (jnp.sort(x), x[0]), x, None, length=3)[0],
    "conditional": lambda x: lax.cond(x[0] > 0, jnp.sort, lambda x: jnp.tanh(x[::-1]), x),
    "a row written": lambda x: x.at[3].set(jnp.sort(x)[5]),
    "both kept": lambda x: jnp.sort(x) + jnp.cumsum(x),
}


@settings(max_examples=12, deadline=None)
@given(names=st.lists(st.sampled_from(sorted(STEPS)), min_size=1, max_size=4), donate=st.booleans())
def test_the_largest_sum_of_live_buffers_is_the_peak_that_xla_says(names, donate):
    def program(x):
        for name in names:
            x = STEPS[name](x)
        return x

    memory = memory_of(program, X, donate=(0,) if donate else ())
    peak = memory.peak - memory.constants
    assert 0.99 * peak <= max(memory.order.totals()) <= 1.01 * peak


def test_a_loop_is_one_of_its_steps_and_its_body_is_inside():
    memory = memory_of(lambda x: lax.fori_loop(0, 9, lambda i, x: jnp.sort(x) * i, x), X)
    ((begin, end),) = memory.order.loops
    assert 0 < begin < end < memory.order.length
    assert begin <= memory.order.peak <= end


@pytest.mark.parametrize("opcode", ["exponential", "sort"])
@pytest.mark.parametrize("later", [True, False])
def test_a_gpu_writes_an_elementwise_result_over_an_operand_that_nobody_takes_later(opcode, later):
    """``a = sort(p); b = opcode(a); return sort(b)``, or ``... return sort(b), a``."""
    module = module_of(
        instruction(1, "parameter"),
        instruction(2, "sort", (1,)),
        instruction(3, opcode, (2,)),
        instruction(4, "sort", (3, 2) if later else (3,)),
        root=4,
        order=(1, 2, 3, 4),
    )
    ranges = LiveRanges(module)
    at = {op.id: ranges.range_of((op.id, ())) for op in ranges.ran}
    held = [Held(Live(1, "temporary", at[id_].start, at[id_].end), ((id_, ()),)) for id_ in (2, 3)]
    assert len(list(reused(ranges, held))) == (1 if opcode == "exponential" and not later else 2)


@pytest.mark.parametrize("size, end, inside", [(8, 2, True), (9, 2, False), (8, 3, False)])
def test_a_gpu_keeps_temporaries_in_the_memory_of_an_output_that_is_not_made_yet(size, end, inside):
    module = module_of(
        instruction(1, "parameter"),
        instruction(2, "sort", (1,)),
        instruction(3, "sort", (2,)),
        instruction(4, "sort", (3,)),
        root=4,
        order=(1, 2, 3, 4),
    )
    ranges = LiveRanges(module)
    output = Held(Live(8, "output", 0, 4), ((4, ()),))
    temporary = Held(Live(size, "temporary", 1, end), ((2, ()),))
    assert list(reused(ranges, [output, temporary])) == ([output] if inside else [output, temporary])


@pytest.mark.parametrize("start, inside", [(2, True), (1, False)])
def test_a_gpu_keeps_temporaries_in_the_memory_of_a_donated_argument_after_its_last_use(start, inside):
    """``a = sort(p); b = sort(a); return sort(b)`` into the memory of ``p``."""
    module = module_of(
        instruction(1, "parameter"),
        instruction(2, "sort", (1,)),
        instruction(3, "sort", (2,)),
        instruction(4, "sort", (3,)),
        instruction(5, "sort", (4,)),
        root=5,
        order=(1, 2, 3, 4, 5),
    )
    module.donated[0] = 0
    ranges = LiveRanges(module)
    argument = Held(Live(8, "argument", 0, 5), ((1, ()), (5, ())))
    temporary = Held(Live(8, "temporary", start, 3), ((3, ()),))
    assert list(reused(ranges, [argument, temporary])) == ([argument] if inside else [argument, temporary])


@pytest.mark.parametrize("until", ["the first", "the last"])
def test_the_carry_of_a_loop_is_free_between_its_last_use_and_its_new_value(until):
    def step(i, x):
        y = jnp.sort(jnp.sort(x) * i)
        return y + x if until == "the last" else jnp.sort(y)

    compiled = jax.jit(lambda x: lax.fori_loop(0, 9, step, jnp.sort(x))).lower(X).compile()
    ranges = LiveRanges(hlo.Module.read(serialized_hlo_module(compiled), None))
    (loop,) = (op for op in ranges.ran if op.opcode == "while")
    (carry,) = {ranges.buffer((loop.id, index)) for index in leaves(loop.shape)} & {
        ranges.buffer(value) for value in ranges.results
    }
    assert len(ranges.pieces[carry]) == (2 if until == "the first" else 1)


def test_an_update_in_place_and_the_carry_of_a_loop_share_a_buffer():
    jaxpr = jax.jit(lambda x: lax.fori_loop(0, 3, lambda i, x: x.at[i].set(1.0), x), donate_argnums=(0,))
    memory = memory_of(jaxpr, X, donate=(0,))
    assert [buffer.kind for buffer in memory.buffers if buffer.bytes >= X.nbytes] == ["argument"]
