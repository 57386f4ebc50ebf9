"""What parity compares with: the same calls made one by one, once for all nestings of a test; and how far two values may lie apart."""

from __future__ import annotations

import functools
import zlib
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checking import broken, call, text
from counts import Counts
from flax import nnx
from healthy import WIDTH, assign, numbers
from parity_calls import Body, X, made_in, norm, parity, ticks, traced

from pytest_nnxcheck import check, register_transform
from pytest_nnxcheck.invariants.parity import may_be_fusion
from pytest_nnxcheck.values.effects import Difference, compare

# --- how far two values may lie apart

ONE = jnp.ones(3)
ALIKE = {
    "a few roundings of the largest": (ONE, ONE * (1 + 2e-5)),
    "NaN and infinity in the same places": (jnp.array([jnp.nan, jnp.inf]), jnp.array([jnp.nan, jnp.inf])),
    "equal keys": (jax.random.key(0), jax.random.key(0)),
    "roundings of half precision": (ONE.astype(jnp.bfloat16), ONE.astype(jnp.bfloat16) * 1.008),
}
APART = {
    "more than a few roundings": (ONE, ONE * (1 + 4e-5)),
    "NaN in another place": (jnp.array([jnp.nan, 1.0]), jnp.array([1.0, jnp.nan])),
    "infinity of another sign": (jnp.array([jnp.inf]), jnp.array([-jnp.inf])),
    "one integer": (jnp.arange(3), jnp.arange(3).at[1].set(0)),
    "a flag": (jnp.array([True]), jnp.array([False])),
    "another dtype": (ONE, ONE.astype(jnp.bfloat16)),
    "another key": (jax.random.key(0), jax.random.key(1)),
    "a tenth in half precision": (ONE.astype(jnp.bfloat16), ONE.astype(jnp.bfloat16) * 1.1),
}


@pytest.mark.parametrize("name", [*ALIKE, *APART])
def test_floats_may_differ_by_a_few_roundings_of_the_largest_and_the_rest_not_at_all(name):
    want, have = {**ALIKE, **APART}[name]
    found = parity(lambda x: have if traced(x) else want, X, nesting="jit")
    assert broken(found) == (["parity"] if name in APART else []), text(found)


@pytest.mark.parametrize("by, verdict", [(4e-7, "held"), (1e-6, "violated")])
def test_a_leaf_that_the_call_leaves_alone_has_the_roundings_of_its_size_and_no_more(by, verdict):
    def call(model, x):
        if traced(x):
            assign(model.scale, model.scale[...] * (1 + by))
        return x

    assert parity(call, norm(), X, nesting="jit").outcome.verdict == verdict


def apart(want, have, old=None, spread=0.0):
    return compare("x", want, have, old, spread, "")


@pytest.mark.parametrize("dtype", ["float32", "int32", "bool"])
def test_ten_times_what_a_nudge_does_is_allowed(dtype):
    want, have = jnp.array([0, 1, 0], dtype), jnp.array([1, 1, 0], dtype)
    assert apart(want, have)
    assert apart(want, have, spread=0.09)
    assert not apart(want, have, spread=0.11)
    assert apart(np.array([2**60]), np.array([2**60 + 1])), "integers that float64 cannot tell apart"
    assert apart(np.array(["a", "b"]), np.array(["a", "c"]))


def test_a_value_that_did_not_move_where_it_should_is_an_update_that_was_dropped():
    assert apart(ONE + 1e-5, ONE, ONE).label == "dropped", "a small step of an optimizer"
    assert apart(ONE + 1e-5, ONE * 2, ONE).label == "differs"


@pytest.mark.parametrize(
    "change, may",
    [({}, True), ({"rounding": False}, False), ({"label": "dropped"}, False)],
    ids=["floats or integers", "NaN", "a dropped update"],
)
def test_what_the_compiler_alone_may_decide(change, may):
    difference = Difference("y", label="differs", wrong=1, elements=2, rounding=True)
    assert may_be_fusion(replace(difference, **change)) is may


class Noise(nnx.Module):
    """Makes a whole step of what is nothing but rounding, as Adam does of a gradient that is zero in theory."""

    def __init__(self):
        self.bias = nnx.Param(jnp.zeros(WIDTH))

    def __call__(self, x):
        slope = jnp.sin(x * 1e7).sum(0)
        assign(self.bias, self.bias[...] - 0.1 * slope / (jnp.abs(slope) + 1e-12))
        return x


