"""What `nnx_wrap` returns is no graph node: flax and jax are handed the module itself, and are told so where they are not."""

import copy

import jax
import jax.numpy as jnp
import optax
import pytest
from checking import nnx_wrap
from flax import nnx

from pytest_nnxcheck import CheckError, Wrapped, check

X = jnp.ones((2, 4))


class Block(nnx.Module):
    """A module that holds another."""

    def __init__(self, inner):
        self.inner = inner

    def __call__(self, x):
        return self.inner(x)


def linear():
    return nnx.Linear(4, 4, rngs=nnx.Rngs(0))


def loss(model, x):
    return model(x).sum()


USES = {
    "Optimizer": lambda model: (nnx.ModelAndOptimizer(model, optax.sgd(0.1)) if hasattr(nnx, "ModelAndOptimizer") else nnx.Optimizer(model, optax.sgd(0.1))),
    "state": nnx.state,
    "split": nnx.split,
    "graphdef": nnx.graphdef,
    "clone": nnx.clone,
    "update": lambda model: nnx.update(model, nnx.state(linear())),
    "iter_graph": lambda model: list(nnx.iter_graph(model)),
    "leaves": lambda model: jax.tree.leaves({"model": model}),
    "nnx.grad": lambda model: nnx.grad(loss)(model, X),
    "nnx.jit": lambda model: nnx.jit(loss)(model, X),
    "nnx.remat": lambda model: nnx.remat(loss)(model, X),
    "nnx.vmap": lambda model: nnx.vmap(lambda model, x: model(x), in_axes=(None, 0))(model, X),
    "nnx.eval_shape": lambda model: nnx.eval_shape(loss, model, X),
    "nnx.cond": lambda model: nnx.cond(True, loss, loss, model, X),
    "a list of modules": lambda model: check(lambda models, x: models[0](x), [model], X, nesting="jit"),
    "a dict of modules": lambda model: check(lambda models, x: models["a"](x), kwargs={"models": {"a": model}, "x": X}, nesting="jit"),
}  # fmt: skip


@pytest.mark.parametrize("use", USES.values(), ids=USES)
def test_flax_and_jax_are_handed_the_module_itself(use):
    use(linear())
    with pytest.raises(CheckError, match=r"nnx_wrap\(Linear\) was handed to .* hand over the module itself, and wrap"):
        use(nnx_wrap(linear()))


def test_an_attribute_of_a_module_is_no_wrapped_object():
    assert check(Block(linear()), X, nesting="jit").ok
    with pytest.raises(CheckError, match=r"nnx_wrap\(Linear\) was handed to"):
        check(Block(nnx_wrap(linear())), X, nesting="jit")


def test_a_wrapped_object_called_inside_another_is_refused():
    inner = linear()
    assert check(lambda model, x: inner(model(x)), linear(), X, nesting="jit").ok
    wrapped = nnx_wrap(inner)

    def swallows(model, x):
        try:
            return wrapped(model(x))
        except CheckError:
            return x

    for step in (lambda model, x: wrapped(model(x)), swallows):
        with pytest.raises(CheckError, match="was called inside the call of another wrapped object: let that one call"):
            check(step, linear(), X, nesting="jit")
    with pytest.raises(CheckError) as raised:
        check(lambda model, x: wrapped(model(x)), linear(), X)
    assert "with your object" not in "".join(getattr(raised.value, "__notes__", [])), (
        "what we refuse is no question of copies"
    )


def test_a_check_inside_of_a_checked_function_is_one_of_its_own():
    assert check(lambda x: check(linear(), X, nesting="jit").ok and x, X, nesting="un-nested").ok


def test_isinstance_and_copies_take_it_for_the_module():
    wrapped = nnx_wrap(linear())
    assert isinstance(wrapped, nnx.Linear)
    for again in (copy.copy(wrapped), copy.deepcopy(wrapped)):
        assert type(again) is Wrapped
    assert copy.copy(wrapped).kernel is wrapped.kernel
    assert copy.deepcopy(wrapped).kernel is not wrapped.kernel
