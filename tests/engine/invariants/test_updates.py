"""The invariant `updates`: what a call writes reaches the caller's state, and what it reads comes from there."""

from __future__ import annotations

import inspect
import re

import bugs
import jax
import jax.numpy as jnp
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
    merged,
)
from flax import nnx
from flax.nnx import update
from healthy import FLAX, assign, numbers, rngs

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


@trees
def test_the_line_is_that_of_the_write_and_not_of_what_hands_it_out():
    found = text(call(jax.jit(lambda model, x: 2 * nnx.remat(forward)(model, x)), Normed(), X))
    assert f"written at {line(Normed.__call__, 'self.norm(')}, in a copy" in found


def body(call):
    """A function of a model and an input, for a loop that carries both."""

    def step(carry):
        model, x = carry
        return model, call(model, x)

    return step


def copy_of(graphdef, state):
    """Older flax always copies."""
    copies = {"copy": True} if "copy" in inspect.signature(nnx.merge).parameters else {}
    return nnx.merge(graphdef, state, **copies)


def on_a_copy(transform):
    """``transform(f, x)`` where f calls what `nnx.merge` makes of the state."""

    def calls(model, x):
        graphdef, state = nnx.split(model)

        def f(x):
            return copy_of(graphdef, state)(x)

        return transform(f, x)

    return calls


def loops(model, x):
    graphdef, state = nnx.split(model)
    step = body(lambda state, x: copy_of(graphdef, state)(x))
    return jax.lax.fori_loop(0, 1, lambda _, carry: step(carry), (state, x))[1]


def loops_while(model, x):
    graphdef, state = nnx.split(model)
    step = body(lambda state, x: copy_of(graphdef, state)(x))
    return jax.lax.while_loop(lambda carry: carry[1].sum() > 0, step, (state, x))[1]


def gradient(transform):
    return on_a_copy(lambda f, x: transform(lambda x: f(x).sum())(x))


CURED = {
    "jax.jit": on_a_copy(lambda f, x: jax.jit(f)(x)),
    "jax.checkpoint": on_a_copy(lambda f, x: jax.checkpoint(f)(x)),
    "jax.grad": gradient(jax.grad),
    "jax.value_and_grad": gradient(lambda f: lambda x: jax.value_and_grad(f)(x)[1]),
    "jax.lax.cond": on_a_copy(lambda f, x: jax.lax.cond(x.sum() > 0, f, f, x)),
    "jax.lax.switch": on_a_copy(lambda f, x: jax.lax.switch(x[0, 0].astype(int), [f, f], x)),
    "jax.lax.fori_loop": loops,
    "jax.lax.while_loop": loops_while,
    "jax.lax.scan": on_a_copy(lambda f, x: jax.lax.scan(lambda _, row: (None, f(row)), None, x[None])[1]),
    "jax.lax.map": on_a_copy(lambda f, x: jax.lax.map(f, x[None])),
}
"""By transform a call whose writes under it no one gets."""


@pytest.mark.parametrize("name", CURED)
def test_the_call_that_the_cure_names_cures(name):
    """It is run as the hint has it."""
    found = call(CURED[name], Normed(), X)
    assert broken(found) == ["updates"], text(found)
    (advice,) = re.findall(rf"write (nnx\..*) instead of {re.escape(name)}: ", found.outcome.violations[0].hint)

    def cured(model, x):
        def f(model, x):
            y = model(x)
            return y.sum() if "grad" in name else (model, y) if "nnx.scan" in advice else y

        def cond(carry):
            return carry[1].sum() > 0

        step = body(forward)
        names = {"model": model, "x": x, "xs": x[None], "f": f, "g": f, "pred": x.sum() > 0, "n": 1, "cond": cond}
        loop = step if name == "jax.lax.while_loop" else lambda _, carry: step(carry)
        names |= {"index": x[0, 0].astype(int), "branches": [f, f], "body": loop, "nnx": nnx}
        leaves = jax.tree.leaves(eval(advice, names))
        return x.sum() + sum(leaf.sum() for leaf in leaves if hasattr(leaf, "sum"))

    found = call(cured, Normed(), X)
    assert found.outcome.verdict == "held", text(found)


STACKED = {"jax.vmap": lambda f, x: jax.vmap(f)(x), "jax.lax.map": jax.lax.map}


@pytest.mark.parametrize("name", STACKED)
@pytest.mark.parametrize("hands_back", [False, True])
def test_a_state_that_a_transform_stacks_is_handed_back_row_by_row(name, hands_back):
    advice = "jax.tree.map(lambda leaf: leaf[0], state)"

    def calls(model, x):
        graphdef, state = nnx.split(model)

        def f(row):
            copy = copy_of(graphdef, state)
            return copy(row), nnx.state(copy) if hands_back else None

        y, new = STACKED[name](f, x[None])
        if hands_back:
            nnx.update(model, eval(advice, {"state": new, "jax": jax}))
        return y

    found = call(calls, Normed(), X)
    assert broken(found) == ["updates"] * (not hands_back), text(found)
    if not hands_back:
        (hint,) = [violation.hint for violation in found.outcome.violations]
        assert f"return nnx.state(copy), which {name} stacks, and nnx.update(model, {advice})" in hint
        assert ("write nnx." in hint) == (name == "jax.lax.map")


