"""What is found around a nesting that did not hold: the nearest that hold, and the way from the un-nested call."""

from __future__ import annotations

import inspect
from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest
from checking import Example, call, flat, near, text
from cures import in_checkpoint
from flax import nnx
from healthy import BATCH, FLAX, WIDTH, numbers, rngs
from hypothesis import given

from pytest_nnxcheck import InvariantViolation, Nesting, Outcome, Violation, assert_invariants, check
from pytest_nnxcheck.core.nesting import impossible
from pytest_nnxcheck.core.notes import MergedVariables
from pytest_nnxcheck.core.settings import Settings, merge
from pytest_nnxcheck.engine import causes
from pytest_nnxcheck.engine.example import Memo
from pytest_nnxcheck.runner import conclude, strategies
from pytest_nnxcheck.runner.strategies import Exclusions
from pytest_nnxcheck.subject.subject import bind

EVERY = Settings()
OPEN = Exclusions()


def parsed(*texts: str) -> tuple[Nesting, ...]:
    return tuple(map(Nesting.parse, texts))


def outcomes(**verdicts: str):
    """A try-out that answers from a table, and keeps what was asked."""
    known = {Nesting.parse(text.replace("__", " > ")): verdict for text, verdict in verdicts.items()}
    asked: list[Nesting] = []

    def try_out(nesting: Nesting, _: Settings) -> Outcome | None:
        asked.append(nesting)
        return Outcome(nesting, known[nesting]) if nesting in known else None

    return try_out, asked


def rows_of(outcome: Outcome, try_out, **settings):
    """What a message says of the nestings around this one."""
    return conclude.explain(outcome, merge(settings), OPEN, try_out).explained


def test_the_neighbours_are_each_layer_in_another_style_or_taken_away():
    few = merge({"styles": ("argument", "functional")})
    found = conclude.neighbours(Nesting.parse("jit > scan[closure]"), few, OPEN)
    assert found == parsed(
        "jit", "scan[closure]", "jit > scan", "jit > scan[functional]", "jit[functional] > scan[closure]"
    )


def test_what_flax_refused_and_what_cannot_run_is_no_neighbour():
    refused = Exclusions(refused=frozenset({"closure", "jax_closure"}))
    found = conclude.neighbours(Nesting.parse("grad > scan"), EVERY, refused)
    assert found
    assert not any(layer.captures for near in found for layer in near.layers)
    assert not [
        near for near in conclude.neighbours(Nesting.parse("jit > while_loop"), EVERY, OPEN) if impossible(near)
    ]
    adding = replace(refused, adds_state=True)
    assert conclude.neighbours(Nesting.parse("scan[functional]"), EVERY, adding) == ()


@given(strategies.nestings(EVERY, lambda _: OPEN))
def test_a_neighbour_differs_in_one_layer(nesting):
    for neighbour in conclude.neighbours(nesting, EVERY, OPEN):
        fewer = len(nesting) - len(neighbour)
        same = sum(one == other for one, other in zip(nesting.layers, neighbour.layers, strict=False))
        assert neighbour != nesting
        assert (fewer == 1 and neighbour.layers) or (fewer == 0 and same == len(nesting) - 1)


def test_the_way_ends_at_the_first_that_fails():
    try_out, asked = outcomes(**{"un-nested": "held", "remat": "failed", "scan__remat": "held"})
    broken_one = Outcome(Nesting.parse("scan > remat"), "violated", (Violation("tracers", "tracers remain"),))
    explained = rows_of(broken_one, try_out, styles=("argument",))
    assert explained == (("steps", "un-nested passes, remat raises"),)
    assert Nesting.parse("un-nested") in asked


def test_a_memory_violation_is_answered_only_by_what_was_measured():
    def try_out(near: Nesting, _: Settings) -> Outcome:
        return Outcome(near, "held", peak=10 if near.layers and near.layers[0].transform == "jit" else None)

    over = Outcome(Nesting.parse("jit > scan"), "violated", (Violation("memory", "over the budget"),), peak=30)
    explained = rows_of(over, try_out, styles=("argument",))
    assert explained[0] == ("passes", "jit, jit > scan[functional], jit[functional] > scan   (of 3 similar nestings)")


