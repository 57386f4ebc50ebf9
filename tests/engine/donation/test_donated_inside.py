"""A jit of the call's own that donates: what else holds the array, a target network say, is left with a deleted one."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from checking import broken, call, hint, text
from flax import nnx
from healthy import numbers

from pytest_nnxcheck import check
from pytest_nnxcheck.invariants.donation import Orphaned, SharedBuffer


def linear(seed=0):
    return nnx.Linear(4, 4, rngs=nnx.Rngs(seed))


def with_own_arrays(model):
    graphdef, state = nnx.split(model)
    return nnx.merge(graphdef, jax.tree.map(jnp.copy, state))


def sgd(model, x):
    gradients = nnx.grad(lambda model: (model(x) ** 2).mean())(model)
    nnx.update(model, jax.tree.map(lambda old, by: old - 0.1 * by, nnx.state(model, nnx.Param), gradients))


donating = nnx.jit(sgd, donate_argnums=0)
donating_state = jax.jit(lambda state: jax.tree.map(lambda old: old * 0.9, state), donate_argnums=0)


def reads_target(model, target, x):
    y = target(x)
    donating(model, x)
    return y


def over_states(state, target, x):
    return donating_state(state), jax.tree.map(lambda leaf: leaf.sum() + x.sum(), target)


def hands_target_on(state, target, x):
    return donating_state(state), target


def averages(state, target, x):
    """Both are replaced by what is returned, so that nobody misses the old arrays."""
    average = jax.tree.map(lambda old, new: 0.9 * old + 0.1 * new, target, state)
    return donating_state(state), average


def replaces_target(model, target, x):
    y = target(x)
    donating(model, x)
    nnx.update(target, jax.tree.map(jnp.copy, nnx.state(model)))
    return y


class Agent(nnx.Module):
    def __init__(self, copy):
        self.online = linear()
        self.target = copy(self.online)

    def __call__(self, x):
        y = self.target(x)
        donating(self.online, x)
        return y


class Trainer:
    """No graph node."""

    def __init__(self, copy):
        self.online = linear()
        self.target = copy(self.online)

    def learn(self, x):
        return reads_target(self.online, self.target, x)


def pairs(found):
    (violation,) = found.outcome.violations
    assert violation.hint == hint("shared")
    assert all(isinstance(finding, SharedBuffer) and finding.inside for finding in violation.findings)
    return {frozenset((finding.path, finding.other)) for finding in violation.findings}


def shared(one, two, *names):
    return {frozenset((one + name, two + name)) for name in names or (".bias", ".kernel")}


X = numbers((2, 4))
KEYS = ("['bias']", "['kernel']")


def modules(copy):
    model = linear()
    return model, copy(model), X


def states(copy):
    state = nnx.state(linear())
    return state, jax.tree.map(jnp.copy, state) if copy is with_own_arrays else state, X


FORMS = {
    "two modules": (lambda copy: (reads_target, *modules(copy)), shared("model", "target")),
    "one module": (lambda copy: (Agent(copy), X), shared("model.online", "model.target")),
    "a plain object": (lambda copy: (Trainer(copy).learn, X), shared("self.online", "self.target")),
    "states": (lambda copy: (over_states, *states(copy)), shared("state", "target", *KEYS)),
    "a state that is handed on": (lambda copy: (hands_target_on, *states(copy)), shared("state", "target", *KEYS)),
}


@pytest.mark.parametrize("form", FORMS)
def test_a_target_that_shares_its_arrays_with_what_is_donated_inside_is_named(form):
    subject, expected = FORMS[form]
    found = call(*subject(nnx.clone))
    assert broken(found) == ["donation"], text(found)
    assert pairs(found) == expected
    assert "share a buffer: a jit inside the call donates it, and deletes both" in text(found)
    found = call(*subject(with_own_arrays))
    assert found.outcome.verdict == "held", text(found)


@pytest.mark.parametrize("copy", [nnx.clone, with_own_arrays])
def test_a_target_that_the_code_captured_as_well(copy):
    model = linear()
    target = copy(model)

    def step(model, x):
        return reads_target(model, target, x)

    found = call(step, model, X)
    assert broken(found) == (["donation"] if copy is nnx.clone else []), text(found)
    if copy is nnx.clone:
        where = " (closure of test_a_target_that_the_code_captured_as_well.<locals>.step)"
        assert pairs(found) == {frozenset((f"model.{name}", f"target.{name}{where}")) for name in ("bias", "kernel")}


@pytest.mark.parametrize("subject, args", [(averages, states), (replaces_target, modules)])
def test_arrays_that_nobody_misses_may_be_shared(subject, args):
    found = call(subject, *args(nnx.clone))
    assert found.outcome.verdict == "held", text(found)


@pytest.mark.parametrize("copy", [nnx.clone, with_own_arrays])
def test_what_is_shared_and_not_donated_holds(copy):
    def step(model, target, x):
        y = target(x)
        nnx.jit(sgd)(model, x)
        return y

    found = call(step, *modules(copy))
    assert found.outcome.verdict == "held", text(found)


# --- shared by the call itself


def syncs(model, target, x):
    nnx.update(target, nnx.state(model))
    donating(model, x)
    return x.sum()


def syncs_copies(model, target, x):
    nnx.update(target, jax.tree.map(jnp.copy, nnx.state(model)))
    donating(model, x)
    return x.sum()


def test_a_target_that_is_given_the_arrays_before_the_step_is_named():
    found = call(syncs, linear(), linear(1), X)
    assert broken(found) == ["donation"], text(found)
    (violation,) = found.outcome.violations
    assert set(violation.findings) == {Orphaned(f"target.{name}", other=f"model.{name}") for name in ("bias", "kernel")}
    assert "target.bias got the array of model.bias, which a jit inside the call donates: it is deleted" in text(found)
    assert violation.hint == hint("shared")
    held = call(syncs_copies, linear(), linear(1), X)
    assert held.outcome.verdict == "held", text(held)


def test_a_step_that_uses_the_model_up_holds():
    """Whoever calls it goes on with what it returns."""

    def step(model, x):
        return donating_state(nnx.state(model)), x.sum()

    found = call(step, linear(), X)
    assert found.outcome.verdict == "held", text(found)


# --- what the call itself leaves in one array


class Learner(nnx.Module):
    def __init__(self):
        self.online, self.target = linear(0), linear(1)


def synchronizes(learner, x):
    nnx.update(learner.target, nnx.state(learner.online))
    return learner.target(x)


def copies_over(learner, x):
    nnx.update(learner.target, jax.tree.map(jnp.copy, nnx.state(learner.online)))
    return learner.target(x)


def moves_towards(learner, x):
    towards = jax.tree.map(lambda old, new: 0.9 * old + 0.1 * new, nnx.state(learner.target), nnx.state(learner.online))
    nnx.update(learner.target, towards)
    return learner.target(x)


def notes_on(step, **settings):
    found = check(step, Learner(), numbers((2, 4)), effort="quick", styles="argument", **settings)
    assert found.verdict == "held"
    return [note for note in found.notes if "in one array" in note]


@pytest.mark.slow
def test_what_a_call_leaves_in_one_array_has_a_note():
    (note,) = notes_on(synchronizes)
    first, both = "learner.online.bias, learner.target.bias", "a jit that donates both is refused from then on"
    assert (
        f"called without a jit, synchronizes leaves {first} in one array (pairs: 2): {both}; hand over a copy" in note
    )
    assert notes_on(copies_over) == notes_on(moves_towards) == notes_on(synchronizes, donate="none") == []
