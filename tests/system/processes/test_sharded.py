"""Sharded models on eight simulated devices: peaks of one device, donation shard by shard, both specs of what was resharded."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checking import Example, broken, call, text
from eight_devices import DEVICES, on_eight_devices, outside_of_them, passes
from flax import nnx
from healthy import assign
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from pytest_nnxcheck import check
from pytest_nnxcheck.compat import graph
from pytest_nnxcheck.paste.program import zeros

WIDTH, HIDDEN, BATCH = 256, 1024, 16
STATE = 2 * WIDTH * HIDDEN * 4

explicit_by_default = pytest.mark.skipif(
    jax.__version_info__ < (0, 9), reason="jax.make_mesh makes axes that are not explicit"
)


@outside_of_them
def test_this_file_passes_on_eight_devices():
    passes(__file__, "(26 passed, 1|18 passed, 9|17 passed, 10) skipped", "-m", "not full")


class MLP(nnx.Module):
    """Tensor parallel: the hidden axis is cut into one piece a device."""

    def __init__(self, rngs):
        init = nnx.initializers.lecun_normal()
        up, down = nnx.with_partitioning(init, (None, "model")), nnx.with_partitioning(init, ("model", None))
        self.up = nnx.Linear(WIDTH, HIDDEN, use_bias=False, kernel_init=up, rngs=rngs)
        self.down = nnx.Linear(HIDDEN, WIDTH, use_bias=False, kernel_init=down, rngs=rngs)

    def __call__(self, x):
        return self.down(nnx.relu(self.up(x)))


def sgd(mlp, x):
    loss, grads = nnx.value_and_grad(lambda mlp: (mlp(x) ** 2).mean())(mlp)
    nnx.update(mlp, jax.tree.map(lambda value, grad: value - 0.1 * grad, nnx.state(mlp, nnx.Param), grads))
    return loss


def value_of(variable):
    return variable.get_value() if hasattr(variable, "get_value") else variable.value


TELLS_MESH = hasattr(jax, "set_mesh") and hasattr(jax.sharding, "get_mesh")  # jax 0.7 sets one, and does not tell it


@pytest.fixture
def mesh():
    if not TELLS_MESH:
        yield (made := Mesh(np.array(jax.devices()), ("model",))).__enter__()
        made.__exit__(None, None, None)
        return
    with jax.set_mesh(jax.make_mesh((DEVICES,), ("model",), axis_types=(jax.sharding.AxisType.Auto,))):
        yield jax.sharding.get_mesh()


@pytest.fixture
def mlp(mesh):
    @nnx.jit
    def create():
        mlp = MLP(nnx.Rngs(0))
        state = nnx.state(mlp)
        nnx.update(mlp, jax.lax.with_sharding_constraint(state, nnx.get_partition_spec(state)))
        return mlp

    return create()


@pytest.fixture
def x(mesh):
    return jax.device_put(jnp.ones((BATCH, WIDTH)), NamedSharding(mesh, P()))


def abstract(tree):
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding), tree)


def resharding(mesh, to):
    def step(mlp, x):
        loss = sgd(mlp, x)
        assign(mlp.up.kernel, jax.lax.with_sharding_constraint(value_of(mlp.up.kernel), NamedSharding(mesh, to)))
        return loss

    return step


@on_eight_devices
@pytest.mark.parametrize("subject, styles", [(MLP.__call__, "argument,functional"), (sgd, "argument")])
def test_a_tensor_parallel_model_holds(mlp, x, subject, styles):
    report = check(subject, mlp, x, styles=styles, effort="quick")
    assert report.ok, str(report)
    assert {outcome.verdict for outcome in report.outcomes} == {"held"}


@on_eight_devices
@pytest.mark.parametrize("real", [True, False])
def test_the_peak_is_that_of_one_device(mlp, x, real):
    found = call(mlp, x if real else abstract(x), nesting="jit[functional]")
    inputs = outputs = hidden = BATCH * WIDTH * 4
    assert BATCH * HIDDEN * 4 // DEVICES <= hidden
    assert STATE // DEVICES + inputs + outputs <= found.outcome.peak <= STATE // DEVICES + inputs + outputs + 2 * hidden
    assert found.outcome.budget < STATE


@on_eight_devices
def test_a_captured_model_is_whole_on_every_device_as_any_constant_is(mlp, x):
    for nesting in ("jit[closure]", "jit[jax_closure]"):
        found = call(mlp, x, nesting=nesting)
        assert found.outcome.verdict == "held", text(found)
        assert call(mlp, x, nesting=nesting, memory_budget="10KB").outcome.verdict == "violated"


@on_eight_devices
def test_a_budget_is_for_one_device_and_the_message_says_so(mlp, x):
    found = call(mlp, x, nesting="jit", memory_budget="300KB")
    assert broken(found) == ["memory"]
    assert "devices 8, the bytes are those of one" in text(found)
    assert f"state {STATE // DEVICES / 1024:.1f} KiB" in text(found)


@on_eight_devices
@pytest.mark.parametrize(
    "real, nesting",
    [
        (True, "jit"),
        (False, "jit[functional]"),
        (True, "jit > remat"),
        *(
            pytest.param(*form, marks=pytest.mark.full)
            for form in ((False, "jit"), (True, "jit[functional]"), (False, "jit > remat"))
        ),
    ],
)
def test_a_step_that_reshards_its_state_loses_the_donation_and_names_both_specs(mesh, mlp, x, nesting, real):
    inputs = x if real else abstract(x)
    assert call(resharding(mesh, P(None, "model")), mlp, inputs, nesting=nesting).outcome.verdict == "held"
    found = call(resharding(mesh, P("model", None)), mlp, inputs, nesting=nesting)
    assert broken(found) == ["donation"]
    (violation,) = found.outcome.violations
    assert violation.summary.startswith(
        "mlp.up.kernel   float32[256,1024]   sharding changed from P(None, 'model') to P('model'"
    )
    assert violation.hint.startswith("give the new value the old sharding before it is stored")


@on_eight_devices
def test_a_batch_may_be_sharded(mesh, mlp):
    x = jax.device_put(jnp.ones((BATCH, WIDTH)), NamedSharding(mesh, P("model")))
    for nesting in ("jit", "scan", "jit > vmap[functional]", "jit[functional] > scan > remat"):
        found = call(sgd, mlp, x, nesting=nesting)
        assert found.outcome.verdict == "held", text(found)


@on_eight_devices
def test_a_number_that_jit_spreads_over_the_devices_is_noted_and_not_judged(mesh, mlp, x):
    counter = nnx.BatchStat(jnp.zeros(()))

    def step(mlp, counter, x):
        assign(counter, value_of(counter) + 1)
        return mlp(x)

    found = call(step, mlp, counter, x, nesting="jit")
    assert found.outcome.verdict == "held", text(found)


@on_eight_devices
def test_an_array_that_lies_elsewhere_is_copied_where_it_lies(mesh, mlp, x):
    table = nnx.BatchStat(jax.device_put(jnp.ones(4), jax.devices()[3]))
    found = call(lambda table, mlp, x: mlp(x), table, mlp, x)
    assert found.outcome.verdict == "held"
    assert value_of(table).devices() == {jax.devices()[3]}


@on_eight_devices
def test_equal_programs_on_different_devices_run_where_their_state_lies():
    model, x, example = nnx.Linear(4, 4, rngs=nnx.Rngs(0)), jnp.ones((2, 4)), Example()
    for device in jax.devices()[:2]:
        placed = nnx.merge(nnx.graphdef(model), jax.device_put(nnx.state(model), device))
        for nesting in ("jit", "jit > scan"):
            found = call(placed, jax.device_put(x, device), nesting=nesting, example=example)
            assert found.outcome.verdict == "held", found.outcome.reason
            assert found.output.devices() == {device}


@on_eight_devices
@pytest.mark.parametrize("nesting", ["jit", "jit[functional]", "jit > scan", "jit > vmap[functional]"])
def test_an_abstract_module_lies_as_it_is_annotated(mlp, x, nesting):
    twin = nnx.eval_shape(lambda: MLP(nnx.Rngs(0)))
    found = call(twin, jax.ShapeDtypeStruct(x.shape, x.dtype), nesting=nesting)
    assert found.outcome.verdict == "held", text(found)
    assert found.outcome.peak == call(mlp, x, nesting=nesting).outcome.peak


@on_eight_devices
@pytest.mark.skipif(
    not TELLS_MESH, reason="before jax.set_mesh and jax.sharding.get_mesh nothing keeps the mesh of an abstract array"
)
def test_an_abstract_module_remembers_the_mesh_it_was_made_under():
    with jax.set_mesh(jax.make_mesh((DEVICES,), ("model",), axis_types=(jax.sharding.AxisType.Auto,))):
        twin = nnx.eval_shape(lambda: MLP(nnx.Rngs(0)))
    found = call(twin, jax.ShapeDtypeStruct((BATCH, WIDTH), jnp.float32), nesting="jit[functional]")
    assert found.outcome.verdict == "held", text(found)
    assert found.outcome.peak < STATE // 4


class ExplicitLinear(nnx.Module):
    """The sharding of its output is part of the type: the batch is cut, and the loops carry it so."""

    def __init__(self, mesh):
        self.kernel = nnx.Param(jax.random.normal(jax.random.key(0), (16, 16), out_sharding=P("model", None)))
        self.rows = NamedSharding(mesh, P("data", None))

    def __call__(self, x):
        return jax.lax.dot_general(x, value_of(self.kernel), (((1,), (0,)), ((), ())), out_sharding=self.rows)


@pytest.fixture
def explicit_mesh():
    with jax.set_mesh(jax.make_mesh((2, 4), ("data", "model"))):
        yield jax.sharding.get_mesh()


@on_eight_devices
@explicit_by_default
@pytest.mark.parametrize("transforms", [None, "jit,cond,switch,fori_loop,grad"])
def test_a_sharding_that_is_part_of_the_type_is_carried_through_every_loop(explicit_mesh, transforms):
    model, settings = ExplicitLinear(explicit_mesh), {} if transforms is None else {"transforms": transforms}
    report = check(model, jnp.ones((8, 16)), invariants="tracers,memory,donation,parity", effort="quick", **settings)
    assert report.ok, str(report)
    assert {outcome.verdict for outcome in report.outcomes if not outcome.unfit} == {"held"}


@on_eight_devices
@explicit_by_default
@pytest.mark.parametrize(
    "nesting", ["while_loop > scan", "jit > while_loop > vmap", "while_loop > grad", "cond > scan"]
)
def test_a_loop_carries_the_sharding_of_what_the_layers_inside_return(explicit_mesh, nesting):
    found = call(ExplicitLinear(explicit_mesh), jnp.ones((8, 16)), nesting=nesting)
    assert found.outcome.verdict == "held", found.outcome.reason


@on_eight_devices
@explicit_by_default
def test_a_linear_under_the_mesh_that_jax_makes_by_default_holds(explicit_mesh):
    report = check(nnx.Linear(4, 4, rngs=nnx.Rngs(0)), jnp.ones((8, 4)), effort="quick")
    assert report.ok, str(report)


@on_eight_devices
@explicit_by_default
def test_a_program_to_paste_starts_its_loop_with_that_sharding(explicit_mesh):
    shape = jax.eval_shape(ExplicitLinear(explicit_mesh), jnp.ones((8, 16)))
    types = [jax.typeof(made).str_short() for made in (eval(zeros(shape)), graph.zeros(shape))]
    assert types == ["float32[8@data,16]"] * 2