def test_the_rows():
    violated = Outcome(Nesting.parse("jit[closure]"), "violated", (Violation("tracers", "tracers remain"),))
    try_out, _ = outcomes(**{"un-nested": "held", "jit": "held", "jit[functional]": "held"})
    assert rows_of(violated, try_out) == (
        ("passes", "jit, jit[functional]   (of 3 similar nestings)"),
        ("steps", "un-nested passes, jit[closure] fails"),
    )
    nothing, _ = outcomes()
    assert rows_of(violated, nothing) == ()


# --- in a run


def test_neighbours_are_counted_nowhere():
    def call(x: jax.Array) -> jax.Array:
        return x * 2 if x.shape == () or isinstance(x, jax.core.Tracer) is False else x / bool(x.sum())

    found = check(
        call, numbers(BATCH), transforms="jit", styles="closure", sweep="singles", max_depth=1, max_examples=0
    )
    assert [str(outcome.nesting) for outcome in found.outcomes] == ["un-nested", "jit[closure]"]
    assert ("steps", "un-nested passes, jit[closure] raises") in found.outcomes[1].explained


@pytest.mark.skipif(FLAX >= (0, 10, 7), reason="newer flax refuses what leaks by a closure on flax 0.10.2")
def test_the_nearest_that_hold_are_named_and_the_test_s_own_assertions_count():
    narrow = {"transforms": "while_loop", "styles": "closure", "max_depth": 1, "max_examples": 0}
    with pytest.raises(InvariantViolation) as caught:
        assert_invariants(nnx.BatchNorm(WIDTH, rngs=rngs()), numbers(BATCH), **narrow)
    message = str(caught.value)
    assert "passes while_loop, while_loop[functional] (of 2 similar nestings)" in flat(message)
    assert "  steps       un-nested passes, while_loop[closure] fails" in message


def test_a_replay_runs_no_other():
    found = check(lambda x: x, jnp.ones(3), nesting="jit", memory_budget="1B")
    assert "replayed, no other was run" in str(found)
    assert "passes  " not in str(found)


# --- google/flax#4819: the user's own loop


class Drops(nnx.Module):
    def __init__(self):
        self.linear = nnx.Linear(WIDTH, WIDTH, rngs=rngs())
        self.dropout = nnx.Dropout(0.5, rngs=rngs())

    def __call__(self, x):
        return self.dropout(self.linear(x))


def captured(function, *args):
    """What the transforms inside a call captured."""
    return causes.captured(bind(function, args, {}))


def differentiates(model, x, **copy):
    graphdef, params, rest = nnx.split(model, nnx.Param, ...)

    def loss(params, rest):
        return nnx.merge(graphdef, params, rest, **copy)(x).sum()

    return jax.grad(loss)(params, rest)


def writes_back(model, x):
    graphdef, params, rest = nnx.split(model, nnx.Param, ...)

    def loss(params, rest):
        copy = nnx.merge(graphdef, params, rest, copy=True)
        return copy(x).sum(), nnx.state(copy)

    gradients, state = jax.grad(loss, has_aux=True)(params, rest)
    nnx.update(model, state)
    return gradients


@pytest.mark.slow
@pytest.mark.parametrize("nesting", ["un-nested", "jit"])
def test_5050_names_the_merge_that_takes_over_variables(nesting):
    """google/flax#5050: `jax.grad` hands on what it does not differentiate by, with the Variables of the trace outside."""
    found = call(differentiates, Drops(), numbers(BATCH), nesting=nesting)
    if "copy" not in inspect.signature(nnx.merge).parameters:  # it copies always
        assert found.outcome.verdict == "held"
        return
    assert found.outcome.verdict == "failed"
    line = differentiates.__code__.co_firstlineno + 4
    said = f"nnx.merge at {near(__file__)}:{line} takes over dropout.rngs.count, dropout.rngs.key of its Drops from another trace"
    assert f"{said}; write nnx.merge(..., copy=True)" in text(found)
    assert "tracer left in" not in text(found)
    assert call(writes_back, Drops(), numbers(BATCH), nesting=nesting).outcome.verdict == "held"
    writes_back(model := Drops(), numbers(BATCH))
    assert int(model.dropout.rngs.count[...]) == 1


