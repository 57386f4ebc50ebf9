"""Hints are followed: the change that one asks for is made, and the nesting holds. Those of other folders are followed where their twins are."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import bugs
import cures
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import retraced
from checking import call, flat, hint, near, slow, some, text
from cures import CUSTOM_RULES, OWN, Steps, Tied, remembers
from flax import nnx
from healthy import BATCH, FLAX, WIDTH, numbers, rngs
from leaky import LEAKY, KeepsLastInVariable, KeepsLastSetInInit, case

from pytest_nnxcheck import Nesting, Outcome, Report, Violation, check, register_transform
from pytest_nnxcheck.core.facts import Leak
from pytest_nnxcheck.core.notes import ValueAsked, captured_by
from pytest_nnxcheck.core.settings import Settings
from pytest_nnxcheck.invariants.tracers import TracerLeft
from pytest_nnxcheck.reporting import violations
from pytest_nnxcheck.runner import conclude
from pytest_nnxcheck.runner.strategies import Exclusions

DATA = FLAX >= (0, 12)
LEAKS_BY_CLOSURE = FLAX < (0, 10, 7)
old = pytest.mark.skipif(not LEAKS_BY_CLOSURE, reason="flax from 0.10.7 on refuses what leaks by a closure before")


def one(subject: Any, *args: Any, nesting: str, **settings: Any) -> Report:
    return check(subject, *args, nesting=nesting, **settings)


# --- plain values


@old
def test_what_a_captured_module_keeps_goes_into_a_variable_and_the_module_becomes_an_argument():
    found = check(case(KeepsLastSetInInit).subject, numbers(BATCH), transforms="jit", max_examples=0)
    assert "keep the value in an nnx.Variable, and pass the module as an argument: model.last" in flat(str(found))
    assert one(case(KeepsLastInVariable).subject, numbers(BATCH), nesting="jit").ok
    assert not one(case(KeepsLastInVariable).subject, numbers(BATCH), nesting="jit[closure]").ok


@pytest.mark.slow
def test_what_outlives_the_trace_is_not_kept():
    found = one(remembers, numbers(BATCH), nesting="jit")
    told = flat(str(found))
    assert "do not keep arrays made under a transform in a dict outside of the module: it outlives the trace" in told
    assert one(lambda x: x * 2, numbers(BATCH), nesting="jit").ok
    leaky, healthy = LEAKY["class_attribute"].leaky(), LEAKY["class_attribute"].healthy()
    assert "in a class attribute: it outlives" in flat(str(one(leaky.subject, *leaky.args, nesting="jit")))
    assert one(healthy.subject, *healthy.args, nesting="jit").ok


# --- a module that was captured


def norm() -> nnx.BatchNorm:
    return nnx.BatchNorm(WIDTH, rngs=rngs())


CAPTURING = ["jit", "scan", *slow("remat", "vmap", "while_loop", "fori_loop", "cond", "switch")]
FEW = {"vmap", "custom_vjp", "scan", "map", "eval_shape", "checkify", "grad", "jvp"}
"""One of each kind of transform that a user's own code may name."""


@old
@pytest.mark.parametrize("transform", CAPTURING)
def test_a_layer_that_captures_is_handed_the_module(transform):
    found = check(
        norm(), numbers(BATCH), transforms=transform, styles="closure", sweep="singles", max_depth=1, max_examples=0
    )
    assert f"hint {captured_by(transform)}" in flat(str(found))
    assert f"passes {transform}, {transform}[functional]" in flat(str(found))
    assert one(norm(), numbers(BATCH), nesting=transform).ok


@pytest.mark.slow
@pytest.mark.parametrize("transform", some(OWN, FEW))
def test_a_transform_of_the_user_s_own_is_handed_the_module(transform):
    own, cured = OWN[transform]
    # A function with a rule of its own is traced where the call is.
    with_exception = call(own, norm(), numbers(BATCH), nesting="jit" if transform in CUSTOM_RULES else "un-nested")
    told = text(with_exception)
    assert with_exception.outcome.verdict in ("violated", "failed"), told
    assert f"{transform} at {near(cures.__file__)}:" in told
    assert captured_by(transform) in told
    assert call(cured, norm(), numbers(BATCH), nesting="un-nested").outcome.verdict == "held"
    assert call(cured, norm(), numbers(BATCH), nesting="jit").outcome.verdict == "held"