@pytest.mark.slow
@pytest.mark.usefixtures("forgotten")
def test_what_rounding_alone_decides_is_no_alarm(monkeypatch):
    @register_transform("rounds")
    def rounds(f):
        """A layer that computes in another order: all that comes in is one rounding away."""
        return lambda state, *inputs: f(state, *(leaf * (1 + 1.2e-7) for leaf in inputs))

    found = parity(Noise(), numbers((64, WIDTH)), nesting="rounds")
    assert found.outcome.verdict == "held", text(found)
    monkeypatch.setattr("pytest_nnxcheck.values.effects.TIMES", 0)
    assert "model.bias differs" in text(parity(Noise(), numbers((64, WIDTH)), nesting="rounds"))


# --- the same calls, one by one


LOG = []


@pytest.mark.slow
def test_the_reference_leaves_the_users_objects_alone():
    def logs(counts, x):
        LOG.append(1)
        return counts(x)

    counts = Counts(plain=False)
    before = counts.counter[...]
    assert check(logs, counts, X, nesting="scan > while_loop", invariants="parity").ok
    assert LOG == []
    assert counts.counter[...] is before


def counts(model, counts, x):
    counts(x)
    return {"out": model(x), "count": counts.counter[...]}


@functools.partial(nnx.jit, donate_argnums=(0, 1))
def donates(model, counter, x):
    return counts(model, counter, x)


def donates_one(model, counter, x):
    """The statistics of the model stay where they are."""
    return x * model.scale[...], nnx.jit(lambda counter, x: counter(x), donate_argnums=0)(counter, x)


CALLS = {
    "jit": 1,
    "jit > scan": 2,
    "vmap": 1,
    "call_first": 2,
    "scan > vmap": 2,
    "vmap > while_loop": 2,
    "while_loop > scan > vmap": 4,
    "call_first > scan > fori_loop": 5,
    "vmap > call_first": 2,
}
"""The calls that each nesting makes of one state after another."""


@pytest.mark.parametrize(
    "nesting, subject",
    [
        *((nesting, counts) for nesting in CALLS),
        *((nesting, donates) for nesting in ("jit > scan", "call_first", "while_loop > scan > vmap")),
        ("scan > vmap", donates_one),
    ],
)
def test_a_nesting_means_so_many_calls_of_one_trajectory(nesting, subject):
    counter = Counts(plain=False)
    found = parity(subject, norm(), counter, X, nesting=nesting, transforms="jit,scan,vmap,while_loop,fori_loop")
    assert found.outcome.verdict == "held", text(found)
    assert "not asserted" not in text(found)
    assert counter.counter[...] == CALLS[nesting]


def test_a_leaf_that_the_last_of_the_calls_leaves_alone_keeps_what_an_earlier_one_wrote():
    class Once:
        """Writes its statistics in its first call alone, and has a jit that donates in each."""

        def __init__(self):
            self.norm, self.counts, self.calls = norm(), Counts(plain=False), 0

        def step(self, x):
            if self.calls == 0:
                assign(self.norm.mean, self.norm.mean[...] + 1)
            self.calls += 1
            return nnx.jit(lambda counts, x: counts(x), donate_argnums=0)(self.counts, x)

    once = Once()
    found = parity(once.step, X, nesting="call_first")
    assert found.outcome.verdict == "held", text(found)
    assert once.norm.mean[0] == 1


@functools.partial(jax.jit, donate_argnums=1)
def scaled_in_place(scale, x):
    return x * scale


@pytest.mark.parametrize("nesting", ["jit", "scan", "vmap", "call_first", "jit > while_loop"])
def test_an_input_that_the_call_donates_inside_is_there_for_the_next_call(nesting):
    x = X * 1.0
    found = parity(lambda model, x: scaled_in_place(model.scale[...], x), norm(), x, nesting=nesting)
    assert (found.outcome.verdict, x.is_deleted()) == ("held", False), text(found)
    assert "not asserted" not in text(found)


