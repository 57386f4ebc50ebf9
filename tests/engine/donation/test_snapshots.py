"""Snapshots of a state that a step donates and writes: a note. Copies, and what the step does not write, are quiet."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checking import FEW
from flax import nnx

from pytest_nnxcheck import check
from pytest_nnxcheck.invariants.snapshots import variable_of

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
    assert snapshot is not None


@pytest.mark.parametrize("take", [np.asarray, lambda kernel: {"best": np.asarray(kernel)[1:]}, np.array, np.sum])
def test_a_view_of_numpy_keeps_the_step_from_donating(take):
    model = linear()
    model.kernel.value = jnp.zeros((4, 4)) + 1  # in memory of jax' own
    snapshot = take(model.kernel.value)
    report = check(step, model, **FORM)
    viewed = [note for note in report.notes if note.startswith("snapshot views the buffers of model.kernel")]
    assert report.ok
    assert len(viewed) == (take not in (np.array, np.sum))
    assert snapshot is not None


def test_a_state_that_shares_the_variables_is_no_snapshot():
    model = linear()
    state = nnx.state(model)
    (note,) = notes(step, model)
    assert note.startswith(("state is no snapshot", "state holds 1 array"))
    assert state is not None


def once(model):
    snapshot = pure(model)
    found = notes(step, model)
    del snapshot
    return found


def in_each_turn(model):
    found, snapshot = [], pure(model)
    for _ in range(1):
        found += [str(snapshot)[:0], *notes(step, model)]
    return found[1:]


def of_a_loop(model):
    for leaf in pure(model).values():
        assert leaf.dtype == jnp.float32
    return notes(step, model)


def counts(model):
    state = nnx.state(model)
    size = sum(leaf.size for leaf in jax.tree.leaves(state))
    found = notes(step, model)
    assert size == 20
    return found


def an_argument(model, snapshot=None):
    return notes(step, model) if snapshot else an_argument(model, pure(model))


def captured(model):
    snapshot = pure(model)

    def reads(found):
        return found if snapshot else []

    return reads(notes(step, model))


def body_of_fixture(model):
    snapshot = pure(model)

    def body():
        found = notes(step, model)
        return found if snapshot else []

    return body


def of_a_function_that_is_over(model):
    return body_of_fixture(model)()


BODIES = {
    once: 0,
    of_a_loop: 0,
    counts: 0,
    in_each_turn: 1,
    an_argument: 1,
    captured: 1,
    of_a_function_that_is_over: 1,
}


@pytest.mark.parametrize("body", BODIES, ids=lambda body: body.__name__)
def test_what_the_body_never_reads_again_is_no_snapshot(body):
    assert len(body(linear())) == BODIES[body]


def distills(teacher):
    def step_of_student(model, x):
        y = teacher(x)
        model.kernel.value = model.kernel.value * 0.9 + y.mean()

    return step_of_student


@pytest.mark.parametrize("copied", [False, True])
def test_a_function_that_captured_one_is_named_whole(copied):
    model, teacher = linear(), linear()
    teacher.kernel = nnx.Param(jnp.copy(model.kernel.value) if copied else model.kernel.value)
    found = notes(distills(teacher), model, jnp.ones((2, 4)))
    whole = "subject (closure of distills.<locals>.step_of_student: teacher) holds 1 array of the state"
    assert [note.startswith(whole) for note in found] == [True] * (not copied)


PATHS = {
    "model.kernel": "model",
    "KEPT['a (b'].kernel": "KEPT",
    "held": "held",
    "teacher.kernel (closure of make.<locals>.step)": "teacher (closure of make.<locals>.step)",
    "self.f (closure of make.<locals>.step: teacher['a'].kernel)": "self.f (closure of make.<locals>.step: teacher)",
}


@pytest.mark.parametrize("path", PATHS)
def test_a_holder_is_the_variable_and_where_it_is(path):
    assert variable_of(path) == PATHS[path]


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
    assert kept is not None


def test_a_call_that_writes_nothing_or_donates_nothing():
    model = linear()
    kept = pure(model)
    assert notes(forward, model, jnp.ones((2, 4))) == []
    assert notes(step, model, donate="none") == []
    assert notes(step, model, transforms="scan") == []
    assert kept


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
