"""Advice on the memory of the un-nested call: each mistake with its cure, told by line and buffer, and never a failure unless asked for."""

from __future__ import annotations

import inspect
import json
from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest
from checking import line
from flax import nnx

from pytest_nnxcheck import check
from pytest_nnxcheck.core.peak import Buffer
from pytest_nnxcheck.invariants.advice import LargeLine, Recast, Saved, Sizes, Stack, Waste, advice

JIT = {"nesting": "jit"}


class Looks(nnx.Module):
    """Looks tokens up in a table: by a product with one-hot vectors, or by a gather."""

    def __init__(self, *, wastes):
        self.table, self.wastes = nnx.Param(jnp.ones((512, 64))), wastes

    def __call__(self, tokens):
        return jax.nn.one_hot(tokens, 512) @ self.table[...] if self.wastes else self.table[...][tokens]


class Layers(nnx.Module):
    """Scans over a stack of bfloat16 layers in float32: cast before the scan, or inside it."""

    def __init__(self, *, wastes):
        self.w, self.wastes = nnx.Param(jnp.ones((8, 64, 64), jnp.bfloat16)), wastes

    def __call__(self, x):
        w = self.w[...].astype(jnp.float32) if self.wastes else self.w[...]
        return jax.lax.scan(lambda h, w: (jnp.tanh(h @ w.astype(jnp.float32)), None), x, w)[0]


class Steps(nnx.Module):
    """Takes the last of many steps: of a stack of all, or of the carry."""

    def __init__(self, *, wastes):
        self.w, self.wastes = nnx.Param(jnp.ones((64, 64))), wastes

    def __call__(self, x):
        def body(h, _):
            h = jnp.tanh(h @ self.w[...])
            return h, h if self.wastes else None

        last, every = jax.lax.scan(body, x, None, length=100)
        return every[-1] if self.wastes else last


class Deep(nnx.Module):
    """The gradient of a loop over layers that saves all of each, or what it carries."""

    def __init__(self, *, wastes):
        self.w, self.wastes = nnx.Param(jnp.ones((8, 32, 32)) / 32), wastes

    def loss(self, x):
        def body(h, w):
            return jnp.cos(jnp.sin(jnp.tanh(h @ w))), None

        return jax.lax.scan(body if self.wastes else jax.checkpoint(body), x, self.w[...])[0].sum()

    def __call__(self, x):
        return nnx.value_and_grad(Deep.loss)(self, x)


TOKENS = jnp.zeros((8, 64), jnp.int32)
MISTAKES = {
    "line": (Looks, TOKENS, "1.0 MiB, float32[", "one line holds more than state, inputs and outputs together, 258.0 KiB"),
    "recast": (Layers, jnp.ones((4, 64)), "128.0 KiB float32[8,64,64]: ", "all of model.w once more in another dtype; cast it inside the loop, a step's part at a time"),
    "unread": (Steps, jnp.ones((16, 64)), "400.0 KiB float32[100,16,64]: ", "a scan stacks its outputs, and only one step is read; carry that one"),
    "saved": (Deep, jnp.ones((64, 32)), "the largest part of the peak: ", "8 steps of a scan save it for the backward pass, "),
}  # fmt: skip


