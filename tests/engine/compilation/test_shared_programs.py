"""Programs of the same text are compiled once, and only where the text says all: not of callbacks, devices, weak types or keys."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from checking import Example, call
from flax import nnx
from healthy import assign

from pytest_nnxcheck import Layer
from pytest_nnxcheck.compat.compile_cache import SharedPrograms
from pytest_nnxcheck.core.catalogue import TRANSFORMS
from pytest_nnxcheck.runner import strategies

X = jnp.ones((2, 4))


def lowered(f, *args):
    return jax.jit(f, keep_unused=True).trace(*args).lower()


def of_both(first, second):
    """Two lowered programs compiled one after the other; what the second one gave, and whether it was taken of the first."""
    programs = SharedPrograms()
    programs.compiled(lowered(*first))
    compiled = programs.compiled(lowered(*second))
    return compiled(*second[1:]), compiled.shared


def test_a_program_of_the_same_text_and_another_shape_of_its_output_is_shared():
    output, shared = of_both((lambda x: {"y": x * 2 + 1}, X), (lambda x: [x * 2 + 1], X))
    assert shared
    assert np.array_equal(output[0], X * 2 + 1)


def test_other_constants_are_another_program():
    tables = [jnp.arange(2000.0), jnp.arange(2000.0) + 1]
    output, shared = of_both(*((lambda x, table=table: x + table, jnp.zeros(2000)) for table in tables))
    assert not shared
    assert np.array_equal(output, tables[1])


def plus(number):
    """A call of Python code: from jax 0.6 on the text of the program does not say of which."""
    return lambda x: jax.pure_callback(lambda value: np.asarray(value) + np.float32(number), x, x)


def test_other_callbacks_are_another_program():
    output, _ = of_both((plus(1), X), (plus(2), X))
    assert np.array_equal(output, X + 2)


def test_two_subjects_of_one_test_call_back_to_their_own_python_code():
    example = Example()
    outputs = [call(plus(number), X, nesting="jit", example=example).output for number in (1, 2)]
    assert [np.asarray(output)[0, 0] for output in outputs] == [2, 3]


def test_weakly_typed_outputs_are_another_program():
    output, _ = of_both((lambda x: jnp.float32(2), X), (lambda x: 2.0, X))
    assert output.weak_type
    assert (output + jnp.bfloat16(1)).dtype == jnp.bfloat16


def test_keys_and_their_data_are_other_programs():
    key = jax.random.key(0)
    data = jax.random.key_data(key)
    output, _ = of_both((lambda key: key, data), (lambda key: key, key))
    assert output.dtype == key.dtype


class Average(nnx.Module):
    """All of its state changes, as in a training step: what a loop hands through is taken out of it where nothing stands between."""

    def __init__(self):
        self.mean = nnx.BatchStat(jnp.zeros(4))

    def __call__(self, x):
        assign(self.mean, 0.9 * self.mean[...] + x.mean(0))
        return x - self.mean[...]


def test_a_chain_with_an_idle_layer_is_the_program_of_its_other_one():
    example = Example()
    inner = [Layer(transform) for transform in TRANSFORMS if transform != "jit"]
    beside_idle = [chain for chain in strategies.cover_pairs(inner, 3) if any(layer.row.idle for layer in chain)]
    for chain in beside_idle:
        nesting = " > ".join(map(str, ("jit", *chain)))
        assert call(Average(), X, nesting=nesting, example=example).outcome.verdict == "held"
    assert len(beside_idle) == 8
    # Of a jit, with a scan, with a vmap and with a while_loop, and the un-nested one that they are held against.
    assert len(example.memo.shared_programs.known.values) <= 5
