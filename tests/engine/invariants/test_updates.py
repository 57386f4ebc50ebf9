"""The invariant `updates`: what a call writes reaches the caller's state, and what it reads comes from there."""

from __future__ import annotations

import jax
import pytest
from checking import FEW, broken, call, flat, line, text
from copied import (
    COPIED,
    MODULES_ARE_TREES,
    ON_PURPOSE,
    Gated,
    Noisy,
    Normed,
    forward,
    functional,
    linear,
    rematerializes,
)
from flax import nnx
from healthy import FLAX, assign, numbers

from pytest_nnxcheck import check
from pytest_nnxcheck.compat import graph

X = numbers((3, 8))
trees = pytest.mark.skipif(FLAX < MODULES_ARE_TREES, reason="before flax 0.12 no transform of jax takes a module")


def checked(case):
    return call(case.subject, *case.args)


@pytest.mark.parametrize("name", COPIED)
def test_a_lost_write_or_a_stale_read_is_named_and_its_twin_passes(name):
    twins = COPIED[name]
    if FLAX >= twins.since:
        found = checked(twins.faulty())
        assert broken(found) == ["updates"]
        assert twins.says in text(found)
    assert checked(twins.healthy()).outcome.verdict == "held"


@pytest.mark.parametrize("name", ON_PURPOSE)
def test_copies_that_are_made_on_purpose_pass(name):
    make, since = ON_PURPOSE[name]
    if FLAX < since:
        pytest.skip("this flax refuses the call")
    found = checked(make())
    assert found.outcome.verdict == "held", text(found)


@pytest.mark.parametrize("nesting", ["jit", "jit > scan", "eval_shape"])
def test_a_nesting_which_is_made_of_copies_is_not_asked(nesting):
    found = call(functional(hands_back=False), Normed(), X, nesting=nesting)
    assert "updates" not in broken(found)


def test_the_line_the_transform_and_the_cure_are_named():
    subject = functional(hands_back=False)
    found = text(call(subject, Normed(), X))
    writes, calls = line(Normed.__call__, "self.norm("), line(subject, "pure(state, x)\n")
    assert f"written at {writes}, in a copy that jax.jit at {calls} makes" in found
    assert "return nnx.state(copy), and nnx.update(model, state) with it" in found
    assert "a copy that is meant to be dropped is made by nnx.clone(model)" in found


def learns(model, x):
    gradients = jax.grad(lambda model: forward(model, x).sum())(model)
    return sum(leaf.sum() for leaf in jax.tree.leaves(gradients))


@trees
@pytest.mark.parametrize(
    "subject, cure",
    [
        (jax.jit(forward), "nnx.jit(f)(model, x) instead of jax.jit(f)(model, x)"),
        (rematerializes(jax.checkpoint), "nnx.remat instead of jax.checkpoint"),
        (lambda model, x: jax.lax.cond(True, forward, forward, model, x), "nnx.cond instead of jax.lax.cond"),
        (learns, "nnx.grad instead of jax.grad"),
    ],
    ids=["jit", "checkpoint", "cond", "grad"],
)
def test_the_cure_of_a_transform_of_jax_is_that_of_flax(subject, cure):
    found = call(subject, Normed(), X)
    assert found.outcome.violations[0].hint.startswith(f"write {cure}, which hands back what f writes; or return ")


@pytest.mark.parametrize("returned", [True, False])
def test_a_state_that_is_returned_may_have_new_values_that_are_made_of_others(returned):
    def steps(model, x):
        graphdef, state = nnx.split(model)

        def step(state, x):
            copy = nnx.merge(graphdef, state)
            y = x + copy.mean[...]
            assign(copy.mean, x.mean(0))
            return y, nnx.state(copy) if returned else None

        return jax.jit(step)(state, x)

    assert broken(call(steps, Follows(), X)) == ["updates"] * (not returned)


def test_what_a_line_writes_shares_a_row_before_random_counts_and_stale_reads():
    model = nnx.Sequential(Gated(captures=True), Normed(), Noisy())
    found = call(functional(hands_back=False), model, X)
    assert broken(found) == ["updates"]
    (violation,) = found.outcome.violations
    statistics = "model.layers[1].norm.mean, model.layers[1].norm.var"
    assert violation.summary == f"{statistics}, ... keep their values: the call writes to copies of them"
    rows = [f"{label} {row}" for label, row in violation.details]
    gate = [f"stale model.layers[0].gate.{name}   read at" for name in ("kernel", "bias")]
    told = [f"lost {statistics}   written at", "lost model.layers[2].dropout.", *gate]
    assert [row.startswith(words) for row, words in zip(rows, told, strict=True)] == [True] * 4


class Follows(nnx.Module):
    """Keeps a running mean, in a Variable of this type."""

    def __init__(self, kind=nnx.BatchStat):
        self.mean = kind(X[0])

    def __call__(self, x):
        assign(self.mean, 0.9 * self.mean[...] + 0.1 * x.mean(0))