@pytest.mark.slow
def test_a_merge_of_what_its_own_trace_made_is_not_named():
    def jitted(model, x):
        graphdef, state = nnx.split(model)
        return jax.jit(lambda state, x: nnx.merge(graphdef, state)(x))(state, x)

    merged = causes.merged_inside(bind(jitted, (Drops(), numbers(BATCH)), {}))
    assert not [cause for cause in merged if isinstance(cause, MergedVariables)]


@pytest.mark.slow
@pytest.mark.parametrize(
    "hold, key", [(lambda norm: [norm], 0), (lambda norm: (norm,), 0), (lambda norm: {"first": norm}, "first")]
)
def test_modules_in_a_container_are_captured(hold, key):
    """A cache for each layer, say."""

    def step(layer, norm, x):
        held = hold(norm)
        return nnx.value_and_grad(lambda layer: held[key](layer(x)).sum())(layer)[0]

    linear, norm = nnx.Linear(WIDTH, WIDTH, rngs=rngs()), nnx.BatchNorm(WIDTH, rngs=rngs())
    (cause,) = captured(step, linear, norm, numbers(BATCH))
    assert (*map(str, cause.nodes),) == (f"held[{key!r}] (BatchNorm)",)


@pytest.mark.slow
def test_what_a_call_jits_itself_is_told_once_where_it_is_made():
    def call(norm, x):
        jitted = jax.jit(lambda x: norm(x) * 1)
        return jitted(x)

    (cause,) = captured(call, nnx.BatchNorm(WIDTH, rngs=rngs()), numbers(BATCH))
    assert cause.line == f"{near(__file__)}:{call.__code__.co_firstlineno + 1}"


def test_each_transform_that_captured_a_module_is_told():
    def call(linear, x):
        y = jax.checkpoint(lambda x: 2 * linear(x))(x)
        return jax.vmap(lambda row: 2 * linear(row))(y)

    found = captured(call, nnx.Linear(WIDTH, WIDTH, rngs=rngs()), numbers(BATCH))
    begins = call.__code__.co_firstlineno
    lines = [(cause.transform, cause.line) for cause in found]
    assert lines == [("checkpoint", f"{near(__file__)}:{begins + 1}"), ("vmap", f"{near(__file__)}:{begins + 2}")]


def test_a_call_is_made_once_more_for_all_nestings(monkeypatch):
    """The caches of jax are emptied after it, so that whatever comes next compiles anew."""
    made: list[str] = []
    rehearse = causes.rehearse

    def counted(subject, *arguments):
        made.append(subject.name)
        return rehearse(subject, *arguments)

    monkeypatch.setattr(causes, "rehearse", counted)
    norm, memo = nnx.BatchNorm(WIDTH, rngs=rngs()), Memo()
    for nesting in ("jit", "jit > remat", "remat"):
        with Example(memo) as example:
            assert call(in_checkpoint, norm, numbers(BATCH), nesting=nesting, example=example).outcome.facts
    assert len(made) == 2  # who captured, and what was merged inside


def test_a_loop_over_a_bound_method_captured_its_self():
    class Decoder(nnx.Module):
        def __init__(self):
            self.norm = nnx.BatchNorm(WIDTH, rngs=rngs())

        def step(self, carry):
            return carry[0] + 1, self.norm(carry[1])

        def decode(self, x):
            return nnx.while_loop(lambda carry: carry[0] < 2, self.step, (0, x))[1]

    (cause,) = captured(Decoder().decode, numbers(BATCH))
    text_of_cause = cause.words()
    assert "captured self (Decoder); pass the module in the loop's carry" in text_of_cause
    assert captured(lambda x: x, jnp.ones(3)) == ()


def test_a_neighbour_mends_what_broke_whatever_else_breaks_there():
    """Handing over a module that a closure leaks is a way out, also where a plain jit needs too much memory."""

    def breaks(*invariants):
        verdict = "violated" if invariants else "held"
        return Outcome(Nesting.parse("jit"), verdict, tuple(Violation(name) for name in invariants))

    assert conclude.mends(breaks("tracers"), breaks("memory"))
    assert conclude.mends(breaks("tracers"), breaks())
    assert not conclude.mends(breaks("tracers"), breaks("tracers", "memory"))
    assert not conclude.mends(breaks("tracers"), None)
