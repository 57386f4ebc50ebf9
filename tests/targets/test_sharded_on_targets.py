"""Sharded models, in each form in which a mesh is named, compiled for a slice of TPUs and for eight GPUs: figures of one device."""

from __future__ import annotations

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from eight_devices import DEVICES, on_eight_devices, outside_of_them, passes
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from pytest_nnxcheck import check
from pytest_nnxcheck.compat import targets

WIDTH, HIDDEN, BATCH = 256, 1024, 16
STATE = 2 * WIDTH * HIDDEN * 4
with_a_set_mesh = pytest.mark.skipif(
    jax.__version_info__ < (0, 8), reason="jax.set_mesh, and what tells it, came with jax 0.8"
)


@with_a_set_mesh
@outside_of_them
def test_this_file_passes_on_eight_devices():
    # Named, so that the process is ready for their compilers before jax starts; a test names its own.
    passes(__file__, "30 passed, 1 skipped", "--nnx-target", "v5e,h100")


class MLP(nnx.Module):
    """Tensor parallel: the hidden axis is cut into one piece a device."""

    def __init__(self, mesh, rngs):
        init = nnx.initializers.lecun_normal()
        up, down = nnx.with_partitioning(init, (None, "model")), nnx.with_partitioning(init, ("model", None))
        self.up = nnx.Linear(WIDTH, HIDDEN, use_bias=False, kernel_init=up, rngs=rngs)
        self.down = nnx.Linear(HIDDEN, WIDTH, use_bias=False, kernel_init=down, rngs=rngs)
        self.mesh = mesh

    def __call__(self, x):
        return self.down(self.between(nnx.relu(self.up(x))))

    def between(self, y):
        return y


class Constrained(MLP):
    """Names the mesh in the middle: a `NamedSharding` of the user's devices."""

    def between(self, y):
        return jax.lax.with_sharding_constraint(y, NamedSharding(self.mesh, P(None, "model")))


class Asking(Constrained):
    """Names it where this is no CPU."""

    def between(self, y):
        return y if jax.devices()[0].platform == "cpu" else super().between(y)


class Mapped(MLP):
    """Multiplies on each device what it has, by `shard_map`."""

    def __call__(self, x):
        def of_a_device(up, down, x):
            return jax.lax.psum(nnx.relu(x @ up) @ down, "model")

        specs = (P(None, "model"), P("model", None), P())
        mapped = jax.shard_map(of_a_device, mesh=self.mesh, in_specs=specs, out_specs=P())
        return mapped(self.up.kernel[...], self.down.kernel[...], x)


class Explicit(nnx.Module):
    """Says the sharding of each product, where the axes of the mesh are explicit."""

    def __init__(self, mesh, rngs):
        self.up = nnx.Param(jax.random.normal(rngs(), (WIDTH, HIDDEN), out_sharding=P(None, "model")))
        self.down = nnx.Param(jax.random.normal(rngs(), (HIDDEN, WIDTH), out_sharding=P("model", None)))

    def __call__(self, x):
        y = nnx.relu(jnp.einsum("bi,ij->bj", x, self.up[...], out_sharding=P(None, "model")))
        return jnp.einsum("bi,ij->bj", y, self.down[...], out_sharding=P(None, None))


def train(model, optimizer, x):
    """A step of adam."""
    loss, gradients = nnx.value_and_grad(lambda model: (model(x) ** 2).mean())(model)
    optimizer.update(model, gradients)
    return loss


def mesh(kind):
    return jax.make_mesh((DEVICES,), ("model",), axis_types=(getattr(jax.sharding.AxisType, kind),))


def batch():
    return jax.ShapeDtypeStruct((BATCH, WIDTH), jnp.float32)


@on_eight_devices
@pytest.mark.parametrize("target", ["v5e:2x4", "2*v5e:2x2", "h100:8"])
@pytest.mark.parametrize("form", [MLP, Constrained, Mapped, Explicit])
def test_a_sharded_model_is_judged_on_a_slice(form, target):
    with jax.set_mesh(made := mesh("Explicit" if form is Explicit else "Auto")):
        model = form(made, nnx.Rngs(0))
        report = check(model, jnp.ones((BATCH, WIDTH)), nesting="jit", target=target, devices=DEVICES)
    assert report.ok, str(report)
    (outcome,) = report.outcomes
    (there,) = outcome.evidence.targets
    assert (there.target, there.left_out, there.refused) == (target, "", "")
    assert there.fits
    assert (there.donated, there.lost, there.lost_too) == (2, (), 0)
    # A piece of the state, the batch and its result, and of the hidden values no more than the whole.
    assert STATE // DEVICES <= there.peak <= 1.25 * (STATE // DEVICES + 2 * BATCH * WIDTH * 4 + 2 * BATCH * HIDDEN * 4)


@on_eight_devices
def test_a_model_that_names_its_mesh_on_chips_alone_is_judged_as_on_chips():
    with jax.set_mesh(made := mesh("Auto")):
        peaks = set()
        for form in (Asking, Constrained):
            report = check(form(made, nnx.Rngs(0)), jnp.ones((BATCH, WIDTH)), nesting="jit", target="v5e", devices=8)
            peaks.add(report.outcomes[0].evidence.targets[0].peak)
            asked = [note for note in report.notes if "asked jax.devices(): answered 8 of TPU v5 lite" in note]
            assert bool(asked) == (form is Asking)
    assert len(peaks) == 1


