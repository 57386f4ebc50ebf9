"""Which memory a figure of a target is of: the chip's at the user's effort, the host's, a kernel's. And what happens where nothing is judged."""

from __future__ import annotations

import functools
import re

import jax
import jax.numpy as jnp
import pytest
from checking import flat
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import pallas as pl
from test_on_targets import checked, found, on

from pytest_nnxcheck import CheckError, check
from pytest_nnxcheck.core.chips import GIB
from pytest_nnxcheck.invariants.memory import DoesNotFit

with_host_memory = pytest.mark.skipif(
    jax.__version_info__ < (0, 8), reason="memory spaces are in types from jax 0.8 on"
)
ONE = {"nesting": "jit", "invariants": "memory,donation"}
MIB = 2**20

# --- the effort of the user's jit


class Stack(nnx.Module):
    """Layers that compute in bfloat16: in a loop over float32 weights the default effort casts all of them before it."""

    WIDTH, LAYERS = 8192, 46

    def __init__(self, rngs, **dtypes):
        make = nnx.vmap(lambda rngs: nnx.Linear(self.WIDTH, self.WIDTH, use_bias=False, rngs=rngs, **dtypes))
        self.layers = nnx.split_rngs(splits=self.LAYERS)(make)(rngs)

    def __call__(self, x):
        scan = nnx.scan(lambda layer, x: jnp.tanh(layer(x)), in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
        return scan(self.layers, x)


@pytest.mark.parametrize("weights, fits", [(jnp.float32, False), (jnp.bfloat16, True)], ids=["float32", "bfloat16"])
def test_a_program_fits_by_the_effort_of_a_plain_jit(weights, fits):
    """The fast effort counts 11.5 of 15.75 GiB in float32; the default one refuses 17.3."""
    model = nnx.eval_shape(lambda: Stack(nnx.Rngs(0), dtype=jnp.bfloat16, param_dtype=weights))
    report = checked(model, jax.ShapeDtypeStruct((512, Stack.WIDTH), jnp.bfloat16), target="v5e", **ONE)
    assert found(report, DoesNotFit) == (set() if fits else {"v5e"})
    assert on(report, "v5e").effort == ("O0" if fits else "default")


# --- the memory of the host


class Fetching(nnx.Module):
    """6 GiB of weights, and a call that fetches one layer of other arrays."""

    def __init__(self):
        self.w = nnx.Param(jnp.zeros((24, 8192, 8192)))

    def __call__(self, x, moments):
        y, _ = jax.lax.scan(lambda x, w: (x @ w, None), x, self.w[...])
        return y + jax.device_put(moments[0], jax.memory.Space.Device)[:8]


@with_host_memory
@pytest.mark.parametrize("kind, fits", [("pinned_host", True), ("device", False)])
def test_what_lies_on_the_host_needs_no_memory_of_the_chip(kind, fits):
    there = jax.sharding.SingleDeviceSharding(jax.devices()[0], memory_kind=kind)
    moments = jax.ShapeDtypeStruct((48, 8192, 8192), jnp.float32, sharding=there)  # 12 GiB
    model = nnx.eval_shape(Fetching)
    report = checked(model, jax.ShapeDtypeStruct((8, 8192), jnp.float32), moments, target="v5e", **ONE)
    assert found(report, DoesNotFit) == (set() if fits else {"v5e"})
    assert on(report, "v5e").host == (12 * GIB if fits else 0)


@with_host_memory
def test_nor_of_a_gpu_where_what_is_moved_may_take_a_buffer():
    """An H200 says 6658.5 MiB: it has a buffer for the layer. Without the device the compiler counts the 12 GiB."""
    there = jax.sharding.SingleDeviceSharding(jax.devices()[0], memory_kind="pinned_host")
    moments = jax.ShapeDtypeStruct((48, 8192, 8192), jnp.float32, sharding=there)
    x = jax.ShapeDtypeStruct((8, 8192), jnp.float32)
    gpu = on(checked(nnx.eval_shape(Fetching), x, moments, target="h100", **ONE), "h100")
    assert gpu.host == 12 * GIB
    assert gpu.split.peak == gpu.peak == pytest.approx((6658.5 - 256) * MIB, abs=MIB // 8)
    assert gpu.most == pytest.approx((6658.5 + 32) * MIB, abs=MIB // 8)
    assert gpu.picture.total < 7 * GIB


@with_host_memory
@pytest.mark.parametrize("dtype, size", [(jnp.int8, 16), (jnp.int4, 8)])
def test_its_bytes_are_those_of_the_compiler(dtype, size):
    there = jax.sharding.SingleDeviceSharding(jax.devices()[0], memory_kind="pinned_host")
    held = jax.ShapeDtypeStruct((4096, 4096), dtype, sharding=there)
    call = lambda x, held: x * jax.device_put(held, jax.memory.Space.Device).astype(jnp.float32)  # noqa: E731
    gpu = on(checked(call, jax.ShapeDtypeStruct((4096, 4096), jnp.float32), held, target="h100", **ONE), "h100")
    assert (gpu.host, gpu.split.arguments) == (size * MIB, 64 * MIB)


class Moments(nnx.Module):
    """64 MiB that wait on the host between steps."""

    def __init__(self):
        self.value = nnx.Variable(jnp.zeros((4096, 4096)))


def with_moments(weights, moments, x):
    new = 0.9 * jax.device_put(moments.value[...], jax.memory.Space.Device) + x.T @ weights(x)
    weights.kernel[...] -= 0.1 * new
    moments.value.set_value(jax.device_put(new, jax.memory.Space.Host))


@with_host_memory
def test_state_that_a_step_takes_from_the_host_and_puts_back_is_counted_once():
    """Where an output on the host takes the place of a donated argument, the compiler of a GPU knows both, and moves neither."""
    weights = nnx.eval_shape(lambda: nnx.Linear(4096, 4096, use_bias=False, rngs=nnx.Rngs(0)))
    moments = nnx.eval_shape(Moments)
    there = jax.sharding.SingleDeviceSharding(jax.devices()[0], memory_kind="pinned_host")
    moments.value.set_value(jax.ShapeDtypeStruct((4096, 4096), jnp.float32, sharding=there))
    report = checked(with_moments, weights, moments, jax.ShapeDtypeStruct((256, 4096), jnp.float32), **ONE)
    chip, gpu = on(report, "v5e"), on(report, "h100")
    assert chip.host == gpu.host == 64 * MIB
    assert gpu.peak <= chip.peak <= gpu.most <= gpu.peak + (64 + 64 + 32) * MIB
    assert gpu.split.arguments == chip.split.arguments == (64 + 4) * MIB


@with_host_memory
def test_no_output_on_the_chip_takes_the_place_of_what_is_on_the_host():
    def fetch(moments, x):
        moments.value.set_value(jax.device_put(moments.value[...], jax.memory.Space.Device) + x)

    moments = nnx.eval_shape(Moments)
    there = jax.sharding.SingleDeviceSharding(jax.devices()[0], memory_kind="pinned_host")
    moments.value.set_value(jax.ShapeDtypeStruct((4096, 4096), jnp.float32, sharding=there))
    gpu = on(checked(fetch, moments, jax.ShapeDtypeStruct((4096, 4096), jnp.float32), target="h100", **ONE), "h100")
    assert (gpu.host, gpu.split.arguments, gpu.split.aliased) == (64 * MIB, 64 * MIB, 0)
    assert gpu.peak == gpu.picture.total == pytest.approx(128 * MIB, abs=MIB)
    assert gpu.most == pytest.approx(gpu.peak + 64 * MIB, abs=MIB)


class Offloading(nnx.Module):
    """Sixteen layers whose activations of 256 MiB each wait on the host for the backward pass."""

    def __init__(self):
        self.w = nnx.Param(jnp.zeros((16, 1024, 1024), jnp.bfloat16))

    def __call__(self, x):
        policy = jax.checkpoint_policies.save_and_offload_only_these_names(
            names_which_can_be_saved=[],
            names_which_can_be_offloaded=["h"],
            offload_src="device",
            offload_dst="pinned_host",
        )

        @functools.partial(jax.checkpoint, policy=policy)
        def layer(x, w):
            x = checkpoint_name(x, "h")
            return jnp.tanh(jnp.tanh(x @ w) @ w), None

        return jax.lax.scan(layer, x, self.w[...])[0]


def gradients(model, x):
    return nnx.grad(lambda model: (model(x).astype(jnp.float32) ** 2).mean())(model)


@with_host_memory
def test_the_peak_counts_nothing_that_is_offloaded():
    """The compiler's own peak has the 4 GiB of the host in it."""
    x = jax.ShapeDtypeStruct((131_072, 1024), jnp.bfloat16)
    report = checked(gradients, nnx.eval_shape(Offloading), x, target="v5e", **ONE)
    there = on(report, "v5e")
    assert there.peak <= there.split.peak < 2 * GIB
    assert there.host == 4 * GIB


# --- the memory of a kernel


class Kernel(nnx.Module):
    """A kernel whose blocks have so many rows of 16 KiB."""

    def __init__(self, rows, rngs):
        self.linear, self.rows = nnx.Linear(4096, 4096, rngs=rngs), rows

    def __call__(self, x):
        def double(x):
            def kernel(x, o):
                o[...] = x[...] * 2

            block = pl.BlockSpec((self.rows, 4096), lambda at: (at, 0))
            shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
            return pl.pallas_call(
                kernel, out_shape=shape, grid=(4096 // self.rows,), in_specs=[block], out_specs=block
            )(x)

        return jax.lax.platform_dependent(self.linear(x), tpu=double, default=lambda x: x * 2)


@pytest.mark.skipif(jax.__version_info__ < (0, 10), reason="older kernels are lowered in another way")
@pytest.mark.parametrize("rows, fits", [(4096, False), (64, True)], ids=["64MiB", "1MiB"])
def test_a_kernel_over_its_memory_is_no_matter_of_the_batch(rows, fits):
    model, x = nnx.eval_shape(lambda: Kernel(rows, nnx.Rngs(0))), jax.ShapeDtypeStruct((4096, 4096), jnp.float32)
    report = checked(model, x, target="v5e", **ONE)
    assert found(report, DoesNotFit) == (set() if fits else {"v5e"})
    if not fits:
        text = flat(str(report))
        assert "the program does not compile for a v5e: a kernel needs more VMEM than there is" in text
        assert "hint make the blocks of the kernel smaller" in text
        assert "batch" not in text


# --- a mesh of one device


def plain(mesh, rngs):
    return nnx.Linear(256, 256, rngs=rngs)


def annotated(mesh, rngs):
    init = nnx.with_partitioning(nnx.initializers.lecun_normal(), (None, "model"))
    return nnx.Linear(256, 256, kernel_init=init, rngs=rngs)


class Constrained(nnx.Module):
    def __init__(self, mesh, rngs):
        self.linear, self.mesh = nnx.Linear(256, 256, rngs=rngs), mesh

    def __call__(self, x):
        spec = jax.sharding.NamedSharding(self.mesh, jax.sharding.PartitionSpec("model"))
        return jax.lax.with_sharding_constraint(self.linear(x), spec)


class Captured(nnx.Module):
    def __init__(self, mesh, rngs):
        table = jax.device_put(
            jnp.ones((8, 256)), jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("model"))
        )
        self.linear, self.add = nnx.Linear(256, 256, rngs=rngs), lambda x: x + table

    def __call__(self, x):
        return self.add(self.linear(x))


@pytest.mark.skipif(not hasattr(jax, "set_mesh"), reason="jax.set_mesh came with jax 0.7")
@pytest.mark.parametrize("abstract", [False, True], ids=["concrete", "abstract"])
@pytest.mark.parametrize("make", [plain, annotated, Constrained, Captured])
def test_a_mesh_of_one_device_is_judged(make, abstract):
    if abstract and make is Captured:
        pytest.skip("a captured array has values")
    mesh = jax.make_mesh((1,), ("model",), axis_types=(jax.sharding.AxisType.Auto,))
    with jax.set_mesh(mesh):
        build = lambda: make(mesh, nnx.Rngs(0))  # noqa: E731
        model = nnx.eval_shape(build) if abstract else build()
        x = jax.ShapeDtypeStruct((8, 256), jnp.float32) if abstract else jnp.ones((8, 256))
        report = checked(model, x, **ONE)
    assert report.ok
    assert not [there.left_out for there in (on(report, "v5e"), on(report, "h100")) if there.left_out]


# --- what is printed


def printing(model, x):
    """Prints, in order and not, in a loop and in a branch."""

    def step(x, _):
        jax.debug.print("x is {}", x.sum())
        return jax.lax.cond(x.sum() > 0, lambda x: (jax.debug.callback(print, x), model(x))[1], model, x), None

    jax.debug.print("begins with {}", x.sum(), ordered=True)
    return jax.lax.scan(step, x, length=3)[0]


def silent(model, x):
    """The same without."""
    step = lambda x, _: (jax.lax.cond(x.sum() > 0, model, model, x), None)  # noqa: E731
    return jax.lax.scan(step, x, length=3)[0]


def test_a_program_that_prints_is_judged_as_one_that_does_not():
    model, x = nnx.Linear(256, 256, rngs=nnx.Rngs(0)), jnp.ones((8, 256))
    prints, does_not = (checked(program, model, x, target="v5e", **ONE) for program in (printing, silent))
    assert prints.ok
    assert does_not.ok
    assert on(prints, "v5e").peak == on(does_not, "v5e").peak
    assert on(prints, "v5e").donated == on(does_not, "v5e").donated


# --- nothing is judged


def calling_back(model, x):
    return jax.pure_callback(lambda x: x, jax.ShapeDtypeStruct(x.shape, x.dtype), model(x))


def test_a_target_that_judged_nothing_says_why_and_fails_where_that_is_asked():
    model, x = nnx.Linear(8, 8, rngs=nnx.Rngs(0)), jnp.ones((2, 8))
    report = checked(calling_back, model, x, target="v5e", **ONE)
    assert report.ok
    assert re.search("not checked on v5e: the program calls Python code while it runs: .+", flat(str(report)))
    with pytest.raises(CheckError, match="nothing was checked on v5e: the program calls Python code"):
        checked(calling_back, model, x, target="v5e", target_strict="on", **ONE)
    assert checked(nnx.Linear.__call__, model, x, target="v5e", target_strict="on", **ONE).ok


def test_a_captured_reference_turns_nothing_red():
    counter = jax.new_ref(jnp.zeros(())) if hasattr(jax, "new_ref") else None
    if counter is None:
        pytest.skip("this jax has no public references")

    class Counting(nnx.Module):
        def __init__(self):
            self.linear = nnx.Linear(8, 8, rngs=nnx.Rngs(0))

        def __call__(self, x):
            counter[...] += 1
            return self.linear(x)

    assert check(Counting(), jnp.ones((2, 8)), nesting="jit").ok
    assert check(Counting(), jnp.ones((2, 8)), nesting="jit", target="v5e").ok
