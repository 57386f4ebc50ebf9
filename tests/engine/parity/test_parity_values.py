"""Parity of plain values: arrays of NumPy wherever they are kept, Python scalars, flags; and of values that rounding decides."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checking import broken, call, hint, text
from flax import nnx
from healthy import FLAX, assign, numbers
from parity_calls import TREE
from wild_training import apply_gradients, optimizer_of

from pytest_nnxcheck.compat import graph, staging
from pytest_nnxcheck.transforms import layers

X = numbers((3, 4))
KEPT = {
    "array": lambda first: np.array([first, 1], np.int32),
    "tuple": lambda first: (np.array([first, 1], np.int32),),
    "list": lambda first: [np.array([first, 1], np.int32), "name"],
    "dict": lambda first: {"indices": [np.array([first, 1], np.int64)], "scale": np.float64(2.0)},
    "jax": lambda first: (jnp.array([first, 1], np.int32),),
}
data = getattr(nnx, "data", lambda value: value)


class Permutes(nnx.Module):
    """Keeps its indices in arrays of NumPy, as published flows do; counts its calls."""

    def __init__(self, kept):
        self.kept = data(kept)
        self.count = nnx.BatchStat(jnp.zeros(()))

    def __call__(self, x):
        assign(self.count, jnp.asarray(self.count) + 1)
        return x * 2


def moved(leaf):
    return leaf if isinstance(leaf, str) or not jnp.ndim(leaf) else leaf + 1


class Forgets(Permutes):
    """Sets others under a trace."""

    def __call__(self, x):
        if isinstance(x, jax.core.Tracer):
            self.kept = data(jax.tree.map(moved, self.kept))
        return super().__call__(x)


carries = pytest.mark.skipif(FLAX < (0, 10, 7), reason="earlier flax takes no arrays in containers into a transform")


@carries
@pytest.mark.parametrize("nesting", ["jit", "scan", "vmap", "un-nested"])
@pytest.mark.parametrize("kind", KEPT)
def test_arrays_of_numpy_are_compared_by_their_numbers(kind, nesting, example):
    found = call(Permutes(KEPT[kind](0)), X, nesting=nesting, invariants="parity", example=example)
    assert found.outcome.verdict == "held", text(found)


@carries
@pytest.mark.parametrize("kind", ["array", "tuple", "list", "dict"])
def test_other_numbers_are_told_with_both_values(kind):
    found = call(Forgets(KEPT[kind](0)), X, nesting="jit", invariants="parity")
    assert broken(found) == ["parity"], text(found)
    assert "expected 0, got 1" in text(found)
    assert f"model.kept{ {'array': '', 'dict': chr(91) + repr('indices') + '][0]'}.get(kind, '[0]') }" in text(found)


class Fitted(nnx.Module):
    """Sets a flag; ``wrong`` sets another one under a trace."""

    def __init__(self, *, wrong):
        self.fitted, self.wrong = nnx.BatchStat(jnp.array(False)), wrong

    def __call__(self, x):
        assign(self.fitted, jnp.array(not (self.wrong and isinstance(x, jax.core.Tracer))))
        return x * 2


def test_a_python_scalar_of_the_same_value_is_equal_and_a_note():
    hands_out_bool = type(jax.checkpoint(lambda x: jnp.array(True))(1.0)) is bool
    found = call(Fitted(wrong=False), X, nesting="remat", invariants="parity")
    assert found.outcome.verdict == "held", text(found)
    note = "model.fitted is a Python bool now, no array: jax.checkpoint outside of a jit hands a constant out as it is"
    assert (note in found.outcome.notes) is hands_out_bool
    assert broken(call(Fitted(wrong=True), X, nesting="remat", invariants="parity")) == ["parity"]


# --- what rounding decides


class Mixed(nnx.Module):
    """Computes in bfloat16 with parameters in float32. The norm takes the bias of the layer before it away: its gradient is rounding."""

    def __init__(self):
        self.first = nnx.Linear(8, 16, dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
        self.norm = nnx.LayerNorm(16, dtype=jnp.bfloat16, rngs=nnx.Rngs(1))
        self.last = nnx.Linear(16, 1, dtype=jnp.bfloat16, rngs=nnx.Rngs(2))
        self.steps = nnx.BatchStat(jnp.zeros(()))

    def __call__(self, x):
        h = self.first(x)
        return self.last(nnx.gelu(self.norm(h - h.mean(0))))


def step(model, optimizer, x):
    def loss_of(model):
        return jnp.square(model(x).astype(jnp.float32) - 1).mean()

    loss, gradients = nnx.value_and_grad(loss_of)(model)
    apply_gradients(optimizer, model, gradients)
    assign(model.steps, model.steps[...] + 1)
    return loss


def mixed_step():
    return *optimizer_of(Mixed()), jax.random.normal(jax.random.key(1), (6, 8))


@pytest.mark.slow
@pytest.mark.parametrize(
    "subject, nesting",
    [(step, "jit[functional] > remat"), pytest.param(nnx.jit(step), "un-nested", marks=pytest.mark.full)],
)
def test_a_step_of_adam_in_mixed_precision_holds_and_says_what_rounding_decides(subject, nesting, example):
    found = call(subject, *mixed_step(), nesting=nesting, invariants="parity", example=example)
    assert found.outcome.verdict == "held", text(found)
    (note,) = found.outcome.notes
    assert note.startswith("rounding decides model.first.bias")
    assert note.endswith(": inputs a few roundings away move the un-nested result as far")


class KeepsSigns(nnx.Module):
    """Keeps the signs of what is nothing but rounding, which a jit inside rounds its own way, and a Python number."""

    def __init__(self):
        self.scale = nnx.Param(numbers((64,)))
        self.signs = nnx.BatchStat(jnp.zeros(64))
        self.number = nnx.BatchStat(jnp.zeros(()))

    def __call__(self, x):
        assign(self.signs, jax.jit(lambda v: jnp.sign(jnp.exp(v) * jnp.exp(v) - jnp.exp(v + v)))(self.scale[...]))
        assign(self.number, 3.0)
        return x * 2


def test_of_an_un_nested_call_the_note_on_a_number_comes_before_that_on_rounding():
    found = call(KeepsSigns(), X, nesting="un-nested", invariants="parity")
    assert found.outcome.verdict == "held", text(found)
    assert [note.partition(" ")[0] for note in found.outcome.notes] == ["model.number", "rounding"]


@pytest.mark.slow
def test_one_rounding_of_half_precision_in_a_moment_of_adam_is_no_alarm():
    """On these inputs XLA of jax 0.4 rounds one gradient the other way, which no nudge of the inputs does."""
    model, optimizer, _ = mixed_step()
    found = call(step, model, optimizer, numbers((6, 8)), nesting="jit[functional] > remat", invariants="parity")
    assert found.outcome.verdict == "held", text(found)


@pytest.mark.parametrize("signs", [(1, 1), (1, -1), (-1, 1), (-1, -1)])
def test_what_rounding_decides_is_no_alarm_in_whichever_direction_it_does(signs):
    """A trace stands for a compiler that rounds both elements the one way: of four starts a few roundings away, one goes there."""

    def chooses(x):
        if isinstance(x, jax.core.Tracer):
            return x.sum() * 0 + 1
        return jnp.all((x - 1) * jnp.array(signs) > 0).astype(x.dtype)

    assert call(chooses, jnp.ones(2), nesting="jit", invariants="parity").outcome.verdict == "held"


@pytest.mark.slow
def test_an_update_that_is_dropped_there_is_found_all_the_same(monkeypatch):
    right = layers.jit_functional

    def drops(f, plan):
        def layer(state, *inputs):
            before = [variable for path, variable in graph.variables(state) if path[-1] == "steps"]
            values = [graph.variable_value(variable) for variable in before]
            out = right(f, plan)(state, *inputs)
            for variable, value in zip(before, values, strict=True):
                graph.set_variable_value(variable, value)
            return out

        return layer

    monkeypatch.setattr(layers, "jit_functional", drops)
    found = call(step, *mixed_step(), nesting="jit[functional]", invariants="parity", donate="none")
    assert "model.steps kept its old value: the update was dropped" in text(found)
    assert "largest difference 1 (" in text(found)
    assert "): expected 1, got 0; 1 of 1 elements differ" in text(found)
    assert "first.bias" not in "".join(row for _, row in found.outcome.violations[0].details)


# --- attributes: a hint where its cure was tried


class Starts(nnx.Module):
    """Doubles its first output: by a flag in a Variable, or in a plain attribute."""

    def __init__(self, *, plain):
        self.plain, self.started, self.name = plain, False, "new"
        self.flag = nnx.BatchStat(jnp.array(False))

    def __call__(self, x):
        if self.plain:
            y = x if self.started else x * 2
            self.started = True
            return y
        y = jnp.where(self.flag[...], x, x * 2)
        assign(self.flag, jnp.array(True))
        return y


@pytest.fixture
def in_tree_mode(monkeypatch):
    monkeypatch.setattr(layers, "jit_argument", lambda f, plan: nnx.jit(f, graph=False))


@pytest.mark.skipif(not TREE, reason="tree mode came with flax 0.12")
@pytest.mark.usefixtures("in_tree_mode")
def test_a_flag_that_a_layer_drops_is_told_with_what_chooses_in_its_place():
    found = call(Starts(plain=True), X, nesting="jit", invariants="parity")
    assert (
        "model.started: expected True, as after the same calls one by one (a loop makes one call in each step), got False"
        in text(found)
    )
    assert hint("flag", path="model.started") in text(found)


@pytest.mark.parametrize("nesting", ["scan[functional]", "while_loop[functional]"])
def test_what_a_flag_steers_in_the_next_step_differs_though_the_flag_is_not_compared(nesting):
    """A functional jit hands out no flag, which is a note; the second step of a loop goes by it, which is a difference."""
    alone = call(Starts(plain=True), X, nesting="jit[functional]", invariants="parity")
    assert alone.outcome.verdict == "held", text(alone)
    looped = call(Starts(plain=True), X, nesting=nesting, invariants="parity")
    assert broken(looped) == ["parity"]
    assert "output differs" in text(looped)
    assert "model.started" not in text(looped)


@pytest.mark.parametrize("nesting", ["jit", "jit[functional]", "scan", "while_loop"])
def test_with_what_the_hint_says_it_holds(nesting, example):
    found = call(Starts(plain=False), X, nesting=nesting, invariants="parity", example=example)
    assert found.outcome.verdict == "held", text(found)


class Hinge(nnx.Module):
    """A relu of what is zero wherever product and sum are rounded one after the other; a fused operation rounds once."""

    def __init__(self):
        self.weight = nnx.Param(numbers((8,)))

    def __call__(self, x):
        weight, zero = jnp.asarray(self.weight), jnp.zeros_like(x)
        level = jnp.einsum("ik,ik->i", jnp.stack([x, zero], 1), jnp.stack([weight, zero], 1))
        return jnp.sum(nnx.relu(x * weight - jax.lax.stop_gradient(level)))


def gradient(model, x):
    return jax.tree.leaves(nnx.grad(lambda model: model(x))(model))[0]


def compiled(f, model):
    """What the program computes that a nesting compiles."""
    graphdef, state = nnx.split(model)
    lowered = jax.jit(lambda state, x: f(nnx.merge(graphdef, state), x)).lower(state, numbers((8,)))
    return lowered.compile(compiler_options=staging.compiler_options())(state, numbers((8,)))


UNFUSED = "where XLA fuses no operations, the same program gives the values of the un-nested call"


@pytest.mark.skipif(
    staging.unfused_options() is None or np.array_equal(compiled(gradient, Hinge()), gradient(Hinge(), numbers((8,)))),
    reason="the XLA of jax 0.6.2 fuses them and can leave it; the published GCN shows the same on the newest",
)
@pytest.mark.parametrize("nesting", ["jit", "jit[functional]", "jit > remat"])
def test_a_kink_that_fused_operations_move_is_told_and_no_violation(nesting):
    outcome = call(gradient, Hinge(), numbers((8,)), nesting=nesting, invariants="parity").outcome
    assert outcome.verdict == "held"
    assert outcome.notes == (f"rounding decides output: {UNFUSED}",)


class Rotary(nnx.Module):
    """Positions as angles that are computed of constants alone: XLA simplifies the reciprocal of the power, and no start moves it."""

    def __init__(self):
        self.query = nnx.Linear(160, 160, rngs=nnx.Rngs(0))

    def __call__(self, x, off=0.0):
        frequencies = 1.0 / (10000 ** (jnp.arange(0, 160, 2) / 160))
        angles = jnp.arange(len(x))[:, None] * frequencies + off * isinstance(x, jax.core.Tracer)
        one, other = jnp.split(self.query(x), 2, -1)
        cos, sin = jnp.cos(angles), jnp.sin(angles)
        return jnp.concatenate([one * cos - other * sin, one * sin + other * cos], -1)


@pytest.mark.slow
def test_what_is_computed_of_constants_has_room():
    x = numbers((512, 160))
    assert call(Rotary(), x, nesting="jit", invariants="parity").outcome.verdict == "held"
    wrong = call(lambda model, x: model(x, off=0.01), Rotary(), x, nesting="jit", invariants="parity")
    assert broken(wrong) == ["parity"]


@pytest.mark.parametrize("precision", [None, jax.lax.Precision.HIGHEST])
def test_what_a_chip_rounds_in_a_product_is_no_alarm(precision, monkeypatch):
    """The trace rounds its operand to TF32, as a kernel of a GPU does unless the call asks for more precision."""

    def multiplies(model, x):
        operand = jax.lax.reduce_precision(x, 8, 10) if isinstance(x, jax.core.Tracer) else x
        return jnp.dot(operand, jnp.asarray(model.kernel), precision=precision)

    monkeypatch.setattr(staging, "_OF_BACKEND", {"cpu": 2.0**-10})
    found = call(multiplies, nnx.Linear(4, 8, rngs=nnx.Rngs(0)), X, nesting="jit", invariants="parity")
    assert broken(found) == ([] if precision is None else ["parity"])


class Turns(nnx.Module):
    """Turns complex numbers by angles that grow what rounding leaves."""

    def __init__(self):
        self.weight = nnx.Param(jnp.asarray(numbers((8, 8)) * (0.5 + 0.5j), jnp.complex64))

    def __call__(self, x):
        weight = jnp.asarray(self.weight)
        z = jnp.exp(1j * x) @ weight
        for _ in range(12):
            z = z / jnp.linalg.norm(z, axis=-1, keepdims=True)
            z = (z * jnp.exp(20j * jnp.abs(z))) @ weight
        return z


@pytest.mark.slow
def test_complex_numbers_are_nudged_as_well():
    found = call(Turns(), jnp.arange(64).reshape(8, 8), nesting="jit", invariants="parity")
    assert found.outcome.verdict == "held", text(found)


@pytest.mark.parametrize("wrong", [False, True])
def test_integers_that_rounding_chooses_excuse_no_others(wrong):
    """Of a mask one column is noise; a trace turns all the others round."""

    def masks(x):
        mask = (x - x.mean(0)) > 0
        return ~mask if wrong and isinstance(x, jax.core.Tracer) else mask

    found = call(masks, numbers((64, 64)).at[:, 0].set(0.1), nesting="jit", invariants="parity")
    assert broken(found) == (["parity"] if wrong else [])


class Router(nnx.Module):
    """The best of some experts, in half precision: XLA keeps the scores in float32 where it fuses them, and chooses another of two that are alike."""

    def __init__(self):
        self.gate = nnx.Linear(32, 8, dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
        self.hits = nnx.BatchStat(jnp.zeros(8, jnp.int32))

    def __call__(self, x):
        _, chosen = jax.lax.top_k(nnx.softmax(self.gate(x)), 2)
        assign(self.hits, self.hits[...].at[chosen].add(1))
        return chosen


@pytest.mark.slow
@pytest.mark.usefixtures("optimized")
@pytest.mark.parametrize("nesting", ["jit", "un-nested"])
def test_integers_that_rounding_chooses_are_no_violation(nesting):
    tokens, jitted = jax.random.normal(jax.random.key(0), (2048, 32)), nnx.jit(lambda model, x: model(x))
    subject, args = (Router(), (tokens,)) if nesting == "jit" else (jitted, (Router(), tokens))
    outcome = call(subject, *args, nesting=nesting, invariants="parity").outcome
    assert outcome.verdict == "held", outcome
    assert all(note.startswith("rounding decides ") for note in outcome.notes)


CALLS = [0.0]


class Counts(nnx.Module):
    """Scales by the number of its calls, which is kept outside of its state: a trace freezes it."""

    def __call__(self, x):
        CALLS[0] += 1.0
        return x * jnp.asarray(CALLS[0], x.dtype)


@pytest.mark.parametrize("dtype", ["float32", "int32"])
@pytest.mark.parametrize("nesting", ["scan", "jit > scan"])
def test_what_a_trace_froze_differs(nesting, dtype):
    assert broken(call(Counts(), jnp.arange(8, dtype=dtype), nesting=nesting, invariants="parity")) == ["parity"]