WHERE = {
    "line": "jax.nn.one_hot(",
    "recast": "astype(jnp.float32) if",
    "unread": "length=100)",
    "saved": "jax.checkpoint(body)",
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", MISTAKES)
def test_a_mistake_is_told_by_line_and_buffer_and_its_cure_is_not(kind):
    subject, x, *parts = MISTAKES[kind]
    report = check(subject(wastes=True), x, **JIT)
    assert report.ok
    (piece,) = report.advice
    for part in parts:
        assert part in piece
    assert piece.endswith(f"({line(subject, WHERE[kind])})")
    (violation,) = check(subject(wastes=True), x, **JIT, memory_advice="fail").violations
    assert (violation.invariant, violation.summary) == ("memory", "the un-nested call spends memory that it need not")
    assert dict(violation.details)["advice"] == piece
    cured = check(subject(wastes=False), x, **JIT, memory_advice="fail")
    assert (cured.ok, cured.advice) == (True, ())


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


# --- the rules, on figures

RECAST = Recast(0, "m.py:2", "float32", "float32[50000]", 250_000, widens=True, looped=False)
SCANS = Saved("m.py:3", 4, 1_000_500, 0)
STACK = Stack("m.py:4", "float32[50000]", 65536, read=False)
OUTPUT = Buffer(200_000, "float32[50000]", "output", "dot", ("m.py:9",))
AT_LINE = Buffer(2_004_001, "float32[7,7]", "temporary", "dot", ("m.py:1",))


def pieces(*live, **facts):
    """The kinds and bytes of the advice on a peak of 2 MB of a call with a state of 1 MB."""
    sizes = Sizes(state=1_000_000, inputs=1000, outputs=1000)
    told = advice(2_001_000, [OUTPUT, *live], Waste(**facts), ["model.w", "model.v"], ["x"], sizes)
    return [(type(piece), piece.bytes) for piece in told]


def test_a_leaf_counts_from_a_quarter_of_the_state_on_where_its_buffer_is_at_the_peak():
    assert pieces(recasts=(RECAST,)) == [(Recast, 250_000)]
    assert pieces(recasts=(replace(RECAST, bytes=249_999),)) == []
    assert pieces(recasts=(replace(RECAST, type="float32[7]"),)) == []


def test_mixed_precision_is_no_waste_and_a_stack_that_a_loop_takes_is():
    assert pieces(recasts=(replace(RECAST, widens=False),)) == []
    assert pieces(recasts=(replace(RECAST, widens=False, looped=True),)) == [(Recast, 250_000)]


def test_what_the_scans_of_a_line_save_counts_from_half_of_the_peak_on_without_their_carry():
    assert pieces(saved=(SCANS,)) == [(Saved, 1_000_500)]
    assert pieces(saved=(replace(SCANS, carried=1),)) == []
    one = Saved("m.py:3", 4, 600_000, 10)
    assert pieces(saved=(one, one)) == [(Saved, 1_200_000)]
    assert pieces(saved=(one, replace(one, line="m.py:5"))) == []


def test_a_stack_counts_from_the_floor_on():
    assert pieces(stacks=(STACK,)) == [(Stack, 65536)]
    assert pieces(stacks=(replace(STACK, bytes=65535),)) == []


def test_a_line_counts_where_it_is_larger_than_all_that_goes_in_and_comes_out():
    least = replace(AT_LINE, bytes=2_004_000)
    assert pieces(AT_LINE) == [(LargeLine, 2_004_001)]
    assert pieces(least) == pieces(least, least) == []
    assert pieces(replace(AT_LINE, inserted=True)) == []
    on_line = Stack("m.py:1", "float32[50000]", 70_000, read=True)
    assert pieces(AT_LINE, stacks=(on_line,)) == [(Stack, 70_000)]


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


def test_the_summary_tells_it_with_v_and_the_reports_always(inner, pytester):
    result = inner("-v", "--nnx-report=r.json", "--nnx-report=r.md", "--nnx-report=r.html")
    result.assert_outcomes(passed=1)
    text = "128.0 KiB float32[8,64,64]: all of model.w once more in another dtype"
    result.stdout.fnmatch_lines([f"    advice: {text.replace('[', '[[]')}*"])
    (test,) = json.loads((pytester.path / "r.json").read_text())["tests"]
    assert test["advice"][0].startswith(text)
    labels = [label for label, _ in test["un_nested_peak"]]
    assert labels[:3] == ["un-nested", "line", "buffer"]
    assert text in (pytester.path / "r.md").read_text()
    assert f"advice: {text}" in (pytester.path / "r.html").read_text()