@old
def test_a_shard_map_that_captures_is_handed_the_state():
    found = one(norm(), numbers(BATCH), nesting="shard_map[jax_closure]")
    assert captured_by("shard_map") in flat(str(found))
    assert one(norm(), numbers(BATCH), nesting="shard_map[functional]").ok


@old
@pytest.mark.usefixtures("forgotten")
def test_a_registered_transform_hands_the_module_on():
    def capturing(f: Any) -> Any:
        return lambda state, *inputs: nnx.jit(lambda *inputs: f(state, *inputs))(*inputs)

    register_transform("twice", style="closure")(capturing)
    register_transform("twice")(nnx.jit)
    found = one(norm(), numbers(BATCH), nesting="twice[closure]")
    assert "hint twice should hand the module on as an argument of f" in flat(str(found))
    assert one(norm(), numbers(BATCH), nesting="twice").ok


def test_a_hint_that_was_tried_and_did_not_help_is_taken_back():
    """The value is lost with the module as an argument too: handing it on is no way out."""
    nesting, hint = Nesting.parse("jit[closure]"), captured_by("jit")
    leak = Leak("model.mean", "BatchStat", "DynamicJaxprTracer", "float32[3]", "", str(nesting.layers[0]))
    violation = Violation("tracers", findings=(TracerLeft(leak.path, leak=leak),))
    outcome = violations.worded(Outcome(nesting, "violated", (violation,)))
    assert outcome.violations[0].hint == hint

    def hint_where(neighbour: Outcome | None) -> str:
        tried = conclude.explain(
            outcome, Settings(), Exclusions(), lambda near, _: neighbour and replace(neighbour, nesting=near)
        )
        return tried.violations[0].hint

    assert hint_where(outcome) == ""
    assert hint_where(replace(outcome, verdict="held", violations=())) == hint


# --- memory

TABLE_OF_NUMBERS = np.ones((256, 256), np.float32)


def test_a_captured_array_becomes_an_argument():
    captured = jnp.asarray(TABLE_OF_NUMBERS)
    found = one(lambda x: x @ captured, numbers((4, 256)), nesting="jit")
    assert hint("captured constant") in flat(str(found))
    assert one(lambda x, table: x @ table, numbers((4, 256)), captured, nesting="jit").ok


# --- donation


def test_a_donated_array_is_returned():
    a, b = numbers((64,)), numbers((64,))
    found = one(bugs.arrays_step_drops_one, a, b, nesting="jit", donate="all")
    assert hint("not returned") in flat(str(found))
    assert one(bugs.arrays_step, a, b, nesting="jit", donate="all").ok


def test_an_array_that_is_shared_or_viewed_is_copied():
    x = numbers((64,))
    assert hint("shared") in flat(str(one(Tied(share=True), x, nesting="jit")))
    assert "copy the view: np.array(view), or drop it before the step" in flat(
        str(one(Tied(share=False, view=np.asarray), x, nesting="jit"))
    )
    assert one(Tied(share=False, view=np.array), x, nesting="jit").ok


# --- parity


@pytest.mark.skipif(not DATA, reason="modules are pytrees from flax 0.12 on; before, jax refuses them")
@pytest.mark.parametrize(
    "copied, cured",
    [
        (jax.jit(lambda m, x: m(x)), nnx.jit(lambda m, x: m(x))),
        (
            lambda m, x: jax.lax.cond(True, lambda m, x: m(x), lambda m, x: x, m, x),
            lambda m, x: nnx.cond(True, lambda m, x: m(x), lambda m, x: x, m, x),
        ),
    ],
    ids=["jit", "cond"],
)
def test_a_transform_of_flax_hands_updates_back(copied, cured):
    found = call(copied, norm(), numbers(BATCH), invariants="parity")
    assert hint("copy") in text(found)
    assert call(cured, norm(), numbers(BATCH), invariants="parity").outcome.verdict == "held"


# --- Python that asks for a value


