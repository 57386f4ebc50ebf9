"""Transforms of the user's own: where they are registered, what they must keep, and how they read in a report."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from checking import broken, call, text
from flax import nnx
from healthy import HEALTHY, numbers

from pytest_nnxcheck import CheckError, Layer, Nesting, check, register_transform
from pytest_nnxcheck.core.catalogue import TRANSFORMS, layer_names
from pytest_nnxcheck.core.settings import merge, parse_given
from pytest_nnxcheck.core.text import Unreadable
from pytest_nnxcheck.runner import strategies
from pytest_nnxcheck.runner.strategies import Exclusions

pytestmark = pytest.mark.usefixtures("forgotten")


def scan_layers(f):
    """A scan over a stack of layers, here of one."""

    def layer(state, *inputs):
        def step(state, inputs):
            return state, f(state, *inputs)

        stacked = jax.tree.map(lambda leaf: leaf[None], inputs)
        _, out = nnx.scan(step, in_axes=(nnx.Carry, 0), out_axes=(nnx.Carry, 0))(state, stacked)
        return jax.tree.map(lambda leaf: leaf[0], out)

    return layer


def ensemble(f):
    """Runs eight copies of the state and keeps the first: a leaky layer."""

    def layer(state, *inputs):
        graphdef, leaves = nnx.split(state)
        copies = jax.tree.map(lambda leaf: jnp.stack([leaf + number for number in range(8)]), leaves)

        def member(leaves):
            module = nnx.merge(graphdef, leaves)
            out = f(module, *inputs)
            return nnx.state(module), out

        leaves, out = jax.vmap(member)(copies)
        nnx.update(state, jax.tree.map(lambda leaf: leaf[0], leaves))
        return jax.tree.map(lambda leaf: leaf[0], out)

    return layer


def leaks(f):
    def layer(state, *inputs):
        return jax.checkpoint(lambda *inputs: f(state, *inputs))(*inputs)

    return layer


@pytest.mark.parametrize("name", ["batch_norm_train", "dropout"])
@pytest.mark.parametrize(
    "nesting", ["scan_layers", "jit > scan_layers", "scan_layers > grad[functional]", "vmap > scan_layers"]
)
def test_a_registered_layer_holds_like_any_other(name, nesting):
    register_transform("scan_layers")(scan_layers)
    case = HEALTHY[name]()
    found = call(case.subject, *case.args, nesting=nesting)
    assert found.outcome.verdict == "held" or (name == "dropout" and found.outcome.unfit), text(found)


def test_it_is_measured_and_judged_like_any_other():
    register_transform("ensemble", style="functional")(ensemble)
    model = nnx.Linear(256, 256, rngs=nnx.Rngs(0))
    found = call(model, numbers((4, 256)), nesting="jit > ensemble[functional]")
    assert broken(found) == ["memory"]
    healthy = register_transform("scan_layers")(scan_layers)
    assert healthy is scan_layers
    assert call(model, numbers((4, 256)), nesting="jit > scan_layers").outcome.verdict == "held"


def test_tracers_that_it_leaves_are_its_own():
    register_transform("leaks")(leaks)
    kept = []

    def keeps(model, x):
        kept.append(model(x))
        return kept[-1]

    linear = nnx.Linear(3, 3, rngs=nnx.Rngs(0))
    found = call(keeps, linear, numbers((2, 3)), nesting="leaks")
    assert broken(found) == ["tracers"]
    assert "leaked by leaks" in text(found)


@pytest.mark.slow
def test_check_draws_it_only_where_it_is_named():
    register_transform("scan_layers")(scan_layers)
    case = HEALTHY["linear"]()
    made = check(case.subject, *case.args, transforms="jit, scan_layers", styles="argument", sweep="pairs")
    assert made.ok, str(made)
    ran = {str(outcome.nesting) for outcome in made.outcomes}
    assert {"scan_layers", "jit > scan_layers", "scan_layers > jit", "scan_layers > scan_layers"} <= ran
    assert merge({}).transforms == TRANSFORMS
    assert not any("scan_layers" in str(nesting) for nesting in strategies.sweep(merge({})))


def test_a_style_that_it_lacks_is_not_written_nor_drawn():
    register_transform("own", style="functional")(scan_layers)
    with pytest.raises(Unreadable, match=r"own has no style 'argument', write 'own\[functional\]'"):
        Nesting.parse("jit > own")
    settings = merge({"transforms": ("jit", "own"), "styles": ("argument", "functional")})
    swept = [str(nesting) for nesting in strategies.sweep(settings)]
    assert "own[functional]" in swept
    assert "jit > own[functional] > own[functional]" in swept
    assert str(strategies.workable(Nesting((Layer("own", "functional"),)), settings, Exclusions())) == "own[functional]"


def test_its_name_is_among_the_words_and_a_slip_names_it():
    register_transform("scan_layers")(scan_layers)
    assert layer_names()[-1] == "scan_layers"
    with pytest.raises(Unreadable, match="unknown transform 'scan_layer', did you mean 'scan_layers'?"):
        Nesting.parse("scan_layer")
    assert parse_given({"transforms": "scan_layers,jit"}, str)["transforms"] == ("jit", "scan_layers")


# --- what cannot be registered


@pytest.mark.parametrize(
    "name, message",
    [
        ("scan", "'scan' is the name of a transform already, write a new word such as 'scan_layers'"),
        ("call_first", "'call_first' is the name of a transform already"),
        ("memory", "'memory' is the name of an invariant"),
        ("tree", "'tree' is the name of a mode of flax"),
        ("two words", "that is not a word that a layer can be written with"),
        ("a[b]", "that is not a word"),
        ("", "that is not a word"),
        (3, "register_transform(3): that is not a word"),
    ],
)
def test_a_name_that_cannot_be_used(name, message):
    with pytest.raises(CheckError) as caught:
        register_transform(name)
    assert message in str(caught.value)


def test_without_a_name_or_a_function_or_with_an_unknown_style():
    with pytest.raises(CheckError, match=r"write @register_transform\('scan_layers'\) above the function"):
        register_transform(scan_layers)
    with pytest.raises(CheckError, match="got 3, write it above a function of f"):
        register_transform("own")(3)
    with pytest.raises(CheckError, match="unknown style 'functionl', did you mean 'functional'?"):
        register_transform("own", style="functionl")


def test_a_name_taken_twice_names_both_places():
    register_transform("own")(scan_layers)
    register_transform("own")(scan_layers)
    register_transform("own", style="functional")(ensemble)
    with pytest.raises(CheckError, match="registered twice, at .*test_registry.py:.* and at .*test_registry.py:"):
        register_transform("own")(ensemble)


# --- a layer that breaks the signature


def drops_the_output(f):
    def layer(state, *inputs):
        f(state, *inputs)

    return layer


def adds_an_axis(f):
    return lambda state, *inputs: jax.tree.map(lambda leaf: leaf[None], f(state, *inputs))


def changes_the_type(f):
    return lambda state, *inputs: jax.tree.map(lambda leaf: leaf.astype(jnp.float16), f(state, *inputs))


def returns_the_state_too(f):
    return lambda state, *inputs: (state, f(state, *inputs))


@jax.tree_util.register_pytree_node_class
class Boxed(tuple):
    """A tuple by its text, and another node for jax."""

    __slots__ = ()

    def tree_flatten(self):
        return tuple(self), None

    @classmethod
    def tree_unflatten(cls, _, children):
        return cls(children)


def returns_another_node(f):
    return lambda state, *inputs: Boxed(f(state, *inputs))


def is_no_layer(f):
    return 7


@pytest.mark.parametrize(
    "function, returned",
    [
        (drops_the_output, "returned None, where the program inside it returns (float32[3,4],)"),
        (adds_an_axis, "returned (float32[1,3,4],), where the program inside it returns (float32[3,4],)"),
        (changes_the_type, "returned (float16[3,4],), where the program inside it returns (float32[3,4],)"),
        (returns_the_state_too, "where the program inside it returns (float32[3,4],)"),
        (returns_another_node, "where the program inside it returns (float32[3,4],)"),
        (is_no_layer, "returned int, not a function"),
    ],
)
@pytest.mark.parametrize("nesting", ["own", "jit > own"])
def test_a_layer_that_breaks_the_signature(function, returned, nesting):
    register_transform("own")(function)
    case = HEALTHY["linear"]()
    with pytest.raises(CheckError) as caught:
        check(case.subject, *case.args, nesting=nesting)
    told = str(caught.value)
    line = function.__code__.co_firstlineno
    assert f"the registered transform 'own' ({__file__.rpartition('/')[2]}:{line})" in told.replace(
        "tests/engine/transforms/", ""
    )
    assert returned in told
    assert "a layer keeps the signature layer(state, *inputs) -> out" in told


def test_inside_another_layer_it_returns_what_that_returns():
    register_transform("own")(lambda f: lambda state, *inputs: f(state, *inputs)[0])
    case = HEALTHY["linear"]()
    with pytest.raises(
        CheckError, match=r"returned \(float32\[3,4\],\), where .* \(\(float32\[3,4\],\), \(float32\[4\], f"
    ):
        check(case.subject, *case.args, nesting="own > grad")


# --- where it is registered


CONFTEST = """
from pytest_nnxcheck import register_transform

@register_transform("identity")
def identity(f):
    def layer(state, *inputs):
        return f(state, *inputs)
    return layer
"""
TEST = """
import jax.numpy as jnp
import pytest
from flax import nnx

@pytest.mark.nnx_invariants(styles="argument", max_examples=0, sweep="singles")
def test_linear(nnx_wrap):
    nnx_wrap(nnx.Linear(2, 2, rngs=nnx.Rngs(0)))(jnp.ones((1, 2)))
"""


@pytest.fixture
def suite(pytester):
    pytester.makeconftest(CONFTEST)
    pytester.makepyfile(test_linear=TEST)
    return pytester


@pytest.mark.parametrize(
    "options, counted",
    [
        (["--nnx-transforms=jit,identity"], "3 nestings: 3 passed"),
        (["--nnx-nesting=jit > identity"], "1 nesting: 1 passed"),
        (["-o", "nnx_transforms=identity"], "2 nestings: 2 passed"),
    ],
)
def test_a_conftest_registers_before_the_command_line_is_read(suite, inner_args, options, counted):
    result = suite.runpytest_inprocess(*inner_args, *options)
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines([f"test_linear.py::test_linear  {counted}*"])