def test_an_array_of_numpy_that_is_written_in_place_is_each_call_s_own():
    held = np.zeros(256, np.uint8)
    start = -held.ctypes.data % 64  # jax takes over what is aligned
    buffer = held[start : start + 128].view(np.float32)

    def adds(model, x):
        buffer[...] += 1
        return buffer

    first, second = (call(adds, norm(), X).output[0] for _ in range(2))
    assert second - first >= 1


def test_where_the_calls_raise_one_by_one_nothing_is_compared_and_a_note_says_so():
    def breaks(counts, x):
        y = counts(x)
        if not traced(counts.counter[...]) and counts.counter[...] > 2:
            raise ValueError("worn out")
        return y

    for nesting, notes in {
        "scan > scan": ("parity not asserted: the same calls raise un-nested, ValueError: worn out",),
        "scan": (),
    }.items():
        outcome = parity(breaks, Counts(plain=False), X, nesting=nesting).outcome
        assert (outcome.verdict, outcome.notes) == ("held", notes)


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


# --- calls that a test makes again: equal ones are made once, others anew


@pytest.mark.slow
def test_the_calls_are_made_once_for_all_nestings_of_a_test():
    body, moved = Body(), norm()
    assign(moved.mean, moved.mean[...] + 1)

    def doubles(model, x):
        ticks(x)
        return model(x) * 2.0

    def ask(nesting, scale=1.0, model=None):
        return made_in(lambda: body(doubles, model or norm(), X * scale, nesting=nesting))

    assert ask("jit > vmap > scan") == 2
    assert ask("jit > scan") == ask("jit") == 0
    assert ask("jit > scan > scan") == 4, "more calls than were made"
    assert ask("jit > scan", scale=2.0) == 2, "the inputs"
    assert ask("jit > scan", model=moved) == 2, "the state"


def tagged(tags, **attributes):
    """A layer with a Variable whose metadata holds what has no hash, as those of published libraries do."""
    model = nnx.Linear(8, 8, rngs=nnx.Rngs(0))
    model.bias = nnx.Param(jnp.zeros(8), tags=tags)
    for name, value in attributes.items():
        setattr(model, name, value)
    return model


def reads_tags(model, x):
    """The call goes by what the tags hold, and by whether one object is in two places."""
    ticks(x)
    tags = model.bias.get_metadata()["tags"]
    held = list(tags.values()) if isinstance(tags, dict) else tags
    text = repr((sorted(map(repr, tags)), [sorted(each) if isinstance(each, set) else each for each in held]))
    return x * (zlib.crc32(text.encode()) % 97) + (len({*map(id, held)}) == len(held))


SHARED = [1]
TAGS = [
    {"a": 1},
    {"a": 2},
    {"a": True},
    {"b": 1},
    {"a": [1]},
    ["a", 1],
    {"a": SHARED, "b": SHARED},
    {"a": [1], "b": [1]},
]


@pytest.mark.slow
def test_calls_of_models_whose_tags_have_no_hash_are_told_apart_by_what_these_hold():
    body = Body()
    for tags in (*TAGS, *TAGS):
        found = body(reads_tags, tagged(tags), X, nesting="jit")
        assert found.outcome.verdict == "held", (tags, text(found))


@pytest.mark.parametrize("one, other", [({"a": 1}, {"a": 1}), ({"a": {0, 8}}, {"a": {8, 0}}), ({"a": [1]}, {"a": [1]})])
def test_equal_tags_make_equal_calls(one, other):
    body = Body()
    assert [made_in(lambda: body(reads_tags, tagged(tags), X, nesting="jit")) for tags in (one, other)] == [1, 0]


def test_a_call_is_another_where_an_earlier_one_changed_what_it_goes_by():
    body, tags = Body(), {"a": [1]}
    for _ in range(3):
        assert body(reads_tags, tagged(tags), X, nesting="jit").outcome.verdict == "held"
        tags["a"].append(2)


def activates(model, x):
    ticks(x)
    return model.activation(x)


def test_a_function_that_each_body_writes_anew_is_told_by_what_it_does():
    body = Body()

    def scaled(by):
        return tagged({}, activation=lambda x: x * by)

    made = [made_in(lambda: body(activates, scaled(by), X, nesting="jit")) for by in (2.0, 2.0, 3.0)]
    assert made == [1, 0, 1]
