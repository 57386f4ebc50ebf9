"""Calls taken apart and put together again: graph nodes, inputs, names, outputs, fresh copies."""

from __future__ import annotations

import dataclasses
import functools
from unittest.mock import Mock

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from checking import call, full, nnx_wrap, text
from flax import nnx
from healthy import FLAX, node_list
from hypothesis import given, settings
from hypothesis import strategies as st

from pytest_nnxcheck import CheckError, Invariant, check, register_invariant
from pytest_nnxcheck.compat import graph
from pytest_nnxcheck.subject.contents import graft


class Stack(nnx.Module):
    def __init__(self):
        self.layers = node_list(nnx.Linear(2, 2, rngs=nnx.Rngs(seed)) for seed in range(2))
        self.tied = self.layers[0]

    def __call__(self, x, *, scale=1.0):
        return self.layers[1](self.tied(x)) * scale

    def decode(self, tokens, cache=None):
        return tokens


MODULE_LEVEL = Stack()


X = jnp.ones((1, 2))


@pytest.fixture
def look(forgotten):
    """Call a subject, and return the names and values of its state as an invariant of the user's own sees them."""
    seen = []
    register_invariant(Invariant("looks", lambda call: seen.append(call) or ()))

    def looked(subject, *args):
        found = call(subject, *args, invariants="looks")
        assert found.outcome.verdict == "held", text(found)
        return seen[-1].before

    return looked


def test_paths_read_as_the_user_writes_them_and_a_tied_layer_counts_once(look):
    leaves = {f"layers[{index}].{name}" for index in (0, 1) for name in ("kernel", "bias")}
    assert {*look(Stack(), X)} == {f"model.{leaf}" for leaf in leaves}

    def forward(model, batch, other=None):
        return model(batch["x"])

    norm = nnx.BatchNorm(2, rngs=nnx.Rngs(0))
    model = Stack()
    names = {*look(forward, model, {"x": X, "mask": None}, [norm, model])}
    assert names == {f"model.{leaf}" for leaf in leaves} | {
        f"other[0].{name}" for name in ("scale", "bias", "mean", "var")
    }


def test_arguments_that_are_no_state_go_by_their_names_too():
    def forward(model, batch, *further, scale=1.0):
        return model(batch["x"]) * scale + sum(further)

    with pytest.raises(CheckError, match=r"its array arguments are: batch, further$"):
        call(forward, Stack(), {"x": X}, X, X, donate="state,nothing")
    found = call(forward, Stack(), {"x": X}, X, X, nesting="jit", donate="state,batch,further")
    assert [move.path for move in found.outcome.evidence.moves] == ["further[0]", "further[1]"]


@pytest.mark.parametrize("other", [nnx.Rngs(0), Mock()])
def test_an_argument_that_has_an_answer_for_any_name_is_no_reference(other):
    """Streams of an `nnx.Rngs` that has a default one, and a mock, say something to ``is_ref`` as well."""

    def scaled(model, x, other):
        return model(x)

    assert call(scaled, Stack(), X, other, nesting="jit").outcome.verdict == "held"


LEAVES = st.one_of(
    st.none(), st.text(max_size=3), st.integers(0, 9), st.booleans(), st.just(np.ones((2, 3), np.float32))
)
TREES = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=2), inner, max_size=3) | st.tuples(inner)
    ),
)


@settings(max_examples=30, deadline=None)
@given(TREES)
def test_outputs_come_back_as_they_were(output):
    again = call(lambda x: output, X, invariants="tracers").output
    assert jax.tree.structure(again) == jax.tree.structure(output)
    for old, new in zip(jax.tree.leaves(output), jax.tree.leaves(again), strict=True):
        assert np.array_equal(old, new)
        assert isinstance(new, str | jax.Array)


def test_the_call_is_made_on_a_copy_that_shares_no_buffer_and_keeps_ties():
    model, seen = Stack(), []
    own = pointers_of(model)

    def looks(model, x):
        seen.append((model.tied is model.layers[0], pointers_of(model)))
        return x

    assert call(looks, model, X, shortcuts="off").outcome.verdict == "held"
    assert [(tied, pointers & own) for tied, pointers in seen] == [(True, set())]


def pointers_of(model):
    return {layer.kernel[...].unsafe_buffer_pointer() for layer in model.layers}


class Trainer:
    """A plain object with a model; its step keeps what it computes."""

    def __init__(self):
        self.model = Stack()

    def step(self, x):
        self.last = self.model(x)
        return self.last


@pytest.mark.slow
def test_the_object_of_a_method_goes_by_the_users_name():
    mine = Trainer()
    wrapped = nnx_wrap(mine.step)
    assert wrapped.__owner__ == "mine"
    assert "tracers remain in mine.last" in str(check(mine.step, jnp.ones((1, 2)), nesting="jit"))


def test_of_several_names_it_goes_by_that_of_the_function_and_without_one_by_what_it_is():
    local = MODULE_LEVEL
    assert nnx_wrap(local.decode).__owner__ == "local"
    del local
    assert nnx_wrap(MODULE_LEVEL.decode).__owner__ == "MODULE_LEVEL"
    assert nnx_wrap(functools.partial(MODULE_LEVEL.decode, 1)).__owner__ == "MODULE_LEVEL"
    assert nnx_wrap(Stack().decode).__owner__ == ""
    assert nnx_wrap(MODULE_LEVEL).__owner__ == "", "a module that is wrapped itself is the model"
    wrapped = nnx_wrap(MODULE_LEVEL)
    assert nnx_wrap(wrapped.decode).__owner__ == "wrapped"


