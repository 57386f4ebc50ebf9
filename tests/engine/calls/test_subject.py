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
from checking import Example, call, full, nnx_wrap, text
from flax import nnx
from healthy import FLAX, node_list
from hypothesis import given
from hypothesis import strategies as st

from pytest_nnxcheck import check
from pytest_nnxcheck.compat import graph
from pytest_nnxcheck.subject.contents import graft
from pytest_nnxcheck.subject.subject import Nodes, argument_names, bind, flatten_output, signature


class Stack(nnx.Module):
    def __init__(self):
        self.layers = node_list(nnx.Linear(2, 2, rngs=nnx.Rngs(seed)) for seed in range(2))
        self.tied = self.layers[0]

    def __call__(self, x, *, scale=1.0):
        return self.layers[1](self.tied(x)) * scale

    def decode(self, tokens, cache=None):
        return tokens


MODULE_LEVEL = Stack()


def forward(model, batch, other=None):
    return model(batch["x"])


def run(subject):
    arrays = subject.program(subject.state, *subject.inputs)
    return subject.output_tree.rebuild(arrays)


def test_a_module_is_its_own_state():
    subject = bind(Stack(), (jnp.ones((1, 2)),), {"scale": 2.0})
    assert subject.names == ("model",)
    assert isinstance(subject.state, Stack)
    assert subject.input_names == ("x",)
    assert subject.static == (("scale", 2.0),)
    assert run(subject).shape == (1, 2)


def test_paths_read_as_the_user_writes_them():
    subject = bind(Stack(), (jnp.ones((1, 2)),), {})
    paths = {subject.path(path) for path, _ in graph.raw_leaves(subject.state)}
    assert {"model.layers[1].kernel", "model.layers[1].bias"} <= paths
    assert len(paths) == 4, "the tied layer counts once"


def test_a_function_with_graph_nodes_anywhere_in_its_arguments():
    first, second = Stack(), nnx.BatchNorm(2, rngs=nnx.Rngs(0))
    subject = bind(forward, (first, {"x": jnp.ones((1, 2)), "mask": None}), {"other": [second, first]})
    assert subject.names == ("model", "other_0")
    assert isinstance(subject.state, Nodes)
    assert subject.input_names == ("batch['x']",)
    assert run(subject).shape == (1, 2)


@pytest.mark.parametrize("other", [nnx.Rngs(0), Mock()])
def test_an_argument_that_has_an_answer_for_any_name_is_no_reference(other):
    """Streams of an `nnx.Rngs` that has a default one, and a mock, say something to ``is_ref`` as well."""

    def scaled(model, x, other):
        return model(x)

    assert call(scaled, Stack(), jnp.ones((1, 2)), other, nesting="jit").outcome.verdict == "held"


@pytest.mark.parametrize(
    "given, names", [(3, ["loss", "q", "args[0]"]), (5, ["loss", "q", "args[0]", "args[1]", "args[2]"])]
)
def test_further_arguments_are_counted_from_the_first_of_them(given, names):
    """Whatever stands behind them in the signature."""

    def step(loss, q, *args, scale=1.0, **options):
        return sum(args) * scale

    assert argument_names(step, (None,) * given) == names
    assert argument_names(max, (1, 2)) == ["argument 0", "argument 1"]


LEAVES = st.one_of(
    st.none(), st.text(max_size=3), st.integers(0, 9), st.booleans(), st.just(np.ones((2, 3), np.float32))
)
TREES = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=2), inner, max_size=3) | st.tuples(inner)
    ),
)


@given(TREES)
def test_outputs_come_back_as_they_were(output):
    arrays, rebuild, _ = flatten_output(output)
    assert all(isinstance(array, jax.Array) for array in arrays)
    again = rebuild(arrays)
    assert jax.tree.structure(again) == jax.tree.structure(output)
    for old, new in zip(jax.tree.leaves(output), jax.tree.leaves(again), strict=True):
        assert np.array_equal(old, new)


def test_a_copy_shares_no_buffer_with_the_original_and_keeps_ties():
    model = Stack()
    twin = bind(lambda model: None, (model,), {}).fresh()
    old, new = graph.raw_leaves(model), graph.raw_leaves(twin)
    assert [path for path, _ in old] == [path for path, _ in new]
    assert all(a.unsafe_buffer_pointer() != b.unsafe_buffer_pointer() for (_, a), (_, b) in zip(old, new, strict=True))
    assert twin.tied is twin.layers[0]


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
    subject = bind(mine.step, (jnp.ones((1, 2)),), {}, wrapped.__owner__)
    assert subject.roots(subject.state)[0][0] == "mine.model"
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


def key_of(bound):
    return signature(bound, *bound.split())


@dataclasses.dataclass
class Config:
    """Compares by value, and so has no hash."""

    width: int


class Configured(nnx.Module):
    def __init__(self, config):
        self.config = config
        self.linear = nnx.Linear(4, config.width, rngs=nnx.Rngs(0))

    def __call__(self, x):
        return self.linear(x)


def test_calls_of_equal_modules_are_known_from_each_other_where_an_attribute_has_no_hash():
    def key(config, width=4):
        return key_of(bind(Configured(config), (jnp.ones((2, width)),), {}))

    assert key(Config(4)) == key(Config(4)) != key(Config(5))
    twin = Configured(Config(4))
    twin.config = Config(5)
    assert key(Config(4)) != key_of(bind(twin, (jnp.ones((2, 4)),), {})), "the same shapes"


class Pool(nnx.Module):
    def __init__(self, axis):
        self.axis = axis

    def __call__(self, x):
        return x.sum(axis=self.axis)


def test_calls_of_modules_whose_hashes_collide_are_not_known_from_each_other():
    """``hash(-1) == hash(-2)``; a profile taken for another call makes a healthy loop fail."""

    def key(axis):
        return key_of(bind(Pool(axis), (jnp.ones((2, 3, 4)),), {}))

    assert hash(key(-1)) == hash(key(-2))
    assert key(-1) == key(-1) != key(-2)

    example = Example()
    for axis in (-1, -2):
        assert call(Pool(axis), jnp.ones((2, 3, 4)), nesting="while_loop", example=example).outcome.verdict == "held"


class Unequal:
    """Has a hash, and cannot be compared."""

    def __hash__(self):
        return 1

    def __eq__(self, other):
        raise TypeError("not to be compared")


def test_what_cannot_be_compared_is_not_known_again():
    def key():
        return key_of(bind(Pool(Unequal()), (jnp.ones(3),), {}))

    assert key() != key()


class Bound:
    def __init__(self, wrap):
        self.module = nnx.Linear(3, 3, rngs=nnx.Rngs(0))
        self.jitted = nnx_wrap(self.apply)

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
