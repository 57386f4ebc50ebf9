"""The checks of a program to paste, called as functions: each finds what it is told to look for, and nothing else."""

from __future__ import annotations

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checking import call
from flax import nnx
from healthy import assign

from pytest_nnxcheck.compat.staging import configured
from pytest_nnxcheck.compat.targets import effort_options, lowered_on, mesh_of
from pytest_nnxcheck.reproducer import checks, runtime
from pytest_nnxcheck.reproducer.checks import (
    agree,
    captures_little,
    changes,
    counterpart,
    keeps_donated_buffers,
    leaves_no_tracers,
    living_tracers,
    may_be_written,
    peak_is_within,
    pointers,
    shares_no_buffer,
    touches_nothing,
)
from pytest_nnxcheck.reproducer.own_source import extract, place
from pytest_nnxcheck.reproducer.runtime import arrays_of, parts_of, staged, take_apart, value_at
from pytest_nnxcheck.subject.abstract_arrays import abstract_state
from pytest_nnxcheck.transforms.layer import first, stack
from pytest_nnxcheck.transforms.mapping import on_mesh

KEPT = {}


class Scale(nnx.Module):
    def __init__(self):
        self.factor = nnx.Param(jnp.ones(64))

    def __call__(self, x):
        return x * self.factor[...]


def keeps(x):
    KEPT["x"] = x + 1
    return x


@pytest.mark.slow
def test_a_tracer_that_is_alive_is_a_leak():
    with pytest.raises(AssertionError, match=r"leaked KEPT\['x'\]   float32\[3\]"):
        leaves_no_tracers(lambda: jax.jit(keeps)(jnp.ones(3)), [("KEPT['x']", "float32[3]")], living_tracers)
    KEPT.clear()
    other = [("KEPT['x']", "float32[4]")]
    assert leaves_no_tracers(lambda: jax.jit(keeps)(jnp.ones(3)), other, living_tracers).shape == (3,)
    KEPT.clear()


@pytest.mark.slow
def test_what_an_exception_holds_is_no_leak_and_the_exception_comes_out():
    def fails(x):
        inside = x + 1
        raise RuntimeError(inside.shape)

    with pytest.raises(RuntimeError):
        leaves_no_tracers(lambda: jax.jit(fails)(jnp.ones(3)), [("x", "float32[3]")], living_tracers)


@pytest.mark.parametrize(
    "new, why",
    [
        (None, "not returned"),
        (jnp.ones(8, jnp.bfloat16), r"became bfloat16\[8\]"),
        (jnp.ones(4), r"became float32\[4\]"),
        (jnp.ones(8), "not reused by XLA"),
    ],
)
def test_a_leaf_that_did_not_come_back_in_a_donated_buffer_is_lost(new, why):
    old = jnp.zeros(8)
    places = pointers(old)
    with pytest.raises(AssertionError, match=rf"model.a   float32\[8\]   {why}"):
        keeps_donated_buffers({"model.a": old}, {"model.a": new}, lambda old, new: pointers(new) <= places)
    keeps_donated_buffers({"model.a": old}, {"model.a": old}, lambda old, new: pointers(new) <= places)


def test_as_many_arrays_of_a_type_must_come_back_as_are_donated():
    a, b = jnp.ones(3), jnp.ones(3)
    assert counterpart(b, [a, b], (a,)) is None
    assert counterpart(b, [a, b], (a, b)) is b
    assert counterpart(b, [a, b], (a, jnp.ones(4))) is None


def test_a_buffer_that_two_arrays_have_is_shared():
    model = Scale()
    shares_no_buffer(model, [jnp.ones(3)], {"model.factor": value_at(model, "factor")})
    with pytest.raises(AssertionError, match=r"model.factor shares its buffer with another array"):
        shares_no_buffer(model, [value_at(model, "factor")], {"model.factor": value_at(model, "factor")})


def test_a_leaf_that_is_what_it_was_has_lost_its_update():
    old = {"count": jnp.zeros((), int), "key": jax.random.key(0)}
    with pytest.raises(AssertionError, match=r"donation\n  count   its update is dropped.*\n  key"):
        changes("donation", old, dict(old))
    changes("donation", old, {**old, "count": jnp.ones((), int)})


def test_a_value_is_another_one_where_it_is_far_enough_from_what_was_wanted():
    one = {"output": (jnp.ones(3), 2, "text", jnp.nan)}
    agree(one, {"output": (jnp.ones(3) + 0.01, 2, "text", jnp.nan)}, {"output": 0.5}, "the un-nested call")
    for other in [
        (jnp.ones(3) + 1, 2, "text", jnp.nan),
        (jnp.ones(4), 2, "text", jnp.nan),
        (jnp.ones(3), 3, "text", 0.0),
    ]:
        with pytest.raises(AssertionError, match="output differs from that of the un-nested call"):
            agree(one, {"output": other}, {"output": 0.5}, "the un-nested call")


