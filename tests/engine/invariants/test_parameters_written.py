"""A forward call that writes parameters: a note. One that trains, averages, copies, clips or makes them anew is quiet."""

import jax
import jax.numpy as jnp
import optax
import pytest
from checking import FEW, line
from flax import nnx
from healthy import FLAX

from pytest_nnxcheck import check

X = jnp.ones((2, 4))
# The one form that all versions of flax have.
pytestmark = pytest.mark.filterwarnings("ignore:'.value'")


def linear(seed=0):
    return nnx.Linear(4, 4, rngs=nnx.Rngs(seed))


class Layer(nnx.Module):
    """A layer with a further Variable, and what it does before it is applied."""

    def __init__(self, before, kind=nnx.Param, value=None):
        self.linear = linear()
        self.other = linear(1)
        self.extra = kind(jnp.zeros(4) if value is None else value)
        self.before = before

    def __call__(self, x):
        self.before(self, x)
        return self.linear(x) + self.extra.value.sum()


def normalizes(layer, _):
    layer.linear.kernel.value = layer.linear.kernel.value / jnp.linalg.norm(layer.linear.kernel.value)


def counts_mean(layer, x):
    layer.extra.value = 0.9 * layer.extra.value + 0.1 * x.mean(0)


def keeps_last(layer, x):
    layer.extra.value = x.mean(0)


def clips(layer, _):
    layer.linear.kernel.value = jnp.clip(layer.linear.kernel.value, -0.1, 0.1)


def in_own_jit(layer, x):
    nnx.jit(counts_mean)(layer, x)


def averages(layer, _):
    for name in ("kernel", "bias"):
        old, new = getattr(layer.other, name), getattr(layer.linear, name)
        old.value = 0.9 * old.value + 0.1 * new.value


def initializes(layer, x):
    """As in Glow: the first batch sets the scale, and a flag says that it has."""
    layer.linear.bias.value = jnp.where(layer.extra.value > 0, layer.linear.bias.value, x.mean(0))
    layer.extra.value = jnp.ones((), jnp.int32)


def notes(subject, *args):
    report = check(subject, *args, transforms="jit", **FEW)
    assert report.ok
    return [note for note in report.notes if "computes no gradient" in note]


@pytest.mark.skipif(not hasattr(nnx, "WeightNorm"), reason="it came after flax 0.10")
def test_weights_that_flax_leaves_normalized():
    (note,) = notes(nnx.WeightNorm(linear(), rngs=nnx.Rngs(1)), X)
    assert note.startswith("the call writes model.layer_instance.kernel (Param)")


@pytest.mark.parametrize(
    "before, path",
    [
        (normalizes, "model.linear.kernel"),
        (counts_mean, "model.extra"),
        (keeps_last, "model.extra"),
        (clips, "model.linear.kernel"),
        (in_own_jit, "model.extra"),
    ],
)
def test_a_forward_call_that_writes_parameters(before, path):
    (note,) = notes(Layer(before), X)
    assert note.startswith(f"the call writes {path} (Param)")
    assert notes(lambda model, x: model(x), Layer(before), X)
    if before is not in_own_jit and before is not clips:
        assert f" at {line(before, 'value = ')}" in note


@pytest.mark.parametrize("kind", [nnx.BatchStat, nnx.Cache, nnx.Variable])
def test_statistics_in_a_variable_of_another_kind(kind):
    assert notes(Layer(counts_mean, kind), X) == []


def loss(model, x):
    return (model(x) ** 2).mean()


def by_hand(model, x):
    value, gradients = nnx.value_and_grad(loss)(model, x)
    nnx.update(model, jax.tree.map(lambda old, by: old - 0.1 * by, nnx.state(model), gradients))
    return value


def forward_mode(model, x):
    graph, state = nnx.split(model)
    _, along = jax.jvp(lambda state: loss(nnx.merge(graph, state), x), (state,), (state,))
    model.kernel.value = model.kernel.value - 0.1 * along
    return along


def with_optimizer(model, optimizer, x):
    value, gradients = nnx.value_and_grad(loss)(model, x)
    optimizer.update(*((model, gradients) if FLAX >= (0, 11) else (gradients,)))
    return value


def handed(model, gradients, x):
    nnx.update(model, jax.tree.map(lambda old, by: old - 0.1 * by, nnx.state(model), gradients))
    return loss(model, x)


def synchronized(target, online, x):
    nnx.update(target, nnx.state(online))
    return target(x)


def searched(model, key, x):
    model.kernel.value = model.kernel.value + jax.random.normal(key, (4, 4)) * x.mean()
    return loss(model, x)


def clipped(model):
    model.kernel.value = jnp.clip(model.kernel.value, -0.1, 0.1)


def scaled(model, factor):
    model.kernel.value = model.kernel.value * factor
    return model.kernel.value.sum() * factor


def pruned(model, mask, x):
    model.kernel.value = jnp.where(mask, model.kernel.value, 0)
    return model(x)


KEY = jax.random.key(0)
ON_PURPOSE = {
    "a step by hand": lambda: (by_hand, linear(), X),
    "a step in forward mode": lambda: (forward_mode, linear(), X),
    "a step whose gradients are handed in": lambda: (handed, linear(), nnx.state(linear(1)), X),
    "a target network": lambda: (synchronized, linear(), linear(1), X),
    "a search": lambda: (searched, linear(), KEY, X),
    "weights that are clipped": lambda: (clipped, linear()),
    "weights that are scaled": lambda: (scaled, linear(), jnp.asarray(0.5)),
    "a mask": lambda: (pruned, linear(), jnp.ones((4, 4), bool), X),
    "an average": lambda: (Layer(averages), X),
    "weights that the first batch sets": lambda: (Layer(initializes, nnx.Variable, jnp.zeros((), jnp.int32)), X),
    "batch normalization": lambda: (nnx.BatchNorm(4, rngs=nnx.Rngs(0)), X),
    "dropout": lambda: (nnx.Dropout(0.5, rngs=nnx.Rngs(0)), X),
}


@pytest.mark.parametrize("name", ON_PURPOSE)
def test_parameters_that_are_written_on_purpose(name):
    assert notes(*ON_PURPOSE[name]()) == []


def test_a_step_of_an_optimizer():
    model = linear()
    assert notes(with_optimizer, model, nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param), X) == []
