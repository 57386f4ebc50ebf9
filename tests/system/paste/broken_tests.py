"""Suites whose tests fail, each in a way of its own, and for each program to paste the text that mends it."""

from __future__ import annotations

COUNTS = """
class Counts(nnx.Module):
    seen = []

    def __init__(self):
        self.linear = nnx.Linear(4, 4, rngs=rngs())

    def __call__(self, x):
        y = self.linear(x)
        Counts.seen.append(y)
        return y
"""
BROKEN = {
    "jit": """
from leaky import LEAKY, KeepsLastSetInInit, case
from probes import keeps_tracers

@marked
@pytest.mark.parametrize("name", ["class_attribute", "raises_afterwards", "variable_metadata"])
def test_leak(nnx_wrap, name):
    made = LEAKY[name].leaky()
    nnx_wrap(made.subject)(*made.args)

@marked
@pytest.mark.skipif(not keeps_tracers(), reason="this flax carries the value out")
def test_set_in_init(nnx_wrap):
    made = case(KeepsLastSetInInit)
    nnx_wrap(made.subject)(*made.args)

@marked
def test_copies(nnx_wrap):
    nnx_wrap(bugs.call_twice)(bugs.ScanOverRemat(rngs()), *bugs.inputs_scan_over_remat())

@marked
@pytest.mark.parametrize("remat, scan", [(True, False)])
def test_crash(nnx_wrap, remat, scan):
    nnx_wrap(bugs.autoregressive_decode)(bugs.report_4819(rngs(), remat, scan), *bugs.inputs_4819())

@marked
@pytest.mark.parametrize("step", [bugs.step_other_dtype, bugs.step_drops_one])
def test_step(nnx_wrap, step):
    nnx_wrap(step)(bugs.Pair(100))

@marked(donate="all")
def test_arrays(nnx_wrap):
    nnx_wrap(bugs.arrays_step_drops_one)(jnp.arange(100, dtype=jnp.float32), jnp.ones(100))

P = jax.sharding.PartitionSpec

def resharded(pair):
    mesh = pair.a[...].sharding.mesh if not isinstance(pair.a[...], jax.core.Tracer) else MESH
    assign(pair.a, jax.lax.with_sharding_constraint(pair.a[...] + 1, jax.sharding.NamedSharding(MESH, P(None, "x"))))

MESH = jax.sharding.Mesh(jax.devices(), ("x",))

@marked
def test_sharding(nnx_wrap):
    pair = bugs.Pair(4)
    assign(pair.a, jax.device_put(jnp.ones((4, 8)), jax.sharding.NamedSharding(MESH, P("x"))))
    nnx_wrap(resharded)(pair)

SIZE = 64

@marked(memory_budget="18KiB")
def test_budget(nnx_wrap):
    nnx_wrap(nnx.Linear(SIZE, SIZE, rngs=rngs()))(jnp.ones((8, SIZE)))

@marked(memory_budget="0.5x")
def test_several(nnx_wrap):
    nnx_wrap(bugs.step_other_dtype)(bugs.Pair(5000))

WEIGHTS = jnp.ones((200, 200))

@marked
def test_captured(nnx_wrap):
    nnx_wrap(lambda model, x: model(x) @ WEIGHTS)(nnx.Linear(4, 200, rngs=rngs()), jnp.ones((2, 4)))

@marked
def test_shared(nnx_wrap):
    pair = bugs.Pair(100)
    pair.b = nnx.Param(pair.a[...])
    nnx_wrap(bugs.step_in_place)(pair)

@marked
def test_viewed(nnx_wrap):
    import numpy as np

    pair = bugs.Pair(1000)
    pair.kept = frozenset([Box(np.asarray(pair.a[...]))])
    nnx_wrap(bugs.step_in_place)(pair)

class Box:
    def __init__(self, value):
        self.value = value

@marked
def test_abstract(nnx_wrap):
    model = nnx.eval_shape(lambda: bugs.ScanOverRemat(rngs()))
    nnx_wrap(bugs.call_twice)(model, jax.ShapeDtypeStruct((4, 128), jnp.float32))

@marked
def test_abstract_dtype(nnx_wrap):
    def step(pair):
        bugs.step_other_dtype(pair)

    nnx_wrap(step)(nnx.eval_shape(lambda: bugs.Pair(100)))
""",
    "jit > remat": """
import dataclasses

class Keeps(nnx.Module):
    kept = []

    def __init__(self):
        self.linear = nnx.Linear(4, 4, rngs=nnx.Rngs(0))

    def __call__(self, x, *keys):
        y = self.linear(x)
        Keeps.kept.append(y)
        return (y, *keys)

class Trainer:
    def step(self, model, x):
        return model(x)

class Owner:
    def __init__(self):
        self.model, self.scale, self.name = Keeps(), jnp.ones(4), "owner"

    def step(self, batch):
        (y,) = self.model(batch["x"] * self.scale)
        return Result(y, "done")

@dataclasses.dataclass
class Result:
    y: jax.Array
    text: str

class Batch(dict):
    pass

def of_state(graphdef):
    return lambda state, x: nnx.merge(graphdef, state)(x)

def gives_the_module(model, x):
    model(x)
    return model

X = jnp.ones((2, 4))

@marked
@pytest.mark.skipif(not hasattr(nnx, "cached_partial"), reason="this flax has none")
def test_cached(nnx_wrap):
    nnx_wrap(nnx.cached_partial(lambda model, x: model(x), Keeps()))(X)

@marked
@pytest.mark.skipif(not hasattr(nnx, "jit_partial"), reason="this flax has none")
def test_jit_partial(nnx_wrap):
    nnx_wrap(nnx.jit_partial(lambda model, x: model(x), Keeps(), graph=False))(X)

@marked
def test_state(nnx_wrap):
    graphdef, state = nnx.split(Keeps())
    nnx_wrap(of_state(graphdef))(state, X)

@marked
def test_keys(nnx_wrap):
    nnx_wrap(Keeps())(X, jax.random.key(0))

@marked
def test_module(nnx_wrap):
    nnx_wrap(gives_the_module)(Keeps(), X)

@marked
def test_method(nnx_wrap):
    nnx_wrap(Trainer().step)(Keeps(), X)

@marked
def test_owner(nnx_wrap):
    result = nnx_wrap(Owner().step)(Batch(x=X))
    assert isinstance(result.y, jax.Array) and result.text == "done"

@marked
def test_calls(nnx_wrap):
    first = nnx_wrap(nnx.Linear(4, 8, rngs=rngs()))
    first(X)
    y = first(X)
    nnx_wrap(lambda model, y: Keeps.kept.append(model(y)))(nnx.BatchNorm(8, rngs=rngs()), y)
    nnx_wrap(lambda one, two: one(two(X)))(Keeps().linear, nnx.Linear(4, 4, rngs=rngs()))
""",
    "jit > grad > scan": COUNTS
    + """
@marked(transforms="jit,scan,grad")
def test_nested(nnx_wrap):
    nnx_wrap(Counts())(jnp.ones((2, 4)))
""",
    "scan": COUNTS
    + """
@marked
def test_abstract_leak(nnx_wrap):
    y = nnx_wrap(nnx.eval_shape(lambda: nnx.Linear(8, 4, rngs=rngs())))(jax.ShapeDtypeStruct((2, 8), jnp.float32))
    nnx_wrap(nnx.eval_shape(Counts))(y)

class Normed(nnx.Module):
    def __init__(self, mean):
        self.mean = mean

    def __call__(self, x):
        assign(self.mean, x.mean())
        return x

def smuggled():
    made = []
    jax.eval_shape(lambda: made.append(nnx.BatchStat(jnp.zeros(()))) or 0)
    assign_raw(made[0])
    return made[0]

def assign_raw(variable):
    for name in ("_raw_value", "raw_value"):
        if name in dir(variable):
            return object.__setattr__(variable, name, jnp.zeros(()))

@marked
@pytest.mark.skipif(FLAX < (0, 10, 7), reason="earlier flax takes a trace that has ended for the one that runs")
def test_pinned(nnx_wrap):
    nnx_wrap(Normed(smuggled()))(jnp.ones(4))
""",
    "un-nested": """
def update_a_copy(model, optimizer, x):
    gradients = nnx.grad(lambda model: (model(x) ** 2).mean())(model)
    graphdef, state = nnx.split(optimizer)
    copy = nnx.merge(graphdef, jax.tree.map(jnp.copy, state))
    copy.update(*((gradients,) if FLAX < (0, 11) else (model, gradients)))

@marked
def test_dropped_update(nnx_wrap):
    import optax

    model = nnx.Linear(4, 4, rngs=rngs())
    nnx_wrap(update_a_copy)(model, nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param), jnp.ones((2, 4)))

@marked
def test_abstract_update(nnx_wrap):
    import optax

    model = nnx.eval_shape(lambda: nnx.Linear(4, 4, rngs=rngs()))
    optimizer = nnx.eval_shape(lambda: nnx.Optimizer(nnx.Linear(4, 4, rngs=rngs()), optax.adam(1e-3), wrt=nnx.Param))
    nnx_wrap(update_a_copy)(model, optimizer, jax.ShapeDtypeStruct((2, 4), jnp.float32))

class Gated(nnx.Module):
    def __init__(self):
        self.gate = gate = nnx.Linear(4, 4, rngs=rngs())
        self.apply = lambda x: nnx.relu(gate(x))

    def __call__(self, x):
        return self.apply(x)

@marked
def test_stale(nnx_wrap):
    nnx_wrap(Gated())(jnp.ones((2, 4)))

def updates_a_copy(model, xs):
    return jax.jit(lambda model, xs: model(xs))(model, xs)

@marked(invariants="parity")
@pytest.mark.skipif(FLAX < (0, 12), reason="modules are pytrees from flax 0.12 on; before, jax refuses them")
def test_copy(nnx_wrap):
    nnx_wrap(updates_a_copy)(nnx.BatchNorm(8, rngs=rngs()), jnp.arange(24.0).reshape(3, 8))

def syncs(model, target, x):
    nnx.update(target, nnx.state(model))
    nnx.jit(lambda model, x: assign(model.bias, x), donate_argnums=0)(model, x)

@marked
def test_orphan(nnx_wrap):
    nnx_wrap(syncs)(nnx.Linear(4, 4, rngs=rngs()), nnx.Linear(4, 4, rngs=rngs()), jnp.ones(4))
""",
    "jit > adds": """
class Model(nnx.Module):
    def __init__(self):
        self.count, self.linear = nnx.Variable(jnp.zeros((), int)), nnx.Linear(4, 4, rngs=rngs())

    def __call__(self, x):
        assign(self.count, self.count[...] + 1)
        return self.linear(x)

@marked(invariants="parity", transforms="jit,adds")
def test_layer(nnx_wrap):
    nnx_wrap(Model())(jnp.ones((2, 4)))
""",
}
LAYER = """
import jax
from healthy import assign
from pytest_nnxcheck import register_transform

MORE = 1.0

@register_transform("adds")
def adds(f):
    def layer(state, *inputs):
        out = f(state, *inputs)
        assign(state.count, state.count[...] + int(MORE))
        return jax.tree.map(lambda leaf: leaf + MORE, out)

    return layer
"""
"""A layer that is wrong: of a conftest.py, which is read before the options are."""
KEPT = ("Keeps.kept.append(", "str(")
SEEN = ("Counts.seen.append(y)", "pass")
MENDED = {
    "test_leak": (".leaky()", ".healthy()"),
    "test_set_in_init": ("case(KeepsLastSetInInit)", "__import__('leaky').LEAKY['dict'].healthy()"),
    "test_copies": ("bugs.ScanOverRemat(rngs())", "bugs.ScanOverRemat(rngs(), 'functional')"),
    "test_crash": ("remat=True, scan=False", "remat=False, scan=False"),
    "test_step[step_other_dtype]": ("import step_other_dtype", "import step_in_place as step_other_dtype"),
    "test_step[step_drops_one]": ("import step_drops_one", "import step_in_place as step_drops_one"),
    "test_arrays": ("bugs.arrays_step_drops_one", "bugs.arrays_step"),
    "test_sharding": ('P(None, "x")', 'P("x")'),
    "test_budget": ("SIZE = 64", "SIZE = 8"),
    "test_several": ("(bugs.step_other_dtype)(bugs.Pair(5000))", "(bugs.step_in_place)(bugs.Pair(50))"),
    "test_captured": ("WEIGHTS = jnp.ones((200, 200))", "WEIGHTS = jnp.ones((200, 1))"),
    "test_shared": ("nnx.Param(pair.a[...])", "nnx.Param(pair.a[...] + 0)"),
    "test_viewed": ("np.asarray(", "np.array("),
    "test_dropped_update": ("nnx.merge(graphdef, jax.tree.map(jnp.copy, state))", "optimizer"),
    "test_abstract": ("bugs.ScanOverRemat(rngs())", "bugs.ScanOverRemat(rngs(), 'functional')"),
    "test_abstract_dtype": ("bugs.step_other_dtype", "bugs.step_in_place"),
    "test_abstract_update": ("nnx.merge(graphdef, jax.tree.map(jnp.copy, state))", "optimizer"),
    **dict.fromkeys(
        ["test_cached", "test_jit_partial", "test_state", "test_keys", "test_module", "test_method", "test_owner"], KEPT
    ),
    "test_calls": ("Keeps.kept.append(model(y))", "model(y)"),
    "test_nested": SEEN,
    "test_abstract_leak": SEEN,
    "test_pinned": ("Normed(smuggled())", "Normed(nnx.BatchStat(jnp.zeros(())))"),
    "test_stale": ("self.apply(x)", "nnx.relu(self.gate(x))"),
    "test_copy": ("jax.jit(", "nnx.jit("),
    "test_orphan": ("nnx.state(model)", "jax.tree.map(jnp.copy, nnx.state(model))"),
    "test_layer": ("MORE = 1.0", "MORE = 0.0"),
}
"""By test the text of its program that is wrong, and what mends it."""
