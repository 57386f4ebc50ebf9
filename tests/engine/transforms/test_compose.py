"""Nestings put together: shapes, the effect on the state, and the guard that blames."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checking import FURTHER_SINGLES, SINGLES, Example, call, text
from flax import nnx
from healthy import assign, numbers
from hypothesis import given
from hypothesis import strategies as st

from pytest_nnxcheck import Layer, Nesting
from pytest_nnxcheck.core.catalogue import STYLES, TRANSFORMS, layer_names
from pytest_nnxcheck.subject.profile import Output, Profile, Training
from pytest_nnxcheck.transforms.bound import factor
from pytest_nnxcheck.transforms.compose import output_shapes, primal, stack_inputs, un_nest

REPEATS = {"scan": 2, "while_loop": 2, "fori_loop": 2, "call_first": 2}
PLAIN = [str(Layer(transform, style)) for style in STYLES[:2] for transform in TRANSFORMS]
MORE = [text for text in FURTHER_SINGLES if not Layer.parse(text).captures]


class Counter(nnx.Variable):
    """Counts calls."""


class Counts(nnx.Module):
    """``[2, 3] -> [2, 3]``; what it returns depends on how often it was called."""

    def __init__(self):
        self.linear = nnx.Linear(3, 3, rngs=nnx.Rngs(0))
        self.calls = Counter(jnp.zeros((), jnp.int32))

    def __call__(self, x):
        assign(self.calls, self.calls[...] + 1)
        return {"y": self.linear(x) + self.calls[...], "count": self.calls[...], "name": "counts"}


@pytest.fixture(scope="module")
def reading_example():
    """With shortcuts, the values of the traced program: compiled as a whole, as for a test that reads them."""
    return Example(values_needed=True)


DEEP = (
    "jit > scan > vmap",
    "scan > jit > while_loop",
    "vmap > call_first",
    "fori_loop > grad > scan",
    "vmap > cond > grad[functional]",
    "grad > custom_vjp[functional] > remat",
    "scan[functional] > switch > grad > vmap",
    "grad > call_first",
    "jit > grad > fori_loop",
    "while_loop[functional] > grad > jit",
)


# Without shortcuts each nesting is run: the layers one by one show that it is, and the deep ones have the same parts.
@pytest.mark.parametrize(
    "nesting, shortcuts",
    [
        *((nesting, how) for how in ("on", "off") for nesting in (*PLAIN, *MORE, "call_first")),
        *((nesting, "on") for nesting in DEEP),
        *(pytest.param(nesting, "off", marks=pytest.mark.slow) for nesting in DEEP),
    ],
)
def test_a_nesting_gives_the_un_nested_output_and_as_many_calls_as_it_makes(nesting, shortcuts, reading_example):
    model, x = Counts(), numbers((2, 3))
    want = Counts()(x)
    found = call(model, x, nesting=nesting, example=reading_example, shortcuts=shortcuts)
    assert found.outcome.verdict == "held", text(found)
    assert found.output["name"] == "counts"
    assert found.output["y"].shape == (2, 3)
    calls = int(np.prod([REPEATS.get(layer.transform, 1) for layer in Nesting.parse(nesting).layers]))
    assert model.calls[...] == (calls if "call_first" not in nesting else 2)
    if not any(again in nesting for again in ("while_loop", "fori_loop", "call_first")):
        np.testing.assert_allclose(found.output["y"], want["y"], rtol=1e-5)


@given(st.lists(st.sampled_from(layer_names()), max_size=4))
def test_stacked_inputs_and_abstract_outputs_lose_their_axes_again(names):
    nesting = Nesting(tuple(map(Layer, names)))
    out, gradient = jax.ShapeDtypeStruct((3,), jnp.float32), jax.ShapeDtypeStruct((7,), jnp.float32)
    shapes = output_shapes(nesting.layers, Profile(Output((out,)), training=Training(gradients=(gradient,))), ())
    zeros = jax.tree.map(lambda leaf: np.zeros(leaf.shape), shapes)
    assert jax.tree.map(np.shape, un_nest(nesting, zeros)) == ((3,),)
    assert {leaf.shape[-1] for leaf in jax.tree.leaves(primal(nesting.layers, zeros))} == {3}
    assert sum(leaf.shape[-1] == 7 for leaf in jax.tree.leaves(zeros)) == names.count("grad")
    axes = sum(name in ("scan", "vmap", "call_first") for name in names)
    assert stack_inputs(nesting, (np.zeros(5),))[0].shape == (2,) * axes + (5,)
    assert factor(nesting) == 2**axes


CACHE = {}


class Caches(nnx.Module):
    """Keeps an activation in a module-level dict: a leak under any transform."""

    def __init__(self):
        self.linear = nnx.Linear(3, 3, rngs=nnx.Rngs(0))

    def __call__(self, x):
        CACHE["last"] = y = self.linear(x)
        return y


INNER = [inner for inner in PLAIN if not inner.startswith("eval_shape")]
NESTED = [
    # In every run each layer once outside, and once or twice inside; all pairs in the full one.
    pytest.param(outer, inner, marks=[] if (number - place) % len(INNER) == 0 else pytest.mark.full)
    for number, outer in enumerate(PLAIN)
    for place, inner in enumerate(INNER)
]
NESTED += [
    pytest.param(outer, inner, marks=pytest.mark.slow if (number + place) % 4 == 1 else pytest.mark.full)
    for number, outer in enumerate(("jit", "scan[functional]"))
    for place, inner in enumerate(MORE)
]
NESTED += [("grad[functional]", "scan"), ("fori_loop", "remat"), ("cond", "jit")]


@pytest.mark.parametrize("outer, inner", NESTED)
def test_the_innermost_layer_is_blamed(outer, inner):
    outcome = call(Caches(), jnp.ones((2, 3)), nesting=f"{outer} > {inner}").outcome
    assert [(leak.path, str(leak.layer)) for leak in outcome.evidence.leaks] == [("CACHE['last']", inner)]
    assert "last" not in CACHE, "put back"


@pytest.mark.parametrize("nesting", [text for text in (*SINGLES, *FURTHER_SINGLES) if Layer.parse(text).captures])
def test_every_layer_that_captures_takes_a_model_that_changes_nothing(nesting, example):
    found = call(nnx.Linear(3, 3, rngs=nnx.Rngs(0)), jnp.ones((2, 3)), nesting=nesting, example=example)
    assert found.outcome.verdict == "held", text(found)
    assert found.output.shape == (2, 3)
