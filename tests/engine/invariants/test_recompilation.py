"""The invariant `recompilation`: a second call with the same types is not traced again, and what is in the way is named."""

from __future__ import annotations

import jax
import pytest
from checking import Example, broken, call, flat, text
from counts import Counts
from flax import nnx
from retraced import INPUT, MODELS, STRONG, Halves, Starts, Weighs

from pytest_nnxcheck import check

NESTINGS = ["jit", "jit > remat", "jit > scan[functional]", "jit[functional] > vmap"]


def traces_of_the_second_call(model) -> int:
    """How often the user's own jit traces the model again."""
    traces = []

    @nnx.jit
    def step(model, x):
        traces.append(None)
        return model(x)

    step(model, INPUT)
    first = len(traces)
    step(model, INPUT)
    return len(traces) - first


@pytest.mark.parametrize("name", MODELS)
def test_what_is_told_is_what_a_jit_of_the_users_does(name):
    make, told = MODELS[name]
    assert traces_of_the_second_call(make()) == int(bool(told))
    found = call(make(), INPUT, nesting="jit", invariants="recompilation")
    assert broken(found) == (["recompilation"] if told else [])
    assert told in text(found)


@pytest.mark.parametrize("nesting", NESTINGS)
@pytest.mark.parametrize("name", ["weak", "strong"])
def test_it_is_the_same_under_every_jit_that_is_handed_the_state(name, nesting):
    make, told = MODELS[name]
    found = call(make(), INPUT, nesting=nesting, invariants="recompilation")
    assert broken(found) == (["recompilation"] if told else []), text(found)


def test_a_functional_jit_drops_the_counter_so_that_nothing_is_traced_again():
    found = call(Counts(plain=True), INPUT, nesting="jit[functional]", invariants="recompilation")
    assert found.outcome.verdict == "held", text(found)


@pytest.mark.parametrize("name, old", [("integer", "int32"), ("nothing", "NoneType")])
def test_what_holds_no_fraction_is_made_a_float_where_it_is_made_first(name, old):
    make, _ = MODELS[name]
    told = f"make it float32 where it is made first: {old} does not hold what is stored there"
    assert told in text(call(make(), INPUT, nesting="jit", invariants="recompilation"))
    assert "cast" not in told
    assert call(Halves(STRONG), INPUT, nesting="jit", invariants="recompilation").outcome.verdict == "held"


def test_a_call_that_adds_state_has_no_second_one_to_be_held_against():
    assert traces_of_the_second_call(Starts()) == 1
    found = call(Starts(), INPUT, nesting="jit", invariants="recompilation")
    assert found.outcome.verdict == "held", text(found)
    (note,) = found.outcome.notes
    assert note.startswith("recompilation not asserted: the call adds state")


def test_the_message_names_what_changed_and_shrinks_to_the_jit():
    report = check(Counts(plain=True), INPUT, invariants="recompilation", styles="argument", max_examples=0)
    lines = [" ".join(line.split()) for line in str(report).splitlines()]
    assert lines[0] == "nnx invariant broken: recompilation"
    assert "recompilation a second call is traced again: model.calls has changed" in flat(str(report))
    assert "changed model.calls 0 before the call, 1 after it" in lines
    assert "none: no program can look for recompilation without the plugin" in flat(str(report))
    assert str(report.broken[0].nesting) == "jit"
    assert report.program() == ""


def test_the_users_objects_are_left_as_without_it():
    left = []
    for invariants in ("memory", "memory,recompilation"):
        model, kept = Counts(plain=True), []

        def step(model, x):
            kept.append(None)
            return model(x)

        with Example() as example:
            call(step, model, INPUT, nesting="jit", invariants=invariants, example=example)
            left.append((model.calls, len(kept)))
    assert left[0] == left[1]
    assert left[0][0] == 1


@pytest.mark.slow
def test_an_abstract_call_is_not_judged_and_says_so_once():
    model = nnx.eval_shape(lambda: Weighs(STRONG))
    report = check(
        model,
        jax.ShapeDtypeStruct(INPUT.shape, INPUT.dtype),
        invariants="tracers,parity,recompilation,finite",
        styles="argument",
        max_examples=0,
    )
    assert report.ok
    notes = [note for note in report.notes if "not asserted" in note]
    assert notes == [
        "recompilation, finite, parity not asserted: the state or the inputs are abstract, and nothing was run"
    ]
