"""Advice on the memory of the un-nested call: each mistake with its cure, told by line and buffer, and never a failure unless asked for."""

from __future__ import annotations

import inspect
import json
from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest
from checking import line, some
from flax import nnx
from wasteful import WASTEFUL, Layers

from pytest_nnxcheck import check
from pytest_nnxcheck.core.peak import Buffer
from pytest_nnxcheck.invariants.advice import Sizes, advice
from pytest_nnxcheck.jaxprs.guarded import GuardedWrite
from pytest_nnxcheck.jaxprs.saved import SavedLine
from pytest_nnxcheck.jaxprs.waste import Stack

JIT = {"nesting": "jit"}


def checked(case, **options):
    return check(case.subject, *case.args, **JIT, **options)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    some(
        WASTEFUL,
        {
            "saved by a line",
            "computed again at once",
            "loop under vmap",
            "weights cast",
            "input reversed",
            "policy without a name",
        },
    ),
)
def test_a_cause_is_told_with_its_line_and_its_cure_is_quiet_and_needs_less(name):
    cause = WASTEFUL[name]
    if jax.__version_info__ < cause.since:
        pytest.skip(f"found from jax {cause.since} on")
    wasteful, cured = checked(cause.wasteful()), checked(cause.cured(), memory_advice="fail")
    assert wasteful.ok
    (piece,) = wasteful.advice
    assert cause.words in piece
    assert piece.endswith(f"({line(*cause.line)})")
    assert (cured.ok, cured.advice) == (True, ())
    (before, after) = (report.outcomes[0].evidence.split.peak for report in (wasteful, cured))
    assert after < before - 60_000 or not cause.spends


def test_advice_fails_where_that_is_asked_for():
    (violation,) = checked(WASTEFUL["stack cast"].wasteful(), memory_advice="fail").violations
    assert (violation.invariant, violation.summary) == ("memory", "the un-nested call spends memory that it need not")
    assert WASTEFUL["stack cast"].words in dict(violation.details)["advice"]


def test_an_outer_jit_or_remat_of_the_call_hides_nothing():
    inside = nnx.jit(lambda model, x: model(x))
    (piece,) = check(inside, Layers(wastes=True), jnp.ones((4, 64)), **JIT).advice
    assert "all of model.w once more" in piece


def test_a_nesting_of_the_gradient_asks_for_none_of_the_call():
    report = check(Layers(wastes=True), jnp.ones((4, 64)), nesting="jit > grad", memory_advice="fail")
    assert report.ok
    assert report.advice == ()


class Plain(nnx.Module):
    """A perceptron whose layers are all called on one line; ``wide`` is how much wider it is inside."""

    def __init__(self, wide):
        layers = [(64, 64)] * 4 if wide == 1 else [(64, 64 * wide), (64 * wide, 64)]
        kernels = [nnx.Linear(*sizes, rngs=nnx.Rngs(0)) for sizes in layers]
        self.layers = nnx.Sequential(*(each for kernel in kernels for each in (kernel, nnx.gelu)))

    def __call__(self, x):
        return self.layers(x)


def trains(model, x, y):
    gradients = nnx.grad(lambda model: ((model(x) - y) ** 2).mean())(model)
    nnx.update(model, jax.tree.map(lambda old, by: old - 0.1 * by, nnx.state(model, nnx.Param), gradients))


@pytest.mark.slow
@pytest.mark.parametrize("wide", [1, 4])
def test_what_the_layers_of_a_model_leave_for_the_backward_pass_is_no_line_of_its_own(wide):
    x = jnp.ones((2048, 64))
    for subject, *args in ((trains, Plain(wide), x, x), (Plain(wide), x)):
        report = check(subject, *args, **JIT, memory_advice="fail")
        assert report.ok, report.advice


class Looped(Plain):
    """The same, in a loop of the user's."""

    def __init__(self, activation):
        super().__init__(1)
        self.activation = activation

    def __call__(self, x):
        for layer in self.layers.layers[::2]:
            x = self.activation(layer(x))
        return x


@pytest.mark.slow
def test_what_a_remat_of_each_layer_would_save_as_well_is_no_advice():
    x = jnp.ones((2048, 64))
    quiet = check(trains, Looped(lambda x: x + 1), x, x, **JIT)
    saved = dict(quiet.outcomes[0].evidence.ledger).get("saved for the backward pass", 0)
    assert saved >= 3 * x.nbytes or jax.__version_info__ < (0, 7), "what goes into the second layer, and so on"
    assert quiet.advice == ()
    (piece,) = check(trains, Looped(lambda x: jnp.cos(jnp.sin(nnx.gelu(x)))), x, x, **JIT).advice
    assert "a line that runs several times saves it for the backward pass" in piece


