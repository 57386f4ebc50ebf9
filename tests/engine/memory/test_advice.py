"""Advice on the memory of the un-nested call: each mistake with its cure, told by line and buffer, and never a failure unless asked for."""

from __future__ import annotations

import inspect
import json

import jax
import jax.numpy as jnp
import pytest
from checking import line
from flax import nnx

from pytest_nnxcheck import check

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
    """A perceptron whose layers are all called on one line."""

    def __init__(self):
        kernels = [nnx.Linear(64, 64, rngs=nnx.Rngs(0)) for _ in range(4)]
        self.layers = nnx.Sequential(*(each for kernel in kernels for each in (kernel, nnx.gelu)))

    def __call__(self, x):
        return self.layers(x)


def trains(model, x, y):
    gradients = nnx.grad(lambda model: ((model(x) - y) ** 2).mean())(model)
    nnx.update(model, jax.tree.map(lambda old, by: old - 0.1 * by, nnx.state(model, nnx.Param), gradients))


@pytest.mark.slow
def test_what_the_layers_of_a_model_leave_for_the_backward_pass_is_no_line_of_its_own():
    x = jnp.ones((2048, 64))
    for subject, *args in ((trains, Plain(), x, x), (Plain(), x)):
        report = check(subject, *args, **JIT, memory_advice="fail")
        assert report.ok, report.advice


# --- the rules, on figures


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
