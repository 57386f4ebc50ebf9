"""What parity compares: numbers with a tolerance, bits of the rest, and the un-nested reference that it computes itself."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checking import text
from counts import Counter, Counts
from flax import nnx
from healthy import WIDTH, assign, numbers
from parity_calls import X, norm, parity

from pytest_nnxcheck.engine import reference
from pytest_nnxcheck.engine.example import evaluated_calls
from pytest_nnxcheck.engine.reference import AS_IT_IS, Evaluated, Start, calls_of, separate
from pytest_nnxcheck.subject.subject import bind, identity
from pytest_nnxcheck.transforms import layers
from pytest_nnxcheck.values.differences import compare
from pytest_nnxcheck.values.effects import UNCHANGED, Facts, Leaf, changed, read

# --- comparing


def differs(want, have, old=None, spread=0.0):
    return compare("x", want, have, old, spread, "") is not None


def test_floats_may_differ_by_a_few_roundings_of_the_largest_and_the_rest_not_at_all():
    one = jnp.ones(3)
    assert not differs(one, one * (1 + 2e-5))
    assert differs(one, one * (1 + 4e-5))
    assert not differs(one + 1, (one + 1) * (1 + 4e-7), one + 1), "what did not move has its roundings alone"
    assert differs(one + 1, (one + 1) * (1 + 1e-6), one + 1)
    assert not differs(jnp.array([jnp.nan, jnp.inf]), jnp.array([jnp.nan, jnp.inf]))
    assert differs(jnp.array([jnp.nan, 1.0]), jnp.array([1.0, jnp.nan]))
    assert differs(jnp.array([jnp.inf]), jnp.array([-jnp.inf]))
    assert differs(jnp.arange(3), jnp.arange(3).at[1].set(0))
    assert differs(np.array([2**60]), np.array([2**60 + 1])), "integers that float64 cannot tell apart"
    assert differs(jnp.array([True]), jnp.array([False]))
    assert differs(one, one.astype(jnp.bfloat16))
    assert differs(jax.random.key(0), jax.random.key(1))
    assert not differs(jax.random.key(0), jax.random.key(0))
    assert not differs(one.astype(jnp.bfloat16), one.astype(jnp.bfloat16) * 1.008)
    assert differs(one.astype(jnp.bfloat16), one.astype(jnp.bfloat16) * 1.1)
    assert differs(np.array(["a", "b"]), np.array(["a", "c"]))
    assert differs(one + 1e-5, one, one), "a small step of an optimizer, dropped"
    assert compare("x", one + 1e-5, one, one, 0.0, "").label == "dropped"
    assert compare("x", one + 1e-5, one * 2, one, 0.0, "").label == "differs"


@pytest.mark.parametrize("dtype", ["float32", "int32", "bool"])
def test_ten_times_what_a_nudge_does_is_allowed(dtype):
    want, have = jnp.array([0, 1, 0], dtype), jnp.array([1, 1, 0], dtype)
    assert differs(want, have)
    assert differs(want, have, spread=0.09)
    assert not differs(want, have, spread=0.11)
    assert differs(jax.random.key(0), jax.random.key(1), spread=0.0)


class Noise(nnx.Module):
    """Makes a whole step of what is nothing but rounding, as Adam does of a gradient that is zero in theory."""

    def __init__(self):
        self.bias = nnx.Param(jnp.zeros(WIDTH))

    def __call__(self, x):
        slope = jnp.sin(x * 1e7).sum(0)
        assign(self.bias, self.bias[...] - 0.1 * slope / (jnp.abs(slope) + 1e-12))
        return x


def rounds(f, plan):
    """A layer that computes in another order: all that comes in is one rounding away."""
    return lambda state, *inputs: f(state, *(leaf * (1 + 1.2e-7) for leaf in inputs))


def test_what_rounding_alone_decides_is_no_alarm(monkeypatch):
    monkeypatch.setattr(layers, "remat_argument", rounds)
    found = parity(Noise(), numbers((64, WIDTH)), nesting="remat")
    assert found.outcome.verdict == "held", text(found)
    monkeypatch.setattr("pytest_nnxcheck.values.differences.TIMES", 0)
    assert "model.bias differs" in text(parity(Noise(), numbers((64, WIDTH)), nesting="remat"))


# --- the reference


def test_the_reference_leaves_the_users_objects_alone():
    log = []

    class Logs(nnx.Module):
        def __init__(self):
            self.counter = Counter(jnp.zeros((), jnp.int32))

        def __call__(self, x):
            log.append(1)
            assign(self.counter, self.counter[...] + 1)
            return x

    model = Logs()
    before = model.counter[...]
    found = Evaluated().effect(bind(model, (X,), {}), ("scan", "while_loop"))
    assert found.after.leaves["model.counter"].value == 4
    assert log == []
    assert model.counter[...] is before


def trains(model, x):
    assign(model.mean, model.mean[...] + x.mean())
    return {"out": model(x), "mean": model.mean[...]}


@nnx.jit(donate_argnums=0)
def donates(model, x):
    return trains(model, x)


CALLS = {
    (): (0, 1),
    ("scan",): ([0, 1], 2),
    ("vmap",): ([0, 0], 1),
    ("call_first",): ((0, 1), 2),
    ("scan", "vmap"): ([[0, 0], [1, 1]], 2),
    ("vmap", "while_loop"): ([1, 1], 2),
    ("while_loop", "scan", "vmap"): ([[2, 2], [3, 3]], 4),
    ("call_first", "scan", "fori_loop"): ((0, [2, 4]), 5),
    ("vmap", "call_first"): ([(0, 1), (0, 1)], 2),
}


def test_the_calls_of_a_meaning_are_those_of_one_trajectory():
    for meaning, calls in CALLS.items():
        assert calls_of(meaning) == calls, meaning


@pytest.mark.parametrize("start", [AS_IT_IS, Start(nudged=True)])
@pytest.mark.parametrize("call", [trains, donates])
def test_a_trajectory_leaves_what_as_many_calls_by_hand_leave(call, start):
    subject, trajectory = bind(call, (norm(), X), {}), Evaluated()
    state, inputs = start.of(subject)
    program, outputs = subject.for_run().program, []
    for _ in range(4):
        state = separate(state)
        outputs.append(program(state, *inputs))
    got = trajectory.effect(subject, ("while_loop", "scan"), start)
    wanted = jax.tree.map(lambda *leaves: jnp.stack(leaves), outputs[2], outputs[3])
    jax.tree.map(np.testing.assert_array_equal, got.returned, wanted)
    for path, leaf in read(subject, state).leaves.items():
        if got.after.leaves[path].value is not UNCHANGED:
            np.testing.assert_array_equal(got.after.leaves[path].value, leaf.value)
    assert not any(leaf.value.is_deleted() for leaf in trajectory.trajectories[start].before.leaves.values())


@functools.partial(jax.jit, donate_argnums=1)
def scaled_in_place(scale, x):
    return x * scale


def donates_its_input(model, x):
    return scaled_in_place(model.scale[...], x)


@pytest.mark.parametrize("nesting", ["jit", "scan", "vmap", "call_first", "jit > while_loop"])
def test_an_input_that_the_call_donates_inside_is_there_for_the_next_call(nesting):
    x = X * 1.0
    found = parity(donates_its_input, norm(), x, nesting=nesting)
    assert (found.outcome.verdict, x.is_deleted()) == ("held", False), text(found)
    assert "not asserted" not in text(found)


def test_what_a_call_that_donates_leaves_in_place_is_known_to_be_so():
    @functools.partial(nnx.jit, donate_argnums=0)
    def donates(model, x):
        return model(x)

    def call(model, counts, x):
        return model(donates(counts, x))

    subject = bind(call, (norm(), Counts(plain=False), X), {})
    effect = Evaluated().effect(subject, ("scan", "while_loop"))
    assert effect.error is None
    assert effect.after.leaves["model.scale"].value is UNCHANGED
    assert effect.after.leaves["counts.counter"].value == 4


def test_what_an_earlier_call_changed_is_not_unchanged_where_this_one_left_it():
    old, new, copy = (Leaf(jnp.full(1, number), "Param") for number in range(3))
    assert changed(Facts({"w": old}, {}), Facts({"w": old}, {})).leaves["w"].value is UNCHANGED
    assert changed(Facts({"w": copy}, {}), Facts({"w": copy}, {}), Facts({"w": new}, {})).leaves["w"] == new


def test_an_array_of_numpy_that_is_written_in_place_is_each_call_s_own():
    held = np.zeros(256, np.uint8)
    start = -held.ctypes.data % 64  # jax takes over what is aligned
    buffer = held[start : start + 128].view(np.float32)

    def adds(model, x):
        buffer[...] += 1
        return buffer

    returned = Evaluated().effect(bind(adds, (norm(), X), {}), ("scan",)).returned
    assert returned[0][:, 0].tolist() == [1, 2]


def test_a_meaning_that_needs_more_calls_than_succeed_raises_and_others_do_not():
    class Breaks(nnx.Module):
        def __init__(self):
            self.counter = Counter(jnp.zeros((), jnp.int32))

        def __call__(self, x):
            assign(self.counter, self.counter[...] + 1)
            if self.counter[...] > 2:
                raise ValueError("worn out")
            return x

    calls, subject = Evaluated(), bind(Breaks(), (X,), {})
    assert str(calls.effect(subject, ("scan", "scan")).error) == "worn out"
    assert calls.effect(subject, ("scan",)).error is None
    assert calls.effect(subject, ()).error is None


def test_calls_are_made_once_for_all_nestings_of_equal_calls_and_anew_for_others(monkeypatch):
    made = []
    follow = reference.follow

    def counted(subject, start, calls, **kwargs):
        made.append(calls)
        return follow(subject, start, calls, **kwargs)

    monkeypatch.setattr(reference, "follow", counted)
    model, table = norm(), {}

    def ask(function, scale=1.0, meaning=("scan",), number=1):
        made.clear()
        subject = bind(function, (model, X * scale), {})
        evaluated_calls(table, subject, number).effect(subject, meaning)
        return made

    def scaled(by):
        return lambda model, x: model(x) * by

    assert ask(scaled(2.0), meaning=("vmap", "scan")) == [2]
    assert ask(scaled(2.0)) == ask(scaled(2.0), meaning=()) == []
    assert ask(scaled(2.0), meaning=("scan", "scan")) == [4], "more calls than were made"
    assert ask(scaled(3.0)) == [2], "what the code captured"
    assert ask(scaled(2.0), scale=2.0) == [2], "the inputs"
    assert ask(scaled(2.0), number=2) == [2], "the second call of an example"
    assign(model.mean, model.mean[...] + 1)
    assert ask(scaled(2.0)) == [2], "the state"


def tagged(tags, **attributes):
    """A layer with a Variable whose metadata holds what has no hash, as those of published libraries do."""
    model = nnx.Linear(8, 8, rngs=nnx.Rngs(0))
    model.bias = nnx.Param(jnp.zeros(8), tags=tags)
    for name, value in attributes.items():
        setattr(model, name, value)
    return model


def key_of(model):
    return identity(bind(model, (X,), {}))


def test_what_has_no_hash_in_a_graph_is_told_by_what_it_holds():
    key = key_of(tagged({"a": 1}))
    assert key is not None
    assert hash(key) == hash(key_of(tagged({"a": 1})))
    assert key == key_of(tagged({"a": 1}))
    for other in ({"a": 2}, {"a": True}, {"b": 1}, {"a": [1]}, ["a", 1]):
        assert key_of(tagged(other)) != key, other
    assert key_of(tagged({"a": {0, 8}})) == key_of(tagged({"a": {8, 0}}))
    assert key_of(tagged({"a": object()})) != key_of(tagged({"a": object()}))


def test_a_key_stays_what_it_was_when_a_call_changes_what_it_was_made_of():
    tags = {"a": [1]}
    key = key_of(tagged(tags))
    tags["a"].append(2)
    assert key == key_of(tagged({"a": [1]}))
    assert key != key_of(tagged(tags))


def test_one_list_in_two_places_is_told_from_two_that_are_alike():
    one = [1]
    assert key_of(tagged({"a": one, "b": one})) != key_of(tagged({"a": [1], "b": [1]}))


def test_a_function_that_each_body_writes_anew_is_told_by_what_it_does():
    def scaled(by):
        return tagged({}, activation=lambda x: x * by)

    assert key_of(scaled(2.0)) == key_of(scaled(2.0))
    assert key_of(scaled(2.0)) != key_of(scaled(3.0))
    box = {}
    assert key_of(tagged({}, activation=lambda x: box)) is not None, "itself, where that cannot be told"


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_what_the_call_adds_is_not_asserted_under_a_functional_layer_which_hands_out_what_was_there():
    class Sows(nnx.Module):
        def __call__(self, x):
            self.sow(nnx.Intermediate, "seen", x)
            return x

    assert parity(Sows(), X, nesting="jit").outcome.verdict == "held"
    found = parity(Sows(), X, nesting="jit[functional]")
    assert found.outcome.verdict == "held"
    assert "parity of model.seen[0] not asserted: the call adds it, and a functional layer hands out" in text(found)
