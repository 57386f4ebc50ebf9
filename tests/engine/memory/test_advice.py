"""Advice on the memory of the un-nested call: each mistake with its cure, told by line and buffer, and never a failure unless asked for."""

from __future__ import annotations

import inspect
import json

import jax
import jax.numpy as jnp
import pytest
from checking import models, some
from flax import nnx
from healthy import HEALTHY, assign

from pytest_nnxcheck import check, compat
from pytest_nnxcheck.compat import primitives
from pytest_nnxcheck.core.evidence import Held, HeldTwice, LargeLine, Recast, Saved, Stack
from pytest_nnxcheck.invariants.advice import Sizes, advice
from pytest_nnxcheck.subject.waste import Waste, waste

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


class Fused(nnx.Module):
    """Queries, keys and values in one product: of kernels that each call joins, or of one kernel."""

    def __init__(self, *, wastes):
        shapes = [(128, 128)] * 3 if wastes else [(128, 384)]
        for name, shape in zip("qkv", shapes, strict=False):
            setattr(self, name, nnx.Param(jnp.ones(shape)))

    def __call__(self, x):
        return (
            x @ jnp.concatenate([self.q[...], self.k[...], self.v[...]], -1) if hasattr(self, "v") else x @ self.q[...]
        )


class Decodes(nnx.Module):
    """Scans over the caches of its layers: hands each layer its own, or carries all of them."""

    def __init__(self, *, wastes):
        self.cache, self.wastes = nnx.Cache(jnp.zeros((4, 64, 64))), wastes

    def __call__(self, x):
        def layer(h, cache):
            cache = cache.at[3].set(h)
            return jnp.tanh(cache @ h) @ cache, cache

        def carries(carry, number):
            caches = carry[1].at[number, 3].set(carry[0])
            return (jnp.tanh(caches[number] @ carry[0]) @ caches[number], caches), None

        if self.wastes:
            h, after = jax.lax.scan(layer, x, self.cache[...])
        else:
            (h, after), _ = jax.lax.scan(carries, (x, self.cache[...]), jnp.arange(4))
        assign(self.cache, after)
        return h


TOKENS = jnp.zeros((8, 64), jnp.int32)
MISTAKES = {
    "line": (
        Looks,
        TOKENS,
        "1.0 MiB, float32[",
        "one line holds more than state, inputs and outputs together, 258.0 KiB",
    ),
    "recast": (
        Layers,
        jnp.ones((4, 64)),
        "128.0 KiB float32[8,64,64]: ",
        "all of model.w once more in another dtype; cast it inside the loop, a step's part at a time",
    ),
    "joined": (
        Fused,
        jnp.ones((4, 128)),
        "192.0 KiB float32[128,384]: ",
        "once more, joined into one array; keep them in one Variable, or take each by itself",
    ),
    "unread": (
        Steps,
        jnp.ones((16, 64)),
        "400.0 KiB float32[100,16,64]: ",
        "a scan stacks its outputs, of which one step is read; carry that one",
    ),
    "restacked": (
        Decodes,
        jnp.ones(64),
        "64.0 KiB: all of model.cache once more: ",
        "a scan takes it step by step, writes a part and stacks it anew; carry the whole stack, and write into it in place",
    ),
    "saved": (
        Deep,
        jnp.ones((64, 32)),
        "the largest part of the peak: ",
        "what 8 steps of a scan save for the backward pass, ",
    ),
}


def line_of(subject, words):
    """``path:line`` of the line of a class that has the words."""
    lines, first = inspect.getsourcelines(subject)
    (number,) = (number for number, line in enumerate(lines, first) if words in line)
    return f"{__file__}:{number}"


