"""The looks of a program to paste, called as functions: each finds what it looks for, and nothing in a healthy twin."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checking import call
from flax import nnx

from pytest_nnxcheck.paste import looks, runtime
from pytest_nnxcheck.paste.looks import (
    broken,
    differs,
    living_tracers,
    lost_by_program,
    peak,
    pointers,
    run_for_tracers,
)
from pytest_nnxcheck.paste.runtime import arrays_of, parts_of, staged, take_apart, value_at

KEPT = {}


class Scale(nnx.Module):
    def __init__(self):
        self.factor = nnx.Param(jnp.ones(64))

    def __call__(self, x):
        return x * self.factor[...]


def keeps(x):
    KEPT["x"] = x + 1
    return x


def apart(function, *args, pack=arrays_of, **kwargs):
    """A call with one module."""
    return take_apart((function, args, kwargs), ["model"], pack)


def test_what_is_found_ends_the_program_in_the_words_of_the_plugin():
    broken("memory", [], "nothing")
    with pytest.raises(AssertionError, match="nnx invariant broken: memory\n  too much\n  by far"):
        broken("memory", [1], "too much", "by far")


@pytest.mark.slow
def test_a_tracer_that_is_alive_is_a_leak():
    with pytest.raises(AssertionError, match="nnx invariant broken: tracers\n  a leak"):
        run_for_tracers(lambda: jax.jit(keeps)(jnp.ones(3)), {"float32[3]"}, "a leak")
    assert "float32[3]" in living_tracers().values()
    KEPT.clear()
    assert "float32[3]" not in living_tracers().values()
    assert run_for_tracers(lambda: jax.jit(keeps)(jnp.ones(3)), {"float32[4]"}, "another").shape == (3,)
    KEPT.clear()


@pytest.mark.slow
def test_what_an_exception_holds_is_no_leak_and_the_exception_comes_out():
    def fails(x):
        inside = x + 1
        raise RuntimeError(inside.shape)

    with pytest.raises(RuntimeError):
        run_for_tracers(lambda: jax.jit(fails)(jnp.ones(3)), {"float32[3]"}, "a leak")


@pytest.mark.filterwarnings("ignore:Some donated buffers were not usable")
def test_a_donated_array_that_no_output_takes_has_lost_its_buffer():
    for function, lost in ((lambda x: x + 1, []), (lambda x: x.astype(jnp.int8), [0])):
        staged(jax.jit, function, donate_argnums=0)(jnp.zeros(8))
        lowered = runtime.STAGED[-1][0]
        assert lost_by_program(lowered.compile(), lowered) == lost


def test_arrays_in_one_buffer_have_the_same_pointers():
    model = Scale()
    factor = value_at(model, "factor")
    assert pointers(factor) == pointers(model) != set()
    assert not pointers(factor) & pointers([jnp.ones(64)])


def test_a_value_is_another_one_where_it_is_far_enough_from_what_was_wanted():
    one = (jnp.ones(3), 2, "text", jnp.nan)
    assert not differs(one, (jnp.ones(3) + 0.01, 2, "text", jnp.nan), 0.5)
    others = [(jnp.ones(3) + 1, 2, "text", jnp.nan), (jnp.ones(4), 2, "text", jnp.nan), (jnp.ones(3), 3, "text", 0.0)]
    assert all(differs(one, other, 0.5) for other in others)
    assert differs("text", "other", 0.5)
    keys = jax.random.key(0), jax.random.key(1)
    assert differs(*keys, 0)
    assert not differs(keys[0], keys[0], 0)


@pytest.mark.usefixtures("aliased_bytes")
def test_the_peak_is_that_of_the_plugin(capsys):
    found = call(Scale(), jnp.ones((2, 64)), nesting="jit").outcome
    model = Scale()
    step = staged(nnx.jit, lambda model, x: model(x), keep_unused=True, donate_argnums=0)
    assert step(model, jnp.ones((2, 64))).shape == (2, 64)
    program = runtime.STAGED[-1][0].compile()
    assert peak(program) == found.peak
    assert "temp_size_in_bytes" in capsys.readouterr().out


def test_a_call_is_taken_apart_and_put_together():
    model, other = Scale(), Scale()

    def function(batch, first, *, second, train):
        return {"y": second(first(batch["x"])), "n": len(batch) + train}

    batch = {"x": jnp.ones((2, 64)), "mask": None, "names": np.array(["a"])}
    given = (function, (batch, model), {"second": other, "train": True})
    program, state, inputs, rebuild = take_apart(given, ("first", "second"), arrays_of)
    assert len(inputs) == 1
    assert state.first is model
    assert state.second is other
    output = rebuild(program(state, *inputs))
    assert output["n"] == 4
    assert output["y"].shape == (2, 64)
    assert apart(model, batch["x"])[1] is model
    none = take_apart((lambda: jnp.ones(2), (), {}), (), arrays_of)
    assert none[2][0].shape == (), "a program has an input"


def test_what_is_no_array_comes_back_as_it_was():
    model = Scale()
    returned = ("text", nnx.Linear(2, 2, rngs=nnx.Rngs(0)), model, nnx.state(model), 3)
    program, state, inputs, rebuild = apart(lambda model: returned, model, pack=parts_of)
    arrays = program(state, *inputs)
    assert [array.shape for array in arrays] == [(2,), (2, 2), (64,), ()]
    text, made, own, kept, number = rebuild(arrays)
    assert (text, int(number), own is model, made is returned[1]) == ("text", 3, True, False)
    assert made(jnp.ones((1, 2))).shape == (1, 2)
    assert jax.tree.leaves(kept)[0].shape == (64,)


def test_no_two_functions_of_ours_have_one_name():
    """They stand in one program."""
    names = [
        name
        for module in (looks, runtime)
        for name, value in vars(module).items()
        if callable(value) and value.__module__ == module.__name__
    ]
    assert len(names) == len(set(names))