@on_eight_devices
def test_a_mesh_cuts_what_is_on_the_host():
    made = mesh("Auto")
    x, held = (
        jax.ShapeDtypeStruct((4096, 4096), jnp.float32, sharding=NamedSharding(made, P("model"), memory_kind=kind))
        for kind in ("device", "pinned_host")
    )

    def fetch(x, held):
        return (jax.device_put(held, jax.memory.Space.Device) * x).sum()

    report = check(fetch, x, held, nesting="jit", invariants="memory", target="h100", devices=8)
    (there,) = report.outcomes[0].evidence.targets
    assert there.host == there.split.arguments == there.most - there.peak == 8 * 2**20


class Ragged(nnx.Module):
    """Sends rows to other devices by an operation that no CPU has."""

    def __init__(self, mesh, rngs):
        self.linear, self.mesh = nnx.Linear(WIDTH, WIDTH, rngs=rngs), mesh

    def __call__(self, x):
        def of_a_device(x):
            counts = jnp.ones(DEVICES, jnp.int32)
            places = jnp.arange(DEVICES, dtype=jnp.int32)
            return jax.lax.ragged_all_to_all(x, jnp.zeros_like(x), places, counts, places, counts, axis_name="model")

        mapped = jax.shard_map(of_a_device, mesh=self.mesh, in_specs=P("model"), out_specs=P("model"), check_vma=False)
        return mapped(self.linear(x))


@on_eight_devices
def test_an_operation_that_no_cpu_has_is_judged_on_a_slice_alone():
    with jax.set_mesh(made := mesh("Auto")):
        x = jax.ShapeDtypeStruct((DEVICES * DEVICES, WIDTH), jnp.float32, sharding=NamedSharding(made, P("model")))
        model = nnx.eval_shape(lambda: Ragged(made, nnx.Rngs(0)))
        report = check(model, x, nesting="jit", target="v5e", devices=DEVICES)
    assert report.ok, str(report)
    (there,) = report.outcomes[0].evidence.targets
    assert (there.target, there.left_out) == ("v5e:2x4", "")
    assert any("judged on v5e:2x4 alone" in note for note in report.notes)


def constrains(model, x):
    return jax.lax.with_sharding_constraint(model(x), NamedSharding(mesh("Auto"), P("model")))


def maps(model, x):
    mapped = jax.shard_map(lambda y: 2 * y, mesh=mesh("Auto"), in_specs=P("model"), out_specs=P("model"))
    return mapped(model(x))


@on_eight_devices
@pytest.mark.parametrize("target", ["v5e", "h100"])
@pytest.mark.parametrize("function", [constrains, maps])
def test_a_mesh_that_only_the_code_names_is_judged_on_a_slice(function, target):
    model = nnx.Linear(WIDTH, WIDTH, rngs=nnx.Rngs(0))
    report = check(function, model, jnp.ones((BATCH, WIDTH)), nesting="jit", target=target, devices=DEVICES)
    assert report.ok, str(report)
    (there,) = report.outcomes[0].evidence.targets
    assert (there.target, there.left_out) == ({"v5e": "v5e:2x4", "h100": "h100:8"}[target], "")


@on_eight_devices
@pytest.mark.parametrize("target", ["v5e", "h100"])
def test_two_meshes_of_one_size_are_one_slice(target):
    other = jax.make_mesh((2, 4), ("a", "b"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    x = jax.device_put(jnp.ones((BATCH, WIDTH)), NamedSharding(other, P("a", "b")))
    with jax.set_mesh(made := mesh("Auto")):
        model = MLP(made, nnx.Rngs(0))
    report = check(model, x, nesting="jit", target=target, devices=DEVICES)
    assert report.ok, str(report)
    assert not report.outcomes[0].evidence.targets[0].left_out


@on_eight_devices
@pytest.mark.parametrize("target", ["v5e", "h100"])
def test_a_bare_chip_is_the_slice_of_the_size_of_the_mesh_for_an_abstract_step(target):
    with jax.set_mesh(made := mesh("Auto")):
        model, optimizer = nnx.eval_shape(lambda: with_adam(made))
        report = check(train, model, optimizer, batch(), nesting="jit", target=target, devices=DEVICES)
    (outcome,) = report.outcomes
    (there,) = outcome.evidence.targets
    assert there.target == {"v5e": "v5e:2x4", "h100": "h100:8"}[target]
    assert there.left_out == ""
    assert 3 * STATE // DEVICES <= there.peak < 3 * STATE


def with_adam(mesh):
    model = MLP(mesh, nnx.Rngs(0))
    return model, nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)


@on_eight_devices
@pytest.mark.parametrize("target, write", [("v5e:4x4", "v5e:2x4"), (r"2*v5e:1x2", r"4\*v5e:1x2"), ("h100:4", "h100:8")])
def test_a_slice_of_another_size_says_what_to_write(target, write):
    with jax.set_mesh(made := mesh("Auto")), pytest.raises(Exception, match=f"the mesh has 8 devices.*write {write}"):
        check(MLP(made, nnx.Rngs(0)), jnp.ones((BATCH, WIDTH)), nesting="jit", target=target, devices=DEVICES)


class Device(NamedTuple):
    slice_index: int
    number: int


@pytest.mark.parametrize("shape, across", [((2, 4), 0), ((1, 8), 1), ((3, 4), 1), ((3, 5, 2), 2)])
def test_the_network_between_slices_has_the_first_axis_that_they_divide(shape, across):
    half = math.prod(shape) // 2
    devices = [Device(slice_index, number) for slice_index in range(2) for number in range(half)]
    halves = np.split(targets.in_slices(shape, devices), 2, axis=across)
    assert [{device.slice_index for device in each.flat} for each in halves] == [{0}, {1}]