# --- the rules, on figures

SAVED = SavedLine("m.py:3", 1_002_001, 0, ("float32[50000]",), scanned=False, repeated=True)
STACK = Stack("m.py:4", "float32[50000]", 65536, read=False)
GUARDED = GuardedWrite("m.py:9", "float32[50000]", 250_000, 0, mapped_loop=False)
HELD = Buffer(250_000, "float32[50000]", "temporary", "dot", ("m.py:9",))


def pieces(*facts, live=(HELD,) * 5):
    """The kinds and bytes of the advice on a call with a state of 1 MB, in two leaves."""
    told = advice(live, facts, ["model.w", "model.v", "x"], Sizes(1_000_000, inputs=1000, outputs=1000, leaves=2))
    return [(type(piece), piece.bytes) for piece in told]


def test_what_a_line_saves_counts_where_it_is_more_than_all_that_goes_in_and_comes_out():
    assert pieces(SAVED) == [(SavedLine, 1_002_001)]
    assert pieces(replace(SAVED, bytes=1_002_000)) == []
    assert pieces(SAVED, live=[HELD] * 4) == [], "no more counts than is there at the peak"
    assert pieces(SAVED, live=[HELD] * 4 + [replace(HELD, part="gradients")]) == []
    assert pieces(replace(SAVED, repeated=False)) == [], "a line that runs once is computed again at once"
    assert pieces(replace(SAVED, kept=1)) == [], "a remat saves that as well"
    other = replace(SAVED, line="m.py:5", kept=-1)
    assert pieces(SAVED, other) == pieces(other, SAVED) == [(SavedLine, 1_002_002)], "the line that saves the most"
    assert len(pieces(SAVED, replace(other, scanned=True))) == 2
    again = replace(SAVED, bytes=1_250_000, kept=1_250_000)
    assert pieces(replace(again, largest=247_999)) == [(SavedLine, 1_002_001)]
    assert pieces(replace(again, largest=248_000)) == [], "one remat needs its values"


def test_a_guarded_write_counts_where_more_arrays_are_there_than_the_program_needs():
    assert pieces(GUARDED, live=[HELD]) == [(GuardedWrite, 250_000)]
    made = replace(GUARDED, array=-1)
    assert pieces(made, live=[HELD]) == [], "an array that the program makes is there once"
    assert pieces(made, live=[HELD] * 2) == [(GuardedWrite, 250_000)]
    assert pieces(replace(GUARDED, array=2), live=[HELD]) == [], "nobody donates an input"
    other = replace(HELD, stack=("m.py:8",))
    assert pieces(GUARDED, live=[other]) == []
    assert pieces(GUARDED, live=[replace(HELD, stack=())]) == [(GuardedWrite, 250_000)], "a copy that XLA inserted"
    assert pieces(GUARDED, live=[replace(HELD, shape="float32[7]")]) == []
    assert pieces(replace(GUARDED, bytes=249_999), live=[replace(HELD, bytes=249_999)]) == [], "a quarter of the state"


def test_a_stack_counts_from_the_floor_on():
    assert pieces(STACK) == [(Stack, 65536)]
    assert pieces(replace(STACK, bytes=65535)) == []
    assert pieces(STACK, live=[replace(HELD, shape="float32[7]")]) == []


# --- where it is shown


SOURCE = """
import jax
import jax.numpy as jnp
import pytest
from flax import nnx

@pytest.mark.nnx_invariants(transforms="jit,remat", styles="argument", max_examples=0)
def test_layers(nnx_wrap):
    nnx_wrap(Layers(wastes=True))(jnp.ones((4, 64)))

"""


@pytest.fixture
def inner(pytester, inner_args, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    pytester.makepyfile(SOURCE + inspect.getsource(Layers))
    return lambda *options: pytester.runpytest_inprocess(*inner_args, "-p", "no:cacheprovider", *options)


@pytest.mark.slow
def test_the_summary_tells_it_with_v_and_the_reports_always(inner, pytester):
    result = inner("-v", "--nnx-report=r.json", "--nnx-report=r.md", "--nnx-report=r.html")
    result.assert_outcomes(passed=1)
    text = "128.0 KiB: all of model.w once more, in another dtype"
    result.stdout.fnmatch_lines([f"    advice: {text}*"])
    (test,) = json.loads((pytester.path / "r.json").read_text())["tests"]
    assert test["advice"][0].startswith(text)
    labels = [label for label, _ in test["un_nested_peak"]]
    assert labels[:3] == ["un-nested", "line", "buffer"]
    assert text in (pytester.path / "r.md").read_text()
    assert f"advice: {text}" in (pytester.path / "r.html").read_text()
