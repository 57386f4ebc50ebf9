"""The further transforms: gradients, branches that are really there, what cannot be run, and what a remat saves."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checking import FURTHER_SINGLES, LACKING, broken, call, full, slow, text
from counts import Counts
from flax import nnx
from healthy import assign, numbers

from pytest_nnxcheck import CheckError, Layer, Nesting, check
from pytest_nnxcheck.engine.example import Call
from pytest_nnxcheck.engine.observe import How, observe
from pytest_nnxcheck.subject.profile import profile as profile_of
from pytest_nnxcheck.subject.subject import bind
from pytest_nnxcheck.transforms import layers
from pytest_nnxcheck.transforms.compose import Guards, make_plan, plain_jit

FEW = {"sweep": "singles", "max_examples": 0}


def run(model, *inputs, nesting):
    """What the program of a nesting returned, gradients included."""
    subject = bind(model, inputs, {})
    call = Call(subject, Nesting.parse(nesting), profile=profile_of(subject))
    found = observe(call, call.nesting, How(donate="none"))
    assert found.error is None, found.error
    return found


class Norm(nnx.Module):
    """Has parameters, statistics that change, an integer output and an integer input."""

    def __init__(self):
        self.linear = nnx.Linear(3, 3, rngs=nnx.Rngs(0))
        self.norm = nnx.BatchNorm(3, rngs=nnx.Rngs(0))

    def __call__(self, x, scale):
        y = self.norm(self.linear(x)) ** 2
        return y * scale, jnp.int32(3)


@pytest.mark.slow
@pytest.mark.parametrize(
    "nesting", ["grad", "grad[functional]", "jit > grad", "jit[functional] > grad[functional]", "grad > custom_vjp"]
)
def test_gradients_are_those_of_the_sum_of_the_outputs_by_the_parameters(nesting):
    x, scale = numbers((4, 3)), jnp.int32(2)
    graphdef, parameters, rest = nnx.split(Norm(), nnx.Param, ...)

    def loss(parameters):
        return nnx.merge(graphdef, parameters, jax.tree.map(lambda leaf: leaf, rest))(x, scale)[0].sum()

    wanted = jax.grad(loss)(parameters)
    found = run(Norm(), x, scale, nesting=nesting)
    assert len(found.returned[1]) == 4
    for got, want in zip(found.returned[1], jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)
    assert not np.allclose(found.state.norm.mean[...], 0), "the statistics survive"


@pytest.mark.parametrize("nesting", ["grad[closure]", "grad[jax_closure]"])
def test_with_the_module_captured_gradients_are_by_the_floating_point_inputs(nesting):
    x, tokens, linear = numbers((4, 3)), jnp.arange(4), nnx.Linear(3, 2, rngs=nnx.Rngs(0))

    def picked(model, x, tokens):
        return model(x)[tokens]

    (gradient,) = run(picked, linear, x, tokens, nesting=nesting).returned[1]
    np.testing.assert_allclose(gradient, jax.grad(lambda x: linear(x).sum())(x), rtol=1e-5)


@pytest.mark.parametrize("name", ["cond_functional", "switch_functional", "cond_jax_closure", "switch_jax_closure"])
def test_the_branch_that_is_not_taken_is_in_the_program(name):
    model, x = nnx.Linear(3, 3, rngs=nnx.Rngs(0)), numbers((2, 3))
    subject = bind(model, (x,), {})
    profile = profile_of(subject)
    plan = make_plan(subject, profile, Layer("cond"), (), Guards(subject), plain_jit)
    layer = getattr(layers, name)(subject.program, plan)
    assert " conditional(" in jax.jit(lambda x: layer(model, x)).lower(x).compile().as_text()


# --- what cannot be run is rejected, with the reason


class Adds(nnx.Module):
    def __init__(self):
        self.linear = nnx.Linear(3, 3, rngs=nnx.Rngs(0))

    def __call__(self, x):
        y = self.linear(x)
        self.seen = nnx.Cache(y)
        return y


class Retypes(nnx.Module):
    def __init__(self):
        self.seen = nnx.BatchStat(jnp.zeros((), jnp.float32))

    def __call__(self, x):
        assign(self.seen, jnp.ones((), jnp.float16))
        return x


def until_small(model, x):
    return jax.lax.while_loop(lambda y: y.sum() > 1e-3, lambda y: y / 2 + model(y) * 0, x)


def calls_back(model, x):
    y = model(x)
    return jax.pure_callback(lambda y: y, jax.ShapeDtypeStruct(y.shape, y.dtype), y)


def linear():
    return nnx.Linear(3, 3, rngs=nnx.Rngs(0))


def largest(model, x):
    return model(x).argmax(-1)


@pytest.mark.parametrize(
    "subject, inputs, nesting, reason",
    [
        (until_small, (linear(), numbers((2, 3))), "jit > grad", "the call cannot be differentiated: ValueError: Reverse"),
        (until_small, (linear(), numbers((2, 3))), "grad[closure]", "the call cannot be differentiated: ValueError"),
        (calls_back, (linear(), numbers((2, 3))), "grad[functional]", "the call cannot be differentiated: ValueError: "),
        (nnx.Dropout(0.5, rngs=nnx.Rngs(0)), (numbers((2, 3)),), "jit > grad", "the state holds no floating point nnx.Param"),
        (largest, (linear(), numbers((2, 3))), "vmap > grad", "the call returns no floating point array"),
        (nnx.Embed(5, 3, rngs=nnx.Rngs(0)), (jnp.arange(3),), "grad[closure]", "the call takes no floating point array"),
        (Adds(), (numbers((2, 3)),), "cond", "cond hands on the state where it skips the call, and the call adds model.seen"),
        (Adds(), (numbers((2, 3)),), "fori_loop", "fori_loop carries the state, and the call adds model.seen to it"),
        (Retypes(), (numbers((2, 3)),), "switch[functional]", "switch[functional] hands on the state where it skips the call"),
        (Counts(plain=True, width=3), (numbers((2, 3)),), "cond", "cond compares the modules before and after a step"),
        (Counts(plain=True, width=3), (numbers((2, 3)),), "switch", "switch compares the modules before and after a step"),
    ],
)  # fmt: skip
def test_a_layer_that_cannot_take_the_call_says_why(subject, inputs, nesting, reason):
    outcome = call(subject, *inputs, nesting=nesting).outcome
    assert (outcome.verdict, outcome.unfit) == ("rejected", True), outcome
    assert outcome.reason.startswith(reason)


def test_a_flax_without_nnx_shard_map_says_so():
    assert bool(LACKING) != hasattr(nnx, "shard_map")
    for nesting in LACKING:
        outcome = call(linear(), numbers((2, 3)), nesting=f"jit > {nesting}").outcome
        assert outcome.unfit
        assert outcome.reason.endswith("has no nnx.shard_map")


def test_a_call_that_adds_state_holds_under_what_can_take_it(example):
    for nesting in FURTHER_SINGLES:
        layer = Layer.parse(nesting)
        if layer.style == "functional" or nesting == "grad":
            found = call(Adds(), numbers((2, 3)), nesting=nesting, example=example)
            assert found.outcome.verdict == "held", text(found)


def clips(model, x):
    """The backward pass reads what jax.custom_vjp hands it."""
    clip = jax.custom_vjp(lambda x: x)
    clip.defvjp(lambda x: (x, x), lambda x, gradient: (jnp.where(x > 1, 0, gradient),))
    return jax.remat(clip)(model(x))


def clips_beside(model, x):
    """The backward pass reads what the forward pass left in a dict: a tracer of a trace that has ended."""
    kept = {}

    def forward(x):
        kept["x"] = x * 2
        return x, None

    clip = jax.custom_vjp(lambda x: x)
    clip.defvjp(forward, lambda _, gradient: (jnp.where(kept["x"] > 1, 0, gradient),))
    return jax.remat(clip)(model(x))


@pytest.mark.parametrize("nesting", ["grad", *slow("jit > grad", "grad[functional] > vmap")])
def test_a_leak_that_only_a_gradient_shows_is_no_call_without_a_gradient(nesting):
    outcome = call(clips_beside, linear(), numbers((2, 3)), nesting=nesting).outcome
    assert (outcome.verdict, outcome.unfit) == ("failed", False), outcome
    assert outcome.reason.startswith("UnexpectedTracerError"), outcome.reason
    found = call(clips, linear(), numbers((2, 3)), nesting=nesting)
    assert found.outcome.verdict == "held", text(found)


# --- what was left out is said once, and drawn no more


@pytest.mark.slow
def test_a_subject_without_parameters_is_checked_under_the_rest():
    settings = {"transforms": ("jit", "remat", "grad"), "styles": "argument"}
    made = check(nnx.Dropout(0.5, rngs=nnx.Rngs(0)), numbers((4, 3)), **settings)
    assert made.ok, str(made)
    assert made.notes == ("grad left out: the state holds no floating point nnx.Param to differentiate by",)
    reasons = {str(outcome.nesting): outcome.reason for outcome in made.outcomes if outcome.unfit}
    assert reasons["jit > grad"] == "not run: grad is left out"
    assert not any("grad" in str(outcome.nesting) for outcome in made.outcomes if outcome.verdict == "held")
    assert "3 left out" in str(made)
    assert "rejected" not in str(made)


@pytest.mark.slow
def test_a_rejection_of_ours_is_not_one_of_flax():
    subject = nnx.Dropout(0.5, rngs=nnx.Rngs(0))
    made = check(subject, numbers((4, 3)), transforms="jit,grad", styles="argument", on_rejection="fail", **FEW)
    assert made.ok, str(made)


@pytest.mark.slow
def test_where_nothing_can_be_run_it_is_said():
    with pytest.raises(CheckError, match="no nesting can be run .the state holds no floating point nnx.Param"):
        check(nnx.Dropout(0.5, rngs=nnx.Rngs(0)), numbers((4, 3)), transforms="grad", styles="argument", **FEW)


# --- memory


class Deep(nnx.Module):
    """16 layers of 17 KiB; with a batch of 512 the activations outweigh them by far."""

    def __init__(self):
        rngs = nnx.Rngs(0)
        self.layers = nnx.Sequential(*(nnx.Linear(64, 64, rngs=rngs) for _ in range(16)))

    def __call__(self, x):
        for layer in self.layers.layers:
            x = jnp.tanh(layer(x))
        return x


class Twin(nnx.Module):
    """1 MiB of parameters and a state that changes: above the floor of every memory rule."""

    def __init__(self):
        rngs = nnx.Rngs(0)
        self.inner = nnx.Linear(256, 512, rngs=rngs)
        self.norm = nnx.BatchNorm(512, rngs=rngs)
        self.outer = nnx.Linear(512, 256, rngs=rngs)

    def __call__(self, x):
        return x + self.outer(nnx.relu(self.norm(self.inner(x))))


@pytest.mark.slow
@pytest.mark.parametrize(
    "nesting",
    [
        *(f"jit > {layer}" for layer in FURTHER_SINGLES if "[" not in layer),
        "jit > vmap > grad[functional]",
        *full(
            *(f"jit > {layer}" for layer in FURTHER_SINGLES if "functional" in layer),
            *(
                "jit > grad > scan",
                "jit > grad > remat",
                "jit > scan > grad",
                "jit > grad > fori_loop",
                "jit > grad > cond",
            ),
            "jit[functional] > grad[functional] > fori_loop > scan[functional]",
        ),
    ],
)
def test_a_model_above_the_floor_stays_below_1_4_of_its_expected_peak(nesting, example):
    for budget in ("1.4x", None):  # by default: no copies either
        chosen = {"memory_budget": budget} if budget else {}
        found = call(Twin(), numbers((16, 256)), nesting=nesting, example=example, **chosen)
        assert found.outcome.verdict == "held", text(found)


@pytest.mark.slow
def test_the_expected_peak_of_a_gradient_is_that_of_the_un_nested_gradient(example):
    x = numbers((32, 64))
    plain, under = (
        call(Deep(), x, nesting=nesting, memory_budget="1x", example=example).outcome
        for nesting in ("jit", "jit > grad")
    )
    assert under.peak > 2 * plain.peak / 1.2, "gradients as large as the parameters, and activations"
    assert under.budget > 1.8 * plain.budget
    over = call(Deep(), x, nesting="jit > grad", memory_budget="0.5x", example=example)
    assert broken(over) == ["memory"]


@pytest.mark.parametrize("style, verdict", [("jax_closure", "held"), ("functional", "rejected")])
def test_a_gradient_by_the_inputs_needs_no_parameter(style, verdict):
    found = call(lambda x: x * 2, numbers((2, 3)), nesting=f"grad[{style}]", transforms="jit,grad")
    assert found.outcome.verdict == verdict, text(found)
