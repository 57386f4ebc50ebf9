"""Snapshots of a state that a step donates and writes: a note. Copies, and what the step does not write, are quiet."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checking import FEW
from flax import nnx

from pytest_nnxcheck import check

KEPT = {}
FORM = {**FEW, "transforms": "jit"}
pytestmark = pytest.mark.filterwarnings("ignore:'.value'")


def linear():
    return nnx.Linear(4, 4, rngs=nnx.Rngs(0))


def step(model):
    model.kernel.value = model.kernel.value * 0.9


def forward(model, x):
    return model(x)


def step_beside(model):
    KEPT.get("kernel")
    step(model)


def notes(subject, *args, **settings):
    report = check(subject, *args, **{**FORM, **settings})
    assert report.ok
    return [note for note in report.notes if "donates and writes" in note or "no snapshot" in note]


def pure(model):
    return jax.tree.map(lambda leaf: leaf, {"kernel": model.kernel.value, "bias": model.bias.value})


@pytest.mark.parametrize(
    "take", [pure, lambda model: model.kernel.value, nnx.clone, lambda model: [(model.kernel.value,)]]
)
def test_the_body_holds_arrays_that_the_step_donates(take):
    model = linear()
    snapshot = take(model)
    (note,) = notes(step, model)
    assert note.startswith("snapshot holds 1 array of the state")
    assert "model.kernel" in note
    del snapshot


def test_a_state_that_shares_the_variables_is_no_snapshot():
    model = linear()
    state = nnx.state(model)
    (note,) = notes(step, model)
    assert note.startswith(("state is no snapshot", "state holds 1 array"))
    del state


def test_an_object_that_the_call_reaches_holds_them():
    model = linear()
    KEPT["kernel"] = model.kernel.value
    try:
        (note,) = notes(step_beside, model)
    finally:
        KEPT.clear()
    assert note.startswith("KEPT holds 1 array")


def scalar(model):
    return float(model.kernel.value.sum())


QUIET = {
    "copies": lambda model: jax.tree.map(jnp.copy, pure(model)),
    "copies of NumPy": lambda model: np.array(model.kernel.value),
    "a part of the model": lambda model: [model, model.kernel],
    "a leaf that stays": lambda model: model.bias.value,
    "a number": scalar,
    "a method": lambda model: model.__call__,
    "shapes": lambda model: jax.eval_shape(lambda: pure(model)),
    "new values": lambda model: jax.tree.map(lambda leaf: leaf * 0.9, pure(model)),
}


@pytest.mark.parametrize("name", QUIET)
def test_what_is_no_snapshot_or_a_copy(name):
    model = linear()
    kept = QUIET[name](model)
    assert notes(step, model) == []
    del kept


def test_a_call_that_writes_nothing_or_donates_nothing():
    model = linear()
    kept = pure(model)
    assert notes(forward, model, jnp.ones((2, 4))) == []
    assert notes(step, model, donate="none") == []
    assert notes(step, model, transforms="scan") == []
    del kept


class Average(nnx.Module):
    """Keeps an average of the parameters, from a state that it gets."""

    def __init__(self, state):
        self.state = getattr(nnx, "data", lambda value: value)(state)


class AverageInVariable(nnx.Module):
    """The same, as one tree in a Variable."""

    def __init__(self, state):
        self.state = nnx.Variable(nnx.to_pure_dict(state) if hasattr(nnx, "to_pure_dict") else state.to_pure_dict())


def step_and_read(model, average):
    step(model)
    held = average.state.value if isinstance(average.state, nnx.Variable) else average.state
    return sum(leaf.sum() for leaf in jax.tree.leaves(held))


NO_COPIES = {Average: "average.state is no snapshot", AverageInVariable: "average holds 1 array of the state"}


takes_states = pytest.mark.skipif(
    not hasattr(nnx, "data"), reason="before flax 0.12 a module takes no state as an attribute"
)


@pytest.mark.parametrize("keep", [pytest.param(Average, marks=takes_states), AverageInVariable])
def test_a_module_keeps_the_state_of_the_model_as_its_average(keep):
    model = linear()
    (note,) = notes(step_and_read, model, keep(nnx.state(model)))
    assert note.startswith(NO_COPIES[keep])
    assert "model.kernel" in note
    assert notes(step_and_read, model, keep(jax.tree.map(jnp.copy, nnx.state(model)))) == []


@takes_states
def test_a_module_may_keep_its_parameters_in_a_state():
    def step(model):
        kernel = model.state["kernel"]
        kernel.value = kernel.value * 0.9

    assert notes(step, Average(nnx.state(linear()))) == []