def test_a_state_that_a_shape_was_asked_of_stays_what_it_was():
    model = Scale()
    with touches_nothing(model, {"model.factor": ("factor",)}):
        pass
    with (
        pytest.raises(AssertionError, match="eval_shape changed model.factor"),
        touches_nothing(model, {"model.factor": ("factor",)}),
    ):
        assign(model.factor, jnp.zeros(64))


def test_a_variable_of_this_trace_may_be_written():
    may_be_written(Scale(), {"model.factor": ("factor",)})


@pytest.mark.usefixtures("aliased_bytes")
def test_the_peak_is_that_of_the_plugin(capsys):
    found = call(Scale(), jnp.ones((2, 64)), nesting="jit").outcome
    model = Scale()
    step = staged(
        nnx.jit,
        lambda model, x: model(x),
        lambda compiled, *_: runtime.COMPILED.append(compiled),
        keep_unused=True,
        donate_argnums=0,
    )
    assert step(model, jnp.ones((2, 64))).shape == (2, 64)
    peak_is_within(found.peak)
    assert capsys.readouterr().out.startswith("peak ")
    with pytest.raises(AssertionError, match="is over the budget"):
        peak_is_within(found.peak - 1)
    with pytest.raises(AssertionError, match=r"holds 0.50 more copies of its state at the peak"):
        peak_is_within(1 << 20, state=512, copied=256, seen=found.peak)
    peak_is_within(1 << 20, state=512, copied=256, seen=found.peak + 256)


def test_captured_arrays_are_counted():
    weights = jnp.ones((64, 64))
    made = take_apart(lambda model, x: model(x) @ weights, (Scale(), jnp.ones((2, 64))), {}, ("model",), arrays_of)
    with pytest.raises(AssertionError, match=r"captures 16.0 KiB of constants"):
        captures_little(*made[:3], 1 << 14)
    captures_little(*made[:3], 1 << 15)


def test_a_call_is_taken_apart_and_put_together():
    model, other = Scale(), Scale()

    def function(batch, first, *, second, train):
        return {"y": second(first(batch["x"])), "n": len(batch) + train}

    batch = {"x": jnp.ones((2, 64)), "mask": None, "names": np.array(["a"])}
    keywords = {"second": other, "train": True}
    program, state, inputs, rebuild = take_apart(function, (batch, model), keywords, ("first", "second"), arrays_of)
    assert len(inputs) == 1
    assert state.first is model
    assert state.second is other
    output = rebuild(program(state, *inputs))
    assert output["n"] == 4
    assert output["y"].shape == (2, 64)
    assert take_apart(model, (batch["x"],), {}, ("model",), arrays_of)[1] is model
    assert take_apart(lambda: jnp.ones(2), (), {}, (), arrays_of)[2][0].shape == (), "a program has an input"


def test_what_is_no_array_comes_back_as_it_was():
    model = Scale()
    returned = ("text", nnx.Linear(2, 2, rngs=nnx.Rngs(0)), model, nnx.state(model), 3)
    program, state, inputs, rebuild = take_apart(lambda model: returned, (model,), {}, ("model",), parts_of)
    arrays = program(state, *inputs)
    assert [array.shape for array in arrays] == [(2,), (2, 2), (64,), ()]
    text, made, own, kept, number = rebuild(arrays)
    assert (text, int(number), own is model, made is returned[1]) == ("text", 3, True, False)
    assert made(jnp.ones((1, 2))).shape == (1, 2)
    assert jax.tree.leaves(kept)[0].shape == (64,)


def test_all_that_programs_copy_beside_the_layers_is_small():
    for_target = [checks.compile_on_target, checks.fits_target, checks.keeps_buffers_on_target]
    functions = [each for each in (*vars(runtime).values(), *vars(checks).values()) if inspect.isfunction(each)]
    functions += [first, stack, on_mesh, abstract_state]
    copied = extract(
        tuple(
            place(each)
            for each in functions
            if each not in {*for_target, configured, effort_options, lowered_on, mesh_of}
        )
    )
    assert "leaves_no_tracers" in {name for _, name in copied.definitions}
    assert lines_of(copied) <= 410
    assert lines_of(extract(tuple(map(place, for_target)))) <= 130


def lines_of(copied):
    return sum(text.count("\n") + 1 for text in copied.definitions.values())
