"""A body that raises un-nested and passes with the user's own objects: a row says so, and what it is that a copy or a trace lacks."""

from __future__ import annotations

import queue
import weakref

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checking import flat, nnx_wrap
from flax import nnx
from healthy import assign, numbers, rngs
from hypothesis import strategies as st

from pytest_nnxcheck import assert_invariants, check
from pytest_nnxcheck.core.settings import merge, parse_given
from pytest_nnxcheck.runner import conclude, hypothesis_test
from pytest_nnxcheck.runner.run import Run

QUICK = {"effort": "quick", "styles": "argument", "transforms": "jit"}
PASSES = "passes with your object, "
IDENTITY = f"{PASSES}raises with a copy of it: something goes by the object's identity"
INPUTS, TRACED = f"{PASSES}raises where its inputs are arrays of jax", f"{PASSES}raises after the model was traced once"

DOUBLED: weakref.WeakSet[nnx.Module] = weakref.WeakSet()


def raised(body, own_given=False, **settings):
    """What a marked test with this body ends with, and all that its notes say."""
    chosen = merge(parse_given({**QUICK, **settings}, str))

    @hypothesis.settings(database=None, derandomize=True)
    def without_arguments():
        body()

    test = body if own_given else without_arguments
    run = Run(chosen)
    built = hypothesis_test.build(test, run, ())
    try:
        built()
    except Exception as error:
        final = conclude.conclude(error, run)
        return type(final), flat("\n".join(getattr(final, "__notes__", ())))
    return None, ""


def linear():
    """A model that is doubled, which a set remembers."""
    model = nnx.Linear(2, 2, rngs=rngs())
    DOUBLED.add(model)
    return model


def predict(model, x):
    return {"twice": 2 * model(x)} if model in DOUBLED else model(x)


def twice(model, x):
    return predict(model, x)["twice"]


def test_a_call_that_goes_by_identity_raises_for_a_copy():
    kind, notes = raised(lambda: nnx_wrap(twice)(linear(), numbers((1, 2))))
    assert kind is TypeError
    assert IDENTITY in notes


def test_a_mark_in_the_model_goes_with_the_copy():
    def body():
        model = nnx.Linear(2, 2, rngs=rngs())
        model.doubled = True
        nnx_wrap(lambda model, x: 2 * model(x) if model.doubled else {}[x])(model, numbers((1, 2)))

    assert raised(body) == (None, "")


def test_what_raises_with_any_object_has_no_row():
    def body():
        nnx_wrap(lambda model, x: {}["nothing"])(linear(), numbers((1, 2)))

    assert raised(body) == (KeyError, "")


SHARED = numbers((1, 2))


def shared_only(model, x):
    if x is not SHARED:
        raise ValueError("another array")
    return model(x)


def variable_only(model, x):
    if not any(model.kernel is known for known in KNOWN):
        raise ValueError("another Variable")
    return model(x)


KNOWN: list[nnx.Variable] = []


@pytest.mark.parametrize("function", [shared_only, variable_only])
def test_arrays_and_variables_have_an_identity_too(function):
    def body():
        model = linear()
        KNOWN.append(model.kernel)
        nnx_wrap(function)(model, SHARED)

    kind, notes = raised(body)
    assert kind is ValueError
    assert IDENTITY in notes


def test_an_array_of_numpy_is_none_of_jax():
    def body():
        nnx_wrap(lambda model, x: model(x) if x.flags.owndata else x)(linear(), np.ones((1, 2), np.float32))

    kind, notes = raised(body)
    assert kind is AttributeError
    assert INPUTS in notes


class Counts(nnx.Module):
    """Counts in an object that nobody can look into: a queue."""

    def __init__(self) -> None:
        self.linear = nnx.Linear(2, 2, rngs=rngs())
        self.counts: queue.SimpleQueue[jax.Array] = queue.SimpleQueue()
        self.counts.put(jnp.float32(1))

    def __call__(self, x):
        count = self.counts.get_nowait()
        try:
            count = count + x.sum()
        finally:
            self.counts.put(count)
        return self.linear(x) * count


class CountsInState(nnx.Module):
    """The healthy twin."""

    def __init__(self) -> None:
        self.linear = nnx.Linear(2, 2, rngs=rngs())
        self.count = nnx.BatchStat(jnp.float32(1))

    def __call__(self, x):
        assign(self.count, self.count[...] + x.sum())
        return self.linear(x) * self.count[...]


@pytest.mark.slow
def test_what_a_trace_leaves_behind_raises_afterwards():
    kind, notes = raised(lambda: nnx_wrap(Counts())(numbers((1, 2))))
    assert kind is jax.errors.UnexpectedTracerError
    assert TRACED in notes
    assert IDENTITY not in notes
    assert raised(lambda: nnx_wrap(CountsInState())(numbers((1, 2)))) == (None, "")


def test_in_an_object_that_outlives_the_body_it_raises_with_that_as_well():
    model = Counts()
    kind, notes = raised(lambda: nnx_wrap(model)(numbers((1, 2))))
    assert kind is jax.errors.UnexpectedTracerError
    assert "if the test passes without its marker" in notes
    assert PASSES not in notes


def test_an_output_comes_back_as_from_a_jit():
    """A Python number as an array: neither a copy nor a trace is at fault."""
    kind, notes = raised(lambda: nnx_wrap(lambda model, x: 3.0)(linear(), numbers((1, 2))).is_integer())
    assert kind is AttributeError
    assert notes.endswith(f"{PASSES}unwrapped, and unchecked")


def test_a_body_with_arguments_of_its_own():
    @hypothesis.settings(database=None, derandomize=True)
    @hypothesis.given(st.integers(1, 3))
    def body(rows):
        nnx_wrap(twice)(linear(), numbers((rows, 2)))

    kind, notes = raised(body, own_given=True)
    assert kind is TypeError
    assert IDENTITY in notes


def test_a_check_outside_of_pytest():
    for checked in (check, assert_invariants):
        with pytest.raises(TypeError) as caught:
            checked(twice, linear(), numbers((1, 2)), **QUICK)
        assert IDENTITY in flat(caught.value.__notes__[-1])


def test_what_the_own_object_donates_is_there_afterwards():
    model = linear()

    def donates(model, x):
        kernel = model.kernel[...]
        assign(model.kernel, jax.jit(lambda kernel: kernel + 1, donate_argnums=0)(kernel))
        return twice(model, x)

    before = np.array(model.kernel[...])
    assert IDENTITY in raised(lambda: nnx_wrap(donates)(model, numbers((1, 2))))[1]
    np.testing.assert_array_equal(np.array(model.kernel[...]), before)