@pytest.mark.slow
@trees
def test_a_transform_that_has_no_twin_gets_none():
    """Of flax it refuses the write."""

    def maps(model, x, over=jax.vmap):
        return over(forward, in_axes=(None, 0))(model, x[None])

    hint = call(maps, Normed(), X).outcome.violations[0].hint
    assert hint.startswith("return nnx.state(copy), which jax.vmap stacks")
    with pytest.raises(ValueError, match="axis spec None but output was batched"):
        maps(Normed(), X, over=nnx.vmap)


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
    "a result without a name": (lambda model, x: model.mean[...], "violated"),
    "a number of it": (lambda model, x: {"loss": model.mean[...].sum()}, "violated"),
    "what is computed of it": (lambda model, x: {"mean": model.mean[...] * 2}, "violated"),
    "its value before": (lambda model, x: {"mean": x[0]}, "violated"),
    "the array of the copy": (lambda model, x: {"mean": model.mean[...]}, "held"),
    "its elements in another shape and type": (
        lambda model, x: {"mean": model.mean[...].reshape(2, 4).astype(jnp.float16)},
        "held",
    ),
    "a larger array that it is a row of": (lambda model, x: {"all": jnp.stack([x[0], model.mean[...]])}, "held"),
}


@pytest.mark.parametrize("name", RETURNED)
def test_a_copy_is_handed_out_by_what_has_a_name_and_holds_its_last_value(name):
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


class Counts(nnx.Module):
    """Keeps numbers, one in a list."""

    def __init__(self):
        self.number = nnx.Variable(jnp.zeros(()))
        self.others = nnx.List([nnx.Variable(jnp.zeros(()))]) if hasattr(nnx, "List") else []


def in_list(model):
    model.others[0] = nnx.Variable(model.others[0][...] + 1)


def replaces(model):
    model.number = nnx.Variable(model.number[...] + 1)


def replaces_and_writes(model):
    model.number = nnx.Variable(jnp.ones(()))
    assign(model.number, model.number[...] + 1)


def resets(model):
    model.number.set_raw_value(0) if hasattr(model.number, "set_raw_value") else assign(model.number, 0)


WRITES = {
    "item": (lambda model: assign(model.number, model.number[...] + 1), (0, 10)),
    "a Python number": (resets, (0, 10)),
    "copy_from": (lambda model: model.number.copy_from(nnx.Variable(model.number[...] + 1)), (0, 10)),
    "raw value": (lambda model: model.number.set_raw_value(model.number[...] + 1), MODULES_ARE_TREES),
    "imported update": (lambda model: update(model, jax.tree.map(lambda leaf: leaf + 1, nnx.state(model))), (0, 10)),
    "a new Variable": (replaces, (0, 10)),
    "a new Variable that is written": (replaces_and_writes, (0, 10)),
    "a new Variable in a list": (in_list, MODULES_ARE_TREES),
}
"""Ways to write to a Variable, each with the first flax that has it."""


@pytest.mark.parametrize("jitted", [True, False])
@pytest.mark.parametrize("name", WRITES)
def test_a_write_counts_however_it_is_written(name, jitted):
    write, since = WRITES[name]
    if FLAX < since:
        pytest.skip("this flax has no such write")

    def calls(model, x):
        graphdef, state = nnx.split(model)

        def pure(state, x):
            copy = merged(graphdef, state)
            write(copy)
            return {"y": 2 * x}

        return jax.jit(pure)(state, x) if jitted else pure(state, x)

    found = call(calls, Counts(), X)
    assert broken(found) == ["updates"], text(found)
    assert "written at" in text(found)
    healthy = call(nnx.jit(lambda model, x: (write(model), x)[1]), Counts(), X)
    assert healthy.outcome.verdict == "held", text(healthy)


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


@pytest.mark.slow
def test_counts_of_random_numbers_alone_are_a_note():
    for hands_back in (False, True):
        report = check(functional(hands_back=hands_back), Noisy(), X, transforms="jit", **FEW)
        assert report.ok, str(report)
        drawn = ["every call draws the same random numbers: model.dropout" in note for note in report.notes]
        assert drawn == [True] * (not hands_back)
        assert hands_back or "write nnx.jit(f)(model, x) instead of jax.jit: " in report.notes[0]


@pytest.mark.slow
def test_the_note_on_random_numbers_names_the_transform():
    (note,) = check(on_a_copy(lambda f, x: jax.checkpoint(f)(x)), Noisy(), X, transforms="jit", **FEW).notes
    assert "every call draws the same random numbers" in note
    assert "write nnx.remat(f)(model, x) instead of jax.checkpoint: " in note


def test_what_ran_before_changes_no_verdict():
    subject = COPIED["functional"].faulty()
    subject.subject(*subject.args)  # jax has the trace of it then
    assert broken(checked(subject)) == ["updates"]


def test_a_write_of_the_same_value_is_none():
    def updates(model, x):
        graphdef, state = nnx.split(model)
        return jax.jit(lambda state: nnx.update(model := nnx.merge(graphdef, state), nnx.state(model)))(state) or x  # type: ignore[func-returns-value]

    assert call(updates, linear(), X).outcome.verdict == "held"


@pytest.mark.slow
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


def test_what_an_equation_computes_is_no_copy_of_an_argument():
    """An argument of a trace, and `jnp.copy` of one, are; in a derivative, under `vmap` and in a jit too."""
    found = []

    def look(x):
        found.append([graph.is_computed(value) for value in (x, jnp.copy(x), x + 1, jnp.copy(x + 1))])
        return (x**2).sum()

    def program(x):
        jax.grad(look)(x)
        jax.jit(look)(x)
        return look(x), jax.vmap(look)(x[None])

    jax.make_jaxpr(program)(jnp.ones(3))
    assert found[:3] == [[False, False, True, True]] * 3


def test_a_loop_of_a_scan_of_a_remat_hands_its_model_back_unwritten():
    """The cure of google/flax#4819: each transform writes back what it was given, and a part of it has a name of its own in the inner loop."""
    found = call(bugs.autoregressive_decode_in_carry, bugs.report_4819(rngs(), True, True), *bugs.inputs_4819())
    assert found.outcome.verdict == "held", text(found)