RETURNED = {
    "a result without a name": (lambda model, x: model.mean[...] * 1, "violated"),
    "a number of it": (lambda model, x: {"loss": model.mean[...].sum()}, "violated"),
    "another array": (lambda model, x: {"y": x[0]}, "violated"),
    "the array of the copy": (lambda model, x: {"mean": model.mean[...]}, "held"),
}


@pytest.mark.parametrize("name", RETURNED)
def test_a_copy_is_handed_out_by_what_is_named_has_its_type_and_is_made_of_it(name):
    what, verdict = RETURNED[name]

    def steps(model, x):
        graphdef, state = nnx.split(model)

        def step(state, x):
            copy = nnx.merge(graphdef, state)
            copy(x)
            return what(copy, x)

        return jax.jit(step)(state, x)

    found = call(steps, Follows(), X)
    assert found.outcome.verdict == verdict, text(found)
    if verdict == "violated":
        assert "model.mean keeps its value: the call writes to a copy of it" in text(found)


def averages(model, x):
    """Make a Variable of another type with the metadata of a parameter."""
    average = nnx.Variable(model.kernel[...], **model.kernel.get_metadata())
    assign(average, 0.9 * average[...])
    return x @ average[...]


@pytest.mark.skipif(FLAX < (0, 11), reason="older flax has no Variable.get_metadata() of all")
def test_a_variable_of_another_type_is_no_copy():
    assert call(averages, linear(), X).outcome.verdict == "held"


def test_what_a_call_sows_need_not_come_back():
    assert call(functional(hands_back=False), Follows(nnx.Intermediate), X).outcome.verdict == "held"


def test_counts_of_random_numbers_alone_are_a_note():
    for hands_back in (False, True):
        report = check(functional(hands_back=hands_back), Noisy(), X, transforms="jit", **FEW)
        assert report.ok, str(report)
        drawn = ["every call draws the same random numbers: model.dropout" in note for note in report.notes]
        assert drawn == [True] * (not hands_back)


def test_what_ran_before_changes_no_verdict():
    subject = COPIED["functional"].faulty()
    subject.subject(*subject.args)  # jax has the trace of it then
    assert broken(checked(subject)) == ["updates"]


def test_a_write_of_the_same_value_is_none():
    def updates(model, x):
        graphdef, state = nnx.split(model)
        return jax.jit(lambda state: nnx.update(model := nnx.merge(graphdef, state), nnx.state(model)))(state) or x  # type: ignore[func-returns-value]

    assert call(updates, linear(), X).outcome.verdict == "held"


def test_states_of_the_module_and_of_another_may_be_mapped_over_together():
    first = nnx.state(linear())

    def distance(model, other, x):
        pairs = jax.tree.map(lambda one, two: ((one - two) ** 2).sum(), nnx.state(model), other)
        return sum(jax.tree.leaves(pairs)) + x

    report = check(distance, linear(), first, X, transforms="jit", **FEW)
    assert (report.ok, report.notes) == (True, ())
    report = check(lambda model, x: distance(model, first, x), linear(), X, transforms="jit", **FEW)
    assert report.ok
    (note,) = report.notes
    assert "updates asserted in part: writes to copies are seen by a mark" in note
    assert "this call raises ValueError" in note


def test_the_error_of_states_that_do_not_fit_is_as_without_the_plugin():
    other = linear()
    for _, variable in graph.variables(other):
        graph.set_metadata(variable, "of_the_user", 1)

    def distance(model, x):
        return jax.tree.map(lambda one, two: one - two, nnx.state(model), nnx.state(other)) and x

    with pytest.raises(ValueError, match="of_the_user") as alone:
        distance(linear(), X)
    assert str(call(distance, linear(), X, nesting="jit").error) == str(alone.value)


KEPT = []


def keeps_then_raises(model, x):
    """Raises under a trace, and says how much it has kept."""
    KEPT.append(model(x))
    if isinstance(x, jax.core.Tracer):
        raise TypeError(f"kept {len(KEPT)}")
    return x


def test_a_call_that_keeps_a_tracer_and_raises_is_said_to_raise_what_it_raises_first():
    report = check(keeps_then_raises, linear(), X, nesting="jit")
    assert "tracers remain in KEPT[0]" in flat(str(report))
    assert "raises TypeError: kept 1" in flat(str(report))


def test_a_stale_read_of_an_array_names_what_holds_it_and_the_line():
    found = text(checked(COPIED["closure"].faulty()))
    assert "by way of model.apply (closure of Gated.__init__.<locals>.<lambda>: gate" in found
    assert "read at" in found
    assert "copied.py" in found


def test_an_array_that_a_clone_shares_is_no_stale_read():
    model = linear()
    target = nnx.clone(model)  # shares its arrays, from flax 0.11 on
    report = check(lambda model, x: model(x) - target(x), model, X, transforms="jit", invariants="updates", **FEW)
    assert report.ok, str(report)