class Inner(nnx.Module):
    def __init__(self, **attributes):
        for name, value in attributes.items():
            setattr(self, name, value)


class Locks(nnx.Module):
    """As a Keras layer does: it keeps the layers inside in a list that flax takes for a plain value, a list of its own in every copy, and refuses a new one."""

    def __init__(self, inner):
        self.inner = inner

    def __setattr__(self, name, value):
        if name == "_listed":
            raise ValueError("the layer is already built")
        super().__setattr__(name, value)


def test_a_plain_list_of_graph_nodes_is_not_written_back():
    inner, other = Inner(a=1, calls=0), Inner(calls=1, a=1)
    mine, copy = Locks(inner), Locks(other)
    for layer in (mine, copy):
        object.__setattr__(layer, "_listed", [layer.inner])
    graft(mine, copy)
    assert mine._listed == [inner]
    assert inner.calls == 1


def test_the_variables_that_an_optimizer_keeps_in_trees_stay_the_users_own():
    model = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)

    def step(model, optimizer, x):
        gradients = nnx.grad(lambda model: (model(x) ** 2).mean())(model)
        optimizer.update(*((gradients,) if FLAX < (0, 11) else (model, gradients)))

    before = dict(graph.variables(optimizer))
    assert call(step, model, optimizer, jnp.ones((2, 2)), nesting="jit").outcome.verdict == "held"
    after = dict(graph.variables(optimizer))
    assert before.keys() == after.keys()
    assert all(after[path] is variable for path, variable in before.items())
    assert int(optimizer.step[...]) == 1


def test_the_nodes_of_a_set_are_not_taken_for_one_another():
    kept, other = Inner(calls=0), Inner(calls=1)
    mine, copy = Locks(Inner()), Locks(Inner())
    object.__setattr__(mine, "_listed", {kept})
    object.__setattr__(copy, "_listed", {other})
    graft(mine, copy)
    assert (mine._listed, kept.calls) == ({kept}, 0)


# --- what the module of a stranger holds


def test_a_function_whose_closure_has_an_empty_cell_is_called_as_any_other():
    def made():
        def applies(model, x):
            return model(x) if x.ndim else never

        if MODULE_LEVEL is None:
            never = 0
        return applies

    found = call(made(), nnx.Linear(3, 3, rngs=nnx.Rngs(0)), jnp.ones((2, 3)), nesting="jit", invariants="parity")
    assert found.outcome.verdict == "held", text(found)


@dataclasses.dataclass
class Config:
    """Compares by value, and so has no hash."""

    axis: int


class Unequal:
    """Has a hash, and cannot be compared."""

    axis = -1

    def __hash__(self):
        return 1

    def __eq__(self, other):
        raise TypeError("not to be compared")


class Pool(nnx.Module):
    def __init__(self, axis):
        self.axis = axis

    def __call__(self, x):
        return x.sum(axis=getattr(self.axis, "axis", self.axis))


@pytest.mark.parametrize(
    "one, other, nesting",
    [
        (-1, -2, "while_loop"),
        (Config(-1), Config(-2), "while_loop"),
        (Unequal(), Config(-2), "jit[functional]"),
        (Unequal(), Unequal(), "jit[functional]"),
    ],
)
def test_calls_of_modules_that_differ_in_an_attribute_are_not_taken_for_one_another(one, other, nesting, example):
    """``hash(-1) == hash(-2)``; a profile taken for another call makes a healthy loop fail."""
    for axis in (one, other, one):
        found = call(Pool(axis), jnp.ones((2, 3, 4)), nesting=nesting, example=example)
        assert found.outcome.verdict == "held", text(found)


class Bound:
    def __init__(self, wrap):
        self.module = nnx.Linear(3, 3, rngs=nnx.Rngs(0))
        self.jitted = wrap(self.apply)

    def apply(self, x):
        return self.module(x)

    def process(self, x):
        return self.jitted(x)


class Static:
    def __init__(self):
        self.module = nnx.Linear(3, 3, rngs=nnx.Rngs(0))

    @functools.partial(jax.jit, static_argnums=0)
    def process(self, x):
        return self.module(x)


@pytest.mark.slow
@pytest.mark.parametrize("made", [lambda: Bound(jax.jit), lambda: Bound(nnx.jit), Static])
@pytest.mark.parametrize("nesting", ["un-nested", *full("jit", "vmap"), "jit > scan", "eval_shape"])
def test_an_object_whose_own_jit_captured_its_module_holds_or_is_left_out_with_the_reason(made, nesting, example):
    owner = made()
    found = call(owner.process, jnp.ones(3), nesting=nesting, example=example)
    assert found.outcome.verdict == ("rejected" if nesting == "eval_shape" else "held"), text(found)
    if nesting == "eval_shape":
        assert "hand the module to the jitted function as an argument" in found.outcome.reason
    assert owner.process(jnp.ones(3)).shape == (3,), "the user's own object works on"


class Scaled(nnx.Module):
    def __init__(self):
        self.scale = nnx.Variable(2.0)

    def __call__(self, x):
        return x * self.scale.value


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("nesting", ["scan", "while_loop", "jit > scan > while_loop"])
def test_a_python_number_in_a_variable_is_carried(nesting):
    found = call(Scaled(), jnp.ones(3), nesting=nesting)
    assert (found.outcome.verdict, found.outcome.reason) == ("held", "")
