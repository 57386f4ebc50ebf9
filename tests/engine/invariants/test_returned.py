"""What a call returns is searched for tracers as what it is handed: a set-up that is jitted hands out a module that dies at its next call."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from checking import broken, call, full, hint, near, needs_kept_tracers, some, text
from flax import nnx
from healthy import FLAX, WIDTH, rngs

from pytest_nnxcheck import check

KEY = jax.random.key(0)
X = jnp.ones((2, WIDTH))


class Scaled(nnx.Module):
    """Keeps the slopes of its activation in a closure: those of NumPy are there in a trace as well."""

    def __init__(self, key: jax.Array, numbers: Any = jnp) -> None:
        self.linear = nnx.Linear(WIDTH, WIDTH, rngs=nnx.Rngs(key))
        slopes = numbers.linspace(0.0, 1.0, WIDTH)
        self.activation = lambda x: x * slopes

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.activation(self.linear(x))


class ScaledByVariable(Scaled):
    """Keeps the slopes in a Variable."""

    def __init__(self, key: jax.Array) -> None:
        super().__init__(key)
        self.slopes = nnx.Variable(jnp.linspace(0.0, 1.0, WIDTH))
        self.activation = jnp.multiply

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.activation(self.linear(x), self.slopes[...])


@dataclasses.dataclass
class Bundle:
    model: Any
    step: int = 0


@flax.struct.dataclass
class Train:
    model: Any
    schedule: Any = flax.struct.field(pytree_node=False)


def train_state(key: jax.Array, numbers: Any) -> Train:
    rates = numbers.linspace(1.0, 0.1, 10)
    return Train(jax.random.normal(key, (WIDTH,)), lambda step: rates[step])


def optimizer(key: jax.Array, numbers: Any) -> tuple[nnx.Module, nnx.Optimizer]:
    model = nnx.Linear(WIDTH, WIDTH, rngs=nnx.Rngs(key))
    rates = numbers.linspace(1.0, 0.1, 10)
    tx = optax.sgd(lambda step: jnp.asarray(rates)[step])
    return model, nnx.Optimizer(model, tx, **({} if FLAX < (0, 11) else {"wrt": nnx.Param}))


RETURNED: dict[str, Any] = {
    "module": Scaled,
    "tuple": lambda key, numbers: (key, Scaled(key, numbers)),
    "dict": lambda key, numbers: {"model": Scaled(key, numbers)},
    "list": lambda key, numbers: [Scaled(key, numbers), Scaled(key, numbers)],
    "dataclass": lambda key, numbers: Bundle(Scaled(key, numbers)),
    "static field": train_state,
    "optimizer": optimizer,
    "split": lambda key, numbers: nnx.split(Scaled(key, numbers)),
}


@pytest.mark.slow
@pytest.mark.parametrize("form", some(RETURNED, ("tuple", "dict", "static field", "optimizer")))
def test_what_is_returned_keeps_no_tracers(form):
    """The same with NumPy holds: nothing of it is traced."""
    build = RETURNED[form]
    leaky = call(lambda key: build(key, jnp), KEY, nesting="jit")
    assert broken(leaky) == ["tracers"]
    assert f"created at {near(__file__)}:" in text(leaky)
    assert hint("kept by what is returned", path=leaky.outcome.violations[0].findings[0].path) in text(leaky)
    assert call(lambda key: build(key, np), KEY, nesting="jit").outcome.verdict == "held"


RETURNS: dict[str, Any] = {
    "function": lambda model: lambda z: model(z) + 1,
    "partial": lambda model: functools.partial(nnx.Linear.__call__, model),
    "method": lambda model: model.__call__,
    "jit": lambda model: jax.jit(lambda z: model(z) + 1),
}


@pytest.mark.parametrize("made", RETURNS.values(), ids=RETURNS)
def test_no_transform_hands_out_a_function_that_holds_arrays(made):
    """In a program of the user's own a jit refuses it, so that it can leak nothing there; un-nested it goes on with the arrays that it holds."""

    def returns(model: nnx.Linear, x: jax.Array) -> Any:
        return model(x), made(model)

    model = nnx.Linear(WIDTH, WIDTH, rngs=rngs())
    nested = call(returns, model, X, nesting="jit").outcome
    assert nested.verdict == "rejected"
    assert "holds arrays, which no transform hands out" in nested.reason
    y, again = call(returns, model, X).output
    assert again(X).shape == y.shape


class Kept:
    x: Any = None

    def get(self) -> Any:
        return self.x


@pytest.mark.parametrize("of", [lambda kept: kept, lambda kept: kept.get, lambda kept: lambda: kept.x])
def test_what_a_jit_inside_leaves_in_what_is_returned_is_seen_un_nested(of):
    def returns(model: nnx.Linear, x: jax.Array, doubled: Any) -> Any:
        kept = Kept()

        def inner(x: jax.Array) -> jax.Array:
            kept.x = doubled(x)
            return model(x)

        return jax.jit(inner)(x), of(kept)

    model = nnx.Linear(WIDTH, WIDTH, rngs=rngs())
    assert broken(call(returns, model, X, lambda x: x * 2)) == ["tracers"]
    assert call(returns, model, X, lambda x: x.size).outcome.verdict == "held"