WHERE = {
    "line": "jax.nn.one_hot(",
    "recast": "astype(jnp.float32) if",
    "joined": "jnp.concatenate([self.q",
    "unread": "length=100)",
    "restacked": "jax.lax.scan(layer, x, self",
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
    assert piece.endswith(f"({line_of(subject, WHERE[kind])})")
    assert check(subject(wastes=False), x, **JIT).advice == ()


@pytest.mark.parametrize("kind", some(MISTAKES, {"saved", "restacked"}))
def test_advice_fails_where_it_is_asked_to(kind):
    subject, x, *parts = MISTAKES[kind]
    report = check(subject(wastes=True), x, **JIT, memory_advice="fail")
    assert report.verdict == "violated"
    (violation,) = report.violations
    assert (violation.invariant, violation.summary) == ("memory", "the un-nested call spends memory that it need not")
    assert parts[1] in dict(violation.details)["advice"]
    assert check(subject(wastes=False), x, **JIT, memory_advice="fail").ok


def test_an_outer_jit_or_remat_of_the_call_hides_nothing():
    inside = nnx.jit(lambda model, x: model(x))
    (piece,) = check(inside, Layers(wastes=True), jnp.ones((4, 64)), **JIT).advice
    assert "all of model.w once more" in piece


@pytest.mark.parametrize("name", models())
def test_a_healthy_model_gets_none(name):
    case = HEALTHY[name]()
    assert check(case.subject, *case.args, **JIT).advice == ()


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


@pytest.mark.parametrize("wide", [1, 4])
def test_what_the_layers_of_a_model_leave_for_the_backward_pass_is_no_line_of_its_own(wide):
    x = jnp.ones((2048, 64))
    for subject, *args in ((trains, Plain(wide), x, x), (Plain(wide), x)):
        report = check(subject, *args, **JIT, memory_advice="fail")
        assert report.ok, report.advice


# --- the rules, on figures


SIZES = Sizes(state=1_000_000, inputs=1000, outputs=1000)


def pieces(at_line=0, *, inserted=False, more=(), **facts):
    live = [
        *more,
        Held(200_000, "float32[50000]", "output", "dot", ("m.py:9",)),
        Held(at_line, "float32[7,7]", "temporary", "dot", ("m.py:1",), inserted=inserted),
    ]
    return [
        (type(piece), piece.bytes)
        for piece in advice(2_001_000, live, Waste(**facts), ["model.w", "model.v"], ["x"], SIZES)
    ]


def recast(size, **changed):
    return Recast(**{"leaf": 0, "line": "m.py:2", "dtype": "float32", "type": "float32[50000]", "bytes": size, "widens": True, "looped": False, **changed})  # fmt: skip


def test_a_leaf_counts_from_a_quarter_of_the_state_on_where_its_buffer_is_at_the_peak():
    assert pieces(recasts=(recast(250_000),)) == [(Recast, 250_000)]
    assert pieces(recasts=(recast(249_999),)) == []
    assert pieces(recasts=(recast(250_000, type="float32[7]"),)) == []


def test_mixed_precision_is_no_waste_and_a_stack_that_a_loop_takes_is():
    assert pieces(recasts=(recast(250_000, widens=False),)) == []
    assert pieces(recasts=(recast(250_000, widens=False, looped=True),)) == [(Recast, 250_000)]


@pytest.mark.parametrize(
    "size, kind, others, told",
    [
        (250_000, "temporary", ("model.v",), True),
        (249_999, "temporary", ("model.v",), False),
        (250_000, "temporary", ("x",), False),
        (250_000, "temporary", (), False),
        (250_000, "output", ("model.v",), False),
    ],
    ids=["a quarter of the state", "less", "an input", "one alone", "handed out"],
)
def test_leaves_that_are_joined_count_from_a_quarter_of_the_state_on(size, kind, others, told):
    array = Held(size, "float32[9]", kind, "concatenate", ("m.py:5",), "model.w", whole=True, joined=others)
    assert pieces(more=(array,)) == [(Joined, size)] * told


def test_what_a_scan_saves_counts_from_half_of_the_peak_on_without_its_carry():
    assert pieces(saved=(Saved("m.py:3", 4, 1_000_500, 0),)) == [(Saved, 1_000_500)]
    assert pieces(saved=(Saved("m.py:3", 4, 1_000_500, 1),)) == []


def test_a_stack_counts_from_the_floor_on():
    assert pieces(stacks=(Stack("m.py:4", "float32[50000]", 65536, False),)) == [(Stack, 65536)]
    assert pieces(stacks=(Stack("m.py:4", "float32[50000]", 65535, False),)) == []


@pytest.mark.parametrize("leaf, size, told", [(0, 250_000, True), (0, 249_999, False), (2, 250_000, False)])
def test_what_a_scan_stacks_anew_counts_from_a_quarter_of_the_state_on_and_inputs_do_not(leaf, size, told):
    assert pieces(restacked=(Restacked(leaf, "m.py:6", "float32[50000]", size),)) == [(Restacked, size)] * told
    assert pieces(restacked=(Restacked(leaf, "m.py:6", "float32[7]", size),)) == [], "not there at the peak"


def test_the_keys_and_the_values_of_a_line_are_one_piece():
    halves = tuple(Restacked(number, "m.py:6", "float32[50000]", 125_000) for number in (0, 1, 0))
    assert pieces(restacked=halves) == [(Restacked, 250_000)]


def test_a_line_counts_where_it_is_larger_than_all_that_goes_in_and_comes_out():
    assert pieces(at_line=2_004_001) == [(LargeLine, 2_004_001)]
    assert pieces(at_line=2_004_000) == []
    assert pieces(at_line=2_004_000, more=(Held(2_004_000, "float32[7,7]", "temporary", "dot", ("m.py:1",)),)) == []
    assert pieces(at_line=2_004_001, inserted=True) == []
    assert pieces(at_line=2_004_001, stacks=(Stack("m.py:1", "float32[50000]", 70_000, True),)) == [(Stack, 70_000)]


# --- the facts of a jaxpr


def facts_of(f, *args):
    return waste(compat.open_jaxpr(jax.make_jaxpr(f)(*args)))


def test_every_step_that_is_read_makes_a_stack_no_waste():
    def steps(x, read):
        return read(jax.lax.scan(lambda h, _: (h * 2, h), x, None, length=5)[1])

    x = jnp.ones(3)
    assert [stack.read for stack in facts_of(lambda x: steps(x, lambda every: every[-1]), x).stacks] == [True]
    assert [stack.read for stack in facts_of(lambda x: steps(x, lambda every: x), x).stacks] == [False]
    assert facts_of(lambda x: steps(x, lambda every: every.sum(0)), x).stacks == ()
    assert facts_of(lambda x: steps(x, lambda every: every), x).stacks == ()


def scanned(body):
    """The numbers of the inputs that a scan over a stack, with these steps, stacks anew."""
    call = jax.jit(lambda stack, x: jax.lax.scan(body, x, stack))
    return [leaf.leaf for leaf in facts_of(call, jnp.ones((3, 5)), jnp.ones(())).restacked]


def test_a_stack_of_which_each_step_writes_a_part_is_stacked_anew_and_no_other():
    update = jax.jit(lambda old, h: old.at[0].set(h))
    assert scanned(lambda h, old: (h, old.at[0].set(h))) == [0]
    assert scanned(lambda h, old: (h, update(old, h))) == [0]
    assert scanned(lambda h, old: (h, jax.lax.optimization_barrier(old).at[0].set(h))) == [0]
    assert scanned(lambda h, old: (h, update(update(old, h), h).at[1].add(h))) == [0]
    assert scanned(lambda h, old: (h, old * 0.9)) == [], "other values as a whole, as the mean of a norm"
    assert scanned(lambda h, old: (h, jnp.zeros(5).at[0].set(old[1]))) == [], "a new array"
    assert scanned(lambda h, old: (h + old.at[0].set(h).sum(), None)) == [], "not stacked"
    assert scanned(lambda h, old: (h + old.sum(), jax.lax.optimization_barrier(old))) == [], "handed on"


def test_part_of_a_leaf_and_what_was_computed_are_no_recast():
    w = jnp.ones((4, 4), jnp.bfloat16)
    assert len(facts_of(lambda w: w.astype(jnp.float32), w).recasts) == 1
    assert facts_of(lambda w: w[0].astype(jnp.float32), w).recasts == ()
    assert facts_of(lambda w: (w + 1).astype(jnp.float32), w).recasts == ()
    for dtype in (jnp.int16, jnp.float8_e4m3fn):
        assert facts_of(lambda w: w.astype(jnp.float32), w.astype(dtype)).recasts == (), "quantized on purpose"
    assert primitives.REMATS <= primitives.CALLS, "looked into"


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


@pytest.mark.slow
def test_without_v_the_summary_says_where_to_look(inner):
    inner().stdout.fnmatch_lines(["*5 held; worst peak *; see -v for advice on memory"])
