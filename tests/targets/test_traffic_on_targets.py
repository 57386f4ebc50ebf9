"""What the devices of a program send to each other and compute on targets, against numbers worked out by hand."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from eight_devices import DEVICES, on_eight_devices, outside_of_them, passes
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from test_on_targets import checked, on

from pytest_nnxcheck import check
from pytest_nnxcheck.core.on_target import Collective, Spread
from pytest_nnxcheck.engine import on_targets

LAYERS, WIDTH, BATCH = 6, 1024, 256
KIB = 2**10
ROWS, WEIGHTS = BATCH // 2 * WIDTH * 2, WIDTH * WIDTH // 4 * 2
"""The bytes of a device of the hidden values, and of a layer's weights."""


@pytest.mark.skipif(jax.__version_info__ < (0, 8), reason="jax.set_mesh, and what tells it, came with jax 0.8")
@outside_of_them
def test_this_file_passes_on_eight_devices():
    passes(__file__, "8 passed, 1 skipped", "--nnx-target", "v5e,h100")


class Layers(nnx.Module):
    """Two products a layer, whose result is summed over the axis "model"."""

    def __init__(self):
        self.up, self.down = (nnx.Param(jnp.zeros((LAYERS, WIDTH, WIDTH), jnp.bfloat16)) for _ in range(2))

    def __call__(self, x):
        def layer(x, weights):
            up, down = weights
            return jnp.tanh(jnp.tanh(x @ up) @ down), None

        return jax.lax.scan(layer, x, (self.up[...], self.down[...]))[0]


def step(model, x):
    loss, gradients = nnx.value_and_grad(lambda model: (model(x).astype(jnp.float32) ** 2).mean())(model)
    nnx.update(model, jax.tree.map(lambda w, g: w - g.astype(w.dtype), nnx.state(model), nnx.state(gradients)))
    return loss


def there(target, *, whole=False):
    """What a target tells of a step: over a mesh of 2 x 4, whose second axis cuts the layers, or one axis that cuts the batch and each ``whole`` layer."""
    shape, names = ((8,), ("data",)) if whole else ((2, 4), ("data", "model"))
    mesh = jax.make_mesh(shape, names, axis_types=(jax.sharding.AxisType.Auto,) * len(shape))
    specs = (P(None, "data"),) * 2 if whole else (P(None, None, "model"), P(None, "model", None))

    def cut(leaf, spec):
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, spec))

    model = nnx.eval_shape(Layers)
    for weights, spec in zip((model.up, model.down), specs, strict=True):
        weights.set_value(cut(weights.get_value(), spec))
    x = cut(jax.ShapeDtypeStruct((BATCH, WIDTH), jnp.bfloat16), P("data"))
    with jax.set_mesh(mesh):
        report = check(step, model, x, nesting="jit", target=target, devices=DEVICES)
    (found,) = report.outcomes[0].evidence.targets
    assert not found.left_out
    return found


@on_eight_devices
@pytest.mark.parametrize("target", ["v5e", "h100"])
def test_each_step_of_a_loop_counts(target):
    """Forwards and backwards a sum of the hidden values, then one of the gradients of both weights, and at last one of the loss."""
    (found,) = there(target).collectives
    assert (found.kind, found.network, found.at_least) == ("all-reduce", "", False)
    assert 2 * LAYERS + 2 <= found.count <= 4 * LAYERS + 1
    assert found.bytes == LAYERS * (2 * ROWS + 2 * WEIGHTS) + 4


@on_eight_devices
def test_between_slices_go_the_gradients_alone():
    between, within = there("2*v5e:2x2").collectives
    assert within == Collective("all-reduce", 2 * LAYERS, 2 * LAYERS * ROWS, "ici")
    assert (between.kind, between.count, between.network) == ("all-reduce", 2 * LAYERS + 1, "dcn")
    assert 0 < between.bytes - 2 * LAYERS * WEIGHTS < KIB


@on_eight_devices
@pytest.mark.parametrize("effort", ["O0", "default"])
def test_what_is_gathered_in_each_step_counts_once_however_it_is_fused(effort, monkeypatch):
    """Three times the weights of a product, twice its rows. The default effort spreads each over three fusions."""
    monkeypatch.setattr(on_targets, "NEAR", 0.0 if effort == "default" else 1.0)
    found = there("v5e", whole=True)
    assert found.effort == effort
    gathered = next(each for each in found.collectives if each.kind == "all-gather")
    assert gathered.count == 5 * LAYERS
    assert gathered.bytes == LAYERS * (3 * WIDTH * WIDTH + 2 * BATCH * WIDTH) * 2
    scattered = next(each for each in found.collectives if each.kind == "reduce-scatter")
    assert scattered == Collective("reduce-scatter", LAYERS, LAYERS * WIDTH * WIDTH * 2)


@on_eight_devices
def test_the_arguments_are_counted_by_the_axes_that_cut_them():
    elements = 2 * LAYERS * WIDTH * WIDTH
    assert there("v5e").spread == (
        Spread(("model",), 2, elements, elements // 4 * 2),
        Spread(("data",), 1, BATCH * WIDTH, BATCH * WIDTH // 2 * 2),
    )


@on_eight_devices
def test_the_terminal_shows_it(pytester, inner_args):
    pytester.makepyfile(
        """
        import jax
        import jax.numpy as jnp
        import pytest
        from flax import nnx
        from jax.sharding import NamedSharding, PartitionSpec as P

        @pytest.mark.nnx_invariants(transforms="jit", styles="argument", max_examples=0, devices=8)
        def test_sum(nnx_wrap):
            mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
            x = jax.ShapeDtypeStruct((64, 1024), jnp.float32, sharding=NamedSharding(mesh, P("data")))
            with jax.set_mesh(mesh):
                model = nnx.eval_shape(lambda: nnx.Linear(1024, 1024, rngs=nnx.Rngs(0)))
                nnx_wrap(lambda model, x: model(x).sum(0))(model, x)
        """
    )
    result = pytester.runpytest_inprocess(*inner_args, "-p", "no:randomly", "-v", "--nnx-target", "v5e")
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines(
        [
            "*v5e:2x4 sends: 1 all-reduce (4.0 KiB) a call, by each device",
            "*v5e:2x4 computes: 16.* M flops, * read and written",
            "*v5e:2x4 holds: whole 2 arrays of 1.05 M elements (4.0 MiB a device); over data 1 array of 65.5 K elements (32.0 KiB a device)",
        ]
    )


def test_flops_are_those_of_the_compiler_where_no_loop_hides_some():
    model, x = nnx.Linear(512, 512, use_bias=False, rngs=nnx.Rngs(0)), jnp.ones((64, 512))
    plain = on(checked(model, x, nesting="jit", target="v5e"), "v5e")
    assert 2 * 64 * 512 * 512 <= plain.flops < 2.1 * 64 * 512 * 512
    assert plain.accessed >= 4 * (512 * 512 + 2 * 64 * 512)
    assert plain.collectives == plain.spread == ()

    def looped(model, x):
        return jax.lax.scan(lambda x, _: (model(x), None), x, length=64)[0]

    assert on(checked(looped, model, x, nesting="jit", target="v5e"), "v5e").flops is None
    assert on(checked(model, x, nesting="jit", target="h100"), "h100").flops is None