@pytest.mark.slow
@pytest.mark.parametrize("cured", [*full(lambda key: Scaled(key, np)), ScaledByVariable], ids=["NumPy", "Variable"])
def test_what_the_hint_says_holds_under_the_whole_sweep(cured):
    assert check(cured, KEY, max_examples=0).ok


@pytest.mark.parametrize("nesting", ["scan", "jit[functional] > remat", *full("remat", "jit > scan")])
def test_the_layer_whose_trace_made_it_is_blamed(nesting):
    leaky = call(Scaled, KEY, nesting=nesting)
    assert ("leaked by", nesting.split(" > ")[-1]) in leaky.outcome.violations[0].details


@jax.tree_util.register_pytree_node_class
class Pose:
    """A tree that makes arrays of what it is given, and refuses types."""

    def __init__(self, at: Any, scale: Any) -> None:
        self.at, self.scale = jnp.asarray(at), scale

    def tree_flatten(self) -> tuple[tuple[Any, ...], Any]:
        return (self.at,), self.scale

    @classmethod
    def tree_unflatten(cls, scale: Any, children: tuple[Any, ...]) -> Pose:
        return cls(*children, scale)


@pytest.mark.parametrize("nesting", ["un-nested", "jit", "scan"])
def test_a_tree_that_refuses_types_is_looked_at_when_the_program_has_ended(nesting):
    assert call(lambda x: Pose(x, x.size), X, nesting=nesting).outcome.verdict == "held"
    leaky = call(lambda x: Pose(x, lambda: x), X, nesting="jit")
    assert "tracers remain in output.scale (closure of" in text(leaky)
    assert call(lambda x: Pose(x, lambda: x), X).output.scale().sum() == X.sum()


OPERATIONS = (jnp.sin, jnp.cos, jnp.tan, jnp.exp, jnp.log1p, jnp.tanh, jnp.abs, jnp.floor, jnp.arctan, jnp.expm1)


@pytest.mark.slow
def test_what_such_a_tree_keeps_of_a_call_that_is_too_large_to_run_at_once_is_an_array():
    """Un-nested, such a call is traced first: what the closure holds then is no array, and the call is run after all."""

    def pose(x):
        y = sum(operation(x) for operation in OPERATIONS)
        return Pose(x, lambda: y)

    np.testing.assert_allclose(call(pose, X).output.scale(), pose(X).scale(), rtol=1e-5)


class Wrapped(nnx.Module):
    def __init__(self, model: nnx.Module) -> None:
        self.model = model
        self.scale: Any = None


def wrap(model: nnx.Module, x: jax.Array, keep: bool) -> tuple[Wrapped, jax.Array]:
    wrapped, y = Wrapped(model), model(x)
    kept = y if keep else y.shape
    wrapped.scale = lambda: kept
    return wrapped, y


def test_a_returned_module_may_share_the_variables_of_the_one_that_was_given():
    model = nnx.Linear(WIDTH, WIDTH, rngs=rngs())
    assert "tracers remain in output[0].scale (closure of wrap" in text(
        call(lambda m, x: wrap(m, x, True), model, X, nesting="jit")
    )
    assert call(lambda m, x: wrap(m, x, False), model, X, nesting="jit").outcome.verdict == "held"


@pytest.mark.slow
def test_the_body_gets_a_module_that_no_trace_of_ours_was_in():
    """Un-nested, a trace tells that the call holds where it is clean; here the call is run."""
    built = call(Scaled, KEY)
    assert built.outcome.verdict == "held"
    assert built.output(X).shape == X.shape


@pytest.mark.slow
@needs_kept_tracers
def test_a_module_that_a_vmap_inside_the_call_built():
    """`nnx.vmap` hands out Variables alone: an array that the constructor keeps stays a tracer."""

    def build(key, keep):
        @nnx.split_rngs(splits=3)
        @nnx.vmap(in_axes=(0, 0), out_axes=0)
        def stack(rngs, index):
            block = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
            block.index = keep(index)
            return block

        return stack(nnx.Rngs(key), jnp.arange(3))

    leaky = call(lambda key: build(key, lambda index: index), KEY)
    assert "tracers remain in output.index" in text(leaky)
    assert ("leaked by", "the call itself, un-nested") in leaky.outcome.violations[0].details
    assert hint("plain value, data", path="output.index") in text(leaky)
    for cure in (nnx.data, nnx.Variable):
        for nesting in ("un-nested", "jit"):
            cured = call(lambda key, keep=cure: build(key, keep), KEY, nesting=nesting)
            assert cured.outcome.verdict == "held"