@pytest.mark.parametrize(
    "asks, cured",
    [
        ("if", "jnp.where"),
        ("range", "nnx.while_loop"),
        ("slice", "jax.lax.dynamic_slice"),
        ("mask", "jnp.where as a mask"),
    ],
)
@pytest.mark.parametrize("nesting", ["jit", "jit[functional] > remat"])
def test_python_that_decides_on_a_value_is_told_what_to_write(asks, cured, nesting):
    found = call(functools.partial(Steps().__call__, how=asks), numbers((2, 4)), nesting=nesting)
    assert found.outcome.verdict == "failed"
    assert found.outcome.facts == (ValueAsked(),), text(found)
    assert ValueAsked().words() == hint("value")
    assert (
        call(functools.partial(Steps().__call__, how=cured), numbers((2, 4)), nesting=nesting).outcome.verdict == "held"
    )


@pytest.mark.parametrize(
    "broken, cured, said",
    [
        ("counter", "variable", hint("counted", path="model.calls")),
        ("weak", "strong", "make it an array of its type where it is made first, jnp.asarray(value, jnp.float32)"),
        ("number", "strong", "make it an array of its type where it is made first, jnp.asarray(value, jnp.float32)"),
        ("promoted", "strong", "cast the new value back to bfloat16 before it is stored or returned"),
    ],
)
def test_what_is_traced_again_is_mended_as_the_hint_says(broken, cured, said):
    report = one(retraced.MODELS[broken][0](), retraced.INPUT, nesting="jit", invariants="recompilation")
    assert said in report.violations[0].hint
    assert one(retraced.MODELS[cured][0](), retraced.INPUT, nesting="jit", invariants="recompilation").ok


class Sized(nnx.Module):
    """Keeps a number in a Variable, or as a plain attribute, and asks for it."""

    def __init__(self, number, ask, writes=False):
        self.number, self.other, self.kernel = number, nnx.Variable(3), nnx.Param(jnp.ones(4))
        self.ask, self.writes = ask, writes

    def __call__(self, x):
        number = self.number.value if isinstance(self.number, nnx.Variable) else self.number
        y = x * self.kernel[...] * self.ask(number)
        if self.writes:
            self.number.value = number + 1
        return y


ASKED = {
    "int": (3, int),
    "range": (3, lambda number: len(range(number))),
    "if": (True, lambda number: 1 if number else 2),
    "float": (0.5, float),
    "shape": (3, lambda number: jnp.ones(number).sum()),
    "of NumPy": (np.int64(3), int),
    "of jax": (jnp.array(3), int),
}


old_access = pytest.mark.filterwarnings("ignore:'.value' access is now deprecated")
"""For a number that is no array newer flax has another one."""


@old_access
@pytest.mark.parametrize("nesting", ["jit", "scan"])
@pytest.mark.parametrize("form", ASKED)
def test_a_number_in_a_variable_is_to_be_a_plain_attribute(form, nesting):
    number, ask = ASKED[form]
    found = call(Sized(nnx.Variable(number), ask), jnp.ones(4), nesting=nesting)
    assert found.outcome.facts == (ValueAsked(("model.number",)),), text(found)
    assert "keep model.number as a plain attribute" in text(found)
    if form != "of jax":  # which flax 0.12 asks to be marked as data
        assert call(Sized(number, ask), jnp.ones(4), nesting=nesting).outcome.verdict == "held"


@old_access
def test_a_random_key_is_no_number():
    model = Sized(nnx.Variable(3), int)
    model.rngs = nnx.Rngs(0)
    found = call(model, jnp.ones(4), nesting="jit")
    assert found.outcome.facts == (ValueAsked(("model.number",)),), text(found)


@old_access
def test_a_number_that_the_call_writes_or_that_is_not_all_it_asks_for_is_none():
    for subject in (
        Sized(nnx.Variable(3), int, writes=True),
        functools.partial(lambda model, x: model(x) * int(x.sum()), Sized(nnx.Variable(3), int)),
        functools.partial(lambda model, x: model(x) * int(x.sum()), Sized(nnx.Variable(3), jnp.asarray)),
    ):
        assert call(subject, jnp.ones(4), nesting="jit").outcome.facts == (ValueAsked(),)
