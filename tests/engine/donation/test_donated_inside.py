"""A jit of the call's own that donates: what else holds the array, a target network say, is left with a deleted one."""

from __future__ import annotations

import functools
import re

import jax
import jax.numpy as jnp
import pytest
from checking import FEW, broken, call, full, hint, some, text
from flax import nnx
from healthy import numbers

from pytest_nnxcheck import check
from pytest_nnxcheck.invariants.donation import Orphaned, SharedBuffer


def linear(seed=0):
    return nnx.Linear(4, 4, rngs=nnx.Rngs(seed))


def with_own_arrays(model):
    graphdef, state = nnx.split(model)
    return nnx.merge(graphdef, jax.tree.map(jnp.copy, state))


def shared_clone(model):
    """A clone; before flax 0.11 it has arrays of its own."""
    clone = nnx.clone(model)
    nnx.update(clone, nnx.state(model))
    return clone


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
    assert "share all 2 buffers: a jit inside the call donates them, and deletes both" in text(found)
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


# --- one jit that takes both


def learns(q, q_target, x):
    gradients = nnx.grad(lambda q: ((q(x) - q_target(x)) ** 2).mean())(q)
    nnx.update(q, jax.tree.map(lambda old, by: old - 0.1 * by, nnx.state(q, nnx.Param), gradients))
    return x.sum()


def moves(q, q_target, x):
    mean = jax.tree.map(lambda old, new: 0.9 * old + 0.1 * new, nnx.state(q_target), nnx.state(q))
    nnx.update(q_target, mean)
    return x.sum()


@functools.partial(nnx.jit, donate_argnames=("q",))
def decorated(q, q_target, x):
    return learns(q, q_target, x)


@functools.partial(jax.jit, donate_argnames=("q",))
def of_states(q, q_target, x):
    return jax.tree.map(lambda new, old: new - 0.1 * old * x.sum(), q, q_target)


class Learns:
    def __init__(self, copy):
        self.q = linear()
        self.q_target = copy(self.q)
        self.step = nnx.jit(learns, donate_argnums=0)

    def learn(self, x):
        return self.step(self.q, self.q_target, x)


def in_a_loop(q, q_target, xs):
    return [decorated(q, q_target, x) for x in xs]


def stateful(q, q_target, x):
    nnx.update(q, of_states(nnx.state(q), nnx.state(q_target), x))


TAKES_BOTH = {
    "the first": lambda copy: (nnx.jit(learns, donate_argnums=0), *modules(copy)),
    "the target": lambda copy: (nnx.jit(moves, donate_argnums=1), *modules(copy)),
    "both": lambda copy: (nnx.jit(learns, donate_argnums=(0, 1)), *modules(copy)),
    "by name, decorated": lambda copy: (decorated, *modules(copy)),
    "in a function": lambda copy: (lambda q, q_target, x: decorated(q, q_target, 2 * x), *modules(copy)),
    "in a loop": lambda copy: (in_a_loop, *modules(copy)),
    "states, by number": lambda copy: (
        jax.jit(lambda q, t, x: of_states(q, t, 2 * x), donate_argnums=0),
        *states(copy),
    ),
    "states, by name": lambda copy: (of_states, *states(copy)),
    "states of modules": lambda copy: (stateful, *modules(copy)),
    "of a plain object": lambda copy: (Learns(copy).learn, X),
}


@pytest.mark.parametrize("form", TAKES_BOTH)
def test_one_jit_that_takes_both_and_donates_one_is_found_in_the_plain_call(form):
    found = call(*TAKES_BOTH[form](shared_clone))
    assert broken(found) == ["donation"], text(found)
    assert re.search(r"\w+ and [\w.]+ share all 2 buffers: a jit inside the call donates them, and ", text(found))
    found = call(*TAKES_BOTH[form](with_own_arrays))
    assert found.outcome.verdict == "held", text(found)


def test_the_refusal_of_jax_is_in_the_message():
    found = text(call(decorated, *modules(shared_clone)))
    assert "q and q_target share all 2 buffers: a jit inside the call donates them, and the call raises" in found
    assert "INVALID_ARGUMENT" in found


class OfTwo(nnx.Module):
    def __init__(self, copy):
        self.q = linear()
        self.q_target = copy(self.q)

    def __call__(self, x):
        return learns(self.q, self.q_target, x)


class Normed(nnx.Module):
    """Its statistics move, and its parameters stay those of the clone."""

    def __init__(self):
        self.linear, self.norm = linear(), nnx.BatchNorm(4, rngs=nnx.Rngs(0))

    def __call__(self, x):
        return self.norm(self.linear(x))


def after_a_call(copy):
    model = Normed()
    target = copy(model)
    model(X)
    return model, target


NOTED = {
    "in one module": (lambda copy: (OfTwo(copy), X), "model.q and model.q_target share all 2 buffers"),
    "in a plain object": (lambda copy: (Trainer2(copy).learn, X), "self.q and self.q_target share all 2 buffers"),
    "after a call": (
        lambda copy: (lambda q, old, x: q(x) - old(x), *after_a_call(copy), X),
        "old and q share 4 of 6 buffers",
    ),
    "a jit that donates none": (
        lambda copy: (nnx.jit(learns), *modules(copy)),
        "q and q_target share all 2 buffers",
    ),
    "a jit that donates something else": (
        lambda copy: (
            lambda q, old, other, x: (donating(other, x), learns(q, old, x)),
            *modules(copy)[:2],
            linear(2),
            X,
        ),
        "old and q share all 2 buffers",
    ),
}


class Trainer2:
    def __init__(self, copy):
        self.q = linear()
        self.q_target = copy(self.q)

    def learn(self, x):
        return learns(self.q, self.q_target, x)


@pytest.mark.parametrize("form", some(NOTED, ("in one module", "a jit that donates none"), pytest.mark.slow))
def test_where_only_the_plugin_donates_there_is_a_note_in_one_line(form):
    subject, note = NOTED[form]
    for copy, notes in ((shared_clone, [note]), (with_own_arrays, [])):
        report = check(*subject(copy), transforms="jit", **FEW)
        assert report.ok, str(report)
        assert [each.partition(", as nnx.clone")[0] for each in report.notes if "share" in each] == notes


@pytest.mark.parametrize("form", ["the first", *full("by name, decorated", "in a function")])
def test_a_nesting_breaks_where_the_plain_call_does(form):
    assert broken(call(*TAKES_BOTH[form](shared_clone), nesting="jit")) == ["donation"]
    assert call(replaces_target, *modules(shared_clone), nesting="jit").outcome.verdict == "held"


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
